"""Making a connection: addresses, host keys, keys, proxies, many hosts at once, and what every failure looks like.

Each behaviour is checked for paramiko and asyncssh, mostly against the demo's own server and OpenSSH's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_tfps.demo.hosts import DemoHost, DemoServer, connection_json, read_hosts, serve
from airflow_tfps.errors import (
    AuthenticationError,
    HostKeyError,
    HostUnreachableError,
    SpecError,
)
from airflow_tfps.ssh import (
    MAX_HANDSHAKES,
    Endpoint,
    asynchronous,
    blocking,
    connect,
    connect_all,
    connect_async,
    settings,
)
from airflow_tfps.ssh.dial import dial, dial_async
from airflow_tfps.ssh.wire import DroppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PYTHON = sys.executable
LOCAL = Endpoint(host="here", ssh_conn_id="local")


# --- reaching the host -------------------------------------------------------------------------------------


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


# --- the host's key ----------------------------------------------------------------------------------------


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
    with pytest.raises(HostKeyError, match=r"defined: the host key of .* is not known") as info:
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


# --- keys, passphrases, users ------------------------------------------------------------------------------


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


def test_certificate_beside_the_key_is_offered(open_, sshd_host, define, user_home, tmp_path):
    """A key that the host does not know gets in with `<key>-cert.pub`, signed by an authority that it trusts."""
    other_key(tmp_path)
    authority = Path(sshd_host.key_file).with_name("ca_ed25519")
    subprocess.run(
        [
            "ssh-keygen",
            "-q",
            "-s",
            str(authority),
            "-I",
            "x",
            "-n",
            sshd_host.login,
            str(tmp_path / "other.pub"),
        ],
        check=True,
    )
    with open_(define(sshd_host, private_key=None, key_file=str(tmp_path / "other"))) as transport:
        assert transport.run(["true"]).returncode == 0


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


# --- proxies -----------------------------------------------------------------------------------------------

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
def test_proxy_command(open_, host, define, user_home, netcat, place):
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
    endpoint = define(host, host_proxy_cmd=command)
    with open_(endpoint) as transport, transport.stream(["sh", "-c", "echo up; exec cat"]) as stream:
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


@pytest.fixture
def jump(demo_host, user_home, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Write a ~/.ssh/config with `jump` as ProxyJump and the demo host as bastion; the file with ssh's arguments."""

    def configure(jump: str, host_key: str, strict: str = "yes") -> Path:
        known = tmp_path / "known"
        known.write_text(f"[127.0.0.1]:{demo_host.port} {host_key}\n" if host_key else "")
        config = user_home / ".ssh" / "config"
        config.write_text(
            f"""
            Host 127.0.0.1
              ProxyJump {jump}
            Host bastion bastion-?
              HostName 127.0.0.1
              Port {demo_host.port}
              User {demo_host.login}
              IdentityFile {demo_host.key_file}
              UserKnownHostsFile {known}
              StrictHostKeyChecking {strict}
              ProxyJump none
            """
        )
        # ssh takes the home directory from the password database; only a wrapper can make it read our file.
        wrapper = tmp_path / "bin" / "ssh"
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/ran\nexec {shutil.which("ssh")} -F {config} "$@"\n'
        )
        wrapper.chmod(0o755)
        monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
        return tmp_path / "ran"

    return configure


@pytest.mark.parametrize(
    ("hops", "options"),
    [
        ("bastion", "-W [127.0.0.1]:{port} ssh://bastion"),
        ("bastion-1,bastion-2", "-W [127.0.0.1]:{port} ssh://bastion-2"),
        ("ssh://bastion-1,bastion-2,bastion", "-W [127.0.0.1]:{port} ssh://bastion"),
    ],
)
def test_jump_hosts_of_the_ssh_configuration(open_, demo_host, sshd_host, define, jump, hops, options):
    """ProxyJump works as in OpenSSH: through its own client, with that client's configuration for the jump hosts."""
    ran = jump(hops, demo_host.host_key)
    with open_(define(sshd_host)) as transport:
        parent = transport.run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout.decode().split()
    assert parent[3] == str(sshd_host.port)
    assert options.format(port=sshd_host.port) in ran.read_text()
    assert len(ran.read_text().splitlines()) == hops.count(",") + 1


@pytest.mark.parametrize("hops", ["bastion", "bastion-1,bastion-2"])
@pytest.mark.parametrize("known", ["unknown", "changed"])
def test_the_host_key_of_a_jump_host_is_verified(open_, demo_host, sshd_host, define, jump, hops, known):
    """Also where the configuration would let it pass; and of the first of several, too."""
    ran = jump(hops, "" if known == "unknown" else sshd_host.host_key, strict="no")
    with pytest.raises(HostUnreachableError, match="Host key verification failed"):
        open_(define(sshd_host))
    assert len(ran.read_text().splitlines()) >= hops.count(",") + 1


@pytest.mark.parametrize("known", ["unknown", "changed"])
def test_the_host_key_behind_a_jump_host_is_verified(
    open_, demo_host, sshd_host, define, jump, tmp_path, known
):
    """A jump host sees nothing and can put nobody in the host's place."""
    jump("bastion", demo_host.host_key)
    with pytest.raises(HostKeyError):
        open_(define(sshd_host, host_key=None if known == "unknown" else demo_host.host_key))


# --- many hosts --------------------------------------------------------------------------------------------


class Watched(DemoServer):
    """Counts handshakes at a time, and connections that are open."""

    underway = 0
    most = 0
    open = 0
    last = None

    def connection_made(self, conn) -> None:
        super().connection_made(conn)
        Watched.open += 1
        Watched.underway += 1
        Watched.most = max(Watched.most, Watched.underway)
        self._counted = True
        Watched.last = self

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


def test_algorithms_and_compression_of_the_connection_are_used(open_, watched, define):
    """`ciphers`, `disabled_algorithms` and `compress` shape the first key exchange, in both libraries."""
    extras = {"ciphers": ["aes256-ctr"], "disabled_algorithms": {"macs": ["hmac-sha2-256-etm@openssh.com"]}}
    for compress, algorithm in (("true", "zlib@openssh.com"), ("false", "none")):
        with open_(define(watched, compress=compress, **extras)) as transport:
            assert transport.run(["true"]).returncode == 0
            seen = Watched.last.connection.get_extra_info
            assert (seen("recv_cipher"), seen("recv_compression")) == ("aes256-ctr", algorithm)
            assert seen("recv_mac") != "hmac-sha2-256-etm@openssh.com"
    with pytest.raises(SpecError, match="extra"):
        open_(define(watched, ciphers=["rot13"]))


def test_kernel_gives_up_a_dead_link(demo_host, define):
    """Nobody answers for three keepalives: the socket fails, in place of TCP's quarter of an hour."""
    endpoint = define(demo_host, keepalive_interval=7)
    how = settings.read(endpoint, settings.fetch(endpoint))
    for line in (dial(how), asyncio.run(dial_async(how))):
        assert line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 21_000
        line.close()


# --- the demo's hosts --------------------------------------------------------------------------------------


def test_agents_outlive_their_connection_and_their_demo_host(tmp_path, monkeypatch, wait_until):
    """Neither the end of the connection nor that of the server ends what detached itself; hosts.json goes away."""
    arguments = ["--home", str(tmp_path), "--host", "x"]
    server = subprocess.Popen([PYTHON, "-m", "airflow_tfps.demo.hosts", *arguments])
    try:
        wait_until((tmp_path / "hosts.json").exists, "ready")
        host = read_hosts(tmp_path)["x"]
        assert Path(host.key_file).stat().st_mode & 0o777 == 0o600
        monkeypatch.setenv("AIRFLOW_CONN_X", json.dumps(connection_json(host)))
        with connect(Endpoint(host="x", ssh_conn_id="x")) as transport:
            detach = "setsid sleep 60 </dev/null >/dev/null 2>&1 & echo $!"
            pid = int(transport.run(["sh", "-c", detach], timeout=20).stdout)
    finally:
        server.terminate()
        assert server.wait(20) == 0
    os.kill(pid, 9)  # raises if it has ended
    assert not (tmp_path / "hosts.json").exists()


# --- what must not show ------------------------------------------------------------------------------------


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
