"""Pins: copies of checkpoints, by hard links, that the trainer's clean-up cannot reach; standard library only.

    pin("/data/ckpt", "/data/ckpt/model.ckpt-1200", owner="nightly/run/watch")   # Pin, or None: it is gone
    pins("/data/ckpt", owner="nightly/run/watch");  release("/data/ckpt", owner="nightly/run/watch", step=1200)

Pins of `/data/ckpt` lie in `/data/ckpt.pins/<global step>-<digest of the owner>/`, beside the directory and not in it:
a trainer that empties its directory leaves them, and links need the same file system. Each is a directory with the
checkpoint's files under their own names, a state file `checkpoint` that names it, and `pin.json`. It appears by rename,
whole or not at all. Where files cannot be linked, they are copied.

An owner is who uses the pins: any text, DAG, run and task of a sensor. It releases them. Those of an owner that is gone
are swept: a pin has a lease, renewed when it is pinned again and as long as its owner watches.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from typing import Any, Optional

from tfps_runtime.checkpoint import Checkpoint, complete_checkpoints, write_state
from tfps_runtime.message import Message, ProtocolError, load
from tfps_runtime.protocol import RefusedError, digest
from tfps_runtime.whole import write_whole

PIN_FILE = "pin.json"
PINS_SUFFIX = ".pins"
PINS_AT_MOST = 20
"""Of one owner in one directory."""
PIN_SECS = 7 * 24 * 3600.0
"""A pin whose owner does not show up any more is swept after this long."""
STALE_SECS = 3600.0
"""Half-made pins of a process that died are swept after this long."""
_NAME = re.compile(r"\d{1,18}-[0-9a-f]{12}\Z")
_UNLINKABLE = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True)
class Pin(Message):
    """A pinned checkpoint."""

    prefix: str
    """In the pin's directory: what to restore from."""
    global_step: int
    size: int
    """Bytes of all its files."""
    time: float
    """When the index of the checkpoint appeared, in seconds since the epoch."""
    source: str
    """The prefix in the trainer's directory."""
    owner: str
    until: float
    """End of its lease, in seconds since the epoch."""

    @property
    def directory(self) -> str:
        return os.path.dirname(self.prefix)

    @property
    def checkpoint(self) -> Checkpoint:
        """Of the trainer."""
        return Checkpoint(self.source, self.global_step, self.size, self.time)


def pins_dir(directory: str) -> str:
    """Where the pins of a checkpoint directory lie."""
    return os.path.realpath(directory) + PINS_SUFFIX


def pin(directory: str, checkpoint: Checkpoint, owner: str, *, secs: float = PIN_SECS) -> Optional[Pin]:
    """Pin a complete checkpoint of `directory` for `owner`; None when it is gone meanwhile. Idempotent.

    Pinning again renews the lease; a newer checkpoint of the same step takes the place of the former. Blocks while it
    copies, if the files cannot be linked. Raises RefusedError(`workdir`) when it cannot write beside the directory.
    """
    folder = pins_dir(directory)
    target = os.path.join(folder, f"{checkpoint.global_step}-{digest(owner)}")
    until = time.time() + secs
    former = _read(target)
    if former is not None and former.time == checkpoint.time:
        return _write_pin(target, former, until)
    temporary = os.path.join(folder, f".{os.path.basename(target)}.{os.getpid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        os.mkdir(temporary, 0o700)
    except OSError as error:
        raise RefusedError("workdir", f"pins go to {folder}: {error.strerror}") from None
    try:
        name = os.path.basename(checkpoint.prefix)
        _link_all(os.path.dirname(checkpoint.prefix), temporary, name)
        if not any(found.time == checkpoint.time for found in complete_checkpoints(temporary)):
            return None  # its files went while they were linked, or belong to another save
        write_state(temporary, name)
        found = Pin(
            os.path.join(target, name), checkpoint.global_step, checkpoint.size, checkpoint.time,
            checkpoint.prefix, owner, until,
        )  # fmt: skip
        _write_pin(temporary, found, until)
        _put(temporary, target)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RefusedError("workdir", f"pins go to {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return found


def _link_all(source: str, target: str, name: str) -> None:
    """Link the files of the checkpoint `name`, or copy them. Raises FileNotFoundError when they go meanwhile."""
    names = [
        entry
        for entry in os.listdir(source)
        if entry in (f"{name}.index", f"{name}.meta")
        or re.match(re.escape(name) + r"\.data-\d+-of-\d+\Z", entry)
    ]
    with contextlib.ExitStack() as stack:
        # Opened first: then they can be copied even while they are deleted.
        files = {entry: stack.enter_context(open(os.path.join(source, entry), "rb")) for entry in names}
        for entry, file in files.items():
            path = os.path.join(target, entry)
            try:
                os.link(os.path.realpath(file.name), path)
            except OSError as error:
                if error.errno not in _UNLINKABLE:
                    raise
                with open(path, "wb") as copy:
                    shutil.copyfileobj(file, copy, 1024 * 1024)
                status = os.fstat(file.fileno())
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _put(temporary: str, target: str) -> None:
    """Rename a whole pin into its place; a former one goes."""
    for _ in range(10):
        try:
            os.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            aside = f"{temporary}.old"
            with contextlib.suppress(FileNotFoundError):
                os.rename(target, aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            return
    raise OSError(errno.EBUSY, "the pin is made by several at once")


def pins(directory: str, owner: Optional[str] = None) -> list[Pin]:
    """The pins of a checkpoint directory, of one owner or of all, by global step."""
    found = (_read(os.path.join(pins_dir(directory), name)) for name in _names(directory))
    return sorted(
        (one for one in found if one is not None and owner in (None, one.owner)),
        key=lambda one: (one.global_step, one.owner),
    )


def renew(directory: str, owner: str, *, secs: float = PIN_SECS) -> None:
    """Let the leases of an owner's pins run from now."""
    for one in pins(directory, owner):
        _write_pin(one.directory, one, time.time() + secs)


def release(directory: str, owner: str, step: Optional[int] = None) -> list[Pin]:
    """Let go of an owner's pins, or of the one of a global step; gives those that went. None there is no error."""
    gone = [one for one in pins(directory, owner) if step in (None, one.global_step)]
    for one in gone:
        _remove(one.directory)
    _remove_if_empty(directory)
    return gone


def sweep(directory: str, now: Optional[float] = None) -> list[Pin]:
    """Remove pins whose lease has run out, and what was left half-made; gives the pins that went."""
    now = time.time() if now is None else now
    gone = [one for one in pins(directory) if one.until < now]
    for one in gone:
        _remove(one.directory)
    folder = pins_dir(directory)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                is_stale = os.stat(path).st_mtime < now - STALE_SECS
                if is_stale and os.path.isfile(path):
                    os.unlink(path)
                elif is_stale and (name.startswith(".") or (_NAME.match(name) and _read(path) is None)):
                    shutil.rmtree(path, ignore_errors=True)
    _remove_if_empty(directory)
    return gone


def _names(directory: str) -> list[str]:
    try:
        return [name for name in os.listdir(pins_dir(directory)) if _NAME.match(name)]
    except OSError:
        return []


def _remove(path: str) -> None:
    """At once for whoever looks: renamed first."""
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)


def _remove_if_empty(directory: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(pins_dir(directory))


def _read(path: str) -> Optional[Pin]:
    """The pin in a directory, with its prefix as it is now; None where there is none."""
    try:
        with open(os.path.join(path, PIN_FILE), encoding="utf-8") as file:
            found = Pin.from_json(load(file.read(65536)))
    except (OSError, ProtocolError, ValueError):
        return None
    values: dict[str, Any] = {**found.to_json(), "prefix": os.path.join(path, os.path.basename(found.prefix))}
    return Pin.from_json(values)


def _write_pin(path: str, found: Pin, until: float) -> Pin:
    written = Pin.from_json({**found.to_json(), "until": until})
    with contextlib.suppress(FileNotFoundError):  # released meanwhile
        write_whole(os.path.join(path, PIN_FILE), json.dumps(written.to_json()))
    return written
