"""The pieces of `tf.contrib` that parameter-server scripts used most, on `tensorflow.compat.v1`.

`compat` makes `tensorflow.contrib` of them. Variables have the names they had, so an old checkpoint fits. Written anew
from the documentation of TensorFlow 1.15; arguments that are not listed here were rare, and are refused by Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import rnn_cell  # tf.nn.rnn_cell, which users of Keras 3 are not shown

Function = Callable[..., Any]
Shape2 = Any
"""One number for both sides, or a pair."""


# --- layers: regularizers and initializers ----------------------------------------------------------------------------


def l1_regularizer(scale: float) -> Function:
    """`scale` times the sum of absolute values."""
    return _regularizer("l1", scale, lambda weights: tf.reduce_sum(tf.abs(weights)))


def l2_regularizer(scale: float) -> Function:
    """`scale` times half the sum of squares."""
    return _regularizer("l2", scale, tf.nn.l2_loss)


def l1_l2_regularizer(scale_l1: float = 1.0, scale_l2: float = 1.0) -> Function:
    return sum_regularizer([l1_regularizer(scale_l1), l2_regularizer(scale_l2)])


def sum_regularizer(regularizers: Sequence[Optional[Function]]) -> Function:
    def penalty(weights: Any) -> Any:
        terms = [one(weights) for one in regularizers if one is not None]
        terms = [term for term in terms if term is not None]
        return tf.add_n(terms) if terms else None

    return penalty


def _regularizer(name: str, scale: float, norm: Function) -> Function:
    if not scale >= 0.0:  # also not a number
        raise ValueError(f"the scale of {name}_regularizer must be >= 0, is {scale}")

    def penalty(weights: Any) -> Any:
        if scale == 0.0:
            return None
        with tf.name_scope(f"{name}_regularizer"):
            return tf.multiply(tf.cast(scale, weights.dtype.base_dtype), norm(weights))

    return penalty


def apply_regularization(regularizer: Function, weights_list: Optional[Sequence[Any]] = None) -> Any:
    """The sum of the penalties of all weights; it joins the regularisation losses."""
    weights = tf.get_collection(tf.GraphKeys.WEIGHTS) if weights_list is None else weights_list
    penalties = [penalty for penalty in map(regularizer, weights) if penalty is not None]
    total = tf.add_n(penalties) if penalties else tf.constant(0.0)
    tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, total)
    return total


def xavier_initializer(uniform: bool = True, seed: Optional[int] = None, dtype: Any = tf.float32) -> Any:
    """Glorot and Bengio (2010): variance 2 / (inputs + outputs)."""
    kind = tf.glorot_uniform_initializer if uniform else tf.glorot_normal_initializer
    return kind(seed=seed, dtype=dtype)


def variance_scaling_initializer(
    factor: float = 2.0,
    mode: str = "FAN_IN",
    uniform: bool = False,
    seed: Optional[int] = None,
    dtype: Any = tf.float32,
) -> Any:
    """He et al. (2015) by default: variance `factor` / inputs."""
    return tf.variance_scaling_initializer(
        scale=factor,
        mode=mode.lower(),
        distribution="uniform" if uniform else "truncated_normal",
        seed=seed,
        dtype=dtype,
    )


# --- layers: layers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """What `fully_connected` and `conv2d` take by name beside their first arguments, with the defaults of old."""

    normalizer_fn: Optional[Function] = None
    normalizer_params: Mapping[str, Any] = field(default_factory=dict)
    weights_initializer: Any = None
    weights_regularizer: Any = None
    biases_initializer: Any = tf.zeros_initializer
    biases_regularizer: Any = None
    reuse: Any = None
    trainable: bool = True
    scope: Any = None

    def weights(self, shape: Sequence[int], dtype: Any) -> Any:
        """The variable `weights`; Xavier's initialisation by default."""
        return tf.get_variable(
            "weights",
            shape,
            dtype,
            initializer=self.weights_initializer or xavier_initializer(),
            regularizer=self.weights_regularizer,
            trainable=self.trainable,
            collections=[tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES, tf.GraphKeys.WEIGHTS],
        )

    def finish(self, outputs: Any, size: int, activation: Optional[Function]) -> Any:
        """Normalise, or add the variable `biases`, and activate."""
        if self.normalizer_fn is not None:
            outputs = self.normalizer_fn(outputs, **(self.normalizer_params or {}))
        elif self.biases_initializer is not None:
            make = self.biases_initializer
            biases = tf.get_variable(
                "biases",
                [size],
                outputs.dtype.base_dtype,
                initializer=make() if isinstance(make, type) else make,
                regularizer=self.biases_regularizer,
                trainable=self.trainable,
                collections=[
                    tf.GraphKeys.GLOBAL_VARIABLES,
                    tf.GraphKeys.MODEL_VARIABLES,
                    tf.GraphKeys.BIASES,
                ],
            )
            outputs = tf.nn.bias_add(outputs, biases)
        return outputs if activation is None else activation(outputs)


def fully_connected(
    inputs: Any, num_outputs: int, activation_fn: Optional[Function] = tf.nn.relu, **options: Any
) -> Any:
    """A dense layer over the last dimension; relu by default. See `_Options` for the rest."""
    chosen = _Options(**options)
    with tf.variable_scope(chosen.scope, "fully_connected", [inputs], reuse=chosen.reuse):
        inputs = tf.convert_to_tensor(inputs)
        size = _known(inputs.shape[-1], "the last dimension of fully_connected's inputs")
        weights = chosen.weights([size, num_outputs], inputs.dtype.base_dtype)
        if inputs.shape.rank == 2:
            outputs = tf.matmul(inputs, weights)
        else:
            outputs = tf.tensordot(inputs, weights, [[inputs.shape.rank - 1], [0]])
        return chosen.finish(outputs, num_outputs, activation_fn)


def linear(inputs: Any, num_outputs: int, **options: Any) -> Any:
    """`fully_connected` without an activation."""
    return fully_connected(inputs, num_outputs, **{"activation_fn": None, **options})


def conv2d(
    inputs: Any,
    num_outputs: int,
    kernel_size: Shape2,
    stride: Shape2 = 1,
    padding: str = "SAME",
    *,
    activation_fn: Optional[Function] = tf.nn.relu,
    **options: Any,
) -> Any:
    """A convolution of images (batch, height, width, channels); relu by default. See `_Options` for the rest."""
    chosen = _Options(**options)
    with tf.variable_scope(chosen.scope, "Conv", [inputs], reuse=chosen.reuse):
        inputs = tf.convert_to_tensor(inputs)
        channels = _known(inputs.shape[-1], "the channels of conv2d's inputs")
        shape = [*_pair(kernel_size), channels, num_outputs]
        weights = chosen.weights(shape, inputs.dtype.base_dtype)
        outputs = tf.nn.conv2d(inputs, weights, strides=[1, *_pair(stride), 1], padding=padding)
        return chosen.finish(outputs, num_outputs, activation_fn)


def max_pool2d(
    inputs: Any, kernel_size: Shape2, stride: Shape2 = 2, padding: str = "VALID", scope: Any = None
) -> Any:
    with tf.name_scope(scope, "MaxPool2D", [inputs]):
        return tf.nn.max_pool2d(inputs, _pair(kernel_size), _pair(stride), padding)


def avg_pool2d(
    inputs: Any, kernel_size: Shape2, stride: Shape2 = 2, padding: str = "VALID", scope: Any = None
) -> Any:
    with tf.name_scope(scope, "AvgPool2D", [inputs]):
        return tf.nn.avg_pool2d(inputs, _pair(kernel_size), _pair(stride), padding)


def flatten(inputs: Any, scope: Any = None) -> Any:
    """(batch, …) to (batch, product of the rest)."""
    with tf.name_scope(scope, "Flatten", [inputs]):
        inputs = tf.convert_to_tensor(inputs)
        size = _known(inputs.shape[1:].num_elements(), "all but the first dimension of flatten's inputs")
        return tf.reshape(inputs, [-1, size])


def dropout(
    inputs: Any,
    keep_prob: Any = 0.5,
    noise_shape: Any = None,
    is_training: Any = True,
    *,
    scope: Any = None,
    seed: Optional[int] = None,
) -> Any:
    with tf.name_scope(scope, "Dropout", [inputs]):
        if isinstance(is_training, bool):
            if not is_training:
                return tf.identity(inputs)
            return tf.nn.dropout(inputs, rate=1 - keep_prob, noise_shape=noise_shape, seed=seed)
        return tf.cond(
            is_training,
            lambda: tf.nn.dropout(inputs, rate=1 - keep_prob, noise_shape=noise_shape, seed=seed),
            lambda: tf.identity(inputs),
        )


def _known(size: Any, what: str) -> int:
    size = getattr(size, "value", size)
    if size is None:
        raise ValueError(f"{what} must be known when the graph is built")
    return int(size)


def _pair(value: Shape2) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


# --- training -------------------------------------------------------------------------------------------------------


class GreedyLoadBalancingStrategy:
    """For `replica_device_setter(ps_strategy=…)`: each variable goes to the ps with the least load so far."""

    def __init__(self, num_tasks: int, load_fn: Function) -> None:
        self._loads = [0.0] * num_tasks
        self._load_fn = load_fn

    def __call__(self, op: Any) -> int:
        task = self._loads.index(min(self._loads))
        self._loads[task] += self._load_fn(op)
        return task


def byte_size_load_fn(op: Any) -> float:
    """The bytes of a variable's op."""
    shape = tf.TensorShape(op.get_attr("shape"))
    size: int = tf.as_dtype(op.get_attr("dtype")).size or 1
    return float(_known(shape.num_elements(), f"the shape of {op.name}") * size)


# --- what `tf.contrib` is made of -------------------------------------------------------------------------------------

PARTS: Mapping[str, Mapping[str, Any]] = {
    "layers": {
        "apply_regularization": apply_regularization,
        "avg_pool2d": avg_pool2d,
        "conv2d": conv2d,
        "convolution2d": conv2d,
        "dropout": dropout,
        "flatten": flatten,
        "fully_connected": fully_connected,
        "l1_l2_regularizer": l1_l2_regularizer,
        "l1_regularizer": l1_regularizer,
        "l2_regularizer": l2_regularizer,
        "linear": linear,
        "max_pool2d": max_pool2d,
        "relu": fully_connected,
        "sum_regularizer": sum_regularizer,
        "variance_scaling_initializer": variance_scaling_initializer,
        "xavier_initializer": xavier_initializer,
        "xavier_initializer_conv2d": xavier_initializer,
    },
    "rnn": {
        **{
            name: getattr(rnn_cell, name)
            for name in (
                "BasicLSTMCell",
                "BasicRNNCell",
                "DropoutWrapper",
                "GRUCell",
                "LSTMCell",
                "LSTMStateTuple",
                "MultiRNNCell",
                "RNNCell",
            )
        },
        "static_bidirectional_rnn": tf.nn.static_bidirectional_rnn,
        "static_rnn": tf.nn.static_rnn,
    },
    "framework": {
        "assert_global_step": tf.train.assert_global_step,
        "create_global_step": tf.train.create_global_step,
        "get_global_step": tf.train.get_global_step,
        "get_or_create_global_step": tf.train.get_or_create_global_step,
    },
    "training": {
        "GreedyLoadBalancingStrategy": GreedyLoadBalancingStrategy,
        "byte_size_load_fn": byte_size_load_fn,
    },
}
