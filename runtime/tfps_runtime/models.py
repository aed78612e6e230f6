"""A model directory: numbered versions, the link `current`, the history of decisions; promote and roll back.

Standard library only. The layout is TensorFlow Serving's, with a few names that it passes over:

    <model_dir>/3/                     a SavedModel; in `assets.extra/` its record and what evaluates it again
    <model_dir>/current -> 3           switched by one rename
    <model_dir>/history.jsonl          one line for each decision: promoted, refused, rolled back
    <model_dir>/.lock                  held while a decision is carried out
    <model_dir>/.pending.json          a decision that is being carried out
    <model_dir>/.staging-<digest>/     an export that waits for its decision

A decision is written down first (`.pending.json`), then carried out in steps each of which may be done again; whoever
comes next completes what a crash has left. So no reader of `current` sees a version that is missing or in part, and two
promotions cannot interleave.

    promote(PromoteRequest(...))        rollback(RollbackRequest(...))        describe("/srv/ctr")
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

from tfps_runtime.protocol import Message, ProtocolError, RefusedError, digest, dump, load
from tfps_runtime.rules import ABSOLUTE, Rule, decide, value_of
from tfps_runtime.whole import clear_parts, write_whole

CURRENT = "current"
HISTORY = "history.jsonl"
PENDING = ".pending.json"
LOCK = ".lock"
STAGING = ".staging-"
WITHDRAWN = ".withdrawn-"
REMOVED = ".removed-"
EXTRA = "assets.extra"
"""TensorFlow's own name for what a SavedModel may carry beside itself."""
RECORD = "tfps.json"
COMPARED = "compared.json"
EXPORTED = "model"
RECALLED = "the current model's as of its promotion"
LOCK_SECS = 60.0
STALE_SECS = 24 * 3600.0
"""An export that nobody decided about for so long is removed."""

_VERSION = re.compile(r"[1-9][0-9]{0,17}\Z")


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromoteRequest(Message):
    """Decide about an export, and make it the current model if it is good enough."""

    model_dir: str
    id: str
    """Whose decision this is: the same one is carried out once, however often it is asked for."""
    rule: Rule
    metrics: dict[str, float]
    """Of the model that is to be promoted."""
    keep: int = 5
    """Versions that stay; the current one and the one before always do."""
    staging: Optional[str] = None
    """Names the export, if another than `id` does."""
    may_recall: bool = False
    """Compare with the current model's metrics as of its promotion, when nobody has evaluated it again."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where it comes from; goes into the record and the history as it is."""


@dataclass(frozen=True)
class RollbackRequest(Message):
    """Make the version before the current one, or `to`, the current one."""

    model_dir: str
    id: str
    to: Optional[int] = None
    withdraw: bool = False
    """Hide the version that is left, from a server that takes the highest number."""
    reason: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compared(Message):
    """What the exporting process found out about the current model, on the same evaluation data."""

    version: Optional[int] = None
    """The current version that it looked at."""
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""
    """Why these metrics are those of its promotion, if the model could not be evaluated again."""


# --- the directory ----------------------------------------------------------------------------------------------------


class ModelDirectory:
    """Where everything of a model lies. Looking is free; whatever changes it needs `locked`."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))

    def version_path(self, version: int) -> str:
        return os.path.join(self.path, str(version))

    def staging(self, id_: str) -> str:
        """Where the export for the decision `id_` lies."""
        return os.path.join(self.path, STAGING + digest(id_))

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions that are there, ascending."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(
            int(n) for n in names if _VERSION.match(n) and os.path.isdir(os.path.join(self.path, n))
        )

    @property
    def current(self) -> Optional[int]:
        """The version that `current` leads to. Raises RefusedError(`model`) when it is no link of ours."""
        link = os.path.join(self.path, CURRENT)
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            return None
        except OSError:
            raise RefusedError("model", f"{link} is no symbolic link; move it away") from None
        name = os.path.basename(target.rstrip("/"))
        if not _VERSION.match(name):
            raise RefusedError("model", f"{link} leads to {target[:200]}, which is no version")
        return int(name)

    def record(self, version: int) -> dict[str, Any]:
        """What is known of a version: `former`, `metrics`, `provenance`, …; empty for one that is not ours."""
        try:
            with open(os.path.join(self.version_path(version), EXTRA, RECORD), encoding="utf-8") as file:
                found = load(file.read())
        except (OSError, ProtocolError, UnicodeDecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    def former(self, version: Optional[int]) -> Optional[int]:
        """The version before `version`, if it is still there."""
        found = None if version is None else self.record(version).get("former")
        return found if isinstance(found, int) and os.path.isdir(self.version_path(found)) else None

    @property
    def history(self) -> list[dict[str, Any]]:
        """All decisions, oldest first; a last line that a crash has cut off is passed over."""
        try:
            with open(os.path.join(self.path, HISTORY), encoding="utf-8", errors="replace") as file:
                text = file.read()
        except FileNotFoundError:
            return []
        found = []
        for line in text.split("\n")[:-1]:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [entry for entry in found if isinstance(entry, dict)]

    @contextlib.contextmanager
    def locked(self, secs: float = LOCK_SECS) -> Iterator[None]:
        """Hold the directory alone, and complete what a crash has left. Raises RefusedError(`busy`) after `secs`."""
        os.makedirs(self.path, mode=0o755, exist_ok=True)
        fd = os.open(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            until = time.monotonic() + secs
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise RefusedError(
                            "busy", f"another promotion holds {self.path}", transient=True
                        ) from None
                    time.sleep(0.02)
            self._complete()
            self._clear()
            yield
        finally:
            os.close(fd)

    # --- changing it, with the lock

    def carry_out(self, entry: dict[str, Any]) -> None:
        """Carry out a decision that switches `current`; a crash on the way is made good by whoever comes next."""
        self._write(PENDING, dump(entry) + "\n")
        self._complete()

    def note(self, entry: dict[str, Any]) -> None:
        """Add a line to the history."""
        path = os.path.join(self.path, HISTORY)
        with open(path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":  # the line that a crash has cut off
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write(dump(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _complete(self) -> None:
        path = os.path.join(self.path, PENDING)
        try:
            with open(path, encoding="utf-8") as file:
                entry = load(file.read())
        except FileNotFoundError:
            return
        version, staging = int(entry["version"]), entry.get("staging")
        target = self.version_path(version)
        if staging is not None and not os.path.isdir(target):
            exported = os.path.join(self.path, str(staging), EXPORTED)
            if os.path.isdir(exported):
                os.rename(exported, target)
        if os.path.isdir(target):
            self._switch(version)
            told = {key: value for key, value in entry.items() if key not in ("staging", "withdraw")}
            if all(
                (known.get("id"), known.get("time")) != (told["id"], told["time"])
                for known in self.history[-20:]
            ):
                self.note(told)
            left = entry.get("former")
            if entry.get("withdraw") and left is not None and os.path.isdir(self.version_path(left)):
                os.rename(self.version_path(left), os.path.join(self.path, f"{WITHDRAWN}{left}"))
        if staging is not None:
            shutil.rmtree(os.path.join(self.path, str(staging)), ignore_errors=True)
        os.unlink(path)  # last: until then it says what else there is to do
        self._sync()

    def _switch(self, version: int) -> None:
        """One rename: a reader sees the former version or this one."""
        temporary = os.path.join(self.path, f".{CURRENT}.tmp")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        os.symlink(str(version), temporary)
        os.replace(temporary, os.path.join(self.path, CURRENT))
        self._sync()

    def _write(self, name: str, text: str) -> None:
        write_whole(os.path.join(self.path, name), text, mode=0o666, is_durable=True)
        self._sync()

    def _sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def next_version(self) -> int:
        """A number above all that are there or ever were."""
        numbers = [*self.versions, *(int(entry.get("version") or 0) for entry in self.history)]
        return max(numbers, default=0) + 1

    def prune(self, keep: int) -> list[int]:
        """Remove versions, the oldest first, until `keep` are left; never the current one nor the one before it."""
        current = self.current
        kept = {current, self.former(current)}
        spare = [version for version in self.versions if version not in kept]
        excess = len(self.versions) - max(keep, 2)
        removed = spare[: max(excess, 0)]
        for version in removed:
            hidden = os.path.join(self.path, f"{REMOVED}{version}")
            os.rename(self.version_path(version), hidden)
        self._clear()
        return removed

    def _clear(self) -> None:
        """Remove what is nobody's any more: parts of files, versions that are gone, exports that were given up."""
        clear_parts(self.path)
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            is_stale = name.startswith(STAGING) and _age(path) > STALE_SECS
            if is_stale or name.startswith(REMOVED):
                shutil.rmtree(path, ignore_errors=True)


def _age(path: str) -> float:
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


# --- deciding ---------------------------------------------------------------------------------------------------------


def promote(request: PromoteRequest, *, lock_secs: float = LOCK_SECS) -> dict[str, Any]:
    """Decide about the export that waits in `staging(id)`; make it the current model if it is good enough.

    Idempotent: a decision whose version is the current one is answered again. Blocks while another one is carried out.

    Raises:
        RefusedError: `model_changed` (transient): another model became the current one since this export was compared;
            `not_found`: there is no export; `busy`.
        ProtocolError: the rule makes no sense, or the metrics lack its metric.
    """
    rule = request.rule
    rule.check()
    value = value_of(rule, request.metrics)
    directory = ModelDirectory(request.model_dir)
    with directory.locked(lock_secs):
        current = directory.current
        record = {} if current is None else directory.record(current)
        staging = directory.staging(request.staging or request.id)
        if record.get("id") == request.id:
            shutil.rmtree(staging, ignore_errors=True)
            removed = directory.prune(request.keep)
            return {**_answer(directory, record, is_promoted=True), "removed": removed}
        if request.may_recall and not os.path.exists(os.path.join(staging, COMPARED)):
            compared = Compared(current, record.get("metrics") or {}, RECALLED if record else "")
        else:
            compared = _compared(staging, current)
        current_value = compared.metrics.get(rule.metric)
        if current is not None and current_value is None and rule.compare != ABSOLUTE:
            raise ProtocolError(f"the current model, version {current}, has no metric {rule.metric[:80]!r}")
        decision = decide(rule, value, current_value)
        entry: dict[str, Any] = {
            "action": "promoted" if decision.is_good else "refused",
            "id": request.id,
            "time": round(time.time(), 3),
            "version": None,
            "former": current,
            "metric": rule.metric,
            "value": value,
            "former_value": current_value,
            "reason": f"{decision.reason} ({compared.note})" if compared.note else decision.reason,
            "rule": rule.to_json(),
            "metrics": dict(request.metrics),
            "provenance": dict(request.provenance),
        }
        if not decision.is_good:
            directory.note(entry)
            shutil.rmtree(staging, ignore_errors=True)
            return _answer(directory, entry, is_promoted=False)
        exported = os.path.join(staging, EXPORTED)
        if not os.path.isdir(exported) or not os.listdir(exported):
            raise RefusedError("not_found", f"there is no exported model in {exported}")
        entry["version"] = directory.next_version()
        os.makedirs(os.path.join(exported, EXTRA), exist_ok=True)
        record_path = os.path.join(exported, EXTRA, RECORD)
        write_whole(record_path, dump(entry) + "\n", mode=0o666, is_durable=True)
        directory.carry_out({**entry, "staging": os.path.basename(staging)})
        removed = directory.prune(request.keep)
        return {**_answer(directory, entry, is_promoted=True), "removed": removed}


def _compared(staging: str, current: Optional[int]) -> Compared:
    """What is known of the current model. Raises RefusedError(`model_changed`) if it was another one then."""
    try:
        with open(os.path.join(staging, COMPARED), encoding="utf-8") as file:
            compared = Compared.loads(file.read())
    except FileNotFoundError:
        raise RefusedError(
            "not_found", f"there is no export in {staging}; clear the task", transient=True
        ) from None
    if compared.version != current:
        raise RefusedError(
            "model_changed",
            f"version {current} became the current model while this one was compared with "
            f"{compared.version or 'none'}",
            transient=True,
        )
    return compared


def _answer(directory: ModelDirectory, entry: dict[str, Any], *, is_promoted: bool) -> dict[str, Any]:
    version = entry.get("version")
    keys = ("version", "former", "metric", "value", "former_value", "reason")
    return {
        "type": "promotion",
        "promoted": is_promoted,
        "path": directory.version_path(version) if version is not None else None,
        "removed": [],
        **{key: entry.get(key) for key in keys},
    }


def rollback(request: RollbackRequest, *, lock_secs: float = LOCK_SECS) -> dict[str, Any]:
    """Make the version before the current one the current one again, in one switch; no version is removed.

    Idempotent: the same `id` rolls back once. Raises RefusedError(`not_found`) when there is no such version.
    """
    directory = ModelDirectory(request.model_dir)
    if not os.path.isdir(directory.path):
        raise RefusedError("not_found", f"there is no model directory {directory.path}")
    with directory.locked(lock_secs):
        current = directory.current
        decisions = [e for e in directory.history if e.get("action") in ("promoted", "rolled_back")]
        if decisions and decisions[-1].get("id") == request.id:
            entry = decisions[-1]
        else:
            to = directory.former(current) if request.to is None else request.to
            if to is None or not os.path.isdir(directory.version_path(to)):
                what = "a version before it" if request.to is None else f"a version {to}"
                there = ", ".join(map(str, directory.versions)) or "none"
                raise RefusedError(
                    "not_found",
                    f"{directory.path}: the current version is {current}, and there is not {what} "
                    f"(there are: {there})",
                )
            entry = {
                "action": "rolled_back",
                "id": request.id,
                "time": round(time.time(), 3),
                "version": to,
                "former": current,
                "reason": request.reason or "asked for",
                "provenance": dict(request.provenance),
            }
            directory.carry_out({**entry, "withdraw": request.withdraw})
        return {
            "type": "rollback",
            "version": entry["version"],
            "path": directory.version_path(entry["version"]),
            "former": entry["former"],
            "reason": entry["reason"],
        }


def describe(model_dir: str, lines: int = 20) -> dict[str, Any]:
    """Versions, the current one, the one before, and the last decisions. Changes nothing."""
    directory = ModelDirectory(model_dir)
    current = directory.current
    return {
        "type": "models",
        "path": directory.path,
        "current": current,
        "former": directory.former(current),
        "versions": [
            {"version": number, **{k: directory.record(number).get(k) for k in ("time", "metrics")}}
            for number in directory.versions
        ],
        "history": directory.history[-lines:] if lines > 0 else [],
    }


# --- checkpoints ------------------------------------------------------------------------------------------------------


def hold_checkpoint(prefix: str, directory: str) -> str:
    """Hard links (copies across file systems) of a checkpoint's files in a directory; their prefix.

    From then on nobody's clean-up takes them away. Raises RefusedError(`not_found`) if they are gone already.
    """
    os.makedirs(directory, exist_ok=True)
    paths = [f"{prefix}.index", *sorted(glob.glob(f"{glob.escape(prefix)}.data-*"))]
    for path in paths:
        target = os.path.join(directory, os.path.basename(path))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        try:
            try:
                os.link(path, target)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, target)
        except FileNotFoundError:
            raise RefusedError("not_found", f"there is no checkpoint {prefix}") from None
    if len(paths) < 2:
        raise RefusedError("not_found", f"there is no checkpoint {prefix}")
    return os.path.join(directory, os.path.basename(prefix))


def metrics_path(prefix: str) -> str:
    return f"{prefix}.metrics.json"


def note_metrics(request: dict[str, Any]) -> dict[str, Any]:
    """Write what an evaluation found beside its checkpoint, `<prefix>.metrics.json`; the last one stays."""
    prefix = os.path.expanduser(str(request["checkpoint"]))
    path = metrics_path(prefix)
    found = dict(request["evaluation"])
    try:
        text = json.dumps(found, indent=2, sort_keys=True, allow_nan=False) + "\n"
        write_whole(path, text, mode=0o666, is_durable=True)
    except FileNotFoundError:
        raise RefusedError(
            "not_found", f"{os.path.dirname(path)}: the checkpoint's directory is gone"
        ) from None
    return {"type": "noted", "path": path}


# --- commands ---------------------------------------------------------------------------------------------------------


def promote_command(request: dict[str, Any]) -> dict[str, Any]:
    """Decide about an export that waits, see `promote`."""
    return promote(PromoteRequest.from_json(request))


def rollback_command(request: dict[str, Any]) -> dict[str, Any]:
    """Make the former version the current one, see `rollback`."""
    return rollback(RollbackRequest.from_json(request))


def models_command(request: dict[str, Any]) -> dict[str, Any]:
    """What lies in a model directory, see `describe`."""
    return describe(str(request["model_dir"]), int(request.get("lines", 20)))


COMMANDS = {
    "promote": promote_command,
    "rollback": rollback_command,
    "models": models_command,
    "note": note_metrics,
}
"""Each answers with one message."""

__all__ = ["COMMANDS", "Compared", "ModelDirectory", "promote", "rollback"]
