"""The reader against files that TensorFlow wrote, whole and damaged; what TensorFlow says of them is what is right."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tfps_runtime.checkpoint import (
    CheckpointError,
    complete_checkpoints,
    latest_checkpoint,
    parse_index,
    read_index,
    read_state,
    verify,
)
from tfps_runtime.pins import pin

pytestmark = pytest.mark.tensorflow

SAVES = Path(__file__).parent / "scripts" / "saves.py"
KINDS = ["one", "sharded", "placed", "objects"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Kind of checkpoint -> what TensorFlow says of it."""
    folder = tmp_path_factory.mktemp("saves")
    done = subprocess.run(
        [sys.executable, str(SAVES), str(folder)],
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tensors_are_listed(saved, kind):
    """Every name with its dtype and shape, parts of a variable as the one that they are."""
    theirs = saved[kind]
    ours = read_index(theirs["prefix"])
    assert {t.name: [t.dtype, list(t.shape)] for t in ours.tensors.values()} == theirs["tensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_complete_and_the_newest(saved, kind):
    """Found in its directory, with the number in its name and the size of its files."""
    prefix = saved[kind]["prefix"]
    directory = os.path.dirname(prefix)
    [found] = complete_checkpoints(directory)
    assert found.prefix == prefix == saved[kind]["newest"] == read_state(directory)[0]
    assert found.global_step == int(prefix.rpartition("-")[2])
    files = [name for name in saved[kind]["files"] if ".data-" in name or name.endswith(".index")]
    assert found.size == sum(os.path.getsize(os.path.join(directory, name)) for name in files)


@pytest.mark.parametrize("kind", KINDS)
def test_every_checksum_is_right(saved, kind):
    """Of numbers and strings, whole and in parts; the shards hold nothing else."""
    prefix = saved[kind]["prefix"]
    index = read_index(prefix)
    found = verify(index)
    assert found.unchecked == ()
    assert found.tensors == len(index.tensors)
    sizes = [os.path.getsize(index.shard_path(i)) for i in range(index.shards)]
    assert list(index.needed_bytes().values()) == sizes
    assert found.size == sum(sizes)


def test_partitioned_variables_have_their_slices(saved):
    """Along either axis; their parts make the whole."""
    tensors = read_index(saved["one"]["prefix"]).tensors
    rows = [(p.extents[0].start, p.extents[0].length) for p in tensors["rows"].parts]
    assert rows == [(0, 100), (100, 100), (200, 100)]
    columns = [(p.extents[1].start, p.extents[1].length) for p in tensors["columns"].parts]
    assert columns == [(0, 35), (35, 35)]
    assert tensors["rows"].size == tensors["columns"].size == 300 * 70 * 4


def test_shards_are_told_apart(saved):
    """Each device's variables lie in its own shard."""
    index = read_index(saved["placed"]["prefix"])
    assert index.shards == 3
    assert {index.tensors[f"on{i}"].shard for i in range(3)} == {0, 1, 2}


def test_the_global_step_is_in_the_data(saved):
    """The variable's value, not the file's name."""
    assert read_index(saved["one"]["prefix"]).global_step() == 1234
    assert read_index(saved["objects"]["prefix"]).global_step() is None
    assert read_index(saved["objects"]["prefix"]).global_step("step/.ATTRIBUTES/VARIABLE_VALUE") == 7


def moved(prefix: str, folder: Path) -> Path:
    shutil.copytree(os.path.dirname(prefix), folder)
    return folder / os.path.basename(prefix)


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_directory_is_read_where_it_is(saved, kind, tmp_path):
    """State files with absolute paths, too."""
    prefix = moved(saved[kind]["prefix"], tmp_path / "elsewhere")
    assert latest_checkpoint(str(prefix.parent)).prefix == str(prefix)
    assert read_state(str(prefix.parent))[0] == str(prefix)


PINNED = """
import json, sys
import tensorflow as tf
for directory in sys.argv[1:]:
    newest = tf.train.latest_checkpoint(directory)
    print(json.dumps([newest, sorted(tf.train.load_checkpoint(newest).get_variable_to_shape_map())]))
"""


def test_tensorflow_reads_pins(saved, tmp_path):
    """After the trainer has deleted its own: the state file of a pin is one that TensorFlow understands."""
    taken = []
    for kind in KINDS:
        prefix = moved(saved[kind]["prefix"], tmp_path / kind)
        taken.append(pin(str(prefix.parent), latest_checkpoint(str(prefix.parent)), "me"))
        shutil.rmtree(prefix.parent)
    done = subprocess.run(
        [sys.executable, "-c", PINNED, *(one.directory for one in taken)],
        check=True, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said == [
        [one.prefix, sorted(saved[kind]["tensors"])] for one, kind in zip(taken, KINDS, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_cut_off_it_is_not_complete(saved, kind, tmp_path):
    """An index cut off anywhere, or a shard that lacks its last byte, is no checkpoint."""
    prefix = moved(saved[kind]["prefix"], tmp_path / "cut")
    whole = Path(f"{prefix}.index").read_bytes()
    for size in range(0, len(whole), 7):
        with pytest.raises(CheckpointError):
            parse_index(whole[:size])
    shards = sorted(prefix.parent.glob("*.data-*"))
    for shard in shards:
        content = shard.read_bytes()
        os.truncate(shard, len(content) - 1)
        assert complete_checkpoints(str(prefix.parent)) == []
        shard.write_bytes(content)
        shard.rename(f"{shard}.tempstate17")
        assert complete_checkpoints(str(prefix.parent)) == []
        os.rename(f"{shard}.tempstate17", shard)
    assert len(complete_checkpoints(str(prefix.parent))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_are_found(saved, kind, tmp_path):
    """In the index none gives another answer; in the shards every one is found."""
    prefix = moved(saved[kind]["prefix"], tmp_path / "flipped")
    chance = random.Random(5)
    whole = Path(f"{prefix}.index").read_bytes()
    expected = parse_index(whole)
    for _ in range(300):
        damaged = bytearray(whole)
        at = chance.randrange(len(damaged))
        damaged[at] ^= 1 << chance.randrange(8)
        try:
            found = parse_index(bytes(damaged))
        except CheckpointError:
            continue
        assert found == expected, at
    for shard in sorted(prefix.parent.glob("*.data-*")):
        content = shard.read_bytes()
        for _ in range(10):
            damaged = bytearray(content)
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            shard.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                verify(str(prefix))
        shard.write_bytes(content)
    verify(str(prefix))
