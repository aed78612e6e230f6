"""`tensorflow.examples.tutorials.mnist.input_data` for scripts of TensorFlow 1; see `compat`.

Reads what lies in a local directory and downloads nothing. Needs NumPy only.

    mnist = read_data_sets("/data/mnist", one_hot=True)
    images, labels = mnist.train.next_batch(100)
"""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

TRAIN, TEST = "train", "test"
_IDX = {
    TRAIN: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    TEST: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
VALIDATION_SIZE = 5000
MNIST_SIZE = 60000


class DataSet:
    """Images and labels, served in batches, epoch after epoch, shuffled anew for each."""

    def __init__(self, images: Any, labels: Any, seed: Optional[int] = None) -> None:
        self.images, self.labels = images, labels
        self.epochs_completed = 0
        # The module's own generator, of which each TF task has another state.
        self._random: Any = np.random if seed is None else np.random.RandomState(seed)
        self._order = np.arange(self.num_examples)
        self._next = 0

    @property
    def num_examples(self) -> int:
        return len(self.labels)

    def next_batch(self, batch_size: int, fake_data: bool = False, shuffle: bool = True) -> tuple[Any, Any]:
        """The next `batch_size` images and labels. A batch may reach over the end of an epoch."""
        if fake_data:
            raise ValueError("fake_data is not supported")
        if batch_size > self.num_examples:
            raise ValueError(f"a batch of {batch_size} is more than the {self.num_examples} examples")
        if shuffle and self._next == 0 and self.epochs_completed == 0:
            self._order = self._random.permutation(self.num_examples)
        chosen = self._order[self._next : self._next + batch_size]
        self._next += len(chosen)
        missing = batch_size - len(chosen)
        if missing:
            self.epochs_completed += 1
            if shuffle:
                self._order = self._random.permutation(self.num_examples)
            chosen = np.concatenate([chosen, self._order[:missing]])
            self._next = missing
        return self.images[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Datasets:
    train: DataSet
    validation: DataSet
    test: DataSet


def read_data_sets(
    train_dir: str,
    fake_data: bool = False,
    one_hot: bool = False,
    *,
    dtype: Any = np.float32,
    reshape: bool = True,
    validation_size: int = VALIDATION_SIZE,
    seed: Optional[int] = None,
    source_url: str = "",
) -> Datasets:
    """Read images and their digits from a directory, or from the .npz file that `train_dir` names.

    A directory holds MNIST's four files, packed (`.gz`) or not; or `mnist.npz` as Keras has it (`x_train`, `y_train`,
    `x_test`, `y_test`); or `train.npz` and `test.npz` (or `eval.npz`) with `x` and `y`.

    Args:
        train_dir: the directory or file; nothing is downloaded.
        fake_data: refused.
        one_hot: whether labels are vectors of ten.
        dtype: float32: integer pixels 0..255 become 0..1, others stay; uint8: as they are.
        reshape: whether images are flat.
        validation_size: taken from the front of the training images. The default, 5000, is of MNIST's 60000: of fewer
            images it takes a twelfth, too.
        seed: of the shuffling; None: as `numpy.random` is seeded.
        source_url: passed over.

    Raises:
        FileNotFoundError: there is nothing of the above.
        ValueError: what is there is damaged, or the arguments make no sense.
    """
    del source_url
    if fake_data:
        raise ValueError("fake_data is not supported")
    (x, y), (x_test, y_test) = _load(os.fspath(train_dir))
    if validation_size == VALIDATION_SIZE and len(y) < MNIST_SIZE:
        validation_size = len(y) // (MNIST_SIZE // VALIDATION_SIZE)
    if not 0 <= validation_size <= len(y):
        raise ValueError(f"validation_size must be from 0 to {len(y)}, is {validation_size}")

    def make(images: Any, labels: Any) -> DataSet:
        return DataSet(_pixels(images, dtype, is_flat=reshape), _digits(labels, one_hot=one_hot), seed)

    return Datasets(
        train=make(x[validation_size:], y[validation_size:]),
        validation=make(x[:validation_size], y[:validation_size]),
        test=make(x_test, y_test),
    )


def _load(path: str) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    if os.path.isfile(path):
        return _keras(path)
    if os.path.isfile(os.path.join(path, "mnist.npz")):
        return _keras(os.path.join(path, "mnist.npz"))
    if os.path.isfile(os.path.join(path, "train.npz")):
        names = [name for name in ("test.npz", "eval.npz") if os.path.isfile(os.path.join(path, name))]
        train = _npz(os.path.join(path, "train.npz"))
        return train, _npz(os.path.join(path, names[0])) if names else (train[0][:0], train[1][:0])
    found = {part: [_find(path, name) for name in names] for part, names in _IDX.items()}
    missing = [name for part, names in _IDX.items() for name, at in zip(names, found[part]) if at is None]
    if missing:
        raise FileNotFoundError(
            f"{path}: no {missing[0]}[.gz], mnist.npz or train.npz is there; nothing is downloaded, "
            "put the data on the hosts or name them in the job's inputs"
        )
    train, test = ((_idx(str(images), 3), _idx(str(labels), 1)) for images, labels in found.values())
    for images, labels in (train, test):
        if len(images) != len(labels):
            raise ValueError(f"{path}: {len(images)} images, but {len(labels)} labels")
    return train, test


def _keras(path: str) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    with np.load(path) as data:
        return (data["x_train"], data["y_train"]), (data["x_test"], data["y_test"])


def _npz(path: str) -> tuple[Any, Any]:
    with np.load(path) as data:
        return data["x"], data["y"]


def _find(folder: str, name: str) -> Optional[str]:
    paths = [os.path.join(folder, name + ending) for ending in ("", ".gz")]
    return next(filter(os.path.isfile, paths), None)


def _idx(path: str, rank: int) -> Any:
    """An array in the format of MNIST's page: magic number (0, 0, 8 for bytes, rank), sizes, values; big-endian."""
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
        data = file.read()
    header = 4 + 4 * rank
    if len(data) < header or data[:4] != bytes([0, 0, 8, rank]):
        raise ValueError(f"{path} is no idx file of {rank} dimensions")
    shape = np.frombuffer(data, ">u4", rank, 4)
    if len(data) - header != int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{path} is cut off")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _pixels(images: Any, dtype: Any, *, is_flat: bool) -> Any:
    kind = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
    if kind not in (np.float32, np.uint8):
        raise ValueError(f"dtype must be float32 or uint8, is {dtype}")
    if is_flat:
        images = images.reshape(len(images), int(np.prod(images.shape[1:])))
    elif images.ndim == 3:
        images = images[..., np.newaxis]
    if kind == np.float32 and np.issubdtype(images.dtype, np.integer):
        return images.astype(np.float32) / 255
    return images.astype(kind)


def _digits(labels: Any, *, one_hot: bool) -> Any:
    labels = labels.astype(np.uint8)
    return np.eye(10)[labels] if one_hot else labels
