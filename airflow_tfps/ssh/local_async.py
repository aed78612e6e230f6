"""This machine as a host, for triggers. See `airflow_tfps.ssh` and `airflow_tfps.ssh.local`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self, cast

from airflow_tfps.ssh import Completed
from airflow_tfps.ssh.local import CLOSE_SECS, kill_group, spawn_options
from airflow_tfps.ssh.wire import CHUNK, STDERR_BYTES, Lines, Output, no_answer, quote, unread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


class AsyncLocalTransport:
    """`airflow_tfps.ssh.AsyncTransport` without a network."""

    def __init__(self, host: str) -> None:
        self._host = host

    async def run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        timeout: float | None = None,
    ) -> Completed:
        process = await _Child.start(argv)
        stdout, stderr = Output(self._host), Output(self._host)
        exchange = [
            asyncio.create_task(each)
            for each in (process.write(stdin), process.read(1, stdout), process.read(2, stderr))
        ]
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*exchange)
                await process.wait()
        except TimeoutError:
            raise no_answer(self._host, argv, timeout) from None
        finally:
            for task in exchange:
                task.cancel()
            await asyncio.gather(*exchange, return_exceptions=True)
            await process.end(0.0)
        assert process.returncode is not None
        return Completed(returncode=process.returncode, stdout=bytes(stdout), stderr=bytes(stderr))

    @contextlib.asynccontextmanager
    async def stream(self, argv: Sequence[str], stdin: bytes = b"") -> AsyncIterator[AsyncLocalStream]:
        stream = AsyncLocalStream(self._host, argv, await _Child.start(argv), stdin)
        try:
            yield stream
        finally:
            await stream.close()

    async def close(self) -> None:
        """Nothing is held between commands."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class AsyncLocalStream:
    """`airflow_tfps.ssh.AsyncStream` of a child process."""

    def __init__(self, host: str, argv: Sequence[str], process: _Child, stdin: bytes) -> None:
        self._host = host
        self._argv = argv
        self._process = process
        self._stdin = cast("asyncio.StreamWriter", process.stdin)
        self._stdout = cast("asyncio.StreamReader", process.stdout)
        self._stderr = cast("asyncio.StreamReader", process.stderr)
        self.returncode: int | None = None
        self.stderr = b""
        self._complaints = asyncio.create_task(self._keep())
        self._first = asyncio.create_task(self._write(stdin))

    async def __aiter__(self) -> AsyncIterator[str]:
        lines = Lines(self._host)
        while data := await self._stdout.read(CHUNK):
            for line in lines.feed(data):
                yield line
        for line in lines.feed(b""):
            yield line
        await self._complaints
        self.returncode = await self._process.wait()

    async def send(self, line: str) -> None:
        await self._first
        if not await self._write(f"{line}\n".encode()):
            raise unread(self._host, self._argv)

    async def close(self) -> None:
        self._stdin.close()
        for task in (self._complaints, self._first):
            task.cancel()
        await asyncio.gather(self._complaints, self._first, return_exceptions=True)
        await self._process.end(CLOSE_SECS)

    async def _write(self, data: bytes) -> bool:
        if self._stdin.is_closing():
            return False
        try:
            self._stdin.write(data)
            await self._stdin.drain()
        except OSError:
            return False
        return True

    async def _keep(self) -> None:
        while data := await self._stderr.read(CHUNK):
            self.stderr = (self.stderr + data)[-STDERR_BYTES:]


class _Child(asyncio.subprocess.Process):
    """A process whose pipes can be closed before it ends, which asyncio's own keeps to itself."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        protocol: asyncio.subprocess.SubprocessStreamProtocol,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, protocol, loop)
        self._pipes = transport

    @classmethod
    async def start(cls, argv: Sequence[str]) -> Self:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=CHUNK, loop=loop),
            "/bin/sh",
            "-c",
            quote(argv),
            **spawn_options(),
        )
        return cls(transport, protocol, loop)

    async def write(self, data: bytes) -> None:
        """Give it all of its standard input, or as much as it takes."""
        stdin = cast("asyncio.StreamWriter", self.stdin)
        with contextlib.suppress(OSError):
            stdin.write(data)
            await stdin.drain()
        stdin.close()

    async def read(self, number: int, output: Output) -> None:
        """Read standard output (1) or standard error (2) to its end. Raises CommandError when it is too much."""
        reader = cast("asyncio.StreamReader", self.stdout if number == 1 else self.stderr)
        while data := await reader.read(CHUNK):
            output.add(data)

    async def end(self, patience_secs: float) -> None:
        """Close the pipes, give the command a while to end by itself, then kill its group; wait for it.

        Pipes first: asyncio does not call a process ended while one of them is open or full.
        """
        for number in range(3):
            pipe = self._pipes.get_pipe_transport(number)
            if pipe is not None:
                pipe.close()
        try:
            await asyncio.wait_for(self.wait(), patience_secs)
        except TimeoutError:
            pass
        finally:
            if self.returncode is None:
                kill_group(self.pid)
                await self.wait()
