"""This machine as a host, without SSH: what sshd would do with a command, done here. See `airflow_tfps.ssh`.

A command is run by `/bin/sh -c` in the home directory, in a session of its own, with the environment of a
login: none of Airflow's settings, secrets or proxies get into a training. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

from airflow_tfps.ssh import Completed
from airflow_tfps.ssh.wire import CHUNK, STDERR_BYTES, Lines, Output, no_answer, quote, unread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""And `LC_*`. LD_LIBRARY_PATH since containers find the GPU's driver by it."""

CLOSE_SECS = 2.0
"""A command whose pipes were closed has that long to end; then its group is killed (sshd would let it be)."""


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Choose from an environment what a login would have."""
    return {name: value for name, value in given.items() if name in _KEPT or name.startswith("LC_")}


def spawn_options() -> dict[str, Any]:
    """Keyword arguments of subprocess.Popen and of asyncio.create_subprocess_exec."""
    return {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "cwd": Path.home(),
        "env": environment(os.environ),
        "start_new_session": True,
    }


def kill_group(pid: int) -> None:
    """Kill what a command left in its group; agents have sessions of their own and stay."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _write_some(fd: int, data: memoryview) -> int:
    """How much of `data` is done with: as much as the pipe takes, or all of it when nobody reads."""
    try:
        return os.write(fd, data[:CHUNK])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


class LocalTransport:
    """`airflow_tfps.ssh.Transport` without a network."""

    def __init__(self, host: str) -> None:
        self._host = host

    def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float | None = None) -> Completed:
        with subprocess.Popen(["/bin/sh", "-c", quote(argv)], **spawn_options()) as process:
            try:
                stdout, stderr = self._exchange(process, stdin, timeout)
            except BaseException as error:
                kill_group(process.pid)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise no_answer(self._host, argv, timeout) from None
                raise
        return Completed(returncode=process.returncode, stdout=stdout, stderr=stderr)

    def _exchange(
        self, process: subprocess.Popen[bytes], stdin: bytes, timeout: float | None
    ) -> tuple[bytes, bytes]:
        """`Popen.communicate` with an end to what it takes. Raises TimeoutExpired, CommandError."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        pipes = [cast("IO[bytes]", pipe) for pipe in (process.stdout, process.stderr, process.stdin)]
        outputs = [Output(self._host), Output(self._host)]
        view = memoryview(stdin)
        os.set_blocking(pipes[2].fileno(), False)
        with selectors.DefaultSelector() as selector:
            for i, pipe in enumerate(pipes):
                selector.register(pipe, selectors.EVENT_WRITE if i == 2 else selectors.EVENT_READ, i)
            while selector.get_map():
                left = until - time.monotonic()
                if left <= 0:
                    raise subprocess.TimeoutExpired(process.args, timeout or 0.0)
                for key, _ in selector.select(None if timeout is None else left):
                    pipe = pipes[key.data]
                    if key.data == 2:
                        view = view[_write_some(pipe.fileno(), view) :]
                        is_over = not view
                    else:
                        data = os.read(pipe.fileno(), CHUNK)
                        outputs[key.data].add(data)
                        is_over = not data
                    if is_over:
                        selector.unregister(pipe)
                        pipe.close()
        process.wait(None if timeout is None else max(until - time.monotonic(), 0.0))
        return bytes(outputs[0]), bytes(outputs[1])

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], stdin: bytes = b"") -> Iterator[LocalStream]:
        with contextlib.closing(LocalStream(self._host, argv, stdin)) as stream:
            yield stream

    def close(self) -> None:
        """Nothing is held between commands."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LocalStream:
    """`airflow_tfps.ssh.Stream` of a child process."""

    def __init__(self, host: str, argv: Sequence[str], stdin: bytes) -> None:
        self._host = host
        self._argv = argv
        self.returncode: int | None = None
        self.stderr = b""
        self._process = subprocess.Popen(["/bin/sh", "-c", quote(argv)], bufsize=0, **spawn_options())
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self._stdout = cast("IO[bytes]", self._process.stdout)
        self._stderr = cast("IO[bytes]", self._process.stderr)
        self._complaints = threading.Thread(target=self._keep, name="local-stderr", daemon=True)
        self._complaints.start()
        self._first = threading.Thread(target=self._write, args=(stdin,), name="local-stdin", daemon=True)
        self._first.start()

    def __iter__(self) -> Iterator[str]:
        lines = Lines(self._host)
        while data := self._stdout.read(CHUNK):
            yield from lines.feed(data)
        yield from lines.feed(b"")
        self._complaints.join()
        self.returncode = self._process.wait()

    def send(self, line: str) -> None:
        self._first.join()
        if not self._write(f"{line}\n".encode()):
            raise unread(self._host, self._argv)

    def close(self) -> None:
        self._stdout.close()
        if not self._first.is_alive():
            self._stdin.close()
        try:
            self._process.wait(CLOSE_SECS)
        except subprocess.TimeoutExpired:
            kill_group(self._process.pid)
            self._process.wait()
        for thread in (self._first, self._complaints):
            thread.join(CLOSE_SECS)
        self._stdin.close()

    def _write(self, data: bytes) -> bool:
        view = memoryview(data)
        try:
            while view:
                view = view[self._stdin.write(view) :]
        except (OSError, ValueError):  # ValueError: it is closed
            return False
        return True

    def _keep(self) -> None:
        with self._stderr:
            while data := self._stderr.read(CHUNK):
                self.stderr = (self.stderr + data)[-STDERR_BYTES:]
