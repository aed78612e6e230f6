"""Handwritten digits: one hidden layer, L2 regularisation, a decaying learning rate, moving averages.

Inputs `train` and `eval`: an .npz file with `x` (n images of 8 x 8 pixels in 0..16, flat) and `y` (n digits), or a
directory of such files; scikit-learn's `load_digits` has them.

hparams: `learning_rate`, `decay_rate` and `decay_steps` (the learning rate shrinks by the one every so many global
steps), `batch_size`, `hidden_units`, `l2`, `moving_average_decay`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf
from tfps_runtime.training import EVAL, PREDICT, TRAIN, Model, Params, Shard

PIXELS, CLASSES = 64, 10


def load(path: str) -> tuple[np.ndarray, np.ndarray]:
    """All images in 0..1, and their digits."""
    files = sorted(Path(path).glob("*.npz")) if Path(path).is_dir() else [Path(path)]
    parts = [np.load(file) for file in files]
    x = np.concatenate([part["x"] for part in parts]).astype(np.float32) / 16
    return x, np.concatenate([part["y"] for part in parts]).astype(np.int32)


def input_fn(mode: str, params: Params, shard: Shard) -> tf.data.Dataset | None:
    """Every replica shuffles every `shard.count`-th image, again and again; evaluation sees all once."""
    if mode == PREDICT:  # no input of its own: that of evaluation
        return None
    x, y = load(params.inputs[mode])
    if mode == EVAL:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(256)
    x, y = x[shard.index :: shard.count], y[shard.index :: shard.count]
    images = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(y), seed=shard.seed)
    return images.repeat().batch(params.get("batch_size", 100)).prefetch(1)


def model_fn(features: tf.Tensor, labels: tf.Tensor | None, mode: str, params: Params) -> Model:
    units = params.get("hidden_units", 500)
    hidden = tf.nn.relu(_layer("hidden", features, PIXELS, units))
    logits = _layer("output", hidden, units, CLASSES)
    digits = tf.argmax(logits, axis=1, output_type=tf.int32)
    decay = params.get("moving_average_decay", 0.99)
    if labels is None:
        predictions = {"digit": digits, "probabilities": tf.nn.softmax(logits)}
        return Model(predictions=predictions, moving_average_decay=decay)

    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    weights = [variable for variable in tf.trainable_variables() if variable.op.name.endswith("/weights")]
    penalty = params.get("l2", 1e-4) * tf.add_n([tf.nn.l2_loss(weight) for weight in weights])
    learning_rate = tf.train.exponential_decay(
        params.get("learning_rate", 0.5),
        tf.train.get_global_step(),
        params.get("decay_steps", 100),
        params.get("decay_rate", 0.99),
    )
    if mode == TRAIN:
        tf.summary.scalar("learning_rate", learning_rate)
    return Model(
        loss=tf.reduce_mean(cross_entropy) + penalty,
        optimizer=tf.train.GradientDescentOptimizer(learning_rate),
        metrics={"accuracy": tf.metrics.accuracy(labels, digits)},
        predictions={"digit": digits},
        moving_average_decay=decay,
    )


def _layer(name: str, inputs: tf.Tensor, size: int, units: int) -> tf.Tensor:
    with tf.variable_scope(name):
        weights = tf.get_variable(
            "weights", [size, units], initializer=tf.truncated_normal_initializer(stddev=0.1)
        )
        biases = tf.get_variable("biases", [units], initializer=tf.constant_initializer(0.1))
    return tf.matmul(inputs, weights) + biases
