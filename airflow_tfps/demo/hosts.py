"""Hosts for the demo and the tests: SSH servers on 127.0.0.1 in one process, without root or a system
service.

Each host has a port, a host key and a home directory of its own; all let the current user in with one fresh
key. A command gets what sshd gives it: the user's shell with `-c` in a session of its own, in its home, with
a clean environment and three pipes; when the client goes away the pipes are closed and the command is let be.
For loopback only.

    python -m airflow_tfps.demo.hosts --home DIR --host gpu-a --host gpu-b      # until SIGTERM
    hosts = read_hosts(Path(DIR))                       # once DIR/hosts.json is there
    os.environ["AIRFLOW_CONN_GPU_A"] = json.dumps(connection_json(hosts["gpu-a"]))
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import getpass
import json
import logging
import os
import pwd
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

log = logging.getLogger(__name__)

_CHUNK = 64 * 1024

_RFC4254_SIGNALS = frozenset(
    ["ABRT", "ALRM", "FPE", "HUP", "ILL", "INT", "KILL", "PIPE", "QUIT", "SEGV", "TERM", "USR1", "USR2"]
)


@dataclass(frozen=True, kw_only=True)
class DemoHost:
    """How to reach one host; what stands in hosts.json under its name."""

    port: int
    """On 127.0.0.1."""
    login: str
    host_key: str
    """Public half, `ssh-ed25519 AAAA...`."""
    key_file: str
    """Private key of the user, mode 0600."""
    home: str
    """Home directory of the user on this host."""


def read_hosts(home: Path) -> dict[str, DemoHost]:
    """Read what a running `demo.hosts` serves. Raises FileNotFoundError until it is ready."""
    return {name: DemoHost(**host) for name, host in json.loads((home / "hosts.json").read_text()).items()}


def connection_json(host: DemoHost) -> dict[str, Any]:
    """Describe an Airflow connection of type ssh, as `connections add --conn-json` and AIRFLOW_CONN_* take
    it.
    """
    return {
        "conn_type": "ssh",
        "host": "127.0.0.1",
        "port": host.port,
        "login": host.login,
        "extra": {"private_key": Path(host.key_file).read_text(), "host_key": host.host_key},
    }


class DemoServer(asyncssh.SSHServer):
    """Lets one user in with one key; forwards to loopback, so that a demo host can be a jump host."""

    def __init__(self, login: str, key: asyncssh.SSHKey) -> None:
        self._login = login
        self._key = key.public_data
        self.connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self.connection = conn

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == self._login and key.public_data == self._key

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:  # noqa: ARG002  # noqa: ARG002
        return dest_host in {"127.0.0.1", "::1", "localhost"}


@contextlib.asynccontextmanager
async def serve(
    home: Path,
    names: Sequence[str],
    server: Callable[[str, asyncssh.SSHKey], DemoServer] = DemoServer,
) -> AsyncIterator[dict[str, DemoHost]]:
    """Serve hosts until the context is left, then drop their connections. Commands' children stay."""
    login = getpass.getuser()
    key_file = home / "id_ed25519"
    user_key = asyncssh.generate_private_key("ssh-ed25519", comment="airflow-tfps demo")
    key_file.unlink(missing_ok=True)
    key_file.touch(mode=0o600)
    key_file.write_bytes(user_key.export_private_key())
    servers: list[DemoServer] = []

    def make_server() -> DemoServer:
        servers.append(server(login, user_key))
        return servers[-1]

    hosts = {}
    async with contextlib.AsyncExitStack() as listeners:
        for name in names:
            host_home = home / "hosts" / name
            host_home.mkdir(parents=True, exist_ok=True)
            host_key = asyncssh.generate_private_key("ssh-ed25519")
            listener = await listeners.enter_async_context(
                asyncssh.listen(
                    "127.0.0.1",
                    0,
                    server_factory=make_server,
                    server_host_keys=[host_key],
                    process_factory=_Commands(host_home).run,
                    encoding=None,
                    allow_pty=False,
                    agent_forwarding=False,
                    compression_algs=["none", "zlib@openssh.com"],
                )
            )
            hosts[name] = DemoHost(
                port=listener.get_port(),
                login=login,
                host_key=" ".join(host_key.export_public_key().decode().split()[:2]),
                key_file=str(key_file),
                home=str(host_home),
            )
        try:
            yield hosts
        finally:
            for one in servers:
                if one.connection is not None:
                    one.connection.abort()


class _Commands:
    """Runs the commands of one host."""

    def __init__(self, home: Path) -> None:
        self._home = home
        user = pwd.getpwuid(os.getuid())
        self._shell = user.pw_shell if Path(user.pw_shell or "/").is_file() else "/bin/sh"
        self._environment = {
            "HOME": str(home),
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "SHELL": self._shell,
            # `python3` on a demo host is the interpreter that has TensorFlow: the one that runs the demo.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "LANG": "C.UTF-8",
        }

    async def run(self, channel: asyncssh.SSHServerProcess[bytes]) -> None:
        """Run one command to its end, whether or not the client stays."""
        if channel.command is None:
            channel.stderr.write(b"This host runs commands only.\n")
            channel.exit(1)
            return
        channel.channel.set_write_buffer_limits(0)  # drained means sent: exit() would overtake the rest
        # Output pipes of our own: closing asyncio's kills the process, and sshd does not do that.
        out, child_out = os.pipe()
        err, child_err = os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                self._shell,
                "-c",
                channel.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=child_out,
                stderr=child_err,
                cwd=self._home,
                env=self._environment,
                start_new_session=True,
            )
        finally:
            os.close(child_out)
            os.close(child_err)
        pumps = [
            asyncio.create_task(_feed(channel.stdin, child)),
            asyncio.create_task(_drain(out, channel.stdout)),
            asyncio.create_task(_drain(err, channel.stderr)),
        ]
        gone = asyncio.create_task(channel.channel.wait_closed())
        gone.add_done_callback(lambda _: [pump.cancel() for pump in pumps])
        code = await child.wait()
        await asyncio.gather(*pumps[1:], return_exceptions=True)
        pumps[0].cancel()
        if code >= 0:
            channel.exit(code)
        else:
            name = signal.Signals(-code).name.removeprefix("SIG")
            # sshd says it so for signals which the RFC does not name.
            channel.exit_with_signal(name if name in _RFC4254_SIGNALS else "SIG@openssh.com")


async def _feed(source: asyncssh.SSHReader[bytes], child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    try:
        while data := await source.read(_CHUNK):
            child.stdin.write(data)
            await child.stdin.drain()
    except (OSError, asyncssh.Error) as error:
        log.debug("standard input: %s", error)
    finally:
        child.stdin.close()


async def _drain(pipe: int, sink: asyncssh.SSHWriter[bytes]) -> None:
    reader = asyncio.StreamReader(limit=_CHUNK)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
    )
    try:
        while data := await reader.read(_CHUNK):
            sink.write(data)
            await sink.drain()
    except (OSError, asyncssh.Error) as error:
        log.debug("output: %s", error)
    finally:
        transport.close()


def write_hosts(home: Path, hosts: Mapping[str, DemoHost]) -> None:
    """Write hosts.json; it appears complete or not at all."""
    partial = home / "hosts.json.partial"
    partial.write_text(json.dumps({name: dataclasses.asdict(host) for name, host in hosts.items()}, indent=2))
    partial.replace(home / "hosts.json")


async def _main(home: Path, names: Sequence[str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serve(home, names) as hosts:
        write_hosts(home, hosts)
        log.info("ready: %s", ", ".join(hosts))
        await stop.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m airflow_tfps.demo.hosts", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--home", type=Path, required=True, help="directory for keys, homes and hosts.json")
    parser.add_argument("--host", action="append", required=True, help="name of a host; may be repeated")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    home = arguments.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    ready = home / "hosts.json"
    ready.unlink(missing_ok=True)
    try:
        asyncio.run(_main(home, arguments.host))
    finally:
        ready.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
