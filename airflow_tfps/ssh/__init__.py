"""Running commands on hosts: two methods, over SSH or on this machine, blocking or asynchronous.

Workers use `connect` (paramiko), triggers use `connect_async` (asyncssh); a connection id of `local` means
this machine. All of them read the same Airflow `ssh` connection in the same way, verify the host's key, and
raise the same errors. A command is an argv list; it runs with the user's home as working directory, so
relative paths are relative to the home. No environment travels: what a command must know goes into its
arguments or its standard input.

    with connect(Endpoint(host="gpu-a", ssh_conn_id="gpu_a")) as transport:
        done = transport.run(["python3", "-V"], timeout=30)
        with transport.stream(["tail", "-f", "log"]) as lines:
            for line in lines: ...

Importing this package imports neither paramiko nor asyncssh nor Airflow.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from tfps_runtime.protocol import LOCAL

from airflow_tfps.errors import AuthenticationError, HostError, HostKeyError, HostUnreachableError, SpecError
from airflow_tfps.ssh.wire import DroppedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 8
"""Handshakes at a time in one process: more is slower, and sshd's `MaxStartups` (10) begins to drop them."""

RETRY_SECS = (0.5, 2.0)
"""Waits before a second and third try, when a host refuses the connection or drops it during the
handshake.
"""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A host as the inventory names it."""

    host: str
    """Name in the inventory; messages begin with it."""
    ssh_conn_id: str
    """Airflow connection of type `ssh`, or `local`."""


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A command that ended."""

    returncode: int
    """Exit code, or minus the number of the signal that killed it (-64: a signal that SSH has no name
    for).
    """
    stdout: bytes
    stderr: bytes


class Stream(Protocol):
    """A running command whose output is read line by line."""

    @property
    def returncode(self) -> int | None:
        """None until the iteration has come to its end; then as in `Completed`."""

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB that the command wrote to its standard error so far."""

    def __iter__(self) -> Iterator[str]:
        """Yield lines without their newline; bytes that are not UTF-8 are replaced.

        Ends when the command has ended. Raises HostUnreachableError when the connection is lost instead, and
        CommandError (code `protocol`) for a line longer than `protocol.MAX_LINE`.
        """

    def send(self, line: str) -> None:
        """Write one line to the command's standard input. Raises HostUnreachableError when nobody can read
        it.
        """

    def close(self) -> None:
        """Close the command's pipes, which tells it to end; over SSH it is not killed. Idempotent."""


class AsyncStream(Protocol):
    """`Stream` for an event loop."""

    @property
    def returncode(self) -> int | None: ...

    @property
    def stderr(self) -> bytes: ...

    def __aiter__(self) -> AsyncIterator[str]: ...

    async def send(self, line: str) -> None: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """One connection to a host. `run` and `stream` may be used by several threads at once."""

    def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float | None = None) -> Completed:
        """Run a command to its end, with `stdin` (of any size, then EOF) as its standard input. Blocks.

        A command that cannot be found ends with 127, as in a shell; no exit code raises. Raises
        HostUnreachableError when the connection is lost or when nothing has come back for `timeout` seconds
        in all; the command may then still be running, with its pipes closed.
        """

    def stream(self, argv: Sequence[str], stdin: bytes = b"") -> AbstractContextManager[Stream]:
        """Start a command, send it `stdin`, keep its standard input open. Leaving the context closes the
        stream.
        """

    def close(self) -> None:
        """Close the connection and everything that uses it, from any thread. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


class AsyncTransport(Protocol):
    """`Transport` for an event loop."""

    async def run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        timeout: float | None = None,
    ) -> Completed: ...

    def stream(self, argv: Sequence[str], stdin: bytes = b"") -> AbstractAsyncContextManager[AsyncStream]: ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


_handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
_handshakes_of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


def connect(endpoint: Endpoint) -> Transport:
    """Connect to a host. Blocks; at most MAX_HANDSHAKES at a time get through, the others wait.

    A refused or dropped handshake is tried three times. Raises SpecError (the Airflow connection is missing
    or wrong), HostKeyError, AuthenticationError, HostNotReadyError (no algorithm in common),
    HostUnreachableError.
    """
    if endpoint.ssh_conn_id == LOCAL:
        from airflow_tfps.ssh.local import LocalTransport

        return LocalTransport(endpoint.host)
    from airflow_tfps.ssh import blocking, settings

    how = settings.read(endpoint, settings.fetch(endpoint))
    for wait_secs in RETRY_SECS:
        try:
            with _handshakes:
                return blocking.connect(how)
        except DroppedError as error:
            log.info("%s; trying again", error)
        time.sleep(_jitter(wait_secs))
    with _handshakes:
        return blocking.connect(how)


async def connect_async(endpoint: Endpoint) -> AsyncTransport:
    """`connect` for an event loop; nothing in it blocks. The bound on handshakes is per loop."""
    if endpoint.ssh_conn_id == LOCAL:
        from airflow_tfps.ssh.local_async import AsyncLocalTransport

        return AsyncLocalTransport(endpoint.host)
    await asyncio.to_thread(importlib.import_module, "airflow_tfps.ssh.asynchronous")  # it takes a second
    from airflow_tfps.ssh import asynchronous, settings

    # Masks secrets and reads key files, known_hosts and ~/.ssh/config: all of it blocks.
    how = await asyncio.to_thread(settings.read, endpoint, await settings.fetch_async(endpoint))
    handshakes = _handshakes_of.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_HANDSHAKES))
    for wait_secs in RETRY_SECS:
        try:
            async with handshakes:
                return await asynchronous.connect(how)
        except DroppedError as error:
            log.info("%s; trying again", error)
        await asyncio.sleep(_jitter(wait_secs))
    async with handshakes:
        return await asynchronous.connect(how)


def connect_all(endpoints: Sequence[Endpoint]) -> dict[str, Transport]:
    """Connect to all hosts, or to none: if any fails, the others are closed and one error names all that
    failed.

    The error is of the class that a retry can mend least: any SpecError, HostKeyError or AuthenticationError
    makes it such, else it is HostUnreachableError. Blocks as long as the slowest host.
    """
    transports: dict[str, Transport] = {}
    errors: list[HostError | SpecError] = []
    with ThreadPoolExecutor(MAX_HANDSHAKES, thread_name_prefix="ssh-connect") as pool:
        futures = {endpoint.host: pool.submit(connect, endpoint) for endpoint in endpoints}
        try:
            for host, future in futures.items():
                try:
                    transports[host] = future.result()
                except (HostError, SpecError) as error:
                    errors.append(error)
        except BaseException:
            # A timeout of the task, or a mistake of ours: leave no connection behind.
            for future in futures.values():
                future.cancel()
                future.add_done_callback(_discard)
            raise
    if errors:
        for transport in transports.values():
            transport.close()
        raise _merge(errors, of=len(futures))
    return transports


def _discard(future: Future[Transport]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def _merge(errors: Sequence[HostError | SpecError], of: int) -> HostError | SpecError:
    if len(errors) == 1:
        return errors[0]
    faults = [fault for e in errors if isinstance(e, SpecError) for fault in e.faults]
    hosts = [e for e in errors if isinstance(e, HostError)]
    if faults:
        return SpecError("connections", faults + [str(e) for e in hosts])
    kinds = {type(e) for e in hosts}
    kind = next((k for k in (HostKeyError, AuthenticationError) if k in kinds), HostUnreachableError)
    lines = "".join(f"\n  - {e}" for e in hosts)
    return kind(", ".join(e.host for e in hosts), f"{len(hosts)} of {of} hosts cannot be used:{lines}")


def _jitter(secs: float) -> float:
    return secs * random.uniform(0.5, 1.5)  # noqa: S311  spreads the tries of many hosts; no secret  # noqa: S311  spreads the tries of many hosts; no secret
