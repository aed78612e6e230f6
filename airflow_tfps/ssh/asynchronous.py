"""The asynchronous transport, for triggers: asyncssh. See `airflow_tfps.ssh` for the contract."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

import asyncssh

from airflow_tfps.ssh import Completed
from airflow_tfps.ssh.handshake_async import open_connection
from airflow_tfps.ssh.wire import (
    CHUNK,
    STDERR_BYTES,
    Lines,
    Output,
    lost,
    no_answer,
    quote,
    signal_number,
    unread,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from airflow_tfps.ssh.dial import Line
    from airflow_tfps.ssh.settings import Settings

_FAILURES = (asyncssh.Error, OSError)

CLOSE_SECS = 2.0
"""For an orderly end of a connection; then it is cut."""


async def connect(settings: Settings) -> AsyncSshTransport:
    """Connect, verify the host's key, authenticate; one try."""
    connection, line = await open_connection(settings)
    return AsyncSshTransport(settings.host, connection, line)


class AsyncSshTransport:
    """`airflow_tfps.ssh.AsyncTransport` over asyncssh."""

    def __init__(self, host: str, connection: asyncssh.SSHClientConnection, line: Line) -> None:
        self._host = host
        self._connection = connection
        self._line = line

    async def run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        timeout: float | None = None,
    ) -> Completed:
        try:
            async with asyncio.timeout(timeout):
                process = await self._open(argv)
                try:
                    # All three at once: a command may write before it has read everything, and to either
                    # output.
                    stdout, stderr, _ = await asyncio.gather(
                        self._gather(process.stdout),
                        self._gather(process.stderr),
                        _write(process, stdin, eof=True),
                    )
                    await process.wait_closed()
                finally:
                    process.close()
        except TimeoutError:
            raise no_answer(self._host, argv, timeout) from None
        except _FAILURES as error:
            raise lost(self._host, argv, error) from error
        return Completed(returncode=_returncode(process, self._host, argv), stdout=stdout, stderr=stderr)

    async def _gather(self, reader: asyncssh.SSHReader[bytes]) -> bytes:
        output = Output(self._host)
        while data := await reader.read(CHUNK):
            output.add(data)
        return bytes(output)

    @contextlib.asynccontextmanager
    async def stream(self, argv: Sequence[str], stdin: bytes = b"") -> AsyncIterator[AsyncSshStream]:
        try:
            process = await self._open(argv)
        except _FAILURES as error:
            raise lost(self._host, argv, error) from error
        async with contextlib.aclosing(AsyncSshStream(self._host, argv, process, stdin)) as stream:
            yield stream

    async def close(self) -> None:
        self._connection.close()
        try:
            await asyncio.wait_for(self._connection.wait_closed(), CLOSE_SECS)
        except TimeoutError:
            self._connection.abort()
        finally:
            await asyncio.to_thread(self._line.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _open(self, argv: Sequence[str]) -> asyncssh.SSHClientProcess[bytes]:
        command = quote(argv).encode("utf-8", "surrogateescape")
        return await self._connection.create_process(command, encoding=None)


class AsyncSshStream:
    """`airflow_tfps.ssh.AsyncStream` over an asyncssh process."""

    def __init__(
        self, host: str, argv: Sequence[str], process: asyncssh.SSHClientProcess[bytes], stdin: bytes
    ) -> None:
        self._host = host
        self._argv = argv
        self._process = process
        self.returncode: int | None = None
        self.stderr = b""
        self._complaints = asyncio.create_task(self._keep())
        self._first = asyncio.create_task(_write(process, stdin, eof=False))

    async def __aiter__(self) -> AsyncIterator[str]:
        lines = Lines(self._host)
        try:
            while data := await self._process.stdout.read(CHUNK):
                for line in lines.feed(data):
                    yield line
            for line in lines.feed(b""):
                yield line
            await self._complaints
            await self._process.wait_closed()
        except _FAILURES as error:
            raise lost(self._host, self._argv, error) from error
        self.returncode = _returncode(self._process, self._host, self._argv)

    async def send(self, line: str) -> None:
        try:
            await self._first
            self._process.stdin.write(f"{line}\n".encode())
            await self._process.stdin.drain()
        except _FAILURES as error:
            raise unread(self._host, self._argv) from error

    async def aclose(self) -> None:
        self._process.close()
        for task in (self._complaints, self._first):
            task.cancel()
        await asyncio.gather(self._complaints, self._first, return_exceptions=True)

    close = aclose

    async def _keep(self) -> None:
        with contextlib.suppress(
            *_FAILURES
        ):  # whether the connection was lost shows in the missing exit code
            while data := await self._process.stderr.read(CHUNK):
                self.stderr = (self.stderr + data)[-STDERR_BYTES:]


def _returncode(process: asyncssh.SSHClientProcess[bytes], host: str, argv: Sequence[str]) -> int:
    if process.exit_signal is not None:
        return -signal_number(process.exit_signal[0])
    if process.exit_status is None:  # the channel was closed and nobody said how the command had ended
        raise lost(host, argv)
    return process.exit_status


async def _write(process: asyncssh.SSHClientProcess[bytes], data: bytes, *, eof: bool) -> None:
    view = memoryview(data)
    with contextlib.suppress(*_FAILURES):  # it ended without reading everything; its exit code tells the rest
        for start in range(0, len(data), CHUNK):
            process.stdin.write(bytes(view[start : start + CHUNK]))
            await process.stdin.drain()  # asyncssh would cut all of `data` anew for each packet
        if eof:
            process.stdin.write_eof()
