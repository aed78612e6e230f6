"""Which checkpoints lie in a directory, and whether they are complete; no TensorFlow needed.

Standard library only. A checkpoint (format V2) is a prefix such as `model.ckpt-1200` with `<prefix>.index` and
`<prefix>.data-00000-of-00001`, …. TensorFlow renames the data into place first, then the index, then writes the state
file `checkpoint` (text protocol buffer CheckpointState). A checkpoint is *complete* when its index ends in a table's
footer and every shard that belongs to it is there and not empty; otherwise it does not exist for us.

Format of the index: LevelDB's table format (tensorflow/core/lib/io/format.h): the last 48 bytes are two block handles,
padding, and the magic number 0xdb4775248b80fb57, little-endian.
"""

from __future__ import annotations

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


def is_whole_index(path: str) -> bool:
    """Whether the file ends as a finished table ends. A missing file is not whole."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() < FOOTER_BYTES:
                return False
            file.seek(-8, os.SEEK_END)
            return bool(struct.unpack("<Q", file.read(8))[0] == TABLE_MAGIC)
    except OSError:
        return False


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
    shards: dict[str, dict[int, tuple[int, int]]] = {}
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
                    shards.setdefault(shard["prefix"], {})[int(shard["i"])] = (int(shard["n"]), size)
    except OSError:
        return []
    found = []
    for step, prefix in sorted(indices):
        parts = shards.get(prefix, {})
        counts = {n for n, _ in parts.values()}
        if len(counts) != 1 or set(parts) != set(range(next(iter(counts)))):
            continue
        if any(size == 0 for _, size in parts.values()):
            continue
        path = os.path.join(directory, prefix)
        if not is_whole_index(path + ".index"):
            continue
        try:
            status = os.stat(path + ".index")
        except OSError:
            continue
        size = status.st_size + sum(size for _, size in parts.values())
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
    while True:
        fresh = []
        now = _signature(directory)
        if now != signature:
            signature = now
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
    """Changes whenever a file in the directory appears or is renamed, or the state file is replaced."""
    try:
        status = os.stat(directory)
        state = os.stat(os.path.join(directory, STATE_FILE))
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, state.st_mtime_ns, state.st_ino
