"""Reading files that TF tasks append to: logs (rotated) and progress records.

Standard library only. Offsets are logical: they count from the first byte ever written, over rotations.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Optional

from tfps_runtime.protocol import Progress, ProtocolError, dump, load
from tfps_runtime.whole import write_whole

ROTATE_BYTES = 64 * 1024 * 1024
CHUNK = 64 * 1024


class LogFile:
    """A TF task's log: `log`, and the part before it in `log.1` once it has grown beyond ROTATE_BYTES."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._base_path = path + ".base"
        self._base = 0
        with contextlib.suppress(OSError, ValueError), open(self._base_path, encoding="ascii") as file:
            self._base = int(file.read())

    def size(self) -> int:
        """Logical size: the offset after the last byte."""
        try:
            return self._base + os.stat(self.path).st_size
        except FileNotFoundError:
            return self._base

    def rotate_if_large(self, limit: int = ROTATE_BYTES) -> bool:
        """Move what there is to `log.1`; the writer appends, so it goes on at the file's new start.

        What is written between the copy and the cut is lost from the log (microseconds, once per 64 MiB).
        """
        try:
            size = os.stat(self.path).st_size
        except FileNotFoundError:
            return False
        if size < limit:
            return False
        temporary = self.path + ".1.tmp"
        try:
            with open(self.path, "rb") as source, open(temporary, "wb") as target:
                while chunk := source.read(1024 * 1024):
                    target.write(chunk)
                    target.flush()
                os.truncate(self.path, 0)
                copied = target.tell()
        except OSError:  # the disk is full: give back what the part before takes
            for path in (temporary, self.path + ".1"):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            return False
        os.replace(temporary, self.path + ".1")
        self._base += copied
        with contextlib.suppress(OSError):
            write_whole(self._base_path, str(self._base))
        return True

    def read_lines(self, offset: int, *, is_complete: bool = False) -> tuple[int, list[str]]:
        """Whole lines from `offset` on, at most CHUNK bytes of them; returns the offset after them.

        A last line without a newline is held back until `is_complete` (the writer is gone) or until it is longer
        than a chunk. An offset that was rotated away continues at the oldest byte still there.
        """
        data = self._read(max(offset, 0), CHUNK)
        if data is None:
            return offset, []
        start, content = data
        cut = content.rfind(b"\n") + 1
        if cut == 0 and (len(content) >= CHUNK or is_complete):
            cut = len(content)
        if is_complete and len(content) < CHUNK:
            cut = len(content)
        content = content[:cut]
        return start + cut, content.decode("utf-8", "replace").splitlines()

    def _read(self, offset: int, count: int) -> Optional[tuple[int, bytes]]:
        if offset < self._base:
            with contextlib.suppress(FileNotFoundError):
                before = self._base - os.stat(self.path + ".1").st_size
                offset = max(offset, before)
                content = _pread(self.path + ".1", offset - before, count)
                # The rotation may have cut through a line.
                return offset, content + _pread(self.path, 0, count - len(content))
            offset = self._base
        try:
            content = _pread(self.path, offset - self._base, count)
        except FileNotFoundError:
            return None
        return (offset, content) if content else None

    def tail(self, lines: int) -> list[str]:
        """The last lines, of at most 256 KiB; with the rotated part's end when the log is shorter."""
        size = self.size()
        start = max(0, size - 256 * 1024)
        found: list[str] = []
        while start < size:
            after, chunk = self.read_lines(start, is_complete=True)
            if after <= start:
                break
            found.extend(chunk)
            start = after
        return found[-lines:] if lines else []


def _pread(path: str, offset: int, count: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, count, offset)
    finally:
        os.close(fd)


class ProgressFile:
    """A TF task's progress records, as they are appended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._offset = 0
        with contextlib.suppress(FileNotFoundError):  # of an earlier life of the training
            self._offset = os.stat(path).st_size
        self.newest: Optional[Progress] = None

    def read(self) -> list[Progress]:
        """Records that came since the last call; a line that is none is passed over (it is a program's output)."""
        try:
            data = _pread(self.path, self._offset, 1024 * 1024)
        except FileNotFoundError:
            return []
        cut = data.rfind(b"\n") + 1
        if cut == 0:
            if len(data) >= 1024 * 1024:
                self._offset += len(data)
            return []
        self._offset += cut
        records = []
        for line in data[:cut].splitlines():
            with contextlib.suppress(ProtocolError):
                records.append(Progress.from_json(load(line.decode("utf-8", "replace"))))
        if records:
            self.newest = records[-1]
        return records

    def append(self, record: Progress) -> None:
        """For programs that write no records themselves: what was read from their log."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, record.dumps().encode() + b"\n")
        finally:
            os.close(fd)


class Acknowledged:
    """Which part of which log a follower has acknowledged; on disk, so that it outlives the agent."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offsets: dict[str, int] = {}
        with (
            contextlib.suppress(OSError, ProtocolError, UnicodeDecodeError),
            open(path, encoding="utf-8") as file,
        ):
            found: Any = load(file.read(1024 * 1024))
            if isinstance(found, dict):
                self._offsets = {k: v for k, v in found.items() if isinstance(v, int)}

    def get(self, task: str) -> int:
        return self._offsets.get(task, 0)

    def put(self, task: str, offset: int) -> None:
        if offset > self.get(task):
            self._offsets[task] = offset
            write_whole(self._path, dump(self._offsets))
