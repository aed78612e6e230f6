"""What a program sees: the modes, its parameters, its share of the input, and the model it returns.

Imports nothing of TensorFlow, so that a program's own tests can build these without it.

    def model_fn(features, labels, mode, params):
        ...
        return Model(loss=loss, optimizer=tf.train.AdagradOptimizer(params["learning_rate"]))
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

TRAIN = "train"
EVAL = "eval"
PREDICT = "predict"


class ProgramError(Exception):
    """A program, its parameters or its input cannot work; trying again does not help."""


class _Named(Mapping[str, Any]):
    """A read-only mapping whose KeyError says what there is and where to add the rest."""

    def __init__(self, values: Mapping[str, Any], kind: str, remedy: str) -> None:
        self._values = MappingProxyType(dict(values))
        self._kind = kind
        self._remedy = remedy

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            known = ", ".join(sorted(self._values)) or "none"
            raise KeyError(f"no {self._kind} {name!r} (there is: {known}); {self._remedy}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self._values)!r})"


class Params(_Named):
    """The job's `hparams` as a read-only mapping; `inputs` holds the job's inputs as name -> local path.

    rate = params["learning_rate"]
    path = params.inputs["train"]
    """

    inputs: Mapping[str, str]
    ps_count: int
    """How many ps hold the variables in mode `train`; 1 without a cluster. See `partitioner`."""

    def __init__(
        self,
        hparams: Mapping[str, Any] | None = None,
        inputs: Mapping[str, str] | None = None,
        *,
        ps_count: int = 1,
    ) -> None:
        super().__init__(hparams or {}, "hyperparameter", "add it to the job's hparams")
        self.inputs = _Named(inputs or {}, "input", "add it to the job's inputs")
        self.ps_count = max(1, ps_count)


@dataclass(frozen=True)
class Shard:
    """Which part of the input a replica reads: every `count`-th example, from `index` on, say."""

    index: int = 0
    count: int = 1
    seed: int = 0
    """For shuffling: differs between replicas and between restarts of one; fixed by the job's `seed`."""


@dataclass(frozen=True)
class EarlyStopping:
    """End the training when a metric no longer gets better.

    The chief evaluates every checkpoint that it saves, beside the training: `save_checkpoint_secs` is how often. The
    training ends for all replicas, successfully, when the last `patience` evaluations in a row were not better than
    the best before them.
    """

    patience: int = 3
    """Evaluations without a gain that are put up with."""
    metric: str = "loss"
    """One of the model's metrics, or `loss`."""
    min_gain: float = 0.0
    """What is better by less than this is not better."""
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        if self.patience < 1 or self.min_gain < 0:
            raise ValueError(f"patience must be >= 1 and min_gain >= 0: {self}")


@dataclass(frozen=True)
class Model:
    """What `model_fn` returns. Fields that a mode has no use for may stay empty."""

    loss: Any = None
    """Scalar tensor; required in `train` and `eval`."""
    optimizer: Any = None
    """A `tf.train.Optimizer`; required in `train`. The harness computes, clips, aggregates and applies."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Read in `eval`: name -> a `tf.metrics` pair (value, update), or a tensor to average over the examples."""
    predictions: Any = None
    """Tensor or nested dict of tensors; what `predict` is for."""
    moving_average_decay: float | None = None
    """Keep averages of the trainable variables and evaluate with them; give it in every mode.

    Formula: `tf.train.ExponentialMovingAverage` with `num_updates` = global step. In async mode the chief updates
    them after each of its own steps; in sync mode every global step updates them once.
    """
    clip_norm: float | None = None
    """Clip each replica's gradients to this global norm before they are applied or aggregated."""
    early_stopping: EarlyStopping | None = None
    """End before the job's `steps`, when evaluation shows no more gain."""
    start_from_names: Mapping[str, str | None] = field(default_factory=dict)
    """For a job with `start_from`: this model's variables -> their names in that checkpoint; None: not from there.

    Names that end with `/` stand for all variables below; the longest that fits counts. Others keep their names.
    """
    hooks: Sequence[Any] = ()
    """`tf.train.SessionRunHook`s to run on every replica while training. Each step costs more with any."""


def random_seed(base: int | None, *scope: object) -> int:
    """A 31-bit seed of `base` and `scope` (a task, an attempt); drawn from the system if `base` is None."""
    if base is None:
        return int.from_bytes(os.urandom(4), "big") >> 1
    text = "/".join(str(part) for part in (base, *scope))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
