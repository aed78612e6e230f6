"""Keys of the parts of partitioned variables in an index; standard library only.

A variable in parts has an entry of its own under its name, without data, that lists the slices; each slice's entry lies
under a key that sorts before all names (EncodeTensorNameSlice in tensorflow/core/util/saved_tensor_slice_util.cc): 0,
the name, the rank, then start and length of each dimension, in the ordered code of
tensorflow/core/lib/strings/ordered_code.cc.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FULL = -1
"""Length of a dimension that is not cut (TensorSlice::kFullExtent)."""


@dataclass(frozen=True)
class Extent:
    """From where on and how much of one dimension a slice holds; `length` FULL: all of it."""

    start: int = 0
    length: int = FULL


def slice_key(name: str, extents: tuple[Extent, ...]) -> bytes:
    """The key of a slice's entry."""
    key = bytearray(_number(0) + _string(name.encode("utf-8", "surrogateescape")) + _number(len(extents)))
    for extent in extents:
        key += _signed(extent.start) + _signed(extent.length)
    return bytes(key)


def _number(value: int) -> bytes:
    """WriteNumIncreasing: how many bytes, then these, the highest first."""
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _string(value: bytes) -> bytes:
    """WriteString: 00 and FF escaped, then a terminator."""
    return re.sub(rb"[\0\xff]", lambda found: b"\0\xff" if found[0] == b"\0" else b"\xff\0", value) + b"\0\1"


def _signed(value: int) -> bytes:
    """WriteSignedNumIncreasing: as many leading 1 bits as there are bytes, inverted for numbers below zero."""
    size = next(n for n in range(1, 11) if (~value if value < 0 else value) < 1 << (7 * n - 1))
    header = (1 << size) - 1 << (8 * size - size)
    return ((value & (1 << 8 * size) - 1) ^ header).to_bytes(size, "big")
