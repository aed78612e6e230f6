"""Checkpoints as TensorFlow lays them out, without TensorFlow: tables with prefixes, checksums, several blocks.

save(directory, 1200)               # data, index, state, each by rename, in TensorFlow's order
index({"w": (0, 0, 200)})           # the bytes of an index: name -> shard, offset, size
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from tfps_runtime.checkpoint import crc32c
from tfps_runtime.checkpoint.table import TABLE_MAGIC

TENSORS = {"global_step": (0, 0, 8), "w": (0, 8, 200), "w/Adagrad": (0, 208, 92), "x": (0, 300, 700)}
SHARDED = {"a": (0, 0, 100), "b": (1, 0, 50), "c": (1, 50, 50), "d": (2, 0, 30)}


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value) if value else b""


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def block(entries: list[tuple[bytes, bytes]], compression: int = 0) -> bytes:
    """A table's block with shared key prefixes and one restart point, and its trailer."""
    out, last = b"", b""
    for key, value in entries:
        shared = len(os.path.commonprefix([last, key]))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    out += struct.pack("<II", 0, 1) + bytes([compression])
    return out + struct.pack("<I", crc32c.mask(crc32c.extend(0, out)))


def table(rows: list[tuple[bytes, bytes]], rows_per_block: int = 3) -> bytes:
    """A whole table."""
    data, handles = b"", []
    for first in range(0, len(rows), rows_per_block):
        chunk = rows[first : first + rows_per_block]
        written = block(chunk)
        handles.append((chunk[-1][0], varint(len(data)) + varint(len(written) - 5)))
        data += written
    meta, blocks = block([]), block(handles)
    footer = (
        varint(len(data)) + varint(len(meta) - 5) + varint(len(data) + len(meta)) + varint(len(blocks) - 5)
    )
    return data + meta + blocks + footer.ljust(40, b"\0") + struct.pack("<Q", TABLE_MAGIC)


def header(shards: int = 1, *, is_big_endian: bool = False) -> bytes:
    return field(1, shards) + field(2, int(is_big_endian)) + message(3, field(1, 1))


def entry(
    shard: int, offset: int, size: int, *, dtype: int = 4, shape: tuple[int, ...] | None = None
) -> bytes:
    """A BundleEntryProto: by default of bytes (uint8)."""
    dimensions = b"".join(message(2, field(1, n)) for n in ((size,) if shape is None else shape))
    return (
        field(1, dtype) + message(2, dimensions) + field(3, shard) + field(4, offset) + field(5, size)
        + b"\x35" + struct.pack("<I", crc32c.mask(crc32c.extend(0, b"x" * size)))
    )  # fmt: skip


def index(tensors: dict[str, tuple[int, int, int]], shards: int = 1) -> bytes:
    """A checkpoint's index: name -> shard, offset, size; names in several data blocks; all bytes are `x`."""
    rows = [(b"", header(shards))]
    rows += [(name.encode(), entry(*place)) for name, place in sorted(tensors.items())]
    return table(rows)


def _appear(path: str, content: bytes) -> None:
    Path(f"{path}.tempstate1").write_bytes(content)
    os.rename(f"{path}.tempstate1", path)


def save(directory: Path, step: int, *, name: str = "model.ckpt") -> Path:
    """A complete checkpoint in TensorFlow's order: data, index, state."""
    directory.mkdir(exist_ok=True)
    prefix = directory / f"{name}-{step}"
    _appear(f"{prefix}.data-00000-of-00001", b"x" * 1000)
    _appear(f"{prefix}.index", index(TENSORS))
    write_state(directory, [f"{name}-{step}"])
    return prefix


def save_sharded(directory: Path, step: int) -> Path:
    """Three shards, no state file."""
    prefix = directory / f"model.ckpt-{step}"
    for shard, size in enumerate((100, 100, 30)):
        _appear(f"{prefix}.data-{shard:05}-of-00003", b"x" * size)
    _appear(f"{prefix}.index", index(SHARDED, 3))
    return prefix


def delete(prefix: Path) -> None:
    """As a trainer's clean-up does: the index first."""
    for path in [Path(f"{prefix}.index"), *prefix.parent.glob(f"{prefix.name}.data-*")]:
        path.unlink(missing_ok=True)


def write_state(directory: Path, paths: list[str]) -> None:
    """The state file, by rename."""
    lines = [
        f'model_checkpoint_path: "{paths[-1]}"',
        *(f'all_model_checkpoint_paths: "{path}"' for path in paths),
    ]
    temporary = directory / "checkpoint.tmp"
    temporary.write_text("\n".join(lines) + "\n")
    temporary.rename(directory / "checkpoint")
