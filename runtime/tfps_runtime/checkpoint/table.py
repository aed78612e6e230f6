"""A table of TensorFlow (a LevelDB table): sorted keys and values in blocks; standard library only.

After tensorflow/core/lib/io/format.h, block.cc and table_builder.cc. The last 48 bytes of the file are the footer:
the handles (offset and size, varints) of the meta index and of the index block, padding, and the magic number. A block
is a row of entries (varints `shared`, `unshared`, `length`; the rest of the key; the value), each key given by what it
does not share with the one before; then the restart points (uint32, where `shared` is 0) and their number. A byte for
its compression follows, and the masked CRC-32C of block and byte (uint32). The index block's values are the handles of
the data blocks, in order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tfps_runtime.checkpoint import crc32c
from tfps_runtime.checkpoint.errors import CheckpointError

FOOTER_BYTES = 48
TABLE_MAGIC = 0xDB4775248B80FB57
TRAILER_BYTES = 5
MAX_KEY_BYTES = 16 * 1024
MAX_ENTRIES = 500_000
MAX_KEYS_BYTES = 64 * 1024 * 1024
"""Of all keys together, written out: a few bytes of a hostile file can ask for any amount."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of at most 64 bits, seven in a byte from the lowest on, and where it ends. Raises CheckpointError."""
    value = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80 and value < 1 << 64:
                return value, at
            shift += 7
            if shift > 63:
                raise CheckpointError("a number is larger than any")
    except IndexError:
        raise CheckpointError("a number is cut off") from None


def entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All keys and values of a whole table, in order. Raises CheckpointError where it is none, perhaps after some."""
    if len(data) < FOOTER_BYTES or data[-8:] != struct.pack("<Q", TABLE_MAGIC):
        raise CheckpointError("the footer is missing: it is no table, or not all of it")
    footer = data[-FOOTER_BYTES:-8]
    _, at = _handle(footer, 0)
    index, _ = _handle(footer, at)
    end, last, written, count = 0, b"", 0, 0
    for _, value in _block(data, *index):
        (offset, size), _ = _handle(value, 0)
        if offset < end:
            raise CheckpointError("blocks overlap")
        end = offset + size + TRAILER_BYTES
        found = _block(data, offset, size)
        for entry in found:
            key = entry[0]
            if key <= last and last:
                raise CheckpointError("keys are out of order")
            last = key
            written += len(key)
        count += len(found)
        if written > MAX_KEYS_BYTES or count > MAX_ENTRIES:
            raise CheckpointError("it has more names than any model")
        yield from found


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = varint(data, at)
    size, at = varint(data, at)
    return (offset, size), at


def _block(data: bytes, offset: int, size: int) -> list[tuple[bytes, bytes]]:
    end = offset + size
    if end + TRAILER_BYTES > len(data) - FOOTER_BYTES or size < 4:
        raise CheckpointError("a block lies outside the file")
    if data[end] != 0:
        raise CheckpointError("a block is compressed, which TensorFlow never does here")
    (stored,) = struct.unpack_from("<I", data, end + 1)
    if crc32c.mask(crc32c.extend(0, data[offset : end + 1])) != stored:
        raise CheckpointError("a block's checksum is wrong")
    (restarts,) = struct.unpack_from("<I", data, end - 4)
    block, at, end, key, written = data[offset:end], 0, size - 4 - 4 * restarts, b"", 0
    if end < 0:
        raise CheckpointError("a block has more restart points than bytes")
    found = []
    while at < end:
        # Nearly always each of the three fits into one byte.
        shared, unshared, length = block[at : at + 3] if at + 3 <= end else (128, 128, 128)
        if shared < 128 and unshared < 128 and length < 128:
            at += 3
        else:
            shared, at = varint(block, at)
            unshared, at = varint(block, at)
            length, at = varint(block, at)
        middle = at + unshared
        after = middle + length
        if after > end or shared > len(key):
            raise CheckpointError("an entry is cut off")
        if shared + unshared > MAX_KEY_BYTES:
            raise CheckpointError("a name is longer than any variable's")
        key = key[:shared] + block[at:middle]
        at = after
        found.append((key, block[middle:after]))
        written += len(key)
        if written > MAX_KEYS_BYTES or len(found) > MAX_ENTRIES:
            raise CheckpointError("it has more names than any model")
    return found
