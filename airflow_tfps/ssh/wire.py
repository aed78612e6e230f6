"""What every transport shares: the command line, lines, signals, and a word for a dropped handshake.

Pure and without I/O; imports the standard library, the errors and the protocol.
"""

from __future__ import annotations

import shlex
import signal
from typing import TYPE_CHECKING

from tfps_runtime.protocol import MAX_LINE

from airflow_tfps.errors import CommandError, HostUnreachableError

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 64 * 1024
"""Bytes read or written at a time."""

MAX_OUTPUT = 64 * 1024 * 1024
"""Bytes that a command may answer with, on either output, before it is given up: a host may send for ever."""

STDERR_BYTES = 64 * 1024
"""How much of a stream's standard error is kept."""

MAX_COMMAND = 128 * 1024 - 1
"""Bytes of one command line: Linux gives a single argument no more (MAX_ARG_STRLEN), and `sh -c` has just
one.
"""

UNNAMED_SIGNAL = 64
"""RFC 4254 names thirteen signals; sshd calls all others, SIGBUS among them, `SIG@openssh.com`."""


class DroppedError(HostUnreachableError):
    """Refused, or dropped during the handshake: sshd restarts, or has too many at once. A moment later it may
    work.
    """


def quote(argv: Sequence[str]) -> str:
    """One command line for a login shell that runs exactly `argv`, in place of the shell (`exec`).

    Safe for POSIX shells, and for fish: there a backslash means something between single quotes, so it is
    moved out into double quotes, where both agree. Bytes that are not text (surrogate escapes) pass. Raises
    ValueError for an empty argv, for NUL, and for more than MAX_COMMAND bytes: large data belongs on standard
    input.
    """
    if not argv:
        raise ValueError("no command")
    line = f"exec {words(argv)}"
    size = len(line.encode("utf-8", "surrogateescape"))
    if size > MAX_COMMAND:
        raise ValueError(
            f"a command line of {size} bytes; hosts take {MAX_COMMAND}: send data on standard input"
        )
    return line


def words(argv: Sequence[str]) -> str:
    """`argv` as words of a shell's line, without `exec`: the one place where a value is quoted for a shell."""
    if any("\0" in argument for argument in argv):
        raise ValueError("a NUL character in a command's arguments")
    return " ".join('"\\\\"'.join(_quoted(part) for part in argument.split("\\")) for argument in argv)


def _quoted(part: str) -> str:
    """As shlex does it, but for zsh, to which a word like `=ls` is the path of a command."""
    return f"'{part}'" if part.startswith("=") and "'" not in part else shlex.quote(part)


def signal_number(name: str) -> int:
    """Number of a signal that the other side names as RFC 4254 does, without SIG."""
    number = getattr(signal, f"SIG{name}", None)
    return int(number) if isinstance(number, signal.Signals) else UNNAMED_SIGNAL


class Lines:
    """Cuts a stream of bytes into lines of text.

    Raises CommandError (code `protocol`) as soon as a line grows beyond `protocol.MAX_LINE` bytes.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes; no data means the end, and returns an unfinished last
        line.
        """
        *complete, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            complete.append(self._rest)
            self._rest = b""
        if len(self._rest) > MAX_LINE or any(len(line) > MAX_LINE for line in complete):
            raise CommandError(self._host, f"sent a line longer than {MAX_LINE} bytes", code="protocol")
        return [line.decode("utf-8", "replace") for line in complete]


class Output:
    """What a command that is run to its end writes, up to MAX_OUTPUT bytes."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """Raises CommandError (code `protocol`) when it becomes too much."""
        if len(self._data) + len(data) > MAX_OUTPUT:
            raise CommandError(self._host, f"answered with more than {MAX_OUTPUT} bytes", code="protocol")
        self._data += data

    def __bytes__(self) -> bytes:
        return bytes(self._data)


def no_answer(host: str, argv: Sequence[str], timeout: float | None) -> HostUnreachableError:
    within = "" if timeout is None else f" within {timeout:g} s"
    return HostUnreachableError(host, f"{_short(argv)} did not answer{within}")


def lost(host: str, argv: Sequence[str], detail: object = "") -> HostUnreachableError:
    because = f" ({detail})" if str(detail) else ""
    return HostUnreachableError(
        host, f"the connection was lost before {_short(argv)} had ended, how it ended is not known{because}"
    )


def unread(host: str, argv: Sequence[str]) -> HostUnreachableError:
    return HostUnreachableError(
        host, f"{_short(argv)} reads no more: it has ended, or the connection was lost"
    )


def _short(argv: Sequence[str]) -> str:
    """The program and its first argument: enough to recognize a command, too little to show what it was
    given.
    """
    return repr(" ".join(argv[:2])[:60])
