"""The blocking transport, for workers: paramiko. See `airflow_tfps.ssh` for the contract."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING, Self

from airflow_tfps.errors import CommandError
from airflow_tfps.ssh import Completed
from airflow_tfps.ssh.handshake import FAILURES, Connection, open_connection
from airflow_tfps.ssh.settings import HANDSHAKE_SECS, Settings, fingerprint
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
    from collections.abc import Callable, Iterator, Sequence

    import paramiko

    from airflow_tfps.ssh.dial import Line


def connect(settings: Settings) -> SshTransport:
    """Connect, verify the host's key, authenticate; one try."""
    connection, line = open_connection(settings)
    return SshTransport(settings.host, connection, line)


class SshTransport:
    """`airflow_tfps.ssh.Transport` over paramiko."""

    def __init__(self, host: str, connection: Connection, line: Line) -> None:
        self._host = host
        self._connection = connection
        self._line = line
        key = connection.get_remote_server_key()
        self.host_key = fingerprint(f"{key.get_name()} {key.get_base64()}")
        """Fingerprint of the key that the host showed, which is a trusted one."""

    def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float | None = None) -> Completed:
        deadline = None if timeout is None else time.monotonic() + timeout
        stdout, stderr = Output(self._host), Output(self._host)
        too_much: list[CommandError] = []
        channel = self._open(argv)

        def add(output: Output, data: bytes) -> None:
            try:
                output.add(data)
            except CommandError as error:
                too_much.append(error)
                _close(channel)

        try:
            # All three at once: a command may write before it has read everything, and to either output.
            for thread in (
                _start(_write, channel, stdin, True),
                _start(_read, channel.recv, functools.partial(add, stdout)),
                _start(_read, channel.recv_stderr, functools.partial(add, stderr)),
            ):
                thread.join(_left(deadline))
                if thread.is_alive():
                    raise no_answer(self._host, argv, timeout)
            if too_much:
                raise too_much[0]
            if not channel.status_event.wait(_left(deadline)):
                raise no_answer(self._host, argv, timeout)
            returncode = _returncode(channel, self._host, argv)
        finally:
            _close(channel)
        return Completed(returncode=returncode, stdout=bytes(stdout), stderr=bytes(stderr))

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], stdin: bytes = b"") -> Iterator[SshStream]:
        with contextlib.closing(SshStream(self._host, argv, self._open(argv), stdin)) as stream:
            yield stream

    def close(self) -> None:
        self._connection.close()
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self, argv: Sequence[str]) -> paramiko.Channel:
        command = quote(argv).encode("utf-8", "surrogateescape")
        channel = None
        try:
            channel = self._connection.open_session(timeout=HANDSHAKE_SECS)
            channel.exec_command(command)
        except FAILURES as error:
            if channel is not None:
                _close(channel)
            raise lost(self._host, argv, error) from error
        return channel


class SshStream:
    """`airflow_tfps.ssh.Stream` over a paramiko channel."""

    def __init__(self, host: str, argv: Sequence[str], channel: paramiko.Channel, stdin: bytes) -> None:
        self._host = host
        self._argv = argv
        self._channel = channel
        self.returncode: int | None = None
        self.stderr = b""
        self._complaints = _start(_read, channel.recv_stderr, self._keep)
        self._first = _start(_write, channel, stdin, False)

    def __iter__(self) -> Iterator[str]:
        lines = Lines(self._host)
        while data := _receive(self._channel.recv):
            yield from lines.feed(data)
        yield from lines.feed(b"")
        self._complaints.join()
        self._channel.status_event.wait()
        self.returncode = _returncode(self._channel, self._host, self._argv)

    def send(self, line: str) -> None:
        self._first.join()
        try:
            self._channel.sendall(f"{line}\n".encode())
        except FAILURES as error:
            raise unread(self._host, self._argv) from error

    def close(self) -> None:
        _close(self._channel)

    def _keep(self, data: bytes) -> None:
        self.stderr = (self.stderr + data)[-STDERR_BYTES:]


def _returncode(channel: paramiko.Channel, host: str, argv: Sequence[str]) -> int:
    connection = channel.get_transport()
    killed_by = (
        connection.exit_signals.pop(channel.chanid, None) if isinstance(connection, Connection) else None
    )
    if killed_by is not None:
        return -signal_number(killed_by)
    if channel.exit_status == -1:  # the channel was closed and nobody said how the command had ended
        raise lost(host, argv)
    return channel.exit_status


def _start(work: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, name="ssh-pipe", daemon=True)
    thread.start()
    return thread


def _write(channel: paramiko.Channel, data: bytes, eof: bool) -> None:
    view = memoryview(data)
    with contextlib.suppress(*FAILURES):  # it ended without reading everything; its exit code tells the rest
        for start in range(0, len(data), CHUNK):
            channel.sendall(bytes(view[start : start + CHUNK]))
        if eof:
            channel.shutdown_write()


def _read(receive: Callable[[int], bytes], keep: Callable[[bytes], None]) -> None:
    while data := _receive(receive):
        keep(data)


def _receive(receive: Callable[[int], bytes]) -> bytes:
    try:
        return receive(CHUNK)
    except FAILURES:  # whether the connection was lost shows in the missing exit code
        return b""


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(*FAILURES):
        channel.close()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
