"""The form of what hosts say: each message of a follower, each command's answer.

Pure; imports `protocol` and the errors. A host is not trusted further than its own training goes: what has passed here
has the types and sizes that the rest of the package takes for granted, and is about that host's own TF tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from tfps_runtime.checkpoint import Checkpoint
from tfps_runtime.protocol import (
    VERSION,
    Exit,
    Kind,
    Progress,
    ProtocolError,
    Reservation,
    Result,
    Task,
    TaskState,
    TrainingState,
    check,
    is_text,
)

from airflow_tfps.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_PATH = 4096
"""Bytes of a path (PATH_MAX of Linux)."""
MAX_REASON = 4000
"""Characters of a reason that are kept."""

Form = dict[str, Any]
"""Key -> type, one that `protocol.check` knows; what is Optional may be absent. Other keys may be there."""

_EVERY: Form = {
    "seq": Optional[int],
    "time": Optional[float],
    "reason": Optional[str],
    "last": Optional[bool],
}
_MESSAGES: dict[str, Form] = {
    Kind.TASK: {
        "task": str,
        "state": TaskState,
        "attempt": Optional[int],
        "exit": Optional[Exit],
        "stalled": Optional[bool],
    },
    Kind.TRAINING: {"state": TrainingState},
    Kind.RESULT: {"task": Optional[str], "result": Result},
    Kind.PROGRESS: {"task": str, "progress": Progress},
    Kind.LOG: {"task": str, "offset": int, "lines": list[str]},
    Kind.CAUGHT_UP: {},
    Kind.BEAT: {},
    Kind.GONE: {},
}
_STATUS: Form = {
    "state": str,
    "is_alive": bool,
    "reason": Optional[str],
    "result": Optional[Result],
    "tasks": list[dict[str, Any]],
}
_STATUS_TASK: Form = {
    "task": str,
    "state": TaskState,
    "attempt": Optional[int],
    "pid": Optional[int],
    "exit": Optional[Exit],
    "reason": Optional[str],
    "progress": Optional[Progress],
}
_SWEPT: Form = {"count": Optional[int], "bytes": Optional[int], "faults": Optional[list[str]]}
_TRAINING: Form = {
    "training": str,
    "chief": Optional[str],
    "checkpoint_dir": Optional[str],
    "grace_secs": Optional[float],
    "changed": Optional[float],
    "lease_secs": Optional[float],
}
_REMOVED: Form = {"what": str, "name": str, "bytes": int}
_PINNED: Form = {"prefix": str, "global_step": int, "size": int, "time": float}
_STOPPED: Form = {"stopped": dict[str, str]}
_PROMOTION: Form = {
    "promoted": bool,
    "version": Optional[int],
    "path": Optional[str],
    "former": Optional[int],
    "value": Optional[float],
    "former_value": Optional[float],
    "reason": str,
    "removed": list[int],
}
_ANSWERS: dict[str, Form] = {
    "preflight": {
        "faults": list[str],
        "time": Optional[float],
        "proxies": list[str],
        "gpus": Optional[list[dict[str, Any]]],
        "public": Optional[list[str]],
        "swept": Optional[dict[str, Any]],
        "versions": Optional[dict[str, Any]],
        "python": Optional[str],
        "cpus": Optional[int],
        "disk_free": Optional[int],
        "trainings": Optional[list[str]],
    },
    "put": {"path": str, "is_there": bool},
    "start": _STATUS,
    "launch": _STATUS,
    "renew": _STATUS,
    "dump": _STATUS,
    "status": _STATUS,
    "trainings": {"trainings": list[dict[str, Any]]},
    "probe": {
        "missing": dict[str, str],
        "through": Optional[list[str]],
        "failed": Optional[str],
        "exit": Optional[Exit],
        "time": Optional[float],
    },
    "logs": {"lines": list[str], "offset": Optional[int]},
    "stop": _STOPPED,
    "release": _STOPPED,
    "sweep": {**_SWEPT, "removed": list[dict[str, Any]], "is_complete": bool, "faults": list[str]},
    "pin": {"pins": list[dict[str, Any]]},
    "checkpoints": {"type": str, "checkpoint": Optional[Checkpoint]},
    "promote": _PROMOTION,
    "rollback": {"version": int, "path": str, "former": Optional[int], "reason": str},
    "note": {"path": str},
}


def message_of(
    host: str, message: dict[str, Any], tasks: Collection[str] | None = None
) -> dict[str, Any] | None:
    """A follower's message as the rest of the package knows it; None for a kind that is not known here.

    `tasks` are the TF tasks that the host may speak of; None: any. What is null is left out. Raises CommandError (code
    `protocol`).
    """
    kind = str(message.get("type"))
    if kind not in _MESSAGES:
        return None
    try:
        _check(message, {**_EVERY, **_MESSAGES[kind]}, kind)
        for key in ("seq", "offset", "attempt"):
            if (message.get(key) or 0) < 0:
                raise ProtocolError(f"{kind}.{key}: a number below 0")
        if tasks is not None and message.get("task") is not None and message["task"] not in tasks:
            raise ProtocolError(f"{kind}.task: {message['task'][:80]!r} is no TF task of this host")
    except ProtocolError as error:
        raise _refused(host, "sent a message that makes no sense", error) from None
    found = {key: value for key, value in message.items() if value is not None}
    if "reason" in found:
        found["reason"] = found["reason"][:MAX_REASON]
    return found


def check_answer(host: str, command: str, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Raises CommandError (code `protocol`) unless `answer` is one that `command` gives to `request`."""
    try:
        _check(answer, _ANSWERS.get(command, {}), command)
        if command == "reserve":
            _check_reservation(request, Reservation.from_json(answer, command))
        if _ANSWERS.get(command) is _STATUS:
            _check_tasks(answer, command)
        for i, status in enumerate(answer["trainings"] if command == "trainings" else ()):
            _check(status, {**_STATUS, **_TRAINING}, f"trainings[{i}]")
            _check_tasks(status, f"trainings[{i}]")
        for i, removed in enumerate(answer["removed"] if command == "sweep" else ()):
            _check(removed, _REMOVED, f"sweep.removed[{i}]")
        for i, pinned in enumerate(answer["pins"] if command == "pin" else ()):
            _check(pinned, _PINNED, f"pin.pins[{i}]")
            _check_path(pinned["prefix"], f"pin.pins[{i}].prefix")
        if command == "pin" and request.get("action") == "pin" and len(answer["pins"]) != 1:
            raise ProtocolError("pin.pins: one is needed")
        if answer.get("swept") is not None:
            _check(answer["swept"], _SWEPT, f"{command}.swept")
        if command in ("put", "rollback", "note") or answer.get("promoted") is True:
            _check_path(str(answer["path"]), f"{command}.path")
        if answer.get("promoted") is True:
            check(answer.get("version"), int, f"{command}.version")
    except ProtocolError as error:
        raise _refused(host, f"{command} was answered with what makes no sense", error) from None


def checkpoint_of(host: str, message: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint of a message of `checkpoints`; None in others. Raises CommandError (code `protocol`)."""
    if message.get("checkpoint") is None:
        return None
    try:
        found = Checkpoint.from_json(message["checkpoint"], "checkpoint")
        _check_path(found.prefix, "checkpoint.prefix")
    except ProtocolError as error:
        raise _refused(host, "sent a message that makes no sense", error) from None
    return found


def _check(message: Mapping[str, Any], form: Form, where: str) -> None:
    for key, kind in form.items():
        check(message.get(key), kind, f"{where}.{key}")


def _check_tasks(status: Mapping[str, Any], where: str) -> None:
    for i, task in enumerate(status["tasks"]):
        _check(task, _STATUS_TASK, f"{where}.tasks[{i}]")
        Task.parse(task["task"])


def _check_reservation(request: Mapping[str, Any], reservation: Reservation) -> None:
    if reservation.version not in (VERSION, VERSION - 1):
        raise ProtocolError(f"reserve.version: {reservation.version} is not understood")
    for key in ("training", "host"):
        if getattr(reservation, key) != request[key]:
            raise ProtocolError(f"reserve.{key}: another one than was asked for")
    for task in request["tasks"]:
        port = reservation.ports.get(task["task"])
        if task["has_port"] and (port is None or not 0 < port < 65536):
            raise ProtocolError(f"reserve.ports: {task['task']} has no port")
    if request["checkpoint_dir"] is not None:
        if reservation.checkpoint_dir is None:
            raise ProtocolError("reserve.checkpoint_dir: is missing")
        _check_path(reservation.checkpoint_dir, "reserve.checkpoint_dir")


def _check_path(path: str, where: str) -> None:
    if not path.startswith("/") or len(path) > MAX_PATH or "\0" in path or not is_text(path):
        raise ProtocolError(f"{where}: an absolute path is needed, not {path[:80]!r}")


def _refused(host: str, what: str, error: ProtocolError) -> CommandError:
    return CommandError(
        host, f"{what}: {str(error)[:400]} (is something else than our runtime there?)", code="protocol"
    )
