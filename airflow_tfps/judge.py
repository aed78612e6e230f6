"""What the hosts' agents say, together: one pure function over everything that has happened.

Imports `protocol` only. Agents decide what concerns one host; whatever concerns more than one is decided here, from
the events that a follower has gathered, and carried out by whoever asked.

    judge(rules, events)    # None: go on; else a Verdict
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tfps_runtime.protocol import EXIT_TRY_AGAIN, Kind, Task, TaskState, TrainingState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNREACHABLE = "unreachable"
"""Type of an observer's own event: `{"type": …, "host": …, "secs": …}`, how long there has been no connection."""

MAX_EARLIER = 3
"""Of the TF tasks that had failed before the one that mattered, so many are named."""

Outcome = Literal["succeeded", "failed", "stopped", "expired"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a verdict depends on beside the events."""

    tasks: Mapping[str, str]
    """TF task -> host."""
    chief: str
    mode: Literal["async", "sync"] = "async"
    replicas_to_aggregate: int | None = None
    success_policy: Literal["chief", "all_workers"] = "chief"
    unreachable_secs: float = 300.0
    is_in_graph: bool = False
    """The chief drives all others, whatever their role, and can spare none."""
    exits_are_final: bool = True
    """Whether exit codes 1-127 mean what the harness means by them: the program is wrong, trying again is useless."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a training ends. `transient` says whether another try can help."""

    outcome: Outcome
    reason: str
    task: str | None = None
    """The first TF task whose failure mattered, `worker:1@gpu-a`."""
    transient: bool = False
    result: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "task": self.task,
            "transient": self.transient,
            "result": dict(self.result),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        return cls(**data)


_TRAINERS = ("chief", "worker")
_HELPERS = ("ps", "evaluator")
_GONE = (TaskState.FAILED, TaskState.LOST)
_OUTCOMES: Mapping[TrainingState, Outcome] = {
    TrainingState.FAILED: "failed",
    TrainingState.EXPIRED: "expired",
    TrainingState.STOPPED: "stopped",
}
_REASONS = {
    TrainingState.FAILED: "the training failed",
    TrainingState.EXPIRED: "nobody renewed the lease",
    TrainingState.STOPPED: "stopped by someone",
}


def judge(rules: Rules, events: Iterable[Mapping[str, Any]]) -> Verdict | None:
    """The verdict over a training, or None while it goes on. Pure.

    `events` are the agents' numbered events and `gone` messages, each with the `host` it came from, and the observer's
    own `unreachable` events. Those of one host are in their order; how the hosts' events are mixed changes nothing, nor
    does an event that is heard twice. Anything heard from a host means that it can be reached.
    """
    return _Trial(rules).hear(events)


def says_wrong_program(exit_: Mapping[str, Any]) -> bool:
    """Whether a harness program ended in a way that no other try can mend; a script's exit codes say nothing."""
    code = exit_.get("code")
    return code is not None and code != EXIT_TRY_AGAIN and code < 128


class _Trial:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.states: dict[str, TaskState] = {}
        self.whys: dict[str, Mapping[str, Any]] = {}
        """TF tasks that failed or were lost, with the event that says so."""
        self.heard: dict[str, int] = {}
        """Host -> number of the last event heard from it."""
        self.hosts: dict[str, Mapping[str, Any]] = {}
        self.unreachable: dict[str, float] = {}
        self.result: Mapping[str, Any] = {}

    def hear(self, events: Iterable[Mapping[str, Any]]) -> Verdict | None:
        for event in events:
            kind, host, seq = event.get("type"), str(event.get("host")), event.get("seq")
            if isinstance(seq, int):
                if seq <= self.heard.get(host, 0):
                    continue
                self.heard[host] = seq
            if kind != UNREACHABLE:
                self.unreachable.pop(host, None)
            if kind == Kind.TASK:
                self.set_state(event["task"], TaskState(event["state"]), event)
            elif kind == Kind.RESULT:
                self.result = event.get("result", {})
            elif kind == Kind.TRAINING:
                self.hosts[host] = event
            elif kind == Kind.GONE:
                self.lose(host, event)
            elif kind == UNREACHABLE:
                self.unreachable[host] = float(event["secs"])
        return self.verdict()

    def set_state(self, task: str, state: TaskState, why: Mapping[str, Any]) -> None:
        if task not in self.rules.tasks or self.states.get(task) in (TaskState.SUCCEEDED, *_GONE):
            return
        self.states[task] = state
        if state in _GONE:
            self.whys[task] = why

    @property
    def order(self) -> list[str]:
        """TF tasks that failed or were lost, in the order in which that happened by their hosts' clocks."""
        return sorted(self.whys, key=lambda task: (float(self.whys[task].get("time", "inf")), task))

    def lose(self, host: str, event: Mapping[str, Any]) -> None:
        for task, where in self.rules.tasks.items():
            if where == host and not self.states.get(task, TaskState.PENDING).is_final:
                self.set_state(task, TaskState.LOST, {"reason": "the agent on its host is gone", **event})

    # --- the verdict

    def verdict(self) -> Verdict | None:
        rules = self.rules
        if self.states.get(rules.chief) is TaskState.SUCCEEDED:
            done = self.all_workers_done() if rules.success_policy == "all_workers" else True
            if done is True:
                return Verdict(outcome="succeeded", reason="the chief has finished", result=self.result)
            if isinstance(done, str):
                return self.failed(done)
        return self.task_failures() or self.lost_hosts() or self.ended_hosts()

    def all_workers_done(self) -> bool | str:
        """Whether every training task succeeded; the name of one that never will."""
        for task in self.rules.tasks:
            if self.is_trainer(task):
                state = self.states.get(task, TaskState.PENDING)
                if state.is_final and state is not TaskState.SUCCEEDED:
                    return task
                if state is not TaskState.SUCCEEDED:
                    return False
        return True

    def task_failures(self) -> Verdict | None:
        for task in self.order:
            if task == self.rules.chief or Task.parse(task).is_needed:
                return self.failed(task)
        for task in sorted(self.states):
            if Task.parse(task).role == "ps" and self.states[task] is TaskState.SUCCEEDED:
                return Verdict(
                    outcome="failed",
                    reason=f"{self.label(task)} ended with exit code 0 before the chief had finished",
                    task=self.label(task),
                )
        missing = [t for t in self.order if self.is_trainer(t)]
        if len(missing) > self.spare_workers():
            return self.failed(missing[0])
        return None

    def is_trainer(self, task: str) -> bool:
        role = Task.parse(task).role
        return role not in _HELPERS if self.rules.is_in_graph else role in _TRAINERS

    def spare_workers(self) -> int:
        """How many workers may be gone while training still makes sense."""
        if self.rules.is_in_graph:
            return 0
        workers = sum(1 for t in self.rules.tasks if self.is_trainer(t))
        if self.rules.mode == "sync":
            return workers - (self.rules.replicas_to_aggregate or workers)
        return workers

    def failed(self, task: str) -> Verdict:
        why = self.whys.get(task, {})
        reason = f"{self.label(task)}: {why.get('reason') or 'failed'}"
        earlier = self.order[: self.order.index(task)] if task in self.whys else []
        if earlier:  # the training could do without them, but the cause may be theirs
            whys = (
                f"{self.label(t)}: {self.whys[t].get('reason') or 'failed'}" for t in earlier[:MAX_EARLIER]
            )
            reason += f" (before it {'; '.join(whys)})"
        return Verdict(
            outcome="failed",
            reason=reason,
            task=self.label(task),
            transient=self.is_transient(task, why),
        )

    def is_transient(self, task: str, why: Mapping[str, Any]) -> bool:
        if self.states.get(task) is TaskState.LOST:
            return True
        return not (self.rules.exits_are_final and says_wrong_program(why.get("exit") or {}))

    def lost_hosts(self) -> Verdict | None:
        late = sorted(h for h, secs in self.unreachable.items() if secs >= self.rules.unreachable_secs)
        missing = []
        for host in late:
            for task, where in self.rules.tasks.items():
                if where != host or self.states.get(task, TaskState.PENDING).is_final:
                    continue
                if task == self.rules.chief or Task.parse(task).is_needed:
                    secs = self.unreachable[host]
                    return Verdict(
                        outcome="failed",
                        reason=f"{self.label(task)}: no connection to {host} for {secs:.0f} s",
                        task=self.label(task),
                        transient=True,
                    )
                if self.is_trainer(task):
                    missing.append(task)
        gone = [t for t in self.order if self.is_trainer(t)]
        if missing and len({*missing, *gone}) > self.spare_workers():
            return Verdict(
                outcome="failed",
                reason=f"{self.label(missing[0])}: no connection to its host, and too few workers are left",
                task=self.label(missing[0]),
                transient=True,
            )
        return None

    def ended_hosts(self) -> Verdict | None:
        """A training that somebody else ended, on any host, is over on all of them."""
        ends = {host: TrainingState(event["state"]) for host, event in sorted(self.hosts.items())}
        for end in (TrainingState.FAILED, TrainingState.EXPIRED, TrainingState.STOPPED):
            for host, state in ends.items():
                if state is end:
                    reason = str(self.hosts[host].get("reason") or _REASONS[end])
                    return Verdict(
                        outcome=_OUTCOMES[end],
                        reason=f"{host}: {reason}",
                        transient=end is TrainingState.EXPIRED,
                    )
        return None

    def label(self, task: str) -> str:
        return Task.parse(task).at(self.rules.tasks[task])
