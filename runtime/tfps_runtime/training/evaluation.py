"""Evaluate a checkpoint, or predict with it: one process, no cluster, once over the program's input."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps_runtime.failure import first_line
from tfps_runtime.training.checkpoints import saved_as
from tfps_runtime.training.cluster import Cluster
from tfps_runtime.training.inputs import Batches, build_batches
from tfps_runtime.training.model import EVAL, PREDICT, Model, Params, ProgramError, Shard
from tfps_runtime.training.program import Program, load_program

_log = logging.getLogger("tfps")

LOSS = "loss"


def evaluate(
    program: str | Program,
    checkpoint: str,
    hparams: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    *,
    session: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """The program's metrics of a checkpoint, and `loss`; with the moving averages, if the model keeps any.

    Builds a fresh graph and runs until the `eval` input ends. The loss, and metrics that are plain tensors, are
    averaged over the examples. Empty if the program's input_fn returns None for mode `eval`: no evaluation wanted.
    Metrics that are not finite are left out, with a word in the log.

    Args:
        program: path of the program, or a loaded one.
        checkpoint: prefix of the checkpoint, as `/data/ckpt/model.ckpt-1000`.
        hparams: as in training.
        inputs: name -> local path.
        session: ConfigProto's fields, as in the job.
        seed: of random ops.

    Raises:
        ProgramError: no such checkpoint, it does not fit the model, or the input is empty or endless.
    """
    program, params = begin(program, checkpoint, hparams, inputs)
    with tf.Graph().as_default():
        tf.set_random_seed(seed)
        with tf.device("/device:CPU:0"):
            source = program.input_fn(EVAL, params, Shard(0, 1, seed))
            if source is None:
                return {}
            batches = build_batches(source)
        found = restore(program, checkpoint, batches, EVAL, params, session=session)
        with contextlib.closing(found.session):
            _refuse_endless(found.session, batches)
            pairs, tensors = _split(found.model)
            means = _run_over(found.session, batches, tensors, [update for _, update in pairs.values()])
            values = found.session.run({name: value for name, (value, _) in pairs.items()})
    metrics = {name: float(value) for name, value in {**means, **values}.items()}
    for name in [name for name, value in metrics.items() if not math.isfinite(value)]:
        _log.warning("metric %s is %s and left out", name, metrics.pop(name))
    return metrics


def predict(
    program: str | Program,
    checkpoint: str,
    hparams: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    *,
    session: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Iterator[Any]:
    """The model's `predictions` for one batch of input after the other, as arrays in the same structure.

    The input is the program's in mode `predict`; if that is None, the features of mode `eval`. Lazy: each batch is
    read when it is asked for, until the input ends. With the moving averages, if the model keeps any.

    Args and errors as for `evaluate`; ProgramError also if the model gives no predictions.
    """
    program, params = begin(program, checkpoint, hparams, inputs)
    with tf.Graph().as_default():  # left before the first yield, else it would be the caller's graph too
        tf.set_random_seed(seed)
        with tf.device("/device:CPU:0"):
            batches = build_batches(input_to_predict(program, params, seed))
        found = restore(program, checkpoint, batches, PREDICT, params, session=session)
    with contextlib.closing(found.session), contextlib.suppress(tf.errors.OutOfRangeError):
        for feed in batches.feeds():
            yield found.session.run(found.model.predictions, dict(zip(batches.placeholders, feed.values)))


def input_to_predict(program: Program, params: Params, seed: int) -> Any:
    """What input_fn gives in mode `predict`, or else in mode `eval`. Raises ProgramError if that is nothing either."""
    for mode in (PREDICT, EVAL):
        source = program.input_fn(mode, params, Shard(0, 1, seed))
        if source is not None:
            return source
    raise ProgramError(f"{program.path}: input_fn gives no input in mode 'predict', nor in mode 'eval'")


@dataclass(frozen=True)
class Restored:
    """A model with a checkpoint's values."""

    model: Model
    session: Any


def restore(
    program: Program,
    checkpoint: str,
    batches: Batches,
    mode: str,
    params: Params,
    *,
    session: Mapping[str, Any] | None = None,
) -> Restored:
    """Build the model in the current graph and give it the checkpoint's values; close the session.

    Raises ProgramError if they do not fit each other, or the model lacks what the mode is for.
    """
    tf.train.get_or_create_global_step()
    labels = None if mode == PREDICT else batches.labels
    model = program.model_fn(batches.features, labels, mode, params)
    wanted = "predictions" if mode == PREDICT else "loss"
    if getattr(model, wanted) is None:
        raise ProgramError(f"{program.path}: model_fn gave no {wanted} in mode {mode!r}")
    saver = tf.train.Saver(_variables_to_restore(model), name="tfps/restore")
    initialise = [tf.local_variables_initializer(), tf.tables_initializer()]
    tf_session = tf.Session(config=Cluster().config(session or {}))
    try:
        saver.restore(tf_session, checkpoint)
        tf_session.run(initialise)
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, ValueError) as error:
        tf_session.close()
        raise ProgramError(f"{checkpoint} does not fit the program's model: {first_line(error)}") from error
    return Restored(model, tf_session)


def begin(
    program: str | Program,
    checkpoint: str,
    hparams: Mapping[str, Any] | None,
    inputs: Mapping[str, str] | None,
) -> tuple[Program, Params]:
    tf.disable_v2_behavior()
    if isinstance(program, str):
        program = load_program(program)
    if not tf.train.checkpoint_exists(checkpoint):
        raise ProgramError(f"there is no checkpoint {checkpoint}")
    return program, Params(hparams, inputs)


def _variables_to_restore(model: Model) -> dict[str, Any]:
    """Names in the checkpoint -> variables, the averaged ones under the names of their averages.

    `tf.train.ExponentialMovingAverage.variables_to_restore` does not know that a partitioned variable is saved whole.
    """
    averaged = set() if model.moving_average_decay is None else {v.op.name for v in tf.trainable_variables()}
    found: dict[str, list[Any]] = {}
    for variable in tf.global_variables():
        name, _ = saved_as(variable)
        if variable.op.name in averaged:
            name += "/ExponentialMovingAverage"
        found.setdefault(name, []).append(variable)
    return {name: parts if len(parts) > 1 else parts[0] for name, parts in found.items()}


def _split(model: Model) -> tuple[dict[str, tuple[Any, Any]], dict[str, Any]]:
    """The metrics that keep their own state as (value, update), and the tensors to average here."""
    pairs: dict[str, tuple[Any, Any]] = {}
    tensors: dict[str, Any] = {LOSS: model.loss}
    for name, metric in model.metrics.items():
        if isinstance(metric, tuple):
            pairs[name] = metric
        else:
            tensors[name] = metric
    return pairs, tensors


def _refuse_endless(session: Any, batches: Batches) -> None:
    if batches.cardinality is None:
        return
    if session.run(batches.cardinality) == tf.data.experimental.INFINITE_CARDINALITY:
        raise ProgramError("the dataset for evaluation repeats for ever; leave repeat() to mode 'train'")


def _run_over(
    session: Any, batches: Batches, tensors: Mapping[str, Any], updates: list[Any]
) -> dict[str, float]:
    """Run over the whole input; gives the tensors' means over the examples."""
    examples = tf.convert_to_tensor(1 if batches.examples is None else batches.examples)
    fetches = (dict(tensors), examples, updates)
    sums = dict.fromkeys(tensors, 0.0)
    total = 0
    with contextlib.suppress(tf.errors.OutOfRangeError):
        for feed in batches.feeds():
            values, count, _ = session.run(fetches, dict(zip(batches.placeholders, feed.values)))
            count = int(count) if feed.examples is None else feed.examples
            total += count
            for name, value in values.items():
                sums[name] += float(np.mean(value)) * count
    if not total:
        raise ProgramError("the input for evaluation is empty")
    return {name: value / total for name, value in sums.items()}
