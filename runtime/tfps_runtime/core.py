"""What an agent decides: a pure function of its state, what happened, and the time.

Imports `protocol` only. No I/O, no clock, no processes: `agent` turns the world into events and carries out actions.

    state, actions = step(state, Exited("ps:0", Exit(signal=9)), now)
    # -> [Tell(ps:0 BACKOFF), Spawn("ps:0", attempt=2)]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Union

from tfps_runtime.protocol import (
    EXIT_TRY_AGAIN,
    TASK_TRANSITIONS,
    TRAINING_TRANSITIONS,
    Exit,
    Kind,
    Result,
    TaskSpec,
    TaskState,
    TrainingState,
)

QUICK_SECS = 10.0
"""A task that ends sooner than this after its start is failing fast: its next start waits longer each time."""
MAX_BACKOFF_SECS = 30.0
DUMP_SECS = 3.0
"""Between asking a stalled task for its stacks and killing it."""


@dataclass(frozen=True)
class TaskView:
    """One TF task as the agent knows it. Times are of the monotonic clock."""

    spec: TaskSpec
    state: TaskState = TaskState.PENDING
    attempt: int = 0
    """Starts so far."""
    restarts: int = 0
    """Of which restarts that were charged to its budget."""
    quick_failures: int = 0
    pid: Optional[int] = None
    since: float = 0.0
    """When the present state began."""
    started: float = 0.0
    advanced: float = 0.0
    """When it last started or reported progress."""
    has_advanced: bool = False
    """Whether it ever reported progress, in this attempt or an earlier one."""
    due: Optional[float] = None
    """BACKOFF: when it starts again. STOPPING: when SIGKILL follows. RUNNING and dumped: when it is killed."""
    exit: Optional[Exit] = None


@dataclass(frozen=True)
class AgentState:
    """Everything an agent's decisions depend on."""

    tasks: Mapping[str, TaskView]
    lease_until: float
    training: TrainingState = TrainingState.RESERVED
    ending: Optional[tuple[TrainingState, str]] = None
    """What the training's state becomes when the last process is gone, and why."""
    failure: str = ""
    """Why the training failed, if it did."""
    grace_secs: float = 30.0
    stall_secs: float = 600.0
    exits_are_retryable: bool = False
    """Of a script or command, whose exit codes nobody defined; a harness program says 75 for "try again"."""
    has_progress: bool = True
    chief_is_here: bool = False
    dumped: float = float("-inf")
    """When the TF tasks here were last asked for their stacks because of a stall."""
    ps_until: Optional[float] = None
    """While the training ends: ps stay until then, because a chief on another host may still be saving."""


# --- what happens --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The cluster's addresses are known."""

    exits_are_retryable: bool
    has_progress: bool
    lease_secs: float


@dataclass(frozen=True)
class Launch:
    """Start one task that `Start` left out: the chief."""

    task: str


@dataclass(frozen=True)
class Spawned:
    task: str
    pid: int


@dataclass(frozen=True)
class Listening:
    """The task's port accepts connections; a task without a port: its process lives."""

    task: str


@dataclass(frozen=True)
class Advanced:
    """The task reported progress."""

    task: str


@dataclass(frozen=True)
class Exited:
    task: str
    exit: Exit
    reason: str = ""
    charged: bool = True
    """False when the task died through no fault of its own (its nursery was killed)."""


@dataclass(frozen=True)
class Finished:
    """The chief wrote its result."""

    task: str
    result: Result


@dataclass(frozen=True)
class Broken:
    """The host cannot run the training at all (a module does not import, the nursery keeps dying)."""

    reason: str


@dataclass(frozen=True)
class Stop:
    reason: str
    grace_secs: Optional[float] = None
    state: TrainingState = TrainingState.STOPPED


@dataclass(frozen=True)
class Renew:
    secs: float


@dataclass(frozen=True)
class Tick:
    pass


Event = Union[Start, Launch, Spawned, Listening, Advanced, Exited, Finished, Broken, Stop, Renew, Tick]

# --- what to do about it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spawn:
    task: str
    attempt: int


@dataclass(frozen=True)
class Kill:
    """Send a signal to the task's process group; without a process, start none and say that it has ended."""

    task: str
    signal: int


@dataclass(frozen=True)
class Dump:
    """Ask the task for the stacks of its threads, in its log."""

    task: str


@dataclass(frozen=True)
class Tell:
    """Write down and push to followers."""

    message: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Leave:
    """Every process is gone and the end is written down: release everything and exit."""


Action = Union[Spawn, Kill, Dump, Tell, Leave]

SIGTERM, SIGKILL = 15, 9


def step(state: AgentState, event: Event, now: float) -> tuple[AgentState, list[Action]]:
    """Decide. Pure: the same arguments give the same answer; `state` is not changed.

    `now` is of a monotonic clock, in seconds. Events about unknown or already ended tasks change nothing.
    """
    draft = _Draft(state, now)
    if isinstance(event, Start):
        draft.start(event)
    elif isinstance(event, Launch):
        draft.launch(event.task)
    elif isinstance(event, Spawned):
        draft.spawned(event)
    elif isinstance(event, Listening):
        draft.listening(event.task)
    elif isinstance(event, Advanced):
        draft.advanced(event.task)
    elif isinstance(event, Exited):
        draft.exited(event)
    elif isinstance(event, Finished):
        draft.tell({"type": Kind.RESULT, "task": event.task, "result": event.result.to_json()})
    elif isinstance(event, Broken):
        draft.broken(event.reason)
    elif isinstance(event, Stop):
        draft.stop(event.state, event.reason, event.grace_secs)
    elif isinstance(event, Renew) and draft.state.ending is None:
        draft.change(lease_until=now + event.secs)
    draft.look_at_the_clock()
    draft.settle()
    return draft.state, draft.actions


def next_due(state: AgentState) -> float:
    """When, on the monotonic clock, `step` next has something to do without being told anything."""
    times = [state.lease_until] if state.ending is None else []
    if state.ps_until is not None and not _others_alive(state):
        times.append(state.ps_until)
    for task in state.tasks.values():
        if task.due is not None:
            times.append(task.due)
        elif state.ending is None and _can_stall(state, task):
            times.append(task.advanced + state.stall_secs)
    return min(times, default=float("inf"))


def _can_stall(state: AgentState, view: TaskView) -> bool:
    """Whether a lack of progress means that the task is stuck.

    Until its first progress a worker may rightly wait: for the chief, which is started when Airflow has a slot for it.
    A ps reports none, and an evaluator has the pace of the checkpoints.
    """
    return (
        state.has_progress
        and view.state is TaskState.RUNNING
        and view.spec.name.role not in ("ps", "evaluator")
        and (view.spec.is_chief or view.has_advanced)
    )


def _others_alive(state: AgentState) -> bool:
    """Whether processes other than a ps live here."""
    return any(v.state.is_alive and v.spec.name.role != "ps" for v in state.tasks.values())


class _Draft:
    """The next state in the making."""

    def __init__(self, state: AgentState, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    # --- writing

    def change(self, **values: Any) -> None:
        self.state = replace(self.state, **values)

    def put(self, name: str, **values: Any) -> TaskView:
        view = replace(self.state.tasks[name], **values)
        self.change(tasks={**self.state.tasks, name: view})
        return view

    def tell(self, message: dict[str, Any]) -> None:
        self.actions.append(Tell(message))

    def move(self, name: str, to: TaskState, *, reason: str = "", **values: Any) -> None:
        view = self.state.tasks[name]
        if to not in TASK_TRANSITIONS[view.state]:
            raise AssertionError(f"{name}: {view.state.value} -> {to.value} is not in the table")
        view = self.put(name, state=to, since=self.now, **{"due": None, **values})
        message: dict[str, Any] = {
            "type": Kind.TASK,
            "task": name,
            "state": to.value,
            "attempt": view.attempt,
        }
        if to.is_alive and view.pid is not None:
            message["pid"] = view.pid
        if view.exit is not None and not to.is_alive:
            message["exit"] = view.exit.to_json()
        if reason:
            message["reason"] = reason
        self.tell(message)

    def move_training(self, to: TrainingState, reason: str = "", *, is_last: bool = False) -> None:
        if to is self.state.training:
            return
        if to not in TRAINING_TRANSITIONS[self.state.training]:
            raise AssertionError(f"{self.state.training.value} -> {to.value} is not in the table")
        self.change(training=to)
        if to is TrainingState.FAILED and not self.state.failure:
            self.change(failure=reason)
        message: dict[str, Any] = {"type": Kind.TRAINING, "state": to.value}
        if reason:
            message["reason"] = reason
        if is_last:
            message["last"] = True
        self.tell(message)

    def alive(self, name: str) -> Optional[TaskView]:
        """The task, if there is one and a process belongs to it."""
        view = self.state.tasks.get(name)
        return view if view is not None and view.state.is_alive else None

    # --- events

    def start(self, event: Start) -> None:
        if self.state.training is not TrainingState.RESERVED:
            return  # a second `start` of the same training: it is under way
        self.change(
            exits_are_retryable=event.exits_are_retryable,
            has_progress=event.has_progress,
            lease_until=self.now + event.lease_secs,
        )
        self.move_training(TrainingState.STARTING)
        for name, view in self.state.tasks.items():
            if not view.spec.is_chief:
                self.begin(name)

    def launch(self, name: str) -> None:
        view = self.state.tasks.get(name)
        is_open = self.state.training in (TrainingState.STARTING, TrainingState.READY, TrainingState.RUNNING)
        if view is not None and view.state is TaskState.PENDING and is_open:
            self.begin(name)

    def begin(self, name: str) -> None:
        attempt = self.state.tasks[name].attempt + 1
        self.move(name, TaskState.STARTING, attempt=attempt, pid=None, started=self.now, advanced=self.now)
        self.actions.append(Spawn(name, attempt))

    def spawned(self, event: Spawned) -> None:
        view = self.alive(event.task)
        if view is None:
            return
        self.put(event.task, pid=event.pid)
        if view.state is TaskState.STOPPING:  # stopped while it was being forked
            self.actions.append(Kill(event.task, SIGTERM))

    def listening(self, name: str) -> None:
        view = self.alive(name)
        if view is not None and view.state is TaskState.STARTING:
            self.move(name, TaskState.RUNNING)

    def advanced(self, name: str) -> None:
        view = self.alive(name)
        if view is None:
            return
        if view.state is TaskState.STARTING:
            self.move(name, TaskState.RUNNING)
        # Progress after a dump means the task was slow, not stuck.
        due = view.due if view.state is TaskState.STOPPING else None
        self.put(name, advanced=self.now, has_advanced=True, quick_failures=0, due=due)
        if self.state.training in (TrainingState.STARTING, TrainingState.READY):
            self.move_training(TrainingState.RUNNING)

    def exited(self, event: Exited) -> None:
        name = event.task
        if self.alive(name) is None:
            return
        view = self.put(name, exit=event.exit, pid=None)
        if event.exit.code == 0 and view.state is not TaskState.STOPPING:
            self.move(name, TaskState.SUCCEEDED)
            if view.spec.is_chief:
                self.end_well_or_not(TrainingState.SUCCEEDED)
            return
        if view.state is TaskState.STOPPING or self.state.ending is not None:
            self.move(name, TaskState.STOPPED)
            return
        reason = event.reason or str(event.exit)
        is_retryable = self._is_retryable(event.exit) or not event.charged
        if is_retryable and (view.restarts < view.spec.restarts or not event.charged):
            quick = view.quick_failures + 1 if self.now - view.started < QUICK_SECS else 0
            wait = min(0.5 * 2.0 ** (quick - 2), MAX_BACKOFF_SECS) if quick > 1 else 0.0
            self.move(
                name,
                TaskState.BACKOFF,
                reason=reason,
                due=self.now + wait,
                restarts=view.restarts + (1 if event.charged else 0),
                quick_failures=quick,
            )
            return
        if is_retryable and view.spec.restarts:
            reason += f", after {view.restarts} restarts"
        self.move(name, TaskState.FAILED, reason=reason)
        if view.spec.is_chief or view.spec.name.is_needed:
            self.end_well_or_not(TrainingState.FAILED, f"{name}: {reason}")

    def end_well_or_not(self, to: TrainingState, reason: str = "") -> None:
        """The training's own end. The first one counts: a ps that breaks after the chief's success changes nothing."""
        if not self.state.training.is_final and self.state.ending is None:
            self.move_training(to, reason)

    def _is_retryable(self, exit_: Exit) -> bool:
        if exit_.signal is not None or exit_.code == EXIT_TRY_AGAIN:
            return True
        assert exit_.code is not None
        return self.state.exits_are_retryable or exit_.code >= 128

    def broken(self, reason: str) -> None:
        for name, view in self.state.tasks.items():
            if view.state.is_alive and view.pid is None:  # and never will be: nobody is there to start it
                is_ending = self.state.ending is not None
                self.move(name, TaskState.STOPPED if is_ending else TaskState.FAILED, reason=reason)
        self.end_well_or_not(TrainingState.FAILED, reason)

    def stop(self, ending: TrainingState, reason: str, grace_secs: Optional[float] = None) -> None:
        if self.state.ending is not None:
            if grace_secs is not None:  # a second, more impatient stop
                until = self.state.ps_until
                self.change(
                    grace_secs=min(self.state.grace_secs, grace_secs),
                    ps_until=None if until is None else min(until, self.now + grace_secs),
                )
                for name, view in self.state.tasks.items():
                    if view.state is TaskState.STOPPING and view.due is not None:
                        self.put(name, due=min(view.due, self.now + grace_secs))
            return
        if self.state.training.is_final:
            ending = self.state.training
        grace = self.state.grace_secs if grace_secs is None else grace_secs
        # An expired lease comes to all hosts at about the same time, unasked; whoever stops a training by hand
        # stops the chief's host first.
        waits = ending is TrainingState.EXPIRED and not self.state.chief_is_here
        self.change(ending=(ending, reason), grace_secs=grace, ps_until=self.now + grace if waits else None)
        self.move_training(TrainingState.STOPPING, reason)
        for name, view in self.state.tasks.items():
            if view.state in (TaskState.PENDING, TaskState.BACKOFF):
                self.move(name, TaskState.STOPPED, reason=reason)
            elif view.state.is_alive and view.spec.name.role != "ps":
                self.terminate(name, grace)

    def terminate(self, name: str, grace: float) -> None:
        view = self.state.tasks[name]
        if view.state is TaskState.STOPPING:
            return
        self.move(name, TaskState.STOPPING, due=self.now + grace)
        self.actions.append(
            Kill(name, SIGTERM)
        )  # without a pid as well: what only waits to be forked is withdrawn

    # --- time and consequences

    def look_at_the_clock(self) -> None:
        state = self.state
        if state.ending is None and self.now >= state.lease_until:
            self.stop(TrainingState.EXPIRED, "nobody renewed the lease")
        for name, view in self.state.tasks.items():
            if view.state is TaskState.BACKOFF and view.due is not None and self.now >= view.due:
                self.begin(name)
            elif view.state is TaskState.STOPPING and view.due is not None and self.now >= view.due:
                self.actions.append(Kill(name, SIGKILL))
                self.put(name, due=self.now + 1.0)
            elif view.state is TaskState.RUNNING and self.state.ending is None:
                self.look_for_a_stall(name, view)

    def look_for_a_stall(self, name: str, view: TaskView) -> None:
        if not _can_stall(self.state, view):
            return
        if view.due is not None:
            if self.now >= view.due:
                self.actions.append(Kill(name, SIGKILL))
                self.put(name, due=self.now + 1.0)
        elif self.now >= view.advanced + self.state.stall_secs:
            self.tell(
                {
                    "type": Kind.TASK,
                    "task": name,
                    "state": view.state.value,
                    "attempt": view.attempt,
                    "reason": f"no progress for {self.state.stall_secs:.0f} s: stacks dumped, killed next",
                    "stalled": True,
                }
            )
            self.put(name, due=self.now + DUMP_SECS)
            self.dump_all()

    def dump_all(self) -> None:
        """Ask every TF task here for its stacks: what one waits for is often seen in another. Once for each stall."""
        if self.now < self.state.dumped + DUMP_SECS:
            return
        self.change(dumped=self.now)
        self.actions.extend(Dump(name) for name, view in self.state.tasks.items() if view.state.is_alive)

    def settle(self) -> None:
        """What follows from where the tasks are now."""
        state = self.state
        if state.ending is not None:
            if not _others_alive(state) and (state.ps_until is None or self.now >= state.ps_until):
                # ps last: the chief may be saving.
                self.change(ps_until=None)
                for name, view in state.tasks.items():
                    if view.spec.name.role == "ps" and view.state.is_alive:
                        self.terminate(name, state.grace_secs)
            if not any(v.state.is_alive for v in self.state.tasks.values()):
                ending, reason = state.ending
                if self.state.training is TrainingState.STOPPING:
                    if ending is TrainingState.FAILED:
                        reason = self.state.failure  # not why it was stopped then
                    self.move_training(ending, reason, is_last=True)
                    self.actions.append(Leave())
            return
        if state.training is TrainingState.STARTING:
            started = [v for v in state.tasks.values() if not v.spec.is_chief]
            if all(v.state in (TaskState.RUNNING, TaskState.SUCCEEDED) for v in started):
                self.move_training(TrainingState.READY)
        if self.state.training is TrainingState.READY and any(
            v.spec.is_chief and v.state is TaskState.RUNNING for v in state.tasks.values()
        ):
            self.move_training(TrainingState.RUNNING)
