"""What a command gets and gives, over every transport.

Each behaviour is checked for paramiko and asyncssh, against the demo's own server and OpenSSH's, and locally.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st
from tfps_runtime.protocol import MAX_LINE

from airflow_tfps.errors import (
    CommandError,
    HostUnreachableError,
)
from airflow_tfps.ssh import (
    Completed,
    Endpoint,
    connect,
    connect_async,
)
from airflow_tfps.ssh.wire import quote

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


# --- commands ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("pipe", ["", " >&2"])
def test_endless_output_is_an_error_and_not_a_full_memory(transport, wait_until, tmp_path, pipe):
    """A host that never stops sending is cut off, `local` too, and what sent ends; the connection stays usable."""
    pid = tmp_path / "pid"
    with pytest.raises(CommandError, match="more than 67108864 bytes") as caught:
        transport.run(["sh", "-c", f"echo $$ > {pid}; exec cat /dev/zero{pipe}"], timeout=120)
    assert caught.value.code == "protocol"
    assert transport.run(["echo", "still there"]).stdout == b"still there\n"
    wait_until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists(), "cat has ended")


def test_silent_command_is_given_up_and_the_connection_stays(transport):
    """`timeout` bounds a command, says which host did not answer, and leaves the connection usable."""
    with pytest.raises(
        HostUnreachableError, match=r"(here|defined): 'sleep 10' did not answer within 0.3 s"
    ) as info:
        transport.run(["sleep", "10"], timeout=0.3)
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


# --- the command line --------------------------------------------------------------------------------------


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


# --- streams -----------------------------------------------------------------------------------------------


def test_stream_answers_line_by_line(transport):
    """Lines come as they are written, and `send` reaches the command between them."""
    script = """
import sys
for line in sys.stdin:
    print('got', line.strip(), flush=True)
    if 'end' in line:
        sys.exit(5)
"""
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


# --- lost connections --------------------------------------------------------------------------------------


def test_cut_connection_is_never_success(open_, host, define, relay):
    """A link that breaks while a command runs is an error that a retry can mend, in run and in stream."""
    link, behind = relay(host)
    with open_(define(behind)) as transport, transport.stream(["sh", "-c", "echo up; exec cat"]) as stream:
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
        transport.stream(["sh", "-c", "echo $PPID; exec cat"]) as stream,
    ):
        lines = iter(stream)
        os.kill(int(next(lines)), 9)
        with pytest.raises(HostUnreachableError, match="lost"):
            list(lines)


def test_closing_the_transport_ends_a_running_command(endpoint, define, demo_host):
    """A task's on_kill closes the connection from another thread; the blocked call must return, as an error."""
    transport = connect(define(demo_host))
    with transport.stream(["sh", "-c", "echo up; exec cat"]) as stream:
        assert next(iter(stream)) == "up"
        closer = threading.Timer(0.1, transport.close)
        closer.start()
        with pytest.raises(HostUnreachableError):
            transport.run(["sleep", "10"], timeout=30)
        closer.join()
