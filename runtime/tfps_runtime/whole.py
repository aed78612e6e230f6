"""Small files that appear whole or not at all, and leave nothing beside them, whenever their writer is killed.

Standard library only. What is being written has a name of its own, `<name>.<8 hex digits>.tmp`, and is locked by its
writer until it has been renamed. The kernel releases the lock with the writer: what can be locked is a dead one's.

    write_whole("/data/ckpt/.tfps-owner", text)      clear_parts("/srv/ctr")
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from typing import Callable

_PART = re.compile(r".+\.[0-9a-f]{8}\.tmp\Z", re.DOTALL)
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_whole(path: str, text: str, *, mode: int = 0o600, is_durable: bool = False) -> None:
    """Write a file, in place of a former one. Clears what dead writers have left in its directory.

    Args:
        path: of the file.
        text: all of it.
        mode: its permissions, less the umask.
        is_durable: it outlives a crash of the machine, once its directory is synced. Takes a disk's time.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    _write(path, text, mode, is_durable, os.replace)


def write_new(path: str, text: str, *, mode: int = 0o600) -> None:
    """The same, but raises FileExistsError, and changes nothing, when there is such a file."""
    _write(path, text, mode, False, os.link)


def clear_parts(directory: str) -> None:
    """Remove what writers that are dead have left in a directory; those of the living stay. Idempotent.

    What cannot be removed stays, without an error: a file of another user, a file system that knows no locks.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if _PART.match(name):
                with contextlib.suppress(OSError):
                    _clear(os.path.join(directory, name))


def _clear(part: str) -> None:
    fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(part)
    finally:
        os.close(fd)


def _write(path: str, text: str, mode: int, is_durable: bool, put: Callable[[str, str], None]) -> None:
    clear_parts(os.path.dirname(path) or ".")
    with _part(path, mode) as (part, fd):
        with open(fd, "wb", closefd=False) as file:
            file.write(text.encode())
        if is_durable:
            os.fsync(fd)
        put(part, path)


@contextlib.contextmanager
def _part(path: str, mode: int) -> Iterator[tuple[str, int]]:
    """A file that only its writer may take away, locked. It goes with the block, unless it was renamed there."""
    while True:
        part = f"{path}.{os.urandom(4).hex()}.tmp"  # others may write to the directory, too: no name to guess
        fd = os.open(part, _FLAGS, mode)
        try:
            if not _is_ours(fd):
                continue
            try:
                yield part, fd
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)
            return
        finally:
            os.close(fd)


def _is_ours(fd: int) -> bool:
    """Lock a part that was just made; False if somebody who clears was faster."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can clear there
        return True
    return os.fstat(fd).st_nlink > 0
