"""Removing what dead trainings left on a host, and nothing else.

Standard library only. Names that are not ours, other users' files and whatever lies behind a symbolic link are left
alone; so are checkpoints, wherever they lie, but for pins whose lease is over. What somebody may be taking up at this
very moment is first put aside by a rename, looked at again, and put back if it is wanted. Several hosts may share a
workdir: a training is over when it is over on all of them, which another host's events say, or our own locks.

    sweep({"workdir": "~/.tfps", "host": "gpu-a"})
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

from tfps_runtime.orphans import describe, end_orphan, orphans
from tfps_runtime.pins import PINS_SUFFIX, pins, sweep as sweep_pins
from tfps_runtime.processes import runtime_location
from tfps_runtime.protocol import (
    OWNER_FILE,
    Kind,
    Paths,
    ProtocolError,
    RefusedError,
    SweepRequest,
    TrainingId,
    check_place,
    digest,
    load,
    run_dir,
)
from tfps_runtime.recall import read_spec
from tfps_runtime.reserve import Lock, check_run_dir, clear_lock, is_held, living
from tfps_runtime.whole import clear_parts

MAX_TOLD = 1000
"""Removed things that an answer lists; it counts all of them."""
DAY_SECS, HOUR_SECS = 86400.0, 3600.0

_AGENT_FILE = re.compile(r"([0-9a-f]{12})\.(lock|sock)\Z")
_TRAINING = re.compile(r".+-[0-9a-f]{12}\Z", re.DOTALL)
_BLOB = re.compile(r"[0-9a-f]{16,64}\Z")
_RUNTIME = re.compile(r"tfps-[0-9a-f]{16,64}\.pyz\Z")
_PART = re.compile(r"(?:[0-9a-f]{16,64}\..*|tmp[^/]*)\.tmp\Z", re.DOTALL)
_ASIDE = ".swept-"
_CHECKPOINT = re.compile(r".*\.index\Z|.*\.data-[0-9]{5}-of-[0-9]{5}\Z|checkpoint\Z", re.DOTALL)


class OutOfTimeError(Exception):
    """The sweep has used up its time; the next one goes on."""


@dataclass(frozen=True)
class Survey:
    """What a file, or all that is below a directory, amounts to."""

    bytes: int
    newest: float
    """Latest modification, in seconds since the epoch."""
    is_ours: bool
    """Whether all of it belongs to this user and lies on one file system."""
    has_checkpoint: bool


def sweep(message: dict[str, Any]) -> dict[str, Any]:
    """Remove what is left over, as a `SweepRequest` says; the answer. Blocks for about `max_secs`; idempotent.

    What cannot be removed is named in `faults`, and is no error. Several sweeps may run at once. Raises ProtocolError
    for what is no such request.
    """
    request = SweepRequest.from_json(message)
    one = _Sweep(request)
    steps: list[Callable[[], None]] = [check_run_dir, one.processes, one.locks]
    if request.workdir is not None and request.host is not None:
        steps += [one.trainings, one.pins, one.blobs, one.runtimes]
    is_complete = True
    for step in steps:
        try:
            step()
        except OutOfTimeError:
            is_complete = False
            break
        except (
            RefusedError
        ) as error:  # another user's folder in place of ours: what it says is not to be believed
            one.faults.append(str(error))
            break
        except (OSError, ValueError, RecursionError) as error:
            one.faults.append(f"{step.__name__}: {error}")
    return {
        "type": "swept",
        "removed": one.removed[:MAX_TOLD],
        "count": len(one.removed),
        "bytes": sum(int(found["bytes"]) for found in one.removed),
        "faults": [printable(fault) for fault in one.faults[:MAX_TOLD]],
        "is_complete": is_complete,
        "dry_run": request.dry_run,
    }


def printable(text: str, limit: int = 400) -> str:
    """Text with whatever a file's name may hold, safe to be sent and printed."""
    clean = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in clean[:limit])


class _Sweep:
    def __init__(self, request: SweepRequest) -> None:
        self.request = request
        self.removed: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.now = time.time()
        self.until = time.monotonic() + request.max_secs
        self.workdir = ""
        if request.workdir is not None and request.host is not None:
            self.workdir = os.path.realpath(check_place(request.host, request.workdir))
        self.uses: Optional[set[str]] = None
        """Programs, inputs and runtimes that living trainings use; None when not all of that is known."""

    def note(self, what: str, name: str, size: int = 0) -> None:
        self.removed.append({"what": what, "name": printable(name), "bytes": size})

    # --- host-local ---------------------------------------------------------------------------------------------

    def processes(self) -> None:
        for pid in orphans():
            name = describe(pid)
            if self.request.dry_run or end_orphan(pid):
                self.note("process", name)

    def locks(self) -> None:
        """Locks and sockets of dead agents. A GPU's lock file stays: it belongs to the GPU, not to a training."""
        if not self.request.dry_run:
            clear_parts(run_dir())
        with contextlib.suppress(FileNotFoundError):
            names = sorted(os.listdir(run_dir()))
            stems: dict[str, list[str]] = {}
            for name in names:
                match = _AGENT_FILE.match(name)
                kind = stat.S_IFMT(os.lstat(os.path.join(run_dir(), name)).st_mode)
                if match and kind in (stat.S_IFREG, stat.S_IFSOCK):
                    stems.setdefault(match[1], []).append(name)
            for stem, found in stems.items():
                lock = os.path.join(run_dir(), f"{stem}.lock")
                with self.tolerance(lock):
                    if is_held(lock) or not (self.request.dry_run or clear_lock(lock)):
                        continue
                    for name in found:
                        self.note(
                            "lock" if name.endswith(".lock") else "socket", os.path.join(run_dir(), name)
                        )

    # --- trainings ----------------------------------------------------------------------------------------------

    def trainings(self) -> None:
        """Directories of trainings that are over everywhere, and old; what the others use is noted."""
        alive = set()
        for _, record in living():
            with contextlib.suppress(ProtocolError):
                training = TrainingId.parse(record.training)
                alive.add(os.path.realpath(Paths(record.workdir, training, record.host).directory))
        root = os.path.join(self.workdir, "trainings")
        self.leftovers(root)
        uses: Optional[set[str]] = set()
        for directory in alive:  # of other workdirs as well, which have programs of their own
            if directory.startswith(root + os.sep):
                uses = add_uses(uses, directory)
        if has_links(root):
            uses = None
        for name in self.folders(root, _TRAINING):
            hosts = list(self.folders(name))
            if has_links(name):
                uses = None
            elif all(self.is_over(directory, alive) for directory in hosts):
                for directory in hosts:
                    self.out_of_time()
                    with self.tolerance(directory):
                        self.forget(directory, root)
                if not self.request.dry_run and (hosts or self.is_old(os.lstat(name).st_mtime)):
                    with contextlib.suppress(OSError):  # something is in it
                        os.rmdir(name)
            else:
                for directory in hosts:
                    uses = add_uses(uses, directory)
        self.uses = uses

    def is_over(self, directory: str, alive: set[str]) -> bool:
        """Whether no agent works in the directory, on this machine or on any that shares it."""
        if directory in alive:
            return False
        lock = self.lock_of(directory)
        if lock is not None and is_held(lock):
            return False
        if os.path.basename(directory) == self.request.host or not os.path.lexists(
            os.path.join(directory, "spec.json")
        ):
            return True
        return has_ended(directory)

    def lock_of(self, directory: str) -> Optional[str]:
        """The lock of the agent that had the directory, from what it wrote down."""
        try:
            wanted = read_spec(directory)["request"]
            return os.path.join(run_dir(), digest(str(wanted["training"]), str(wanted["host"])) + ".lock")
        except (ProtocolError, KeyError, TypeError):
            return None

    def forget(self, directory: str, root: str) -> None:
        """Remove one training's directory on one host, if it is old and holds no checkpoint."""
        found = self.survey(directory)
        if not self.is_old(found.newest) or found.has_checkpoint or not found.is_ours:
            return
        if self.request.dry_run:
            self.note("training", directory, found.bytes)
            return
        lock = self.lock_of(directory)
        if lock is None:
            self.take_away("training", directory, root, found.bytes)
            return
        try:
            held = Lock.acquire(lock, None)  # a `reserve` of this very training waits for us, and we for none
        except RefusedError:
            return
        try:
            aside = self.put_aside(directory, root)
        finally:
            held.release()
        self.discard("training", directory, aside, found.bytes)

    # --- programs, inputs, runtimes -----------------------------------------------------------------------------

    def blobs(self) -> None:
        """Programs and inputs that no living training uses, and that nobody asked for in a long time."""
        root = os.path.join(self.workdir, "blobs")
        self.leftovers(root)
        if self.uses is None:
            return
        for folder in self.folders(root, _BLOB):
            self.out_of_time()
            with self.tolerance(folder):
                if any((path + os.sep).startswith(folder + os.sep) for path in self.uses):
                    continue
                if self.is_unused(folder):
                    found = self.survey(folder)
                    if found.is_ours:
                        self.take_away("program or input", folder, root, found.bytes, self.is_unused)

    def pins(self) -> None:
        """Pins of checkpoint directories in the workdir whose lease is over: their owners are gone."""
        for path in self.folders(os.path.join(self.workdir, "checkpoints")):
            directory = path[: -len(PINS_SUFFIX)]
            if not path.endswith(PINS_SUFFIX) or os.path.islink(directory):
                continue
            self.out_of_time()
            with self.tolerance(path):
                gone = [one for one in pins(directory) if one.until < self.now]
                if not self.request.dry_run:
                    gone = sweep_pins(directory, self.now)
                for one in gone:
                    self.note("pin", one.directory, one.size)

    def runtimes(self) -> None:
        """Runtimes of other versions, likewise."""
        root = os.path.join(self.workdir, "bin")
        self.leftovers(root)
        if self.uses is None:
            return
        for path in self.files(root, _RUNTIME):
            self.out_of_time()
            with self.tolerance(path):
                if path not in (*self.uses, os.path.realpath(runtime_location())) and self.is_unused(path):
                    self.take_away("runtime", path, root, os.lstat(path).st_size, self.is_unused)

    def is_unused(self, path: str) -> bool:
        return self.now - os.lstat(path).st_mtime > self.request.unused_days * DAY_SECS

    def is_old(self, modified: float) -> bool:
        return self.now - modified > self.request.training_days * DAY_SECS

    def leftovers(self, root: str) -> None:
        """Uploads that broke off, and what an interrupted sweep had put aside."""
        for path in (*self.folders(root), *self.files(root)):
            name = os.path.basename(path)
            is_aside = name.startswith(_ASIDE)
            if not is_aside and not _PART.match(name):
                continue
            self.out_of_time()
            with self.tolerance(path):
                found = self.survey(path)
                since = os.lstat(path).st_mtime if is_aside else found.newest
                if found.is_ours and self.now - since > self.request.upload_hours * HOUR_SECS:
                    if not self.request.dry_run:
                        erase(path, self.until)
                    self.note("leftover" if is_aside else "upload", path, found.bytes)

    # --- how ------------------------------------------------------------------------------------------------------

    def take_away(
        self,
        what: str,
        path: str,
        root: str,
        size: int,
        is_unwanted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Remove something unless, once nobody can find it any more, it turns out to have been taken up."""
        if self.request.dry_run:
            self.note(what, path, size)
            return
        aside = self.put_aside(path, root)
        if is_unwanted(aside):
            self.discard(what, path, aside, size)
            return
        with contextlib.suppress(OSError):  # somebody has brought it anew
            os.rename(aside, path)
        erase(os.path.dirname(aside), self.until)

    @staticmethod
    def put_aside(path: str, root: str) -> str:
        """Rename into a folder of its own; where it is now."""
        aside = os.path.join(tempfile.mkdtemp(prefix=_ASIDE, dir=root), "it")
        os.rename(path, aside)
        return aside

    def discard(self, what: str, path: str, aside: str, size: int) -> None:
        self.note(what, path, size)
        erase(os.path.dirname(aside), self.until)

    @contextlib.contextmanager
    def tolerance(self, path: str) -> Iterator[None]:
        """What cannot be removed is noted and passed over; what is gone already was another sweep's."""
        try:
            yield
        except FileNotFoundError:
            pass
        except (OSError, RecursionError) as error:
            self.faults.append(f"{path}: {getattr(error, 'strerror', None) or error}")

    def out_of_time(self) -> None:
        if time.monotonic() > self.until:
            raise OutOfTimeError

    def folders(self, root: str, name: Optional[re.Pattern[str]] = None) -> Iterator[str]:
        """This user's real folders in a real folder of this user."""
        return self.entries(root, name, stat.S_ISDIR)

    def files(self, root: str, name: Optional[re.Pattern[str]] = None) -> Iterator[str]:
        return self.entries(root, name, stat.S_ISREG)

    def entries(
        self, root: str, name: Optional[re.Pattern[str]], is_kind: Callable[[int], bool]
    ) -> Iterator[str]:
        try:
            place = os.lstat(root)
            if not stat.S_ISDIR(place.st_mode) or place.st_uid != os.getuid():
                return
            names = sorted(os.listdir(root))
        except FileNotFoundError:
            return
        for entry in names:
            path = os.path.join(root, entry)
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(path)
                if (
                    is_kind(found.st_mode)
                    and found.st_uid == os.getuid()
                    and (name is None or name.match(entry))
                ):
                    yield path

    def survey(self, path: str) -> Survey:
        """Look at all of it. Raises OutOfTimeError."""
        top = os.lstat(path)
        size, newest, is_ours, has_checkpoint = 0, top.st_mtime, top.st_uid == os.getuid(), False
        if not stat.S_ISDIR(top.st_mode):
            return Survey(top.st_size, newest, is_ours, has_checkpoint)
        for _, folders, files, fd in os.fwalk(path, onerror=_raise, follow_symlinks=False):
            self.out_of_time()
            for name in (*folders, *files):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                newest = max(newest, found.st_mtime)
                is_ours = is_ours and found.st_uid == os.getuid() and found.st_dev == top.st_dev
                has_checkpoint = has_checkpoint or name == OWNER_FILE or bool(_CHECKPOINT.match(name))
                if stat.S_ISREG(found.st_mode):
                    size += found.st_size
        return Survey(size, newest, is_ours, has_checkpoint)


def _raise(error: OSError) -> None:
    raise error


def add_uses(uses: Optional[set[str]], directory: str) -> Optional[set[str]]:
    """`uses` and what the training in `directory` uses; None when that is not known."""
    if uses is None:
        return None
    try:
        return uses | {os.path.realpath(str(path)) for path in read_spec(directory)["uses"]}
    except (ProtocolError, KeyError, TypeError):  # of an older runtime, or unreadable
        return None if os.path.lexists(os.path.join(directory, "spec.json")) else uses


def has_links(path: str) -> bool:
    """Whether a folder is a symbolic link or holds one: there may be trainings behind it that we do not look at."""
    if os.path.islink(path):
        return True
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        return any(entry.is_symlink() for entry in entries)
    return False


def has_ended(directory: str) -> bool:
    """Whether an agent's last word stands at the end of its events."""
    try:
        fd = os.open(os.path.join(directory, "events.jsonl"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            file.seek(max(os.fstat(fd).st_size - 65536, 0))
            last = file.read().splitlines()[-1:]
        event = load(last[0].decode("utf-8", "replace")) if last else None
    except (OSError, ProtocolError):
        return False
    return isinstance(event, dict) and event.get("type") == Kind.TRAINING and event.get("last") is True


def erase(path: str, until: float = float("inf")) -> None:
    """Remove a file or a directory with all that is in it; follows no symbolic link. Raises OSError, OutOfTimeError."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    for _, folders, files, fd in os.fwalk(path, topdown=False, onerror=_raise, follow_symlinks=False):
        if time.monotonic() > until:
            raise OutOfTimeError
        os.fchmod(fd, 0o700)
        for name in (*folders, *files):
            if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.rmdir(name, dir_fd=fd)
            else:
                os.unlink(name, dir_fd=fd)
    os.rmdir(path)
