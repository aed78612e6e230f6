"""What can be told of a program that knows nothing of us: its progress from its log, its result from its checkpoints.

Standard library only.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from typing import Optional

from tfps_runtime.checkpoint import latest_checkpoint
from tfps_runtime.protocol import Progress, Result
from tfps_runtime.tails import LogFile, ProgressFile

SCANNED_CHUNKS = 32
"""How much of a log is searched at a time (64 KiB each)."""


class LogScanner:
    """Turns the lines of a TF task's log that match a pattern into progress records."""

    def __init__(self, pattern: re.Pattern[str], log: LogFile, progress: ProgressFile) -> None:
        """What stands in the log by now is passed over."""
        self._pattern = pattern
        self._log = log
        self._progress = progress
        self._scanned = log.size()

    def scan(self, *, is_complete: bool) -> None:
        """Search what has come since; append a record for the last match. `is_complete`: no more will come."""
        newest = None
        for _ in range(SCANNED_CHUNKS):
            after, lines = self._log.read_lines(self._scanned, is_complete=is_complete)
            if after == self._scanned:
                break
            self._scanned = after
            newest = next(filter(None, (self._read(line) for line in reversed(lines))), newest)
        if newest is not None:
            with contextlib.suppress(OSError):
                self._progress.append(newest)

    def _read(self, line: str) -> Optional[Progress]:
        found = self._pattern.search(line)
        if found is None:
            return None
        groups = found.groupdict()
        try:
            step = int(groups["step"])
        except (KeyError, TypeError, ValueError):
            return None
        loss = None
        with contextlib.suppress(KeyError, TypeError, ValueError):
            loss = float(groups["loss"])
        if loss is not None and not math.isfinite(loss):
            loss = None  # it went on all the same
        return Progress(time=time.time(), global_step=step, loss=loss)


def result_of(newest: Optional[Progress], directory: Optional[str]) -> Optional[Result]:
    """The result of a chief that wrote none: its last progress, and the last checkpoint in its directory."""
    saved = None if directory is None else latest_checkpoint(directory)
    if newest is None and saved is None:
        return None
    step = newest.global_step if newest is not None else saved.global_step if saved is not None else 0
    return Result(global_step=step, checkpoint=None if saved is None else saved.prefix)
