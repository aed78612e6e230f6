"""What a training left on disk: its events, and how it stood when its agent ended.

Standard library only. Reads what the agent wrote; needs no agent.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Optional

from tfps_runtime.followers import integer
from tfps_runtime.protocol import Kind, Paths, ProtocolError, TaskState, TrainingState, load


def recall(paths: Paths) -> dict[str, Any]:
    """The status of a training whose agent is gone, from its events. What had not ended is LOST."""
    tasks: dict[str, dict[str, Any]] = {}
    state: Optional[str] = None
    reason, result = None, None
    events = history(paths)
    for event in events:
        if event["type"] == Kind.TASK:
            tasks[event["task"]] = {
                k: event[k] for k in ("task", "state", "attempt", "exit", "reason") if k in event
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
