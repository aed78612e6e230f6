"""Whatever lies on a host's disk, only our own errors come out, and soon: checkpoints."""

from __future__ import annotations

import base64
import shutil
import struct
import tempfile
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from bundles import entry, field, header, message, table, varint
from fuzzing import FUZZ, check_size, mutated
from hypothesis import example, given, strategies as st
from tfps_runtime.checkpoint import (
    CheckpointError,
    complete_checkpoints,
    crc32c,
    parse_index,
    read_state,
    verify,
)
from tfps_runtime.checkpoint.slices import Extent, slice_key

INDEX, INDEX_OF_SHARDS = (
    zlib.decompress(base64.b64decode(text))
    for text in (
        "eNpjYGDjYJRi4mBk4OZPz8lPSsyJLy5JLeBgEWIRYuLg0OAwTewTnczAKFwOFGIVYuY4wajAoXGC0fTD061SDEDACCLyrs79wcApVK7vmJKYXpSYAtUeo3CBUSPGtHlt4RwGRpEKqAl7WBXWMGnsYTXlf8F2DG7EhG/P98I5Bz4t3MDAyFTO4AokK7zs4BL751bv6WXkmMUowkAQhP9u6FYpdb8NANNALIE=",
        "eNpjYGDjYJZi4mBkYORP5GARYhFi4kjRSDHt61BcxcAomAQVMpJg1DAyLYzMZWIAAkYQwfop7yoDo3AyQoWCEUwNo2AKVFhOgklDztQgc2EHXKM476rZcM6BTws3MDAyJTFYAskUOxO4hP7lcwrlHC2MIgyEQfjvhm6VUvfbAB9/HDU=",
    )
)
"""As TensorFlow writes them: four tensors in one shard of 1,000 bytes; others in three, of at most 100 bytes."""
STATE = b'model_checkpoint_path: "/old/place/model.ckpt-7"\nall_model_checkpoint_paths: "model.ckpt-7"\n'


@pytest.fixture(scope="module")
def directory():
    folder = Path(tempfile.mkdtemp(prefix="tfps-fuzz-"))
    yield folder
    shutil.rmtree(folder)


@FUZZ
@given(st.one_of(mutated(INDEX), mutated(INDEX_OF_SHARDS), st.binary(max_size=200)), mutated(STATE))
@example(b"\xff" * 40 + INDEX[-8:], b"")
@example(INDEX[:-48] + b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" * 4 + INDEX[-8:], b"\xff\xfe\0")
@example(INDEX[:-48] + b"\x80" * 40 + INDEX[-8:], STATE + b"\\")
def test_checkpoint_bytes(directory, index_bytes, state):
    """A damaged index is no checkpoint, or needs no byte that is not there; a damaged state file says nothing."""
    place = Path(tempfile.mkdtemp(dir=directory))
    (place / "model.ckpt-7.index").write_bytes(index_bytes)
    (place / "checkpoint").write_bytes(state)
    for shard in range(3):
        (place / f"model.ckpt-7.data-{shard:05}-of-00003").write_bytes(b"x" * 100)
    (place / "model.ckpt-7.data-00000-of-00001").write_bytes(b"x" * 1000)
    for found in complete_checkpoints(str(place)):
        assert found.global_step == 7
        assert found.size <= len(index_bytes) + 1300
    newest, paths = read_state(str(place))
    for path in [newest, *paths]:
        assert path is None or Path(path).parent == place
    shutil.rmtree(place)


# --- behind right checksums -------------------------------------------------------------------------------------------
#
# Damage in a table is told by its checksums. Here they are made anew around damaged names and entries, as somebody who
# means harm would.

WORDS = [b"one", b"", b"x" * 200]
LENGTHS = b"".join(struct.pack("<I", len(word)) for word in WORDS)
STRINGS = (
    b"".join(varint(len(word)) for word in WORDS)
    + struct.pack("<I", crc32c.mask(crc32c.extend(0, LENGTHS)))
    + b"".join(WORDS)
)
CUT = [(0, 3), (3, 2)]
SLICES = b"".join(
    message(7, message(1, field(1, start) + field(2, size)) + message(1, b"")) for start, size in CUT
)
ROWS = [
    (b"", header()),
    *((slice_key("parts", (Extent(start, size), Extent())), entry(0, 0, 4 * size)) for start, size in CUT),
    (b"bytes", entry(0, 8, 72)),
    (b"global_step", entry(0, 0, 8, dtype=9, shape=())),
    (b"parts", field(1, 4) + message(2, message(2, field(1, 5)) + message(2, field(1, 4))) + SLICES),
    (
        b"words",
        entry(0, 80, len(STRINGS), dtype=7, shape=(3,))[:-4]
        + struct.pack("<I", crc32c.mask(crc32c.extend(crc32c.extend(0, LENGTHS), STRINGS[-207:]))),
    ),
]
SHARD = b"x" * 80 + STRINGS


@st.composite
def tables(draw: Any) -> bytes:
    """A whole table of ROWS, of which some are damaged, gone, or under another name."""
    rows = dict(ROWS)
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from([key for key, _ in ROWS]))
        value = rows.pop(key, None)
        match draw(st.sampled_from(["value", "value", "key", "other", "gone"])):
            case "value" if value is not None:
                rows[key] = draw(mutated(value))
            case "key" if value is not None:
                rows[draw(mutated(key))] = value
            case "other":
                rows[key] = draw(st.sampled_from(ROWS))[1]
    return table(sorted(rows.items()), draw(st.integers(1, 4)))


HUGE = b"\xff" * 9 + b"\x7f"
"""A number of 70 bits."""


@FUZZ
@given(tables(), st.just(SHARD) | mutated(SHARD))
@example(table(ROWS), SHARD)
@example(table([*ROWS[:-1], (b"words", ROWS[-1][1])]), SHARD[:80] + HUGE + SHARD[81:])
@example(
    table([*ROWS[:5], (b"parts", ROWS[5][1].replace(SLICES, message(7, message(1, b"\x08" + HUGE))))]), SHARD
)
@example(table([(b"", field(1, 100_000) + header()[2:]), *ROWS[1:]]), SHARD)
def test_indexes_and_their_tensors(directory, data, shard):
    """An index and checked tensors, or a CheckpointError; in little time and memory, whatever numbers stand there."""
    place = Path(tempfile.mkdtemp(dir=directory))
    prefix = str(place / "m-7")
    Path(f"{prefix}.data-00000-of-00001").write_bytes(shard)
    began = time.process_time()
    tracemalloc.start()
    try:
        index = parse_index(data, prefix)
        index.needed_bytes()
        index.global_step()
        verify(index)
    except CheckpointError as error:
        check_size(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        shutil.rmtree(place)
    assert peak < 30e6
    assert time.process_time() - began < 10


def test_the_index_here_is_a_good_one(tmp_path):
    """Undamaged it is read, and every tensor has its checksum."""
    (tmp_path / "m-7.data-00000-of-00001").write_bytes(SHARD)
    found = verify(parse_index(table(ROWS), str(tmp_path / "m-7")))
    assert (found.tensors, found.size, found.unchecked) == (4, 20 + 72 + 8 + len(STRINGS), ())
