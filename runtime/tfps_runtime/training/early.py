"""Early stopping: the chief evaluates each of its checkpoints beside the training, and ends it when nothing is gained.

Evaluation runs in a thread, in a graph and a session of its own, and reads files only: the training goes on meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from tfps_runtime.training.checkpoints import Saving
from tfps_runtime.training.model import EarlyStopping, ProgramError
from tfps_runtime.training.summaries import Summaries

_log = logging.getLogger("tfps")


class Verdicts:
    """Values of a metric, one after the other, judged by a rule. Pure."""

    def __init__(self, rule: EarlyStopping) -> None:
        self.rule = rule
        self.best: float | None = None
        self.best_of: str | None = None
        self.without_gain = 0
        """Evaluations since the best one."""

    def hear(self, value: float, checkpoint: str) -> bool:
        """Take up the value of a checkpoint; true if the training should end."""
        gain = 0.0 if self.best is None else value - self.best
        gain = gain if self.rule.higher_is_better else -gain
        if self.best is None or (gain > 0 and gain >= self.rule.min_gain):
            self.best, self.best_of, self.without_gain = value, checkpoint, 0
        else:
            self.without_gain += 1
        return self.without_gain >= self.rule.patience


class EarlyStop:
    """The chief's watcher. One evaluation at a time: of the checkpoints saved during one only the last is looked at.

    What it has seen is forgotten when the chief's process ends.
    """

    def __init__(
        self,
        rule: EarlyStopping,
        saving: Saving,
        evaluate: Callable[[str], Mapping[str, float]],
        summaries: Summaries | None = None,
    ) -> None:
        self._verdicts = Verdicts(rule)
        self._saving = saving
        self._evaluate = evaluate
        self._summaries = summaries
        self._seen: str | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_over = False

    def look(self, session: Any, status: Any) -> bool:
        """Evaluate what is new. Raises ProgramError if that cannot work."""
        del session, status
        if self._error is not None:
            raise self._error
        newest = self._saving.latest
        is_busy = self._thread is not None and self._thread.is_alive()
        if not is_busy and newest is not None and newest != self._seen and not self._is_over:
            self._seen = newest
            self._thread = threading.Thread(
                target=self._judge, args=(newest,), name="tfps-early-stopping", daemon=True
            )
            self._thread.start()
        return self._is_over

    def _judge(self, checkpoint: str) -> None:
        rule = self._verdicts.rule
        try:
            metrics = self._evaluate(checkpoint)
        except Exception as error:  # noqa: BLE001  (the thread's outermost frame; `look` raises it)
            if tf.train.checkpoint_exists(checkpoint):
                self._error = error
            return  # else it was deleted meanwhile (max_to_keep): the next one will do
        if rule.metric not in metrics:
            known = ", ".join(sorted(metrics)) or "none: input_fn gives no input in mode 'eval'"
            self._error = ProgramError(
                f"early stopping: there is no finite metric {rule.metric!r} (there is: {known})"
            )
            return
        step = int(checkpoint.rpartition("-")[2])
        if self._summaries is not None:
            self._summaries.scalars({f"eval/{name}": value for name, value in metrics.items()}, step)
        self._is_over = self._verdicts.hear(metrics[rule.metric], checkpoint)
        _log.info("evaluated %s: %s %.6g", checkpoint, rule.metric, metrics[rule.metric])
        if self._is_over:
            _log.info(
                "early stopping: %s was best at %s with %.6g, and no better in %d evaluations since",
                rule.metric,
                self._verdicts.best_of,
                self._verdicts.best,
                self._verdicts.without_gain,
            )
