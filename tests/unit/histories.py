"""Histories of an agent, for the tests of its core: events in, actions out, on a clock of their own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from tfps_runtime.core import (
    AgentState,
    Launch,
    Listening,
    Spawned,
    Start,
    TaskView,
    Tell,
    step,
)
from tfps_runtime.protocol import (
    Exit,
    TaskSpec,
)

LEASE, GRACE, STALL = 1000.0, 30.0, 100.0

HARNESS = Start(exits_are_retryable=False, has_progress=True, lease_secs=LEASE)
SCRIPT = Start(exits_are_retryable=True, has_progress=False, lease_secs=LEASE)
KILLED, WRONG, DONE, AGAIN = Exit(signal=9), Exit(code=1), Exit(code=0), Exit(code=75)

PS = TaskSpec(task="ps:0", restarts=1)
CHIEF = TaskSpec(task="worker:0", restarts=1, is_chief=True)
WORKER = TaskSpec(task="worker:1", restarts=1)


def begin(*specs: TaskSpec, lease: float = 120.0) -> AgentState:
    return AgentState(
        tasks={spec.task: TaskView(spec=spec) for spec in specs},
        lease_until=lease,
        grace_secs=GRACE,
        stall_secs=STALL,
        chief_is_here=any(spec.is_chief for spec in specs),
    )


@dataclass
class History:
    """A core with everything that it has said so far; `at` feeds it an event."""

    state: AgentState
    actions: list = field(default_factory=list)

    def at(self, now: float, *events) -> History:
        for event in events:
            before = self.state
            copy = dataclasses.replace(before)
            self.state, actions = step(before, event, now)
            assert before == copy, "a step must not change the state that it was given"
            self.actions += actions
        return self

    def run(self, now: float, *tasks: str) -> History:
        """Let started tasks get their process and listen."""
        for pid, task in enumerate(tasks, 100):
            self.at(now, Spawned(task, pid), Listening(task))
        return self

    def of(self, kind: type, since: int = 0) -> list:
        return [action for action in self.actions[since:] if isinstance(action, kind)]

    def states(self, task: str) -> list[str]:
        """States that were told of a task, each once."""
        told = [
            t.message["state"]
            for t in self.of(Tell)
            if t.message.get("task") == task and "state" in t.message
        ]
        return [state for i, state in enumerate(told) if i == 0 or told[i - 1] != state]

    @property
    def trainings(self) -> list[str]:
        return [t.message["state"] for t in self.of(Tell) if t.message["type"] == "training"]

    def task(self, name: str) -> TaskView:
        return self.state.tasks[name]

    def reason(self, task: str) -> str:
        return [t.message.get("reason", "") for t in self.of(Tell) if t.message.get("task") == task][-1]


def running(*specs: TaskSpec, start: Start = HARNESS, lease: float = 120.0) -> History:
    """A training in which every task of this host runs; at time 1."""
    history = History(begin(*specs, lease=lease)).at(0.0, start)
    history.at(0.0, *(Launch(s.task) for s in specs if s.is_chief))
    return history.run(1.0, *(s.task for s in specs))
