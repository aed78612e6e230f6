"""Summaries for TensorBoard, written by the chief beside its checkpoints."""

from __future__ import annotations

import time
from typing import Any, Callable

import tensorflow.compat.v1 as tf


class Summaries:
    """Writes the summaries of a step every `every_secs`, from the first step on, and the rate of global steps.

    Args:
        directory: made if absent.
        every_secs: between two of them.
        graph: shown by TensorBoard too.
    """

    def __init__(
        self, directory: str, every_secs: float, graph: Any, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._writer = tf.summary.FileWriter(directory, graph)
        self._every_secs = every_secs
        self._clock = clock
        self._due = clock()
        self._last: tuple[float, int] | None = None

    def is_due(self) -> bool:
        return self._clock() >= self._due

    def write(self, summary: bytes | None, step: int) -> None:
        """Write the summary of a step; the next one is due `every_secs` from now."""
        now = self._clock()
        self._due = now + self._every_secs
        if summary is not None:
            self._writer.add_summary(summary, step)
        if self._last is not None and now > self._last[0] and step >= self._last[1]:
            self.scalars({"global_step/sec": (step - self._last[1]) / (now - self._last[0])}, step)
        self._last = now, step
        self._writer.flush()

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write single values."""
        parts = [tf.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_summary(tf.Summary(value=parts), step)

    def close(self) -> None:
        self._writer.close()
