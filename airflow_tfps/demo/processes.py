"""What lives on this machine, read from /proc: processes by their environment, and the ports they listen on.

Standard library only; for the demo and the tests, which must leave nothing behind. What other users run cannot be seen.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def leftovers(home: Path) -> list[str]:
    """What still lives of a demo: processes with `home` in their environment and the ports they listen on.

    This process and its ancestors do not count. Reads /proc; what other users run cannot be seen.
    """
    pids = processes(str(home.absolute()))
    return [describe(pid) for pid in pids] + [
        f"port {port}, opened by process {pid}" for pid, port in listening(pids)
    ]


def processes(mark: str) -> list[int]:
    """Processes that have `mark` in their environment, without this one and its ancestors."""
    ours = set(_ancestors())
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in ours:
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return sorted(found)


def _ancestors() -> Iterator[int]:
    pid = os.getpid()
    while pid > 0:
        yield pid
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        pid = int(stat.rpartition(")")[2].split()[1])


def describe(pid: int) -> str:
    """A process for people: id and command line."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return f"process {pid} ({b' '.join(words).decode('utf-8', 'replace')[:200]})"
    return f"process {pid}"


LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


def _listeners() -> dict[str, int]:
    """Inode of each listening TCP socket to its port."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN:
                    found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


def open_ports() -> set[int]:
    """TCP ports on which anybody listens."""
    return set(_listeners().values())


def listening(pids: Iterable[int]) -> list[tuple[int, int]]:
    """(process, port) for each TCP port on which one of these processes listens."""
    ports = _listeners()
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(fd)
                    inode = target.removeprefix("socket:[").removesuffix("]")
                    if target.startswith("socket:") and inode in ports:
                        found.add((pid, ports[inode]))
    return sorted(found)
