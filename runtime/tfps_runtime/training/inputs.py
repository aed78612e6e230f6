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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from tfps_runtime.training.model import ProgramError


@dataclass(frozen=True)
class Feed:
    """What is fed for one step."""

    values: Sequence[Any] = ()
    """For `Batches.placeholders`, in their order."""
    examples: Optional[int] = None
    """In this replica's batch, where the feed itself tells."""


class Batches:
    """The tensors of one batch, and what to feed to get the next one."""

    def __init__(self, features: Any, labels: Any) -> None:
        self.features = features
        self.labels = labels
        self.placeholders: list[Any] = []
        self.examples = _leading_dimension(features)
        """Number of examples in the batch as a tensor or an int; None if unknown, or if feeds tell."""
        self.cardinality: Any = None
        """Tensor: how many batches a dataset has, or a negative number, see `tf.data.experimental.cardinality`."""

    def feeds(self) -> Iterator[Feed]:
        """A feed per step. Endless here: the tensors themselves raise OutOfRangeError at the end."""
        return itertools.repeat(Feed())


class _FedBatches(Batches):
    def __init__(self, pairs: Iterator[Any]) -> None:
        try:
            first = next(pairs)
        except StopIteration:
            raise ProgramError("input_fn returned an iterator without a single batch") from None
        features, labels = pair(first)
        self._structure = features if labels is None else (features, labels)
        self._pairs = itertools.chain([first], pairs)
        placeholders = [_placeholder(array) for array in tf.nest.flatten(self._structure)]
        tensors = tf.nest.pack_sequence_as(self._structure, placeholders)
        super().__init__(*((tensors, None) if labels is None else tensors))
        self.placeholders = placeholders
        self.examples = None

    def feeds(self) -> Iterator[Feed]:
        for each in self._pairs:
            features, labels = pair(each)
            batch = features if labels is None else (features, labels)
            tf.nest.assert_same_structure(self._structure, batch)
            values = [
                np.asarray(array, placeholder.dtype.as_numpy_dtype)
                for array, placeholder in zip(tf.nest.flatten(batch), self.placeholders)
            ]
            yield Feed(values, len(values[0]) if values and values[0].ndim else None)


def is_dataset(source: Any) -> bool:
    return hasattr(source, "element_spec") and not is_iterator(source)


def is_iterator(source: Any) -> bool:
    return hasattr(source, "__next__")


def build_batches(source: Any) -> Batches:
    """Build the input in the current graph and device scope from what `input_fn` returned.

    Raises ProgramError if that is none of the forms above.
    """
    if is_dataset(source):
        return _dataset_batches(source)
    if is_iterator(source):
        return _FedBatches(source)
    if isinstance(source, tuple) and len(source) == 2:
        return Batches(*source)
    raise ProgramError(
        f"input_fn returned {type(source).__name__}; return a tf.data dataset, a (features, labels) pair of tensors, "
        "or an iterator of (features, labels) pairs of arrays"
    )


def _dataset_batches(dataset: Any) -> Batches:
    batches = Batches(*pair(next_element(dataset)))
    batches.cardinality = tf.data.experimental.cardinality(dataset)
    return batches


def next_element(dataset: Any) -> Any:
    """The tensors of a dataset's next element; it begins anew with each session."""
    iterator = tf.data.make_initializable_iterator(dataset)
    # Run with every session's local initialisation, as lookup tables are.
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def pair(element: Any) -> tuple[Any, Any]:
    """Features and labels of `element`; labels are None unless it is a pair."""
    if isinstance(element, tuple) and len(element) == 2:
        return element
    return element, None


def keep_queues_open() -> None:
    """Let the current graph's queue runners close their queues at the input's end only. Call after `input_fn`.

    A stock queue runner closes its queue when a session ends, even if that session was merely lost with a ps. The
    queue lives on in this process's server, and the next session would find it closed: an early end of the input.
    """
    runners = tf.get_collection_ref(tf.GraphKeys.QUEUE_RUNNERS)
    for i, runner in enumerate(runners):
        if type(runner) is tf.train.QueueRunner:  # others know what they do
            runners[i] = tf.train.QueueRunner(
                runner.queue,
                runner.enqueue_ops,
                close_op=runner.close_op,
                cancel_op=tf.no_op(),
                queue_closed_exception_types=runner.queue_closed_exception_types,
            )


def _placeholder(array: Any) -> Any:
    array = np.asarray(array)
    shape: list[int | None] = list(array.shape)
    return tf.placeholder(tf.as_dtype(array.dtype), [None, *shape[1:]] if shape else [])


def _leading_dimension(features: Any) -> Any:
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
