"""What scripts of TensorFlow 1 import as `input_data`: it reads what is there, and downloads nothing. No TensorFlow."""

from __future__ import annotations

import gzip
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import tfps_runtime

# Not by its name: its package imports TensorFlow.
_SPEC = importlib.util.spec_from_file_location(
    "tfps_mnist", Path(tfps_runtime.__file__).parent / "training" / "mnist.py"
)
mnist = sys.modules["tfps_mnist"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(mnist)

IMAGES = (np.arange(24 * 9) % 256).astype(np.uint8).reshape(24, 3, 3)
LABELS = (np.arange(24) % 10).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


def write(folder: Path, kind: str) -> Path:
    """The same 24 training and 12 test images in one of the forms that are read."""
    x, y, x_test, y_test = IMAGES, LABELS, IMAGES[:12], LABELS[:12]
    if kind in ("idx", "gz"):
        for part, images, labels in (("train", x, y), ("t10k", x_test, y_test)):
            for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
                data = idx(array)
                path = folder / (name + (".gz" if kind == "gz" else ""))
                path.write_bytes(gzip.compress(data) if kind == "gz" else data)
        return folder
    if kind == "keras":
        np.savez(folder / "mnist.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
        return folder
    np.savez(folder / "train.npz", x=x, y=y)
    np.savez(folder / f"{kind}.npz", x=x_test, y=y_test)
    return folder


@pytest.mark.parametrize("kind", ["idx", "gz", "keras", "test", "eval"])
def test_every_form_gives_the_same_images(tmp_path, kind):
    """MNIST's own files, packed or not, Keras's and NumPy's: pixels in 0..1, flat, a twelfth kept for validation."""
    data = mnist.read_data_sets(str(write(tmp_path, kind)), one_hot=True)
    assert data.train.num_examples == 22
    assert data.validation.num_examples == 2
    assert data.test.num_examples == 12
    assert data.train.images.dtype == np.float32
    np.testing.assert_allclose(data.train.images, IMAGES[2:].reshape(22, 9) / 255, rtol=1e-6)
    np.testing.assert_array_equal(data.train.labels.argmax(1), LABELS[2:])
    assert data.train.labels.shape == (22, 10)


def test_what_can_be_asked_for(tmp_path):
    """Labels as numbers, images with their shape, bytes as they are, a validation part of any size."""
    folder = write(tmp_path, "idx")
    data = mnist.read_data_sets(folder, reshape=False, dtype=np.uint8, validation_size=0)
    assert data.train.images.shape == (24, 3, 3, 1)
    assert data.train.images.dtype == np.uint8
    np.testing.assert_array_equal(data.train.labels, LABELS)
    assert mnist.read_data_sets(folder, validation_size=24).train.num_examples == 0
    with pytest.raises(ValueError, match="validation_size must be from 0 to 24, is 25"):
        mnist.read_data_sets(folder, validation_size=25)
    with pytest.raises(ValueError, match="dtype must be float32 or uint8"):
        mnist.read_data_sets(folder, dtype=np.int64)


def test_pixels_that_are_fractions_already_stay(tmp_path):
    """Only integers are taken for 0..255."""
    np.savez(tmp_path / "train.npz", x=IMAGES / 255, y=LABELS)
    data = mnist.read_data_sets(tmp_path, validation_size=0)
    np.testing.assert_allclose(data.train.images, IMAGES.reshape(24, 9) / 255, rtol=1e-6)
    assert data.test.num_examples == 0


def test_batches_are_epochs_of_shuffled_examples(tmp_path):
    """Each epoch shows every example once, in an order of its own, even when batches reach over its end."""
    train = mnist.read_data_sets(write(tmp_path, "idx"), validation_size=0, seed=1).train
    batches = [train.next_batch(7) for _ in range(24)]
    assert all(len(x) == len(y) == 7 for x, y in batches)
    assert train.epochs_completed == 6
    shown = np.concatenate([x for x, _ in batches])
    orders = [[tuple(row) for row in shown[i : i + 24]] for i in range(0, 7 * 24, 24)]
    everything = sorted(tuple(row) for row in train.images)
    assert all(sorted(order) == everything for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    labels = dict(zip(map(tuple, train.images), train.labels, strict=True))
    assert all(labels[tuple(image)] == label for x, y in batches for image, label in zip(x, y, strict=True))


def test_the_same_seed_gives_the_same_batches_and_none_follows_numpy(tmp_path):
    """With a seed batches repeat; without one they follow `numpy.random`, which differs between TF tasks."""
    folder = write(tmp_path, "idx")

    def first(seed=None):
        return mnist.read_data_sets(folder, seed=seed).train.next_batch(5)[0].tolist()

    assert first(3) == first(3) != first(4)
    np.random.seed(5)  # noqa: NPY002  the generator that scripts of this kind use
    one = first()
    np.random.seed(5)  # noqa: NPY002
    assert one == first() != first()


def test_without_shuffling_batches_come_in_order(tmp_path):
    """As a script that evaluates wants them."""
    test = mnist.read_data_sets(write(tmp_path, "idx")).test
    images = np.concatenate([test.next_batch(4, shuffle=False)[0] for _ in range(3)])
    np.testing.assert_array_equal(images, test.images)


def test_what_is_wrong_is_said(tmp_path):
    """Nothing there, files cut off or exchanged, more labels than images, too large a batch, made-up data."""
    with pytest.raises(
        FileNotFoundError, match=r"no train-images-idx3-ubyte\[\.gz\], mnist\.npz or train\.npz is there"
    ):
        mnist.read_data_sets(tmp_path)
    folder = write(tmp_path, "idx")
    with pytest.raises(ValueError, match="a batch of 99 is more than the 22 examples"):
        mnist.read_data_sets(folder).train.next_batch(99)
    with pytest.raises(ValueError, match="fake_data"):
        mnist.read_data_sets(folder, fake_data=True)
    labels = folder / "train-labels-idx1-ubyte"
    for data, message in (
        (idx(LABELS)[:-1], "is cut off"),
        (idx(IMAGES), "is no idx file of 1 dimensions"),
        (b"", "is no idx file"),
        (idx(LABELS[:-1]), "24 images, but 23 labels"),
    ):
        labels.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            mnist.read_data_sets(folder)
