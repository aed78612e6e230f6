"""What a training left on disk: its events, and how it stood when its agent ended.

Standard library only. Reads what the agent wrote; needs no agent.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Optional

from tfps_runtime.followers import integer
from tfps_runtime.protocol import (
    MAX_LINE,
    Kind,
    Paths,
    ProtocolError,
    TaskState,
    TrainingState,
    load,
)


def recall(paths: Paths) -> dict[str, Any]:
    """The status of a training whose agent is gone, from its events. What had not ended is LOST."""
    tasks: dict[str, dict[str, Any]] = {}
    state: Optional[str] = None
    reason, result = None, None
    events = history(paths)
    for event in events:
        if event["type"] == Kind.TASK:
            tasks[event["task"]] = {
                k: event[k] for k in ("task", "state", "attempt", "exit", "reason", "time") if k in event
            }
        elif event["type"] == Kind.TRAINING:
            state, reason = event["state"], event.get("reason")
        elif event["type"] == Kind.RESULT:
            result = event["result"]
    for task in tasks.values():
        if not TaskState(task["state"]).is_final:
            task["state"] = TaskState.LOST.value
    is_known = os.path.exists(paths.spec)
    is_final = state is not None and TrainingState(state).is_final
    return {
        "type": "status",
        "training": str(paths.training),
        "host": paths.host,
        "state": state if is_final else ("LOST" if is_known else "UNKNOWN"),
        "reason": reason,
        "result": result,
        "is_alive": False,
        "seq": len(events),
        "tasks": list(tasks.values()),
    }


def read_spec(directory: str) -> dict[str, Any]:
    """What an agent wrote down in a training's directory (`spec.json`). Raises ProtocolError when it cannot be read."""
    try:
        fd = os.open(os.path.join(directory, "spec.json"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, encoding="utf-8", errors="replace") as file:
            found = load(file.read(MAX_LINE))
    except OSError as error:
        raise ProtocolError(str(error)) from None
    if not isinstance(found, dict):
        raise ProtocolError("an object is needed")
    return found


def known(workdir: str, host: str) -> list[str]:
    """Ids of the trainings that left a directory of this host in a workdir."""
    root = os.path.join(workdir, "trainings")
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(root):
            with contextlib.suppress(ProtocolError, KeyError, TypeError):
                found.append(str(read_spec(os.path.join(root, name, host))["request"]["training"]))
    return found


def asked_for(paths: Paths) -> dict[str, Any]:
    """What was asked of a training on this host: its chief if that is here, where it saves, its grace time."""
    found: dict[str, Any] = {"chief": None, "checkpoint_dir": None, "grace_secs": None, "changed": None}
    with contextlib.suppress(OSError):
        found["changed"] = os.stat(paths.events).st_mtime
    with contextlib.suppress(ProtocolError, KeyError, TypeError):
        spec = read_spec(paths.directory)
        wanted = spec["request"]
        found["chief"] = next((task["task"] for task in wanted["tasks"] if task["is_chief"]), None)
        found["grace_secs"] = wanted["grace_secs"]
        found["checkpoint_dir"] = spec["reservation"]["checkpoint_dir"]
    return found


def history(paths: Paths, since: int = 0) -> list[dict[str, Any]]:
    """Events on disk with a higher sequence number; a torn last line is passed over."""
    found = []
    with (
        contextlib.suppress(FileNotFoundError),
        open(paths.events, encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            with contextlib.suppress(ProtocolError):
                event = load(line)
                if isinstance(event, dict) and integer(event.get("seq"), 0) > since:
                    found.append(event)
    return found
