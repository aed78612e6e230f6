"""Turn what `input_fn` returns into tensors, and feeds where tensors alone will not do.

`input_fn(mode, params, shard)` returns one of

- a `tf.data` dataset of features, or of (features, labels) pairs;
- a pair (features, labels) of tensors, or nested structures of them;
- an iterator of (features, labels) pairs of NumPy arrays: the harness feeds one pair per step, through placeholders
  that have the first pair's types, and its shapes but for the leading dimension.

Datasets restart from their beginning when a session is lost; iterators go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps_runtime.training.model import ProgramError


class Batches:
    """The tensors of one batch, and what to feed to get the next one."""

    def __init__(self, features: Any, labels: Any) -> None:
        self.features = features
        self.labels = labels
        self.examples = _leading_dimension(features)
        self.cardinality: Any = None
        """Tensor: how many batches a dataset has, or a negative number, see `tf.data.experimental.cardinality`."""

    def feeds(self) -> Iterator[dict[Any, Any] | None]:
        """A feed per step. Endless here: the tensors themselves raise OutOfRangeError at the end."""
        return itertools.repeat(None)


class _FedBatches(Batches):
    def __init__(self, pairs: Iterator[Any]) -> None:
        try:
            first = next(pairs)
        except StopIteration:
            raise ProgramError("input_fn returned an iterator without a single batch") from None
        features, labels = _pair(first)
        self._structure = features if labels is None else (features, labels)
        self._pairs = itertools.chain([first], pairs)
        self._placeholders = [_placeholder(array) for array in tf.nest.flatten(self._structure)]
        tensors = tf.nest.pack_sequence_as(self._structure, self._placeholders)
        super().__init__(*((tensors, None) if labels is None else tensors))

    def feeds(self) -> Iterator[dict[Any, Any] | None]:
        for pair in self._pairs:
            features, labels = _pair(pair)
            batch = features if labels is None else (features, labels)
            tf.nest.assert_same_structure(self._structure, batch)
            yield dict(zip(self._placeholders, tf.nest.flatten(batch)))


def build_batches(source: Any) -> Batches:
    """Build the input in the current graph and device scope from what `input_fn` returned.

    Raises ProgramError if that is none of the forms above.
    """
    if hasattr(source, "element_spec") and not hasattr(source, "__next__"):
        return _dataset_batches(source)
    if hasattr(source, "__next__"):
        return _FedBatches(source)
    if isinstance(source, tuple) and len(source) == 2:
        return Batches(*source)
    raise ProgramError(
        f"input_fn returned {type(source).__name__}; return a tf.data dataset, a (features, labels) pair of tensors, "
        "or an iterator of (features, labels) pairs of arrays"
    )


def _dataset_batches(dataset: Any) -> Batches:
    iterator = tf.data.make_initializable_iterator(dataset)
    # Run with every session's local initialisation, as lookup tables are.
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    batches = Batches(*_pair(iterator.get_next()))
    batches.cardinality = tf.data.experimental.cardinality(dataset)
    return batches


def _pair(element: Any) -> tuple[Any, Any]:
    """Features and labels of `element`; labels are None unless it is a pair."""
    if isinstance(element, tuple) and len(element) == 2:
        return element
    return element, None


def _placeholder(array: Any) -> Any:
    array = np.asarray(array)
    shape: list[int | None] = list(array.shape)
    return tf.placeholder(tf.as_dtype(array.dtype), [None, *shape[1:]] if shape else [])


def _leading_dimension(features: Any) -> Any:
    """Number of examples in a batch as a tensor or an int; None for features without a leading dimension."""
    leaves = tf.nest.flatten(features)
    if not leaves:
        return None
    tensor = leaves[0]
    dense = getattr(tensor, "dense_shape", None)  # a SparseTensor
    if dense is not None:
        return dense[0]
    if tensor.shape.rank == 0:
        return None
    static = tensor.shape[0] if tensor.shape.rank is not None else None
    static = getattr(static, "value", static)
    return static if static is not None else tf.shape(tensor)[0]
