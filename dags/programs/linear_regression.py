"""Linear regression of y = 2x + 10 with noise: the smallest program, and a quick check of a cluster.

    python -m tfps_runtime run linear_regression.py --local --steps 300

hparams: `learning_rate`, `batch_size`, and `step_secs`, which makes every step last that long: a training to watch,
stop and kill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import tensorflow.compat.v1 as tf
from tfps_runtime.training import EVAL, Model, Params, Shard

Batches = Iterator[tuple[np.ndarray, np.ndarray]]
WEIGHT, BIAS, NOISE = 2.0, 10.0, 0.33


def batches(seed: int, size: int, step_secs: float = 0.0, count: int | None = None) -> Batches:
    """(x, y) pairs of arrays; `count` of them, or without end."""
    random = np.random.default_rng(seed)
    while count is None or count > 0:
        time.sleep(step_secs)
        x = random.normal(size=size).astype(np.float32)
        noise = random.normal(scale=NOISE, size=size).astype(np.float32)
        yield x, WEIGHT * x + BIAS + noise
        count = None if count is None else count - 1


def input_fn(mode: str, params: Params, shard: Shard) -> Batches:
    """Every replica draws examples of its own; evaluation sees always the same ones."""
    size = params.get("batch_size", 32)
    if mode == EVAL:
        return batches(seed=0, size=size, count=10)
    return batches(shard.seed, size, params.get("step_secs", 0.0))


def model_fn(features: tf.Tensor, labels: tf.Tensor | None, mode: str, params: Params) -> Model:  # noqa: ARG001
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    bias = tf.get_variable("bias", [], initializer=tf.zeros_initializer())
    predictions = features * weight + bias
    if labels is None:  # to predict, and to export
        return Model(predictions=predictions)
    tf.summary.scalar("line/weight", weight)
    tf.summary.scalar("line/bias", bias)
    return Model(
        loss=tf.reduce_mean(tf.square(predictions - labels)),
        optimizer=tf.train.GradientDescentOptimizer(params.get("learning_rate", 0.05)),
        metrics={"weight": weight, "bias": bias},
        predictions=predictions,
    )
