"""The transports against real servers: what a command gets, and what every failure looks like.

Every behaviour is checked for paramiko and asyncssh, against the demo's own server and OpenSSH's, and locally.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st
from tfps_runtime.protocol import MAX_LINE

from airflow_tfps.demo_hosts import DemoHost, DemoServer, serve
from airflow_tfps.errors import (
    AuthenticationError,
    CommandError,
    HostKeyError,
    HostUnreachableError,
    SpecError,
)
from airflow_tfps.ssh import (
    MAX_HANDSHAKES,
    Completed,
    Endpoint,
    asynchronous,
    blocking,
    connect,
    connect_all,
    connect_async,
    settings,
)
from airflow_tfps.ssh.wire import DroppedError, quote

PYTHON = sys.executable
LOCAL = Endpoint(host="here", ssh_conn_id="local")

HOSTILE = [
    "",
    " ",
    "a b",
    "it's",
    'say "hi"',
    "$(touch /tmp/pwned)",
    "`id`",
    "$HOME ${PATH} $$",
    "a; exit 3",
    "a && b || c | d > e < f &",
    "*",
    "~",
    "-rf",
    "--",
    "line\nbreak\n",
    "tab\tcr\r",
    "back\\slash\\",
    "\\'",
    "!history",
    "#comment",
    "{a,b}",
    "[x]",
    "naïve ☃ 日本語",
    "x" * 4096,
]


class Sync:
    """`connect_async` behind the same face as `connect`, so that one test drives both."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._runner = asyncio.Runner()
        try:
            self._transport = self._run(connect_async(endpoint))
        except BaseException:
            self._runner.close()
            raise

    def _run(self, awaitable):
        async def wait():
            return await awaitable

        return self._runner.run(wait())

    def run(self, argv, stdin=b"", *, timeout=None) -> Completed:
        return self._run(self._transport.run(argv, stdin, timeout=timeout))

    @contextlib.contextmanager
    def stream(self, argv, stdin=b"") -> Iterator[SyncStream]:
        context = self._transport.stream(argv, stdin)
        stream = self._run(context.__aenter__())
        try:
            yield SyncStream(stream, self._run)
        finally:
            self._run(context.__aexit__(None, None, None))

    def close(self) -> None:
        self._run(self._transport.close())
        self._runner.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class SyncStream:
    def __init__(self, stream, run) -> None:
        self._stream = stream
        self._run = run
        self._lines = None

    def __iter__(self) -> Iterator[str]:
        lines = aiter(self._stream)
        while True:
            try:
                line = self._run(anext(lines))
            except StopAsyncIteration:
                return
            yield line

    def send(self, line: str) -> None:
        self._run(self._stream.send(line))

    @property
    def returncode(self):
        return self._stream.returncode

    @property
    def stderr(self):
        return self._stream.stderr


@pytest.fixture(params=["demo", "openssh"])
def host(request) -> DemoHost:
    return request.getfixturevalue({"demo": "demo_host", "openssh": "sshd_host"}[request.param])


@pytest.fixture(params=[connect, Sync], ids=["paramiko", "asyncssh"])
def open_(request):
    return request.param


@pytest.fixture(params=["demo", "openssh", "local"])
def endpoint(request, define) -> Endpoint:
    if request.param == "local":
        return LOCAL
    return define(request.getfixturevalue({"demo": "demo_host", "openssh": "sshd_host"}[request.param]))


@pytest.fixture
def transport(open_, endpoint):
    with open_(endpoint) as transport:
        yield transport


# --- commands -------------------------------------------------------------------------------------------------------


def test_command_gets_its_arguments_byte_for_byte(transport):
    """No argument is touched by any shell on the way."""
    done = transport.run([PYTHON, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *HOSTILE])
    assert json.loads(done.stdout) == HOSTILE


def test_bytes_and_exit_code_arrive_as_they_are(transport):
    """Standard input, both outputs and the exit code pass through unchanged, whatever the bytes."""
    data = bytes(range(256)) * 5 + b"\n\n\0"
    done = transport.run(["sh", "-c", "cat; printf 'bad \\377' >&2; exit 42"], data)
    assert done == Completed(returncode=42, stdout=data, stderr=b"bad \xff")


@pytest.mark.parametrize(("name", "number"), [("KILL", 9), ("TERM", 15), ("HUP", 1)])
def test_death_by_a_signal_is_told_from_an_exit_code(transport, name, number):
    """A command killed by a signal ends with its negative number; 1 must not read as "lost"."""
    assert transport.run(["sh", "-c", f"kill -{name} $$"]).returncode == -number


def test_signal_without_a_name_in_ssh_is_still_a_failure(open_, host, define):
    """sshd has no word for SIGBUS; the command must not look lost or successful."""
    with open_(define(host)) as transport:
        assert transport.run(["sh", "-c", "kill -BUS $$"]).returncode == -64


def test_missing_program_is_exit_code_127(transport):
    """As in a shell, and not an exception of its own in any transport."""
    done = transport.run(["no-such-program", "x"])
    assert done.returncode == 127
    assert b"no-such-program" in done.stderr


def test_command_replaces_the_shell(transport):
    """No shell stays behind to swallow signals: the process that sshd started is the program itself."""
    done = transport.run(
        [PYTHON, "-c", "import sys; print(open('/proc/self/cmdline').read().split('\\0')[0])"]
    )
    started = transport.run(["sh", "-c", "cat /proc/$$/stat"])
    assert done.stdout.decode().strip() == PYTHON
    pid, session = started.stdout.split()[0], started.stdout.split()[5]
    assert pid == session, "the program leads the session, so no shell is above it"


def test_commands_run_in_the_home_directory(open_, host, define):
    """Relative paths are relative to the user's home on the host."""
    with open_(define(host)) as transport:
        assert transport.run(["pwd"]).stdout.decode().strip() == host.home


def test_local_commands_run_at_home_with_the_environment_of_a_login(open_, user_home, monkeypatch):
    """Neither proxies nor Airflow's settings and secrets reach a training on this machine."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("AIRFLOW_CONN_SECRET", "s3cr3t")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    with open_(LOCAL) as transport:
        environment = transport.run(["env"]).stdout.decode()
        assert transport.run(["pwd"]).stdout.decode().strip() == str(user_home)
    assert f"HOME={user_home}" in environment
    assert "LC_ALL=C.UTF-8" in environment
    assert "PROXY" not in environment
    assert "s3cr3t" not in environment


def test_fifty_megabytes_go_both_ways_at_once(transport):
    """Neither side waits for the other for ever when both are larger than every buffer between them."""
    data = os.urandom(1024 * 1024) * 50
    done = transport.run(["cat"], data, timeout=120)
    assert done.returncode == 0
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


def test_large_output_on_both_pipes_and_unread_input_do_not_block(transport):
    """A command may write much to either output, and end without reading its input."""
    done = transport.run(
        ["sh", "-c", "head -c 5000000 /dev/zero >&2; head -c 5000000 /dev/zero; exit 7"],
        b"x" * 10_000_000,
        timeout=60,
    )
    assert (done.returncode, len(done.stdout), len(done.stderr)) == (7, 5_000_000, 5_000_000)


def test_silent_command_is_given_up_and_the_connection_stays(transport):
    """`timeout` bounds a command, says which host did not answer, and leaves the connection usable."""
    with pytest.raises(
        HostUnreachableError, match=r"(here|defined): 'sleep 60' did not answer within 0.3 s"
    ) as info:
        transport.run(["sleep", "60"], timeout=0.3)
    assert info.value.transient
    assert transport.run(["echo", "on"], timeout=30).stdout == b"on\n"


def test_several_commands_share_a_connection(open_, endpoint):
    """One connection carries commands of several threads at once (or tasks, for asyncssh)."""
    codes = list(range(10))
    if open_ is connect:
        with connect(endpoint) as transport, ThreadPoolExecutor(5) as pool:
            done = list(pool.map(lambda code: transport.run(["sh", "-c", f"exit {code}"]), codes))
    else:

        async def all_at_once():
            async with await connect_async(endpoint) as transport:
                return await asyncio.gather(*(transport.run(["sh", "-c", f"exit {code}"]) for code in codes))

        done = asyncio.run(all_at_once())
    assert [one.returncode for one in done] == codes


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish"])
@given(arguments=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), max_size=4))
@hypothesis_settings(max_examples=60, deadline=None)
def test_quoting_survives_every_shell(shell, arguments):
    """Whatever the login shell, the program gets exactly the arguments."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    line = quote(["printf", "%s\\0", "first", *arguments])
    done = subprocess.run(
        [shell, "-c", line], stdout=subprocess.PIPE, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    assert done.stdout.split(b"\0")[1:-1] == [argument.encode() for argument in arguments]


@pytest.mark.parametrize(
    ("argv", "why"), [([], "no command"), (["a", "b\0c"], "NUL"), (["a", "x" * 140_000], "standard input")]
)
def test_what_cannot_be_a_command_line_is_refused(argv, why):
    """Refused here, where the reason can be told, and not by a shell on some host."""
    with pytest.raises(ValueError, match=why):
        quote(argv)


def test_arguments_that_are_not_text_arrive(open_, sshd_host, define):
    """A path in another encoding is still a path."""
    with open_(define(sshd_host)) as transport:
        done = transport.run(["printf", "%s", os.fsdecode(b"caf\xe9")])
    assert done.stdout == b"caf\xe9"


# --- streams ---------------------------------------------------------------------------------------------------------


def test_stream_answers_line_by_line(transport):
    """Lines come as they are written, and `send` reaches the command between them."""
    script = "import sys\nfor line in sys.stdin:\n    print('got', line.strip(), flush=True)\n    if 'end' in line: sys.exit(5)"
    with transport.stream([PYTHON, "-c", script], b"first\n") as stream:
        lines = iter(stream)
        assert next(lines) == "got first"
        stream.send("zwölf")
        assert next(lines) == "got zwölf"
        assert stream.returncode is None
        stream.send("end")
        assert list(lines) == ["got end"]
        assert stream.returncode == 5


def test_stream_keeps_odd_lines_and_the_standard_error(transport):
    """Empty lines, bytes that are not UTF-8 and a last line without newline arrive; complaints are kept."""
    with transport.stream(["sh", "-c", "printf 'a\\n\\n\\377b\\nlast'; echo oops >&2; exit 1"]) as stream:
        assert list(stream) == ["a", "", "\ufffdb", "last"]
        assert (stream.returncode, stream.stderr) == (1, b"oops\n")


def test_stream_takes_large_input_while_it_is_read(transport):
    """A stream's first input may be larger than every buffer."""
    data = (b"x" * 4095 + b"\n") * 1600
    with transport.stream(["sh", "-c", f"head -c {len(data)}"], data) as stream:
        assert sum(len(line) + 1 for line in stream) == len(data)
        assert stream.returncode == 0


def test_endless_line_is_an_error_and_not_a_full_memory(transport):
    """A sender that never ends its line is stopped at MAX_LINE."""
    with (
        transport.stream(["sh", "-c", "cat /dev/zero"]) as stream,
        pytest.raises(CommandError, match=str(MAX_LINE)) as e,
    ):
        list(stream)
    assert e.value.code == "protocol"


def test_leaving_a_stream_tells_the_command_to_end(transport, wait_until):
    """The remote side sees its pipes closed, as it would when the connection breaks."""
    with transport.stream(["sh", "-c", "echo $$; exec cat"]) as stream:
        pid = next(iter(stream))
    gone = lambda: transport.run(["sh", "-c", f"kill -0 {pid}"]).returncode != 0  # noqa: E731
    wait_until(gone, "cat has ended")


def test_nobody_reads_what_is_sent_to_a_command_that_has_ended(transport, wait_until):
    """`send` fails then, instead of writing into the void for ever."""
    with transport.stream(["true"]) as stream:
        assert list(stream) == []

        def fails() -> bool:
            try:
                stream.send("anybody there?")
            except HostUnreachableError:
                return True
            return False

        wait_until(fails, "sending fails")


# --- lost connections ------------------------------------------------------------------------------------------------


def test_cut_connection_is_never_success(open_, host, define, relay):
    """A link that breaks while a command runs is an error that a retry can mend, in run and in stream."""
    link, behind = relay(host)
    with open_(define(behind)) as transport, transport.stream(["sh", "-c", "echo up; sleep 60"]) as stream:
        lines = iter(stream)
        assert next(lines) == "up"
        link.cut()
        with pytest.raises(
            HostUnreachableError, match="defined: the connection was lost before 'sh -c'"
        ) as info:
            list(lines)
        assert stream.returncode is None
        with pytest.raises(HostUnreachableError):
            transport.run(["true"])
    assert info.value.transient


def test_killed_session_of_sshd_is_never_success(open_, sshd_host, define):
    """When the host's side of the session dies, the command's exit is unknown and said to be so."""
    with (
        open_(define(sshd_host)) as transport,
        transport.stream(["sh", "-c", "echo $PPID; sleep 60"]) as stream,
    ):
        lines = iter(stream)
        os.kill(int(next(lines)), 9)
        with pytest.raises(HostUnreachableError, match="lost"):
            list(lines)


def test_closing_the_transport_ends_a_running_command(endpoint, define, demo_host):
    """A task's on_kill closes the connection from another thread; the blocked call must return, as an error."""
    transport = connect(define(demo_host))
    with transport.stream(["sh", "-c", "echo up; sleep 60"]) as stream:
        assert next(iter(stream)) == "up"
        closer = threading.Timer(0.1, transport.close)
        closer.start()
        with pytest.raises(HostUnreachableError):
            transport.run(["sleep", "60"], timeout=30)
        closer.join()


# --- reaching the host ------------------------------------------------------------------------------------------------


def test_dropped_handshake_is_tried_again(open_, host, define, relay):
    """sshd that restarts, or has too many handshakes at once, drops a few: that alone fails nothing."""
    link, behind = relay(host, drop_first=2)
    with open_(define(behind)) as transport:
        assert transport.run(["true"]).returncode == 0
    assert link.accepted == 3


def test_refused_port_is_told_with_the_address(open_, demo_host, define):
    """Nobody listens: transient, with host, address and a hint."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = define(demo_host, port=unused.getsockname()[1])
        with pytest.raises(
            HostUnreachableError, match=f"defined: 127.0.0.1:{endpoint and unused.getsockname()[1]} ref"
        ):
            open_(endpoint)


def test_silent_port_is_given_up(open_, demo_host, define):
    """A port that accepts and says nothing is given up after the handshake's time, and not worth another try."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = define(demo_host, port=silent.getsockname()[1])
        how = dataclasses.replace(
            settings.read(endpoint, settings.fetch(endpoint)), connect_secs=0.5, handshake_secs=0.5
        )
        with pytest.raises(HostUnreachableError, match="broke off the handshake") as info:
            blocking.connect(how) if open_ is connect else asyncio.run(asynchronous.connect(how))
    assert not isinstance(info.value, DroppedError)


def test_unknown_name_is_unreachable(open_, demo_host, define):
    """A name that does not resolve is reported as that."""
    with pytest.raises(HostUnreachableError, match=r"the name no\.such\.host\.invalid cannot be resolved"):
        open_(define(demo_host, host="no.such.host.invalid"))


def test_missing_connection_is_a_mistake_in_the_inventory(open_):
    """Airflow has no such connection: no retry can help."""
    with pytest.raises(SpecError, match="Airflow has no connection 'nowhere'"):
        open_(Endpoint(host="gpu-x", ssh_conn_id="nowhere"))


# --- the host's key --------------------------------------------------------------------------------------------------


def printed_fingerprint(key: str, tmp_path: Path) -> str:
    """What `ssh-keygen -l` prints for a public key."""
    (tmp_path / "key.pub").write_text(key + "\n")
    shown = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, check=True)
    return shown.stdout.decode().split()[1]


def other_key(tmp_path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(tmp_path / "other")], check=True)
    return " ".join((tmp_path / "other.pub").read_text().split()[:2])


def test_unknown_host_key_is_shown_with_what_to_do(open_, host, define, user_home, tmp_path):
    """The message has the host, the fingerprint as ssh-keygen prints it, and a key that can be pasted as it is."""
    with pytest.raises(HostKeyError, match="defined: the host key of .* is not known") as info:
        open_(define(host, host_key=None))
    message = str(info.value)
    assert f"ssh-ed25519 {printed_fingerprint(host.host_key, tmp_path)}" in message
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in message
    assert not info.value.transient
    advised = re.search(r'connection \'defined\' to "([^"]+)"', message)
    with open_(define(host, host_key=advised[1])) as transport:
        assert transport.run(["true"]).returncode == 0


def test_the_line_that_is_advised_for_known_hosts_works(open_, host, define, user_home):
    """With that line in ~/.ssh/known_hosts the same connection works, on a port other than 22 too."""
    with pytest.raises(HostKeyError) as info:
        open_(define(host, host_key=None))
    line = str(info.value).split("tasks and triggers: ")[1]
    assert line.startswith(f"[127.0.0.1]:{host.port} ssh-ed25519 ")
    (user_home / ".ssh" / "known_hosts").write_text(f"# mine\nnonsense\n{line}\n")
    with open_(define(host, host_key=None)) as transport:
        assert transport.run(["true"]).returncode == 0


@pytest.mark.parametrize("where", ["extra", "known_hosts"])
def test_changed_host_key_shows_both(open_, host, define, user_home, tmp_path, where):
    """A key that differs from the known one is refused with both fingerprints; nothing is sent."""
    other = other_key(tmp_path)
    (user_home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{host.port} {other}\n")
    with pytest.raises(HostKeyError, match="has changed") as info:
        open_(define(host, host_key=other if where == "extra" else None))
    assert printed_fingerprint(host.host_key, tmp_path) in str(info.value)
    assert printed_fingerprint(other, tmp_path) in str(info.value)
    assert where in str(info.value)


def test_host_key_extra_beats_known_hosts(open_, host, define, user_home, tmp_path):
    """What the connection says counts, in both backends alike."""
    (user_home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{host.port} {other_key(tmp_path)}\n")
    with open_(define(host)) as transport:
        assert transport.run(["true"]).returncode == 0


def test_hashed_known_hosts_in_another_place(open_, host, define, user_home, tmp_path):
    """The extra `known_hosts` names a file, and hashed names are understood."""
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{host.port} {host.host_key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, capture_output=True)
    assert "127.0.0.1" not in known.read_text()
    with open_(define(host, host_key=None, known_hosts=str(known))) as transport:
        assert transport.run(["true"]).returncode == 0


def test_revoked_host_key_is_refused(open_, host, define, user_home):
    """`@revoked` wins over an entry that trusts the key."""
    (user_home / ".ssh" / "known_hosts").write_text(
        f"[127.0.0.1]:{host.port} {host.host_key}\n@revoked * {host.host_key}\n"
    )
    with pytest.raises(HostKeyError, match="revoked"):
        open_(define(host, host_key=None))


def test_known_key_is_asked_for_among_several(open_, sshd_host, define, user_home):
    """A host with an ed25519 and an RSA key of which only the RSA one is known is no changed host."""
    rsa = " ".join(Path(sshd_host.key_file).with_name("host_rsa.pub").read_text().split()[:2])
    (user_home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{sshd_host.port} {rsa}\n")
    with open_(define(sshd_host, host_key=None)) as transport:
        assert transport.run(["true"]).returncode == 0
    with open_(define(sshd_host, host_key=rsa)) as transport:
        assert transport.run(["true"]).returncode == 0


@pytest.mark.parametrize(
    "extra", ["no_host_key_check", "allow_host_key_change", "ignore_hostkey_verification"]
)
def test_switching_the_check_off_is_refused(open_, demo_host, define, extra):
    """There is no way to an unverified host; set to false, the extras are as good as absent."""
    with pytest.raises(SpecError, match=f"extra.{extra}: host keys are always verified"):
        open_(define(demo_host, host_key=None, **{extra: "true"}))
    with open_(define(demo_host, **{extra: False})) as transport:
        assert transport.run(["true"]).returncode == 0


# --- keys, passphrases, users ------------------------------------------------------------------------------------------


def test_wrong_key_names_user_and_key(open_, host, define, user_home, tmp_path):
    """A refused key is final, and the message tells which key was offered to whom."""
    other = other_key(tmp_path)
    text = (tmp_path / "other").read_text()
    with pytest.raises(AuthenticationError, match=f"does not let '{host.login}' in") as info:
        open_(define(host, private_key=text))
    assert printed_fingerprint(other, tmp_path) in str(info.value)
    assert not info.value.transient


def test_wrong_user_and_no_key_at_all_are_refused(open_, host, define, user_home):
    """Neither a strange user nor an empty connection gets in, nor is either called unreachable."""
    with pytest.raises(AuthenticationError, match="does not let 'nobody-here' in"):
        open_(define(host, login="nobody-here"))
    with pytest.raises(AuthenticationError, match="neither a key nor a password"):
        open_(define(host, private_key=None))


def test_password_alone_is_tried_and_refused(open_, host, define, user_home):
    """A password reaches the host, which takes keys only, and stays out of the message."""
    with pytest.raises(AuthenticationError, match="a password") as info:
        open_(define(host, private_key=None, password="s3cr3t-pw"))
    assert "s3cr3t-pw" not in str(info.value)


@pytest.mark.parametrize("given", ["private_key", "key_file"])
def test_key_with_a_passphrase(open_, host, define, user_home, tmp_path, given):
    """`private_key_passphrase` unlocks a key that is given as text and one that is given as a file."""
    locked = tmp_path / "locked"
    shutil.copy(host.key_file, locked)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(locked)], check=True)
    extras = {"private_key": None, given: str(locked) if given == "key_file" else locked.read_text()}
    with open_(define(host, **extras, private_key_passphrase="open sesame")) as transport:
        assert transport.run(["true"]).returncode == 0
    with pytest.raises(SpecError, match="cannot be read"):
        open_(define(host, **extras, private_key_passphrase="wrong"))


def test_key_file_that_is_not_there_is_a_fault_of_the_connection(open_, host, define):
    """Not an authentication failure some time later, and with the path."""
    with pytest.raises(SpecError, match=r"extra.key_file: /no/such/key: No such file"):
        open_(define(host, private_key=None, key_file="/no/such/key"))


def test_default_keys_are_looked_for_unless_forbidden(open_, host, define, user_home):
    """~/.ssh/id_ed25519 is offered, and `look_for_keys: false` keeps it back."""
    shutil.copy(host.key_file, user_home / ".ssh" / "id_ed25519")
    with open_(define(host, private_key=None)) as transport:
        assert transport.run(["true"]).returncode == 0
    with pytest.raises(AuthenticationError):
        open_(define(host, private_key=None, look_for_keys="false"))


def test_identity_file_of_the_ssh_configuration_is_offered(open_, host, define, user_home):
    """IdentityFile in ~/.ssh/config means for us what it means for the ssh provider."""
    (user_home / ".ssh" / "config").write_text(f"Host 127.0.0.1\n  IdentityFile {host.key_file}\n")
    with open_(define(host, private_key=None)) as transport:
        assert transport.run(["true"]).returncode == 0


# --- proxies ---------------------------------------------------------------------------------------------------------

NETCAT = """
import os, select, socket, sys
there = socket.create_connection((sys.argv[1], int(sys.argv[2])))
open(sys.argv[3], "a").write(f"{os.getpid()} {sys.argv[1]} {sys.argv[2]}\\n")
while True:
    for ready in select.select([0, there], [], [])[0]:
        data = os.read(0, 65536) if ready == 0 else there.recv(65536)
        if not data:
            sys.exit()
        there.sendall(data) if ready == 0 else os.write(1, data)
"""


@pytest.fixture
def netcat(tmp_path) -> tuple[str, Path]:
    """A proxy command, and the file in which it leaves a line for each run."""
    script, record = tmp_path / "netcat.py", tmp_path / "record"
    script.write_text(NETCAT)
    return f"{PYTHON} {script} %h %p {record}", record


@pytest.mark.parametrize("place", ["extra", "config"])
def test_proxy_command(open_, host, define, user_home, netcat, wait_until, place):
    """The connection goes through `host_proxy_cmd` or ProxyCommand, %h and %p filled in, and the proxy is reaped."""
    command, record = netcat
    if place == "config":
        (user_home / ".ssh" / "config").write_text(f"Host 127.0.0.1\n  ProxyCommand {command}\n")
    endpoint = define(host, **({"host_proxy_cmd": command} if place == "extra" else {}))
    data = os.urandom(3_000_000)
    with open_(endpoint) as transport:
        assert transport.run(["cat"], data, timeout=60).stdout == data
        pid, *target = record.read_text().split()
    assert target == ["127.0.0.1", str(host.port)]
    assert not Path("/proc", pid).exists()


def test_killed_proxy_is_a_lost_connection(open_, host, define, user_home, netcat):
    """A proxy that dies under a running command is noticed at once."""
    command, record = netcat
    with open_(define(host, host_proxy_cmd=command)) as transport:
        with transport.stream(["sh", "-c", "echo up; sleep 60"]) as stream:
            lines = iter(stream)
            assert next(lines) == "up"
            os.kill(int(record.read_text().split()[0]), 9)
            with pytest.raises(HostUnreachableError, match="lost"):
                list(lines)


def test_what_a_failing_proxy_says_is_in_the_message(open_, host, define, user_home):
    """The reason of a failure behind a proxy is known to the proxy only."""
    with pytest.raises(HostUnreachableError, match="its proxy command said: no route to bastion"):
        open_(define(host, host_proxy_cmd="sh -c 'echo no route to bastion >&2; exit 1'"))
    with pytest.raises(HostUnreachableError, match="'no-such-proxy' cannot be started"):
        open_(define(host, host_proxy_cmd="no-such-proxy %h"))


def test_jump_host_of_the_ssh_configuration(
    open_, demo_host, sshd_host, define, user_home, tmp_path, monkeypatch
):
    """ProxyJump works as in OpenSSH: through its own client, with that client's configuration for the jump host."""
    config = user_home / ".ssh" / "config"
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{demo_host.port} {demo_host.host_key}\n")
    config.write_text(
        f"""
        Host 127.0.0.1
          ProxyJump bastion
        Host bastion
          HostName 127.0.0.1
          Port {demo_host.port}
          User {demo_host.login}
          IdentityFile {demo_host.key_file}
          UserKnownHostsFile {known}
          StrictHostKeyChecking yes
          ProxyJump none
        """
    )
    # ssh takes the home directory from the password database; only a wrapper can make it read our file.
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/ran\nexec {shutil.which("ssh")} -F {config} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    with open_(define(sshd_host)) as transport:
        parent = transport.run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout.decode().split()
    assert parent[3] == str(sshd_host.port)
    assert f"-W [127.0.0.1]:{sshd_host.port} ssh://bastion" in (tmp_path / "ran").read_text()


# --- many hosts ------------------------------------------------------------------------------------------------------


class Watched(DemoServer):
    """Counts handshakes at a time, and connections that are open."""

    underway = 0
    most = 0
    open = 0

    def connection_made(self, conn) -> None:
        super().connection_made(conn)
        Watched.open += 1
        Watched.underway += 1
        Watched.most = max(Watched.most, Watched.underway)
        self._counted = True

    async def begin_auth(self, username) -> bool:
        await asyncio.sleep(0.1)  # long enough that all who are allowed to are here
        return True

    def auth_completed(self) -> None:
        self._done()

    def connection_lost(self, exc) -> None:
        self._done()
        Watched.open -= 1

    def _done(self) -> None:
        if self._counted:
            Watched.underway -= 1
            self._counted = False


@pytest.fixture
def watched(tmp_path) -> Iterator[DemoHost]:
    """A demo host in a thread of this process, whose server is `Watched`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serving = serve(tmp_path, ["w"], Watched)
    Watched.underway = Watched.most = Watched.open = 0
    try:
        yield asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(20)["w"]
    finally:
        asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def test_at_most_eight_handshakes_at_a_time(open_, watched, define):
    """Twenty hosts are connected to at once, and sshd's MaxStartups is not hit."""
    endpoint = define(watched)
    if open_ is connect:
        with ThreadPoolExecutor(20) as pool:
            for transport in pool.map(connect, [endpoint] * 20):
                transport.close()
    else:

        async def all_at_once() -> None:
            for transport in await asyncio.gather(*(connect_async(endpoint) for _ in range(20))):
                await transport.close()

        asyncio.run(all_at_once())
    assert 1 < Watched.most <= MAX_HANDSHAKES


def test_connecting_to_all_hosts_gives_each_its_transport(embedded_hosts):
    """Every host of the list is there by its name, `local` among them."""
    embedded_hosts("many-a", "many-b")
    endpoints = [Endpoint(host=name, ssh_conn_id=name.replace("-", "_")) for name in ("many-a", "many-b")]
    transports = connect_all([*endpoints, LOCAL])
    try:
        homes = {
            name: transport.run(["pwd"]).stdout.decode().strip() for name, transport in transports.items()
        }
    finally:
        for transport in transports.values():
            transport.close()
    assert [Path(homes[name]).name for name in ("many-a", "many-b")] == ["many-a", "many-b"]
    assert homes["here"] == str(Path.home())


def test_connecting_to_all_names_every_failure_and_keeps_nothing(
    watched, demo_host, define, user_home, wait_until
):
    """One error lists all hosts that failed, of the class that no retry mends; the others are closed again."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoints = [
            define(watched, name="good"),
            define(demo_host, name="down", port=unused.getsockname()[1]),
            define(demo_host, name="stranger", host_key=None),
        ]
        with pytest.raises(HostKeyError, match=r"down, stranger: 2 of 3 hosts cannot be used") as info:
            connect_all(endpoints)
    assert "down: 127.0.0.1" in str(info.value)
    assert "stranger: the host key" in str(info.value)
    assert Watched.most == 1
    wait_until(lambda: Watched.open == 0, "the good connection is closed")


def test_connections_that_are_wrong_are_listed_together(demo_host, define):
    """Mistakes in the inventory's connections come as one SpecError."""
    with pytest.raises(SpecError) as info:
        connect_all([Endpoint(host=name, ssh_conn_id=name) for name in ("absent_a", "absent_b")])
    assert len(info.value.faults) == 2


# --- what must not show ------------------------------------------------------------------------------------------------


def test_no_secret_is_logged(open_, host, define, user_home, tmp_path, caplog):
    """At any level, neither keys, passphrase and password nor what a command is sent reach a log."""
    locked = tmp_path / "locked"
    shutil.copy(host.key_file, locked)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "s3cr3t-phrase", "-f", str(locked)], check=True)
    endpoint = define(
        host, private_key=locked.read_text(), private_key_passphrase="s3cr3t-phrase", password="s3cr3t-word"
    )
    with caplog.at_level(logging.DEBUG), open_(endpoint) as transport:
        transport.run(["cat"], b"s3cr3t-input")
        with transport.stream(["cat"], b"s3cr3t-first\n") as stream:
            assert next(iter(stream)) == "s3cr3t-first"
    assert "s3cr3t" not in caplog.text
    assert not [line for line in locked.read_text().splitlines() if line in caplog.text]
    assert "s3cr3t" not in repr(settings.read(endpoint, settings.fetch(endpoint)))


def test_libraries_are_quiet_in_a_task_log(open_, host, define, caplog):
    """At INFO, the level of a task's log, connecting and running a command says nothing."""
    with caplog.at_level(logging.INFO), open_(define(host)) as transport:
        transport.run(["true"])
    assert [record for record in caplog.records if record.name.startswith(("asyncssh", "paramiko"))] == []


def test_importing_the_package_loads_no_ssh_library():
    """DAG files and triggers import this package; only connecting costs the libraries' import."""
    code = "import sys, airflow_tfps.ssh; print([m for m in ('paramiko', 'asyncssh', 'airflow') if m in sys.modules])"
    assert subprocess.run([PYTHON, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
