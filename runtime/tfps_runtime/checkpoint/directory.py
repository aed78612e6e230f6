"""Which checkpoints lie in a directory, and whether they are complete; standard library only.

TensorFlow renames the data into place first, then the index, then writes the state file `checkpoint`; its clean-up
(`max_to_keep`) comes after that and deletes the index first. A checkpoint is *complete* when its index can be read and
every shard that it speaks of is there and holds the bytes that it points to; otherwise it does not exist for us. The
state file is not needed: it names what its trainer would restore, which may be gone, moved, or of last night.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Optional

from tfps_runtime.checkpoint.bundle import parse_index, read_limited
from tfps_runtime.checkpoint.errors import CheckpointError
from tfps_runtime.protocol import Message

LOOK_SECS = 2.0
"""A watched directory is looked through at least this often, even when it seems unchanged."""
_INDEX = re.compile(r"(?P<prefix>.+-(?P<step>\d{1,18}))\.index\Z", re.DOTALL)
_SHARD = re.compile(r"(?P<prefix>.+)\.data-(?P<i>\d{5,6})-of-(?P<n>\d{5,6})\Z", re.DOTALL)


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


@dataclass(frozen=True)
class FileStatus:
    """What a listing says of a file."""

    size: int
    time: float
    """Last change, in seconds since the epoch."""
    identity: object = None
    """Differs when the content does; hashable."""


def complete_in(
    files: Mapping[str, FileStatus], needs: Callable[[str, FileStatus], Optional[Mapping[int, int]]]
) -> list[Checkpoint]:
    """Complete checkpoints among `files` (name -> status), by global step; their prefixes are names.

    `needs` gives for the name of an index what it needs, shard -> bytes, or None when it is no whole index.
    """
    shards: dict[str, dict[int, dict[int, int]]] = {}  # prefix -> number of shards -> shard -> bytes
    indices: list[tuple[int, str]] = []
    for name, status in files.items():
        index = _INDEX.match(name)
        if index is not None:
            indices.append((int(index["step"]), index["prefix"]))
            continue
        shard = _SHARD.match(name)
        if shard is not None:
            of = shards.setdefault(shard["prefix"], {}).setdefault(int(shard["n"]), {})
            of[int(shard["i"])] = status.size
    found = []
    for step, prefix in sorted(indices):
        if prefix not in shards:
            continue
        status = files[prefix + ".index"]
        needed = needs(prefix + ".index", status)
        if not needed:
            continue
        parts = shards[prefix].get(len(needed), {})
        if all(i in parts and parts[i] >= count for i, count in needed.items()):
            size = status.size + sum(parts[i] for i in needed)
            found.append(Checkpoint(prefix, step, size, status.time))
    return found


def complete_checkpoints(directory: str) -> list[Checkpoint]:
    """Complete checkpoints in `directory`, by global step. A missing directory has none; reads no tensor data."""
    files = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(".index") or ".data-" in entry.name:
                    try:
                        status = entry.stat()
                    except OSError:
                        continue
                    identity = (status.st_ino, status.st_size, status.st_mtime_ns)
                    files[entry.name] = FileStatus(status.st_size, status.st_mtime, identity)
    except OSError:
        return []

    def needs(name: str, status: FileStatus) -> Optional[Mapping[int, int]]:
        return _needed_bytes(os.path.join(directory, name), status.identity)

    return [
        Checkpoint(os.path.join(directory, c.prefix), c.global_step, c.size, c.time)
        for c in complete_in(files, needs)
    ]


@functools.lru_cache(maxsize=1024)
def _needed_bytes(path: str, identity: object) -> Optional[dict[int, int]]:
    """What the index at `path` needs: shard -> bytes; None when it is no whole one. `identity` tells versions apart."""
    del identity
    try:
        return parse_index(read_limited(path)).needed_bytes()
    except CheckpointError:
        return None


def latest_checkpoint(directory: str) -> Optional[Checkpoint]:
    """The complete checkpoint with the highest global step."""
    found = complete_checkpoints(directory)
    return found[-1] if found else None


def watch(
    directory: str,
    *,
    after_step: int = -1,
    after_time: float = float("inf"),
    min_step: int = 0,
    newer_than: float = 0.0,
    newest: bool = False,
    poll_secs: float = 0.2,
    also: Callable[[], list[Checkpoint]] = list,
) -> Iterator[Optional[Checkpoint]]:
    """Complete checkpoints in order as they appear, each once; None after each look that found nothing. Endless.

    With `newest`, each look gives the newest only.

    Args:
        directory: need not be there yet.
        after_step: Only what comes after this cursor: a higher global step, or
        after_time: an index that is younger (seconds since the epoch), for a training that begins again from a lower
            step in the same directory.
        min_step: Only global steps from here on.
        newer_than: Only those whose index is not older (seconds since the epoch).
        newest: see above.
        poll_secs: between two looks.
        also: Checkpoints that are to be had elsewhere, asked at each look.
    """
    signature: Any = None
    looked = float("-inf")
    while True:
        fresh = []
        now = _signature(directory)
        # What changes twice within one tick of the file system's clock looks unchanged, hence a look now and then.
        if now != signature or time.monotonic() - looked >= LOOK_SECS:
            signature, looked = now, time.monotonic()
            there = {(c.global_step, c.time): c for c in [*also(), *complete_checkpoints(directory)]}
            fresh = [
                there[key]
                for key in sorted(there)
                if (key[0] > after_step or key[1] > after_time)
                and key[0] >= min_step
                and key[1] >= newer_than
            ]
        for checkpoint in fresh[-1:] if newest else fresh:
            after_step = max(after_step, checkpoint.global_step)
            yield checkpoint
        if fresh and after_time != float("inf"):
            after_time = max(after_time, *(c.time for c in fresh))
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
