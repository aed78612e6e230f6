"""A checkpoint's index: which tensors there are, and where in the shards they lie; standard library only.

    index = read_index("/data/ckpt/model.ckpt-1200")
    index.tensors["w"].shape, index.needed_bytes(), index.global_step()

A checkpoint (format V2) is `<prefix>.index` and `<prefix>.data-00000-of-00001`, …. The index is a table (`table`) whose
values are protocol buffers (tensorflow/core/protobuf/tensor_bundle.proto): under the empty key BundleHeaderProto
with num_shards (1), endianness (2: 0 little, 1 big), version (3: producer (1), min_consumer (2)); under each
tensor's name a BundleEntryProto with dtype (1), shape (2), shard_id (3), offset (4), size (5), crc32c (6, fixed32) and,
for a variable in parts, slices (7). Fields with the value 0 are not written.

Shapes are TensorShapeProto (dim (2): size (1)), slices TensorSliceProto (extent (1): start (1), length (2)); dtypes are
numbers of DataType (tensorflow/core/framework/types.proto).
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Optional, Union

from tfps_runtime.checkpoint import table
from tfps_runtime.checkpoint.errors import CheckpointError
from tfps_runtime.checkpoint.slices import FULL, Extent, slice_key
from tfps_runtime.checkpoint.table import varint

MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_ENTRY_BYTES = 1024 * 1024
MAX_MESSAGE_BYTES = 16 * 1024
MAX_SHARDS = 100_000
MAX_DIMENSIONS = 254
"""TensorShape::MaxDimensions."""
BUNDLE_VERSION = 1
"""kTensorBundleVersion; an index says which is the oldest reader that it is for."""

DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    8: "complex64",
    9: "int64",
    10: "bool",
    11: "qint8",
    12: "quint8",
    13: "qint32",
    14: "bfloat16",
    15: "qint16",
    16: "quint16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    20: "resource",
    21: "variant",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
    26: "float8_e4m3fnuz",
    27: "float8_e4m3b11fnuz",
    28: "float8_e5m2fnuz",
    29: "int4",
    30: "uint4",
    31: "int2",
    32: "uint2",
    33: "float4_e2m1fn",
}
_ITEM_BYTES = {
    **dict.fromkeys(("uint8", "int8", "bool", "qint8", "quint8"), 1),
    **dict.fromkeys(("int16", "uint16", "qint16", "quint16", "bfloat16", "float16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


class Part(NamedTuple):
    """A slice of a variable in parts, and where it lies."""

    extents: tuple[Extent, ...]
    shard: int
    offset: int
    size: int
    crc32c: int


class Tensor(NamedTuple):
    """One tensor of a checkpoint. Of a variable in `parts`, `size` is the sum, and there is no place of its own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    """Bytes in its shard."""
    crc32c: int
    """Masked, as it is stored; of its bytes (of strings see `verify`)."""
    parts: tuple[Part, ...] = ()


_PLACE = re.compile(
    rb"(?:\x18([\x80-\xff]{0,7}[\0-\x7f]))?(?:\x20([\x80-\xff]{0,7}[\0-\x7f]))?(?:\x28([\x80-\xff]{0,7}[\0-\x7f]))?"
    rb"\x35(.{4})\Z",
    re.DOTALL,
)


@dataclass(frozen=True)
class Index:
    """What the index of a checkpoint says."""

    prefix: str
    shards: int
    is_big_endian: bool
    tensors: Mapping[str, Tensor] = field(repr=False)

    def shard_path(self, shard: int) -> str:
        """Where a shard lies."""
        return f"{self.prefix}.data-{shard:05}-of-{self.shards:05}"

    def needed_bytes(self) -> dict[int, int]:
        """Shard -> how many bytes of it the tensors need; every shard is there, if only with 0."""
        needed = dict.fromkeys(range(self.shards), 0)
        for tensor in self.tensors.values():
            for part in tensor.parts or (tensor,):
                needed[part.shard] = max(needed[part.shard], part.offset + part.size)
        return needed

    def global_step(self, name: str = "global_step") -> Optional[int]:
        """The value of the variable `name`, or None if there is no such integer. Reads a few bytes of a shard.

        Raises CheckpointError when the shard lacks them.
        """
        tensor = self.tensors.get(name)
        if (
            tensor is None
            or tensor.shape != ()
            or (tensor.dtype, tensor.size) not in (("int64", 8), ("int32", 4))
        ):
            return None
        data = read_bytes(self, tensor)
        return int.from_bytes(data, "big" if self.is_big_endian else "little", signed=True)


def read_bytes(index: Index, part: Union[Tensor, Part]) -> bytes:
    """A tensor's bytes as they lie in its shard. Raises CheckpointError when the shard lacks them."""
    path = index.shard_path(part.shard)
    try:
        with open(path, "rb") as file:
            file.seek(part.offset)
            data = file.read(part.size)
    except (OSError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if len(data) < part.size:
        raise CheckpointError(f"{path} is shorter than its index says")
    return data


def read_index(prefix: str) -> Index:
    """The index of the checkpoint `prefix`; reads no tensor data. Raises CheckpointError, naming the file."""
    path = prefix + ".index"
    try:
        return parse_index(read_limited(path), prefix)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_limited(path: str) -> bytes:
    """The bytes of an index. Raises CheckpointError when there are none, or more than any index has."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_INDEX_BYTES + 1) if size <= MAX_INDEX_BYTES else b""
    except OSError as error:
        raise CheckpointError(str(error.strerror)) from None
    if size > MAX_INDEX_BYTES or len(data) > MAX_INDEX_BYTES:
        raise CheckpointError(f"larger than {MAX_INDEX_BYTES >> 20} MiB")
    return data


def parse_index(data: bytes, prefix: str = "") -> Index:
    """The same from the bytes of an index. Raises CheckpointError for anything that is not a whole one."""
    rows = table.entries(data)
    key, value = next(rows, (b"?", b""))
    if key:
        raise CheckpointError("the header is missing")
    shards, is_big_endian = _header(value)
    tensors: dict[str, Tensor] = {}
    cut: list[tuple[str, str, tuple[int, ...], list[bytes]]] = []
    stored: dict[bytes, Part] = {}
    for key, value in rows:
        number, described, shard, offset, size, crc, slices = _entry(value)
        if shard >= shards:
            raise CheckpointError(f"shard {shard} is not in the header")
        if key[:1] == b"\0":
            stored[key] = Part((), shard, offset, size, crc)
            continue
        name = key.decode("utf-8", "surrogateescape")
        dtype, shape, whole = _kind(number, described)
        if slices:
            cut.append((name, dtype, shape, slices))
            continue
        if size != whole and whole is not None:
            raise CheckpointError(f"{name}: {size} bytes do not make a tensor of shape {shape}")
        tensors[name] = Tensor(name, dtype, shape, shard, offset, size, crc)
    if sum(len(slices) for _, _, _, slices in cut) > len(stored):
        raise CheckpointError("a slice is missing")
    for name, dtype, shape, slices in cut:
        parts = tuple(_part(name, piece, stored) for piece in slices)
        size = sum(part.size for part in parts)
        tensors[name] = Tensor(name, dtype, shape, 0, 0, size, 0, parts)
    return Index(prefix, shards, is_big_endian, tensors)


def _part(name: str, piece: bytes, stored: Mapping[bytes, Part]) -> Part:
    extents = []
    for tag, value in _fields(piece):
        if tag == 10 and isinstance(value, bytes):
            found = dict(_fields(value))
            extents.append(Extent(_signed(found.get(8, 0)), _signed(found.get(16, FULL))))
    part = stored.get(slice_key(name, tuple(extents)))
    if part is None:
        raise CheckpointError(f"{name}: a slice is missing")
    return Part(tuple(extents), part.shard, part.offset, part.size, part.crc32c)


def _header(message: bytes) -> tuple[int, bool]:
    shards, endianness, oldest = 0, 0, 0
    for tag, value in _fields(message):
        if tag == 8 and isinstance(value, int):
            shards = value
        elif tag == 16 and isinstance(value, int):
            endianness = value
        elif tag == 26 and isinstance(value, bytes):
            oldest = _signed(dict(_fields(value)).get(16, 0))
    if not 0 < shards <= MAX_SHARDS:
        raise CheckpointError(f"the header names {shards} shards")
    if endianness > 1:
        raise CheckpointError(f"the header names byte order {endianness}")
    if oldest > BUNDLE_VERSION:
        raise CheckpointError(f"written for readers of version {oldest} and later")
    return shards, endianness == 1


def _entry(message: bytes) -> tuple[int, bytes, int, int, int, int, list[bytes]]:
    """dtype, shape, shard, offset, size, CRC, slices of a BundleEntryProto. Raises CheckpointError."""
    # Nearly all are written in this order, with a dtype and a shape of less than 128 bytes.
    if (
        message[:1] == b"\x08"
        and message[2:3] == b"\x12"
        and len(message) > 4
        and 0 < message[1] < 128 > message[3]
    ):
        shape_end = 4 + message[3]
        found = _PLACE.match(message, shape_end)
        if found is not None:
            shard, offset, size, crc = found.groups(b"\0")
            return (
                message[1],
                message[4:shape_end],
                shard[0] if len(shard) == 1 else varint(shard, 0)[0],
                offset[0] if len(offset) == 1 else varint(offset, 0)[0],
                size[0] if len(size) == 1 else varint(size, 0)[0],
                int.from_bytes(crc, "little"),
                [],
            )
    return _any_entry(message)


def _any_entry(message: bytes) -> tuple[int, bytes, int, int, int, int, list[bytes]]:
    if len(message) > MAX_ENTRY_BYTES:
        raise CheckpointError("an entry is larger than any")
    number = shard = offset = size = crc = 0
    shape, slices = b"", []
    at, end = 0, len(message)
    try:
        while at < end:
            tag = message[at]
            at += 1
            if tag == 53:
                crc = int.from_bytes(message[at : at + 4], "little")
                at += 4
                continue
            value = message[at]
            at += 1
            if value >= 128:
                value, at = varint(message, at - 1)
            if tag == 8:
                number = value
            elif tag == 18:
                shape = message[at : at + value]
                at += value
            elif tag == 24:
                shard = value
            elif tag == 32:
                offset = value
            elif tag == 40:
                size = value
            elif tag == 58:
                slices.append(message[at : at + value])
                at += value
            else:
                raise CheckpointError(f"an entry has a field {tag >> 3} of kind {tag & 7}")
    except IndexError:
        at = end + 1
    if at > end:
        raise CheckpointError("an entry's fields are cut off")
    if number == 0 or max(shard, offset, size) >= 1 << 62:
        raise CheckpointError("an entry makes no sense")
    return number, shape, shard, offset, size, crc, slices


@functools.lru_cache(maxsize=1024)
def _kind(number: int, shape: bytes) -> tuple[str, tuple[int, ...], Optional[int]]:
    """dtype, shape, and bytes of such a tensor where the dtype's items are all of one size."""
    dtype = DTYPES.get(number, f"dtype {number}")
    dimensions = []
    for tag, value in _fields(shape):
        if tag == 18 and isinstance(value, bytes):
            size = _signed(dict(_fields(value)).get(8, 0))
            if size < 0:
                raise CheckpointError("a dimension has no size")
            dimensions.append(size)
    if len(dimensions) > MAX_DIMENSIONS:
        raise CheckpointError(f"{len(dimensions)} dimensions")
    item = _ITEM_BYTES.get(dtype)
    return dtype, tuple(dimensions), None if item is None else item * math.prod(dimensions)


def _signed(value: Union[int, bytes]) -> int:
    if not isinstance(value, int):
        raise CheckpointError("a field is of the wrong kind")
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(message: bytes) -> list[tuple[int, Union[int, bytes]]]:
    """The fields of a small protocol buffer, as (tag, number or bytes). Raises CheckpointError."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise CheckpointError("a shape is larger than any")
    found: list[tuple[int, Union[int, bytes]]] = []
    at, end = 0, len(message)
    while at < end:
        tag, at = varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = varint(message, at)
            found.append((tag, value))
            continue
        if kind == 2:
            length, at = varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise CheckpointError(f"a field of kind {kind}")
        if at + length > end:
            raise CheckpointError("a field is cut off")
        found.append((tag, message[at : at + length]))
        at += length
    return found
