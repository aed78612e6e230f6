"""Which checkpoints lie in a directory, and whether they are complete; no TensorFlow needed.

Standard library only. A checkpoint (format V2) is a prefix such as `model.ckpt-1200` with `<prefix>.index` and
`<prefix>.data-00000-of-00001`, …. TensorFlow renames the data into place first, then the index, then writes the state
file `checkpoint` (text protocol buffer CheckpointState). A checkpoint is *complete* when its index can be read and
every shard that it speaks of is there and holds the bytes that it points to; otherwise it does not exist for us.

The index (tensorflow/core/util/tensor_bundle/tensor_bundle.h) is a LevelDB table, format.h and block.cc in
tensorflow/core/lib/io: the last 48 bytes are the handles (offset and size, varints) of the meta index and the index
block, padding, and the magic number. A block is a row of entries (varints shared, unshared, length; key; value), then
the restart points (uint32) and their number; after it come a byte for its compression, which TensorFlow never uses
here, and a checksum. The index block's values are the handles of the data blocks; their values are protocol buffers:
BundleHeaderProto under the empty key, first, and a BundleEntryProto for each tensor.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

from tfps_runtime.protocol import Message

FOOTER_BYTES = 48
TABLE_MAGIC = 0xDB4775248B80FB57
STATE_FILE = "checkpoint"
LOOK_SECS = 2.0
"""A watched directory is looked through at least this often, even when it seems unchanged."""
_INDEX = re.compile(r"(?P<prefix>.+-(?P<step>\d+))\.index\Z")
_SHARD = re.compile(r"(?P<prefix>.+)\.data-(?P<i>\d{5})-of-(?P<n>\d{5})\Z")
_STATE_PATH = re.compile(
    r'^\s*(?P<field>model_checkpoint_path|all_model_checkpoint_paths)\s*:\s*"(?P<path>(?:[^"\\]|\\.)*)"'
)


@dataclass(frozen=True)
class Checkpoint(Message):
    """A complete checkpoint."""

    prefix: str
    """Absolute path without the suffixes: what `Saver.restore` takes."""
    global_step: int
    size: int
    """Bytes of all its files."""
    time: float
    """When its index appeared, in seconds since the epoch."""


@functools.lru_cache(maxsize=1024)
def _needed_bytes(path: str, identity: tuple[int, ...]) -> Optional[dict[int, int]]:
    """What the index at `path` needs: shard -> bytes. None when it is no whole index; `identity` tells versions apart.

    Reads the index only, never tensor data.
    """
    del identity
    try:
        with open(path, "rb") as file:
            return _read_index(file.read())
    except (OSError, ValueError, IndexError, struct.error):
        return None


def _read_index(data: bytes) -> dict[int, int]:
    """Raises ValueError, IndexError or struct.error for anything that is not a whole index."""
    if len(data) < FOOTER_BYTES or struct.unpack("<Q", data[-8:])[0] != TABLE_MAGIC:
        raise ValueError("the footer is missing")
    footer = data[-FOOTER_BYTES:]
    _, at = _handle(footer, 0)
    index, _ = _handle(footer, at)
    needed: dict[int, int] = {}
    for _, value in _entries(data, index):
        block, _ = _handle(value, 0)
        for key, message in _entries(data, block):
            fields = _fields(message)
            if not key:
                needed.update(dict.fromkeys(range(fields.get(1, 0)), 0))
            else:
                shard, end = fields.get(3, 0), fields.get(4, 0) + fields.get(5, 0)
                if shard not in needed:
                    raise ValueError(f"shard {shard} is not in the header")
                needed[shard] = max(needed[shard], end)
    return needed


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _entries(data: bytes, block: tuple[int, int]) -> Iterator[tuple[bytes, bytes]]:
    offset, size = block
    if offset + size >= len(data) or data[offset + size] != 0:
        raise ValueError("a block is cut off or compressed")
    restarts = struct.unpack_from("<I", data, offset + size - 4)[0]
    at, end, key = offset, offset + size - 4 * (restarts + 1), b""
    while at < end:
        shared, at = _varint(data, at)
        unshared, at = _varint(data, at)
        length, at = _varint(data, at)
        if at + unshared + length > end:
            raise ValueError("an entry is cut off")
        key = key[:shared] + data[at : at + unshared]
        at += unshared
        yield key, data[at : at + length]
        at += length


def _fields(message: bytes) -> dict[int, int]:
    """The integers of a protocol buffer by field number; everything else is passed over."""
    found, at = {}, 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            found[tag >> 3], at = _varint(message, at)
        elif kind == 2:
            length, at = _varint(message, at)
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
    return found


def read_state(directory: str) -> tuple[Optional[str], list[str]]:
    """The state file's newest path and all its paths, re-based on `directory`; (None, []) without a state file.

    Absolute paths in the file are of the machine and folder where it was written; what counts is the last part.
    """
    newest, paths = None, []
    try:
        with open(os.path.join(directory, STATE_FILE), encoding="utf-8", errors="replace") as file:
            text = file.read(1024 * 1024)
    except OSError:
        return None, []
    for line in text.splitlines():
        found = _STATE_PATH.match(line)
        if found is not None:
            path = os.path.join(directory, os.path.basename(_unescape(found["path"])))
            if found["field"] == "model_checkpoint_path":
                newest = path
            else:
                paths.append(path)
    return newest, paths


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def complete_checkpoints(directory: str) -> list[Checkpoint]:
    """Complete checkpoints in `directory`, by global step. A missing directory has none; reads no tensor data."""
    shards: dict[str, dict[int, dict[int, int]]] = {}  # prefix -> number of shards -> shard -> bytes
    indices: list[tuple[int, str]] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                index = _INDEX.match(entry.name)
                if index is not None:
                    indices.append((int(index["step"]), index["prefix"]))
                    continue
                shard = _SHARD.match(entry.name)
                if shard is not None:
                    try:
                        size = entry.stat().st_size
                    except OSError:
                        continue
                    shards.setdefault(shard["prefix"], {}).setdefault(int(shard["n"]), {})[
                        int(shard["i"])
                    ] = size
    except OSError:
        return []
    found = []
    for step, prefix in sorted(indices):
        path = os.path.join(directory, prefix)
        try:
            status = os.stat(path + ".index")
        except OSError:
            continue
        needed = _needed_bytes(path + ".index", (status.st_ino, status.st_size, status.st_mtime_ns))
        if not needed:
            continue
        parts = shards.get(prefix, {}).get(len(needed), {})
        if all(i in parts and parts[i] >= count for i, count in needed.items()):
            size = status.st_size + sum(parts[i] for i in needed)
            found.append(Checkpoint(path, step, size, status.st_mtime))
    return found


def latest_checkpoint(directory: str) -> Optional[Checkpoint]:
    """The complete checkpoint with the highest global step."""
    found = complete_checkpoints(directory)
    return found[-1] if found else None


def watch(
    directory: str,
    *,
    after_step: int = -1,
    newer_than: float = 0.0,
    newest: bool = False,
    poll_secs: float = 0.2,
) -> Iterator[Optional[Checkpoint]]:
    """Complete checkpoints in order as they appear, each once; None after each look that found nothing. Endless.

    With `newest`, each look gives the newest only. `after_step`: only higher global steps. `newer_than`: only
    those whose index is younger (seconds since the epoch).
    """
    signature: Any = None
    looked = float("-inf")
    while True:
        fresh = []
        now = _signature(directory)
        # What changes twice within one tick of the file system's clock looks unchanged, hence a look now and then.
        if now != signature or time.monotonic() - looked >= LOOK_SECS:
            signature, looked = now, time.monotonic()
            fresh = [
                c
                for c in complete_checkpoints(directory)
                if c.global_step > after_step and c.time >= newer_than
            ]
        for checkpoint in fresh[-1:] if newest else fresh:
            after_step = max(after_step, checkpoint.global_step)
            yield checkpoint
        if not fresh:
            yield None
            time.sleep(poll_secs)


def _signature(directory: str) -> Any:
    """Changes when a file in the directory appears, goes or is renamed."""
    try:
        status = os.stat(directory)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
