"""CRC-32C as TensorFlow stores it; standard library only, with `google-crc32c` where that can be imported.

Polynomial 0x1EDC6F41, bits reversed (RFC 3720, appendix B.4). In files it stands *masked*, since a CRC over data that
holds CRCs is weak: rotated right by 15 bits, plus a constant (tensorflow/core/lib/hash/crc32c.h).
"""

from __future__ import annotations

import functools
import struct
from typing import Callable

_REVERSED = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_BY_C_FROM = 4096
"""Below so many bytes the tables are not slower than finding out whether there is something better."""


def extend(crc: int, data: bytes) -> int:
    """The CRC of what `crc` stands for, followed by `data`; begin with 0. Pure Python: 50 MB/s, else 1 GB/s and more."""
    if len(data) >= _BY_C_FROM:
        fast = _fast()
        if fast is not None:
            return fast(crc, bytes(data))
    two, four = _tables()
    crc ^= 0xFFFFFFFF
    whole = len(data) & ~3
    for word in struct.unpack_from(f"<{whole >> 2}I", data):
        crc ^= word
        crc = four[crc & 0xFFFF] ^ two[crc >> 16]
    for byte in data[whole:]:
        crc = two[((crc ^ byte) & 0xFF) << 8] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def mask(crc: int) -> int:
    """As it is stored."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def is_fast() -> bool:
    """Whether `google-crc32c` is there."""
    return _fast() is not None


@functools.lru_cache(maxsize=1)
def _fast() -> Callable[[int, bytes], int] | None:
    try:
        import google_crc32c
    except ImportError:
        return None
    found: Callable[[int, bytes], int] = google_crc32c.extend
    return found


@functools.lru_cache(maxsize=1)
def _tables() -> tuple[list[int], list[int]]:
    """What 16 bits become after two bytes, and after four."""
    one = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_REVERSED if value & 1 else 0)  # noqa: PLW2901
        one.append(value)
    two = [0] * 65536
    for low in range(256):
        after = one[low]
        rest = after >> 8
        for high in range(256):
            two[high << 8 | low] = one[(after ^ high) & 0xFF] ^ rest
    four = [two[value & 0xFFFF] ^ value >> 16 for value in two]
    return two, four
