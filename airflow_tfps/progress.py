"""The progress of a training as people see it: a bounded JSON value and one log line per transition.

Pure; imports `protocol` and `handle`. `Board.see` takes a follower's messages, `Board.to_json` fits into an XCom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfps_runtime.protocol import Kind, dump

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_tfps.handle import Handle

MAX_BYTES = 32 * 1024
MAX_POINTS = 240
"""Of the curve; when it is full, every second point goes and the rest are further apart."""


class Board:
    """What is known about a training: each TF task's state, the chief's curve of loss and throughput."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._tasks: dict[str, dict[str, Any]] = {
            str(t.task): {
                "task": str(t.task),
                "host": t.host,
                "gpus": list(t.gpus),
                "state": "PENDING",
                "restarts": 0,
            }
            for t in handle.tasks
        }
        self._hosts: dict[str, str] = {}
        self._curve: list[list[float | None]] = []
        self._stride = 1
        self._seen = 0
        self._newest: Mapping[str, Any] = {}

    def see(self, message: Mapping[str, Any]) -> Iterator[str]:
        """Take in a message; yields a line for the log where something changed."""
        kind = message["type"]
        if kind == Kind.TASK:
            yield from self._task(message)
        elif kind == Kind.TRAINING:
            self._hosts[str(message["host"])] = str(message["state"])
        elif kind == Kind.PROGRESS:
            self._progress(message)
        elif kind == Kind.GONE:
            yield f"{message['host']}: the agent is gone"

    def _task(self, message: Mapping[str, Any]) -> Iterator[str]:
        row = self._tasks.get(str(message["task"]))
        if row is None:
            return
        if message["state"] != row["state"] or message.get("stalled"):
            why = f" ({message['reason']})" if message.get("reason") else ""
            yield f"{row['task']}@{row['host']} {message['state']}{why}"
        row["state"] = message["state"]
        row["restarts"] = max(int(message.get("attempt", 1)) - 1, 0)
        if message.get("exit"):
            row["exit"] = message["exit"]

    def _progress(self, message: Mapping[str, Any]) -> None:
        record = message["progress"]
        row = self._tasks.get(str(message["task"]))
        if row is not None:
            row["local_step"] = record.get("local_step")
            row["examples_per_sec"] = record.get("examples_per_sec")
            row["global_step"] = record.get("global_step")
        if message["task"] != str(self._handle.chief):
            return
        self._newest = record
        if self._seen % self._stride == 0:
            self._curve.append(
                [
                    record.get("time"),
                    record.get("global_step"),
                    record.get("loss"),
                    record.get("steps_per_sec"),
                ]
            )
            if len(self._curve) > MAX_POINTS:
                self._curve = self._curve[::2]
                self._stride *= 2
        self._seen += 1

    def to_json(self, outcome: str | None = None) -> dict[str, Any]:
        """The whole board in at most MAX_BYTES: a large cluster shows fewer tasks, a long training fewer points."""
        tasks, curve, hosts = list(self._tasks.values()), list(self._curve), self._hosts
        while True:
            value = {
                "version": 1,
                "training": str(self._handle.training),
                "outcome": outcome,
                "steps": self._handle.job.steps,
                "global_step": self._newest.get("global_step"),
                "loss": self._newest.get("loss"),
                "steps_per_sec": self._newest.get("steps_per_sec"),
                "time": self._newest.get("time"),
                "hosts": hosts,
                "curve": curve,
                "tasks": tasks,
                "tasks_left_out": len(self._tasks) - len(tasks),
            }
            if len(dump(value)) <= MAX_BYTES:
                return value
            if len(curve) > 60:
                curve = curve[::2]
            elif tasks:
                tasks = tasks[: len(tasks) // 2]
            elif hosts:
                hosts = {}
            else:  # what is left has no parts
                return value
