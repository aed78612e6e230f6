"""Whether a model is good enough to be promoted; standard library only.

decide(Rule("auc", min_gain=0.001), 0.91, current=0.90).is_good
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from tfps_runtime.protocol import Message, ProtocolError

_BETTER, _NOT_WORSE, ABSOLUTE = "better", "not_worse", "absolute"


@dataclass(frozen=True)
class Rule(Message):
    """What a model must be to be promoted."""

    metric: str
    compare: str = _BETTER
    """`better`: than the current model by `min_gain`, and by more than nothing; `not_worse`: by no more than
    `tolerance`; `absolute`: only the `threshold` counts."""
    min_gain: float = 0.0
    tolerance: float = 0.0
    threshold: Optional[float] = None
    """The least value (without `higher_is_better` the largest); goes with each `compare`."""
    higher_is_better: bool = True

    def check(self) -> None:
        """Raises ProtocolError for a rule that makes no sense."""
        if self.compare not in (_BETTER, _NOT_WORSE, ABSOLUTE):
            raise ProtocolError(
                f"compare: {self.compare[:40]!r} is none of {_BETTER}, {_NOT_WORSE} and {ABSOLUTE}"
            )
        if self.compare == ABSOLUTE and self.threshold is None:
            raise ProtocolError("compare: absolute needs a threshold")
        if self.min_gain < 0 or self.tolerance < 0:
            raise ProtocolError("min_gain and tolerance must be >= 0")


@dataclass(frozen=True)
class Decision(Message):
    """Whether to promote, and why."""

    is_good: bool
    reason: str


def decide(rule: Rule, value: float, current: Optional[float]) -> Decision:
    """Whether a model with `value` may replace one with `current` (None: there is none). Pure.

    Gains are compared with a relative tolerance of 1e-9, so that 0.3 is better than 0.2 by 0.1.
    """
    sign = 1.0 if rule.higher_is_better else -1.0
    name = f"{rule.metric} {value:.6g}"
    if rule.threshold is not None and not _at_least(sign * value, sign * rule.threshold):
        side = "below" if rule.higher_is_better else "above"
        return Decision(False, f"{name} is {side} the threshold {rule.threshold:.6g}")
    if rule.compare == ABSOLUTE:
        return Decision(True, f"{name} keeps the threshold {rule.threshold:.6g}")
    if current is None:
        return Decision(True, f"{name}, and there is no current model")
    gain = sign * (value - current)
    than = f"the current model's {current:.6g}"
    if rule.compare == _NOT_WORSE:
        if _at_least(gain, -rule.tolerance):
            return Decision(True, f"{name} is not worse than {than}")
        return Decision(False, f"{name} is worse than {than} by {-gain:.6g}")
    if gain > 0 and _at_least(gain, rule.min_gain):
        return Decision(True, f"{name} is better than {than} by {gain:.6g}")
    if gain <= 0:
        return Decision(False, f"{name} is not better than {than}")
    return Decision(False, f"{name} is better than {than} by {gain:.6g} only; {rule.min_gain:.6g} is wanted")


def _at_least(value: float, least: float) -> bool:
    return value >= least or math.isclose(value, least, rel_tol=1e-9, abs_tol=1e-12)


def value_of(rule: Rule, metrics: dict[str, float]) -> float:
    """The rule's metric. Raises ProtocolError when it is not there or no number."""
    value = metrics.get(rule.metric)
    if value is None or not math.isfinite(value):
        there = ", ".join(sorted(metrics)) or "none"
        raise ProtocolError(f"the evaluation has no metric {rule.metric[:80]!r}; there are: {there[:400]}")
    return value
