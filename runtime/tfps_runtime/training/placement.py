"""Where variables go, how evenly, and how gradients get there.

with tf.device(tf.train.replica_device_setter(..., ps_strategy=balance_by_bytes(2))):
    table = tf.get_variable("table", [1_000_000, 16], partitioner=partitioner(params))
_log.info("%s", describe(bytes_by_task(tf.global_variables())))     # ps:0 64.0 MB (50 %), ps:1 64.0 MB (50 %)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from tfps_runtime.training.model import Params

PACKED_BYTES = 16 << 10
"""Gradients up to this size travel together. A tensor between two processes costs about as much as 100 KB of it."""


def balance_by_bytes(tasks: int) -> Callable[[Any], int]:
    """A strategy for `replica_device_setter`: each variable goes to the ps with the fewest bytes so far.

    Depends only on the order in which a graph makes its variables, so every replica that builds the same graph gets
    the same placement. An optimizer's slots are counted where they would have gone, though they are colocated with
    their variable; they are made last, when nothing is left to place.
    """
    load = [0] * tasks

    def choose(op: Any) -> int:
        task = load.index(min(load))
        load[task] += _size(op.get_attr("shape"), op.get_attr("dtype"))
        return task

    return choose


def partitioner(params: Params, *, min_slice_bytes: int = 64 << 10) -> Callable[..., Any]:
    """A partitioner for `tf.get_variable`: rows in as many parts as there are ps, so that each ps holds one.

    For tables of embeddings: `tf.nn.embedding_lookup` and `embedding_lookup_sparse` read and update only the rows
    they need, on every ps at once. Look up with `partition_strategy="div"`, under which a row is the same whatever the
    number of parts. Checkpoints hold the table whole: another number of ps, evaluation and prediction read them too.

    Args:
        params: as `model_fn` got it; in one process there is one part.
        min_slice_bytes: fewer parts, if they would be smaller than this.
    """
    choose: Callable[..., Any] = tf.min_max_variable_partitioner(
        max_partitions=params.ps_count, min_slice_size=min_slice_bytes
    )
    return choose


def bytes_by_task(variables: Iterable[Any]) -> dict[str, int]:
    """Bytes of the variables on each TF task, as `ps:0`; `local` where no task is named."""
    found: defaultdict[str, int] = defaultdict(int)
    for variable in variables:
        device = tf.DeviceSpec.from_string(variable.device)
        task = "local" if device.job is None else f"{device.job}:{device.task}"
        found[task] += _size(variable.shape, variable.dtype.base_dtype)
    return dict(sorted(found.items()))


def describe(loads: Mapping[str, int]) -> str:
    """A line for people: bytes and share of each TF task."""
    total = sum(loads.values()) or 1
    return ", ".join(
        f"{task} {_megabytes(size)} ({100 * size / total:.0f} %)" for task, size in loads.items()
    )


def pack_gradients(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The same (gradient, variable) pairs; small dense gradients for one ps are sent as one tensor.

    Every tensor that goes from one process to another is a call of its own, and a model has many small variables
    (biases, norms): packing them saves more than any other measure here. Bit for bit the same numbers. Build it where
    the gradients are made.
    """
    groups: defaultdict[tuple[str, Any], list[int]] = defaultdict(list)
    for i, (gradient, variable) in enumerate(pairs):
        is_dense = not isinstance(gradient, tf.IndexedSlices)
        if (
            is_dense
            and _size(variable.shape, gradient.dtype) <= PACKED_BYTES
            and _travels(gradient, variable)
        ):
            groups[variable.device, gradient.dtype].append(i)
    packed = list(pairs)
    for (device, _), indices in groups.items():
        if len(indices) < 2:
            continue
        flat = tf.concat([tf.reshape(pairs[i][0], [-1]) for i in indices], axis=0)
        with tf.device(device):
            parts = tf.split(flat, [pairs[i][1].shape.num_elements() for i in indices])
            for i, part in zip(indices, parts):
                packed[i] = tf.reshape(part, pairs[i][1].shape), pairs[i][1]
    return packed


def _travels(gradient: Any, variable: Any) -> bool:
    here, there = (tf.DeviceSpec.from_string(each.device) for each in (gradient, variable))
    return (here.job, here.task) != (there.job, there.task)


def _size(shape: Any, dtype: Any) -> int:
    elements: int | None = tf.TensorShape(shape).num_elements()
    return max(1, (elements or 0) * (tf.as_dtype(dtype).size or 1))


def _megabytes(size: int) -> str:
    return f"{size} B" if size < 10_000 else f"{size / 1e6:.2f} MB"
