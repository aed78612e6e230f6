"""Connections to an agent: requests that get one answer, and followers that are told everything as it happens.

Standard library only. Nothing here blocks: what a connection does not take waits in its buffer, and one that takes
nothing for too long is dropped (it comes back and resumes).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Any, Callable, Optional

from tfps_runtime.protocol import BEAT_SECS, MAX_LINE, Kind, ProtocolError, RefusedError, dump, load
from tfps_runtime.tails import LogFile

MAX_BUFFER = 16 * 1024 * 1024
MAX_SECS = 1e10
PAUSE_BUFFER = 256 * 1024
"""With more than this waiting, logs are held back; they lie in their files."""


class Connection:
    """One client of the agent's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._in = b""
        self._out = b""
        self.is_closed = False
        self.closes_when_sent = False
        self.is_follower = False
        self.logs: dict[str, int] = {}
        """TF tasks whose logs are pushed, with the offset up to which they were."""
        self.said = time.monotonic()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def waiting(self) -> int:
        """Bytes not yet taken by the client."""
        return len(self._out)

    def receive(self) -> list[Any]:
        """Messages that have arrived whole; nonsense is refused. Closes at end of file and at a line without end."""
        try:
            data = self.sock.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
            return []
        self._in += data
        *lines, self._in = self._in.split(b"\n")
        if len(self._in) > MAX_LINE:
            self.close()
            return []
        messages = []
        for line in lines:
            try:
                messages.append(load(line.decode("utf-8", "replace")))
            except ProtocolError as error:
                self.say(RefusedError("bad_request", str(error)).to_json())
        return messages

    def say(self, message: dict[str, Any]) -> None:
        if self.is_closed:
            return
        self._out += dump(message).encode() + b"\n"
        self.said = time.monotonic()
        if len(self._out) > MAX_BUFFER:
            self.close()
        else:
            self.flush()

    def flush(self) -> None:
        """Send as much as the client takes now."""
        while self._out and not self.is_closed:
            try:
                sent = self.sock.send(self._out)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self._out = self._out[sent:]
        if self.closes_when_sent and not self._out:
            self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.sock.close()


class Followers:
    """All connections of an agent."""

    def __init__(self, log_of: Callable[[str], LogFile]) -> None:
        self._log_of = log_of
        self.connections: list[Connection] = []

    def add(self, sock: socket.socket) -> Connection:
        connection = Connection(sock)
        self.connections.append(connection)
        return connection

    def follow(
        self,
        connection: Connection,
        history: Iterable[dict[str, Any]],
        logs: dict[str, int],
        ended: Callable[[str], bool],
    ) -> None:
        """Make a connection a follower: `history` first, then whatever comes, and the `logs` from their offsets.

        Before the history comes what there is of the logs: whoever hears of the end may leave.
        """
        connection.is_follower = True
        connection.logs = dict(logs)
        for task in logs:
            self._push(connection, task, is_complete=ended(task), is_all=True)
        for message in history:
            connection.say(message)
        connection.say({"type": Kind.CAUGHT_UP})

    def tell(self, message: dict[str, Any]) -> None:
        for connection in self.connections:
            if connection.is_follower:
                connection.say(message)

    def forget_closed(self) -> list[Connection]:
        closed = [c for c in self.connections if c.is_closed]
        if closed:
            self.connections = [c for c in self.connections if not c.is_closed]
        return closed

    def push_logs(self, ended: Callable[[str], bool], *, all_of: Optional[str] = None) -> bool:
        """Send each follower what its logs have grown by; whether there is more to send at once.

        A chunk of each log, and `all_of` one TF task as far as the follower takes it.
        """
        is_behind = False
        for connection in self.connections:
            for task in connection.logs:
                is_more = self._push(connection, task, is_complete=ended(task), is_all=task == all_of)
                is_behind = is_behind or is_more
        return is_behind

    def _push(self, connection: Connection, task: str, *, is_complete: bool, is_all: bool) -> bool:
        """Send a follower a chunk of a log, or all of it that it takes; whether it took that and there is more."""
        log, offset = self._log_of(task), connection.logs[task]
        while not connection.is_closed and connection.waiting <= PAUSE_BUFFER and log.size() > offset:
            after, lines = log.read_lines(offset, is_complete=is_complete)
            if after == offset:
                return False
            connection.logs[task] = offset = after
            connection.say({"type": Kind.LOG, "task": task, "offset": after, "lines": lines})
            if not is_all:
                return log.size() > after
        return False

    def beat(self, extra: dict[str, Any]) -> None:
        now = time.monotonic()
        for connection in self.connections:
            if connection.is_follower and now - connection.said >= BEAT_SECS:
                connection.say({"type": Kind.BEAT, "time": time.time(), **extra})

    def finish(self, secs: float, ended: Callable[[str], bool]) -> None:
        """Send what is left, for at most `secs`; blocks. The agent's last act."""
        until = time.monotonic() + secs
        while time.monotonic() < until:
            is_behind = self.push_logs(ended)
            for connection in self.connections:
                connection.flush()
            self.forget_closed()
            if not is_behind and not any(c.waiting for c in self.connections):
                break
            time.sleep(0.01)
        for connection in self.connections:
            connection.close()


def seconds(value: Any, default: Optional[float] = None) -> float:
    """A duration out of a message, from 0 to MAX_SECS. Raises ProtocolError."""
    if value is None and default is not None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_SECS:
        return float(value)
    raise ProtocolError(f"not a duration in seconds: {str(value)[:40]}")


def integer(value: Any, default: Optional[int] = None) -> int:
    """A non-negative integer out of a message. Raises ProtocolError."""
    if value is None and default is not None:
        return default
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise ProtocolError(f"not a non-negative integer: {str(value)[:40]}")
