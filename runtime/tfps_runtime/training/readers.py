"""Input pipelines for `input_fn`: files and arrays, sharded by replica, shuffled, parsed in parallel, prefetched.

    from tfps_runtime.training import readers

    def input_fn(mode, params, shard):
        return readers.tfrecords(params.inputs[mode], parse, mode, shard, batch_size=128)

    def parse(records):                         # a vector of serialised examples
        parsed = tf.io.parse_example(records, {"ids": tf.io.FixedLenFeature([4], tf.int64), ...})
        return parsed, parsed.pop("clicked")

What all of them do, in this order. Mode `train`: this replica's shard, shuffled with its seed, again and again (or
`epochs` times), in batches, parsed in parallel to the steps and prefetched, so that a step finds its batch ready. Every
other mode: all of it, once, in order. Shards are as even as the data allows; those that are not end at their own time,
see "When input ends" in the documentation.
"""

from __future__ import annotations

import glob
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Union

import numpy as np
import tensorflow.compat.v1 as tf

from tfps_runtime.training.model import TRAIN, ProgramError, Shard

AUTOTUNE = tf.data.AUTOTUNE

Paths = Union[str, Sequence[str]]
"""A file, a directory (all its files), a pattern, or several of them."""


def tfrecords(
    paths: Paths,
    parse: Callable[[Any], Any],
    mode: str,
    shard: Shard,
    *,
    batch_size: int,
    shuffle: int = 10_000,
    epochs: int | None = None,
    compression: str = "",
) -> Any:
    """A dataset of TFRecord files.

    Args:
        paths: read in the order of their names. With at least as many files as replicas, a replica reads only its own
            ones; else it reads all and keeps every `shard.count`-th record.
        parse: from a vector of serialised records to features, or (features, labels), such as `tf.io.parse_example`
            with what follows. It gets whole batches, which is much faster than single records.
        mode: as `input_fn` got it.
        shard: as `input_fn` got it.
        batch_size: the last batch may be smaller.
        shuffle: records that are held to draw the next one from; 0: no shuffling.
        epochs: passes over the data in mode `train`; None: without end.
        compression: `GZIP` or `ZLIB`.

    Raises:
        ProgramError: there is no such file.
    """
    files, rest = _share(_files(paths), mode, shard)
    records = tf.data.TFRecordDataset(files, compression_type=compression)
    return _pipeline(records, parse, mode, rest, batch_size=batch_size, shuffle=shuffle, epochs=epochs)


def csv(
    paths: Paths,
    columns: Mapping[str, Any],
    mode: str,
    shard: Shard,
    *,
    batch_size: int,
    label: str | None = None,
    header: bool = True,
    delimiter: str = ",",
    shuffle: int = 10_000,
    epochs: int | None = None,
) -> Any:
    """A dataset of CSV files: features are a dict of column -> vector, the label another vector.

    Args:
        paths: as for `tfrecords`; every file has the same columns.
        columns: all columns of the files, in their order -> what an empty field means (`0.0`, `""`, `0`), which also
            gives the type; a type (`tf.float32`) where every field must be filled; None for a column to pass over.
        mode: as `input_fn` got it.
        shard: as `input_fn` got it.
        batch_size: the last batch may be smaller.
        label: name of the column with the labels; None: features only.
        header: whether the first line of every file names the columns.
        delimiter: between fields; quoted fields may hold it.
        shuffle: lines that are held to draw the next one from; 0: no shuffling.
        epochs: passes over the data in mode `train`; None: without end.

    Raises:
        ProgramError: there is no such file, or no such label column.
    """
    wanted = [name for name, default in columns.items() if default is not None]
    if label is not None and label not in wanted:
        raise ProgramError(f"csv: the label {label!r} is none of the columns {', '.join(wanted)}")
    selected = [i for i, default in enumerate(columns.values()) if default is not None]

    def parse(lines: Any) -> Any:
        defaults = [
            # An empty tensor: no default, the field must be filled.
            tf.constant([], default) if isinstance(default, tf.DType) else [default]
            for default in columns.values()
            if default is not None
        ]
        values = tf.io.decode_csv(lines, defaults, field_delim=delimiter, select_cols=selected)
        features = dict(zip(wanted, values))
        return features if label is None else (features, features.pop(label))

    files, rest = _share(_files(paths), mode, shard)
    lines = tf.data.Dataset.from_tensor_slices(files).flat_map(
        lambda file: tf.data.TextLineDataset(file).skip(1 if header else 0)
    )
    return _pipeline(lines, parse, mode, rest, batch_size=batch_size, shuffle=shuffle, epochs=epochs)


def arrays(
    data: Any,
    mode: str,
    shard: Shard,
    *,
    batch_size: int,
    epochs: int | None = None,
) -> Any:
    """A dataset of NumPy arrays in memory, or mapped from a file (`np.load(path, mmap_mode="r")`).

    Nothing is copied into the graph (`Dataset.from_tensor_slices` would, up to 2 GB at most): batches are gathered by
    a thread while the step before them runs. Every pass over the data has an order of its own.

    Args:
        data: features, or (features, labels): arrays, or dicts of arrays, all of one length.
        mode: as `input_fn` got it.
        shard: as `input_fn` got it; a replica gets every `count`-th row.
        batch_size: the last batch of a pass may be smaller.
        epochs: passes over the data in mode `train`; None: without end.

    Raises:
        ProgramError: the lengths differ, or are 0.
    """
    leaves = [
        np.asarray(leaf) if not isinstance(leaf, np.ndarray) else leaf for leaf in tf.nest.flatten(data)
    ]
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1 or lengths == {0}:
        raise ProgramError(f"arrays: rows of all arrays must be as many, and some, are {sorted(lengths)}")
    rows, passes = np.arange(lengths.pop()), epochs
    if mode == TRAIN:
        rows = rows[shard.index :: shard.count]
        orders: Callable[[int], Any] = _Orders(rows, shard.seed)
    else:
        passes, orders = 1, lambda _: rows
    per_pass = math.ceil(len(rows) / batch_size)

    def gather(number: int) -> list[Any]:
        order, first = orders(number // per_pass), number % per_pass * batch_size
        # Rows in ascending order are read from a mapped file without going back and forth.
        chosen = np.sort(order[first : first + batch_size])
        return [leaf[chosen] for leaf in leaves]

    def batch(number: Any, _: Any) -> Any:
        tensors = tf.numpy_function(gather, [number], [tf.as_dtype(leaf.dtype) for leaf in leaves])
        for tensor, leaf in zip(tensors, leaves):
            tensor.set_shape([None, *leaf.shape[1:]])
        return tf.nest.pack_sequence_as(data, tensors)

    # Not `from_generator`: with its first element TensorFlow sets malloc to give back what each step frees.
    return tf.data.Dataset.range(per_pass).repeat(passes).enumerate().map(batch).prefetch(2)


class _Orders:
    """The order of the rows in each pass: those of one generator, whoever asks for which."""

    def __init__(self, rows: Any, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._lock = threading.Lock()
        self._at = -1

    def __call__(self, number: int) -> Any:
        with self._lock:  # each iterator has a thread of its own
            if number < self._at or self._at < 0:
                self._random, self._at = np.random.default_rng(self._seed), -1
            while self._at < number:
                self._order = self._random.permutation(self._rows)
                self._at += 1
            return self._order


def load_npz(paths: Paths) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, or of several one below the other, by name. Raises ProgramError without a file."""
    parts = [np.load(file) for file in _files(paths, "*.npz")]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}


def _pipeline(
    records: Any,
    parse: Callable[[Any], Any],
    mode: str,
    shard: Shard,
    *,
    batch_size: int,
    shuffle: int,
    epochs: int | None,
) -> Any:
    if mode == TRAIN:
        if shard.count > 1:
            records = records.shard(shard.count, shard.index)
        if shuffle:
            records = records.shuffle(shuffle, seed=shard.seed)
        records = records.repeat(epochs)
    return records.batch(batch_size).map(parse, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)


def _share(files: list[str], mode: str, shard: Shard) -> tuple[list[str], Shard]:
    """The files to read, and which of their records."""
    if mode == TRAIN and len(files) >= shard.count:
        return files[shard.index :: shard.count], Shard(0, 1, shard.seed)
    return files, shard


def _files(paths: Paths, inside: str = "*") -> list[str]:
    """All files, sorted. Raises ProgramError if one of `paths` stands for none."""
    found: list[str] = []
    for path in [paths] if isinstance(paths, str) else paths:
        pattern = str(Path(path) / inside) if Path(path).is_dir() else path
        files = sorted(file for file in glob.glob(pattern) if Path(file).is_file())
        if not files:
            raise ProgramError(f"there is no file {pattern}")
        found += files
    return found
