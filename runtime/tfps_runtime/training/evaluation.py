"""Evaluate a checkpoint: one process, no cluster, once over the program's `eval` input."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps_runtime.failure import first_line
from tfps_runtime.training.cluster import Cluster
from tfps_runtime.training.inputs import Batches, build_batches
from tfps_runtime.training.model import EVAL, Model, Params, ProgramError, Shard
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
    tf.disable_v2_behavior()
    if isinstance(program, str):
        program = load_program(program)
    if not tf.train.checkpoint_exists(checkpoint):
        raise ProgramError(f"there is no checkpoint {checkpoint}")
    params = Params(hparams, inputs)
    with tf.Graph().as_default():
        tf.set_random_seed(seed)
        with tf.device("/device:CPU:0"):
            source = program.input_fn(EVAL, params, Shard(0, 1, seed))
            if source is None:
                return {}
            batches = build_batches(source)
        tf.train.get_or_create_global_step()
        model = program.model_fn(batches.features, batches.labels, EVAL, params)
        if model.loss is None:
            raise ProgramError(f"{program.path}: model_fn gave no loss in mode 'eval'")
        saver = tf.train.Saver(_variables_to_restore(model), name="tfps/evaluate")
        pairs, tensors = _split(model)
        with tf.Session(config=Cluster().config(session or {})) as tf_session:
            try:
                saver.restore(tf_session, checkpoint)
            except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, ValueError) as error:
                raise ProgramError(
                    f"{checkpoint} does not fit the program's model: {first_line(error)}"
                ) from error
            tf_session.run([tf.local_variables_initializer(), tf.tables_initializer()])
            _refuse_endless(tf_session, batches)
            means = _run_over(tf_session, batches, tensors, [update for _, update in pairs.values()])
            values = tf_session.run({name: value for name, (value, _) in pairs.items()})
    metrics = {name: float(value) for name, value in {**means, **values}.items()}
    for name in [name for name, value in metrics.items() if not math.isfinite(value)]:
        _log.warning("metric %s is %s and left out", name, metrics.pop(name))
    return metrics


def _variables_to_restore(model: Model) -> Any:
    if model.moving_average_decay is None:
        return tf.global_variables()
    return tf.train.ExponentialMovingAverage(model.moving_average_decay).variables_to_restore()


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
            values, count, _ = session.run(fetches, feed_dict=feed)
            total += int(count)
            for name, value in values.items():
                sums[name] += float(np.mean(value)) * int(count)
    if not total:
        raise ProgramError("the input for evaluation is empty")
    return {name: value / total for name, value in sums.items()}
