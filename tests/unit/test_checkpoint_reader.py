"""What the reader makes of an index, a state file and the bytes of tensors; and of bytes that are none of these.

Files that TensorFlow itself wrote are read in tests/integration/test_checkpoint_files.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest
from bundles import (
    SHARDED,
    TENSORS,
    block,
    entry,
    field,
    header,
    index,
    message,
    save,
    save_sharded,
    table,
    varint,
)
from hypothesis import given, settings, strategies as st
from tfps_runtime.checkpoint import (
    CheckpointError,
    complete_checkpoints,
    crc32c,
    parse_index,
    read_index,
    read_state,
    verify,
    write_state,
)
from tfps_runtime.checkpoint.slices import Extent, slice_key
from tfps_runtime.checkpoint.table import TABLE_MAGIC

# --- checksums ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (b"\0" * 32, 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_checksums_are_those_of_the_standard(data, expected):
    """The check value, and the examples of RFC 3720, B.4."""
    assert crc32c.extend(0, data) == expected


@pytest.mark.parametrize("size", [4095, 4096, 4097, 65536, 99_991])
def test_lanes_give_the_same_as_bytes(size):
    """Large data, worked on in lanes, has the checksum of its parts, worked on byte by byte."""
    data = random.Random(size).randbytes(size)
    in_parts = 0
    for at in range(0, size, 1000):
        in_parts = crc32c.extend(in_parts, data[at : at + 1000])
    assert crc32c._by_lanes(0xFFFFFFFF, data) ^ 0xFFFFFFFF == in_parts
    assert crc32c.extend(0, data) == in_parts


def test_a_library_in_c_is_used_where_there_is_one(tmp_path, monkeypatch):
    """`google_crc32c` does the large pieces; the answers stay the same."""
    if importlib.util.find_spec("google_crc32c") is None:
        lines = [
            "from tfps_runtime.checkpoint import crc32c",
            "calls = []",
            "def extend(crc, data):",
            "    calls.append(len(data))",
            "    return crc32c._by_lanes(crc ^ 0xFFFFFFFF, data) ^ 0xFFFFFFFF",
        ]
        (tmp_path / "google_crc32c.py").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(tmp_path)
    data = bytes(10_000)
    before = crc32c.extend(0, data)
    crc32c._fast.cache_clear()
    try:
        assert crc32c.extend(0, data) == before
        assert getattr(sys.modules["google_crc32c"], "calls", [10_000]) == [10_000]
    finally:
        crc32c._fast.cache_clear()
        sys.modules.pop("google_crc32c", None)


# --- an index ---------------------------------------------------------------------------------------------------------


def test_tensors_are_listed_with_all_that_is_known(tmp_path):
    """Name, dtype, shape, and where the bytes lie."""
    found = read_index(str(save_sharded(tmp_path, 7)))
    assert {t.name: (t.shard, t.offset, t.size) for t in found.tensors.values()} == SHARDED
    assert found.tensors["b"][:3] == ("b", "uint8", (50,))
    assert (found.shards, found.is_big_endian) == (3, False)
    assert found.needed_bytes() == {0: 100, 1: 100, 2: 30}
    assert found.shard_path(1) == str(tmp_path / "model.ckpt-7.data-00001-of-00003")


def test_nothing_that_tensorflow_may_write_is_refused():
    """Scalars, empty tensors, dtypes of later versions, references, more than 127 of anything."""
    rows = [(b"", header(130))]
    rows += [
        (b"a", entry(129, 1 << 40, 8, dtype=9, shape=())),
        (b"b", entry(0, 0, 0, dtype=1, shape=(0, 5))),
        (b"c", entry(0, 5, 3, dtype=99, shape=(2,))),
        (b"d", entry(0, 5, 4, dtype=101, shape=(1,))),
        (b"e" * 300, entry(0, 0, 127, shape=(127, *[1] * 60))),
    ]
    found = parse_index(table(rows)).tensors
    assert found["a"][1:6] == ("int64", (), 129, 1 << 40, 8)
    assert found["b"].shape == (0, 5)
    assert found["c"].dtype == "dtype 99"
    assert found["d"].dtype == "dtype 101"
    assert found["e" * 300].shape == (127, *[1] * 60)


def extents(*pairs: tuple[int, int]) -> bytes:
    return b"".join(
        message(1, (field(1, start) + (b"" if size < 0 else field(2, size)))) for start, size in pairs
    )


def test_variables_in_parts_have_their_slices():
    """One tensor under its own name, with the place of each part; names with zeros and high bytes are found too."""
    for name in ("w", "v\0\xff\u00e4", "x" * 200):
        cuts = [((0, 100), (0, -1)), ((100, 300), (0, -1)), ((400, 20_000), (0, -1))]
        rows = [(b"", header())]
        for i, cut in enumerate(cuts):
            key = slice_key(name, tuple(Extent(start, size) for start, size in cut))
            rows.append((key, entry(0, i * 40, 40, shape=(40,))))
        rows.sort()
        whole = entry(0, 0, 0, dtype=1, shape=(20_400, 3)) + b"".join(
            message(7, extents(*cut)) for cut in cuts
        )
        found = parse_index(table([*rows, (name.encode(), whole)])).tensors
        assert list(found) == [name]
        assert found[name].shape == (20_400, 3)
        assert [(p.extents[0], p.offset, p.size) for p in found[name].parts] == [
            (Extent(0, 100), 0, 40),
            (Extent(100, 300), 40, 40),
            (Extent(400, 20_000), 80, 40),
        ]
        assert found[name].parts[0].extents[1] == Extent()
        assert found[name].size == 120
        with pytest.raises(CheckpointError, match="a slice is missing"):
            parse_index(table([*rows[:-1], (name.encode(), whole)]))


@pytest.mark.parametrize("value", [0, 1, 63, 64, 8191, 8192, 2**40, 2**62, 2**63 - 1, -1, -64, -65, -(2**63)])
def test_slice_keys_are_in_order(value):
    """The code of slices keeps the order of numbers, which is what it is for."""
    keys = [slice_key("w", (Extent(other, 1),)) for other in (value - 1, value) if other >= -(2**63)]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_the_global_step_is_read_from_the_data(tmp_path):
    """The variable's value; None where there is none."""
    rows = [(b"", header()), (b"global_step", entry(0, 3, 8, dtype=9, shape=()))]
    prefix = tmp_path / "m-5"
    Path(f"{prefix}.index").write_bytes(table(rows))
    Path(f"{prefix}.data-00000-of-00001").write_bytes(b"xyz" + struct.pack("<q", 1234))
    assert read_index(str(prefix)).global_step() == 1234
    assert read_index(str(prefix)).global_step("other") is None
    os.truncate(f"{prefix}.data-00000-of-00001", 10)
    with pytest.raises(CheckpointError, match="shorter than its index says"):
        read_index(str(prefix)).global_step()


# --- what is no index -------------------------------------------------------------------------------------------------


def handle(offset: int, size: int) -> bytes:
    return varint(offset) + varint(size)


def raw(data: bytes, *handles: bytes) -> bytes:
    """A table around given bytes and given handles."""
    blocks = block([(bytes([i]), one) for i, one in enumerate(handles, 1)])
    footer = handle(0, 0) + handle(len(data), len(blocks) - 5)
    return data + blocks + footer.ljust(40, b"\0") + struct.pack("<Q", TABLE_MAGIC)


ROW = (b"", header())
BLOCK = block([ROW, (b"a", entry(0, 0, 1))])

HOSTILE = {
    "no table": b"x" * 1000,
    "no header": table([(b"a", entry(0, 0, 1))]),
    "nothing": table([]),
    "two billion shards": table([(b"", header(1 << 31))]),
    "no shards": table([(b"", header(0))]),
    "a byte order of 7": table([(b"", field(1, 1) + field(2, 7))]),
    "for later readers": table([(b"", field(1, 1) + message(3, field(1, 9) + field(2, 2)))]),
    "names out of order": table([ROW, (b"b", entry(0, 0, 1)), (b"a", entry(0, 0, 1))]),
    "a name twice": table([ROW, (b"a", entry(0, 0, 1)), (b"a", entry(0, 0, 1))]),
    "a block twice": raw(BLOCK, handle(0, len(BLOCK) - 5), handle(0, len(BLOCK) - 5)),
    "a block far outside": raw(BLOCK, handle(2**62, 2**62)),
    "a block of a byte": raw(BLOCK, handle(0, 1)),
    "a wrong checksum": raw(BLOCK[:-1] + b"?", handle(0, len(BLOCK) - 5)),
    "compressed": raw(block([ROW], compression=1), handle(0, len(block([ROW])) - 5)),
    "a number without end": table([(b"", b"\x08" + b"\xff" * 20)]),
    "a name of 20 KB": table([ROW, (b"a" * 20_000, entry(0, 0, 1))]),
    "no dtype": table([ROW, (b"a", entry(0, 0, 1, dtype=0))]),
    "a field of kind 3": table([ROW, (b"a", b"\x0b")]),
    "an entry without its end": table([ROW, (b"a", entry(0, 0, 1)[:-2])]),
    "a shape without its end": table([ROW, (b"a", b"\x08\x01\x12\x7f\x12")]),
    "a shape below zero": table([ROW, (b"a", b"\x08\x04" + message(2, message(2, b"\x08" + b"\xff" * 9 + b"\1")))]),
    "a shape of 300 dimensions": table([ROW, (b"a", entry(0, 0, 1, shape=(1,) * 300))]),
    "a shape of a megabyte": table([ROW, (b"a", b"\x08\x04" + message(2, b"\x12\0" * 500_000))]),
    "a shape that its bytes do not fill": table([ROW, (b"a", entry(0, 0, 5, shape=(2**60, 2**60)))]),
    "bytes beyond any disk": table([ROW, (b"a", entry(0, 2**63, 1))]),
    "a shard that is not in the header": table([ROW, (b"a", entry(1, 0, 1))]),
    "the same slice for ever": table([ROW, (b"a", entry(0, 0, 0, shape=()) + message(7, b"") * 100_000)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_bytes_are_refused_at_once(kind):
    """With our own error, and without the memory that they ask for."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            parse_index(HOSTILE[kind])
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    assert str(caught.value)


def test_names_that_grow_by_sharing_are_bounded():
    """A few bytes for each name, each of thousands of bytes, more than memory holds: refused on the way."""
    size = 15_000
    out = varint(0) + varint(size) + varint(0) + b"k" * size
    for i in range(20_000):
        out += varint(size) + varint(4) + varint(0) + struct.pack(">I", i)
    out += struct.pack("<II", 0, 1) + b"\0"
    data = out + struct.pack("<I", crc32c.mask(crc32c.extend(0, out)))
    assert len(data) < 300_000
    with pytest.raises(CheckpointError, match="more names than any model"):
        parse_index(raw(data, handle(0, len(data) - 5)))


def test_a_sparse_file_of_a_terabyte_is_not_read(tmp_path):
    """Its size is looked at first."""
    path = tmp_path / "m-1.index"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match=r"m-1\.index: larger than 64 MiB"):
        read_index(str(tmp_path / "m-1"))
    assert complete_checkpoints(str(tmp_path)) == []


def test_every_flipped_bit_is_noticed():
    """Blocks have checksums and the footer a magic number; what can be flipped is only the unused padding."""
    whole = index(TENSORS)
    expected = parse_index(whole).tensors
    for at in range(len(whole)):
        for bit in (0, 3, 7):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            try:
                found = parse_index(bytes(damaged)).tensors
            except CheckpointError:
                continue
            assert found == expected, at


keys = st.binary(max_size=6)
values = st.one_of(
    st.binary(max_size=24),
    st.builds(entry, st.integers(0, 3), st.integers(0, 99), st.integers(0, 99), dtype=st.integers(0, 40)),
    st.builds(lambda a, b: entry(0, 0, 8) + message(7, a) + b, st.binary(max_size=9), st.binary(max_size=9)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(keys, values), max_size=8), st.binary(max_size=20), st.booleans())
def test_whatever_lies_in_a_table_there_is_an_answer_or_our_error(rows, first, is_headed):
    """Right checksums around any keys and values."""
    head = header() if is_headed else first
    data = table([(b"", head), *sorted(dict(rows).items())])
    with contextlib.suppress(CheckpointError):
        parse_index(data).needed_bytes()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=40))
def test_whatever_the_bytes_there_is_an_answer_or_our_error(data, footer):
    """Any bytes, and any footer with the right magic number behind them."""
    for tail in (b"", footer.ljust(40, b"\0") + struct.pack("<Q", TABLE_MAGIC)):
        with contextlib.suppress(CheckpointError):
            parse_index(data + tail)


# --- the bytes of tensors ---------------------------------------------------------------------------------------------


def test_all_bytes_are_checked(tmp_path):
    """Right ones are counted; one wrong bit is found, and its tensor named."""
    prefix = save(tmp_path, 3)
    found = verify(str(prefix))
    assert (found.tensors, found.size, found.unchecked) == (4, 1000, ())
    shard = Path(f"{prefix}.data-00000-of-00001")
    content = bytearray(shard.read_bytes())
    content[250] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"data-00000-of-00001: the checksum of w/Adagrad is wrong"):
        verify(str(prefix))
    os.truncate(shard, 999)
    with pytest.raises(CheckpointError):
        verify(str(prefix))
    shard.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        verify(str(prefix))


# --- the state file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.ckpt-1", "mödel-2", 'it\'s "new"\\-3', "a\tb\nc-4", "\udcff-5"])
def test_a_state_file_that_is_written_is_read(tmp_path, name):
    """Whatever the name; it is pure ASCII, as TensorFlow's is."""
    write_state(str(tmp_path), name)
    assert read_state(str(tmp_path)) == (str(tmp_path / name), [str(tmp_path / name)])
    assert (tmp_path / "checkpoint").read_bytes().isascii()
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_escapes_of_a_state_file_are_read(tmp_path):
    """As C writes them: octal, hexadecimal, letters."""
    (tmp_path / "checkpoint").write_bytes(rb'model_checkpoint_path: "/x/m\303\266del\x2d\t1"')
    assert read_state(str(tmp_path))[0] == str(tmp_path / "mödel-\t1")
