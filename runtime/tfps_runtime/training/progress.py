"""Progress of one TF task: a JSON line for the agent, a readable line for people, at most two a second."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Callable

from tfps_runtime.protocol import Progress

_log = logging.getLogger("tfps")

MIN_INTERVAL_SECS = 0.5


class ProgressWriter:
    """Records steps: the first, the last (`close`), and at most one every MIN_INTERVAL_SECS between them.

    Each record is one write to a file opened for appending, so that a reader sees whole lines and a killed process
    leaves at most one torn line. Without a path only the log lines are written.
    """

    def __init__(
        self,
        path: str | None,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._now = now
        self._clock = clock
        self._due = clock()
        self._since = clock()
        self._since_step: int | None = None
        self._since_waited = 0.0
        self._examples = 0
        self.local_step = 0
        """Steps of this process."""
        self._unwritten: Progress | None = None

    def step(self, global_step: int, loss: float, examples: int | None, waited_secs: float) -> None:
        """Note that this replica has done a step.

        Args:
            global_step: after it.
            loss: of this replica's batch.
            examples: in this replica's batch, if known.
            waited_secs: altogether so far, for input and sessions.
        """
        self.local_step += 1
        self._examples += examples or 0
        self._note(global_step, loss, examples is not None, waited_secs)

    def watch(self, global_step: int, waited_secs: float) -> None:
        """Note what the others do while this replica has nothing left to do; `waited_secs` as in `step`."""
        self._note(global_step, None, False, waited_secs)

    def _note(self, global_step: int, loss: float | None, has_examples: bool, waited_secs: float) -> None:
        now = self._clock()
        steps_per_sec = examples_per_sec = None
        if self._since_step is not None and now > self._since:
            # A cluster that went back to a checkpoint has no rate.
            if global_step >= self._since_step:
                steps_per_sec = (global_step - self._since_step) / (now - self._since)
            if has_examples:
                examples_per_sec = self._examples / (now - self._since)
        self._unwritten = Progress(
            time=self._now(),
            global_step=global_step,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            local_step=self.local_step,
            steps_per_sec=steps_per_sec,
            examples_per_sec=examples_per_sec,
            waiting_secs=max(0.0, waited_secs - self._since_waited),
        )
        if now >= self._due:
            self._due = now + MIN_INTERVAL_SECS
            self._write()
            self._since, self._since_step, self._since_waited, self._examples = (
                now,
                global_step,
                waited_secs,
                0,
            )

    def close(self) -> None:
        """Write the last step, if it is not written yet."""
        self._write()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self) -> None:
        record, self._unwritten = self._unwritten, None
        if record is None:
            return
        if self._file is not None:
            os.write(self._file, record.dumps().encode() + b"\n")
        loss = "" if record.loss is None else f" loss {record.loss:.6g}"
        rate = "" if record.steps_per_sec is None else f" {record.steps_per_sec:.1f} steps/s"
        _log.info("step %d%s%s", record.global_step, loss, rate)
