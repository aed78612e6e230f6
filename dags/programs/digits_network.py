"""The model of `dist_digits.py`: two dense layers whose weights are penalised."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

HIDDEN_UNITS = 128


def inference(images: Any, classes: int, regularizer: Any) -> Any:
    """Logits of each image; the penalties join the collection `penalties`."""
    size = images.shape[1]
    with tf.variable_scope("hidden"):
        hidden = tf.nn.relu(_dense(images, size, HIDDEN_UNITS, regularizer))
    with tf.variable_scope("output"):
        return _dense(hidden, HIDDEN_UNITS, classes, regularizer)


def _dense(inputs: Any, size: int, units: int, regularizer: Any) -> Any:
    weights = tf.get_variable(
        "weights", [size, units], initializer=tf.truncated_normal_initializer(stddev=0.1)
    )
    biases = tf.get_variable("biases", [units], initializer=tf.zeros_initializer())
    tf.add_to_collection("penalties", regularizer(weights))
    return tf.matmul(inputs, weights) + biases
