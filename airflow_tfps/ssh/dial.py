"""The socket below an SSH connection: TCP, or a proxy command at the other end of a socket pair.

Both backends are handed a connected socket, so time limits, proxies and the detection of dead links are the
same. Imports the standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
from typing import IO, TYPE_CHECKING

from airflow_tfps.errors import HostUnreachableError
from airflow_tfps.ssh.wire import DroppedError

if TYPE_CHECKING:
    from airflow_tfps.ssh.settings import Settings

REAP_SECS = 5.0
"""A proxy command has that long to end after its connection was closed; then it is killed."""


class Line:
    """A connected socket, and the proxy process behind it, if there is one."""

    def __init__(
        self,
        sock: socket.socket,
        proxy: subprocess.Popen[bytes] | None = None,
        complaints: IO[bytes] | None = None,
    ) -> None:
        self.sock = sock
        self._proxy = proxy
        self._complaints = complaints

    def explain(self, error: object) -> str:
        """Add to an error what the proxy command had to say: the reason is mostly there."""
        if self._complaints is None or self._complaints.closed:
            return str(error)
        file = self._complaints.fileno()
        # Not by seek: the offset is shared with the proxy, which writes at it.
        said = os.pread(file, 500, max(0, os.fstat(file).st_size - 500)).decode("utf-8", "replace").strip()
        return f"{error}; its proxy command said: {said}" if said else f"{error} (through a proxy command)"

    def close(self) -> None:
        """Close the socket, end the proxy and wait for it. Blocks for up to REAP_SECS. Idempotent."""
        self.sock.close()
        if self._proxy is not None and self._proxy.returncode is None:
            self._proxy.terminate()
            try:
                self._proxy.wait(REAP_SECS)
            except subprocess.TimeoutExpired:
                self._proxy.kill()
                self._proxy.wait()
        if self._complaints is not None:
            self._complaints.close()


def dial(settings: Settings) -> Line:
    """Connect; blocks for up to `connect_secs`. Raises HostUnreachableError, or DroppedError when refused."""
    if settings.proxy:
        return _spawn(settings)
    try:
        sock = socket.create_connection((settings.address, settings.port), settings.connect_secs)
    except OSError as error:
        raise _failed(settings, error) from error
    sock.settimeout(None)
    return _watched(sock, settings)


async def dial_async(settings: Settings) -> Line:
    """`dial` for an event loop."""
    if settings.proxy:
        return await asyncio.to_thread(_spawn, settings)
    loop = asyncio.get_running_loop()
    failure = OSError("it has no address")
    try:
        async with asyncio.timeout(settings.connect_secs):
            for family, kind, proto, _, address in await loop.getaddrinfo(
                settings.address, settings.port, type=socket.SOCK_STREAM
            ):
                sock = socket.socket(family, kind, proto)
                sock.setblocking(False)
                try:
                    await loop.sock_connect(sock, address)
                    return _watched(sock, settings)
                except OSError as error:
                    failure = error
                    sock.close()
                except asyncio.CancelledError:
                    sock.close()
                    raise
    except OSError as error:  # TimeoutError is one
        raise _failed(settings, error) from error
    raise _failed(settings, failure) from failure


def _failed(settings: Settings, error: OSError) -> HostUnreachableError:
    where = f"{settings.address}:{settings.port}"
    if isinstance(error, ConnectionRefusedError):
        return DroppedError(
            settings.host, f"{where} refuses connections: is sshd running there, on that port?"
        )
    if isinstance(error, TimeoutError):
        return HostUnreachableError(
            settings.host, f"{where} did not answer within {settings.connect_secs:g} s (extra conn_timeout)"
        )
    if isinstance(error, socket.gaierror):
        return HostUnreachableError(
            settings.host, f"the name {settings.address} cannot be resolved ({error.strerror})"
        )
    return HostUnreachableError(settings.host, f"{where} cannot be reached ({error.strerror or error})")


def _watched(sock: socket.socket, settings: Settings) -> Line:
    """Let the kernel give up a dead link after the missed keepalives; it would wait for 15 minutes.

    asyncssh counts the answers to its keepalives, paramiko sends them and does not look.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        limit = settings.keepalive_secs * settings.keepalive_misses * 1000
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
    return Line(sock)


def _spawn(settings: Settings) -> Line:
    ours, theirs = socket.socketpair()
    complaints = tempfile.TemporaryFile()  # noqa: SIM115  the Line closes it  # noqa: SIM115  the Line closes it
    try:
        # A session of its own: a Ctrl-C or the end of a task's group must not cut the connection first.
        proxy = subprocess.Popen(
            settings.proxy,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=complaints,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        complaints.close()
        raise HostUnreachableError(
            settings.host, f"its proxy command {settings.proxy[0]!r} cannot be started ({error.strerror})"
        ) from error
    finally:
        theirs.close()
    return Line(ours, proxy, complaints)
