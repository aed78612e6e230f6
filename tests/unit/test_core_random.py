"""Whatever happens to an agent, in whatever order, what its core promises holds."""

from __future__ import annotations

import dataclasses

from histories import CHIEF, GRACE, PS, WORKER, begin
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tfps_runtime.core import (
    SIGKILL,
    Advanced,
    Broken,
    Exited,
    Kill,
    Launch,
    Leave,
    Listening,
    Renew,
    Spawn,
    Spawned,
    Start,
    Stop,
    Tell,
    Tick,
    next_due,
    step,
)
from tfps_runtime.protocol import (
    TASK_TRANSITIONS,
    TRAINING_TRANSITIONS,
    Exit,
    TaskSpec,
    TaskState,
    TrainingState,
)

SPECS = (
    PS,
    TaskSpec(task="ps:1", restarts=0),
    dataclasses.replace(CHIEF, restarts=2),
    dataclasses.replace(WORKER, restarts=3),
    TaskSpec(task="evaluator:0", has_port=False, restarts=0),
)
TASKS = [spec.task for spec in SPECS]
NAMES = st.sampled_from(TASKS)


class AnyHistory(RuleBasedStateMachine):
    """A host on which anything happens in any order; the rules hold all the time."""

    @initialize(
        chosen=st.sets(NAMES, min_size=1),
        retryable=st.booleans(),
        has_progress=st.booleans(),
    )
    def reserve(self, chosen, retryable, has_progress):
        self.specs = [spec for spec in SPECS if spec.task in chosen]
        self.state = begin(*self.specs, lease=200.0)
        self.now = 1.0
        self.start_event = Start(exits_are_retryable=retryable, has_progress=has_progress, lease_secs=300.0)
        self.asked: set[str] = set()
        self.pids: dict[str, int] = {}
        self.next_pid = 1
        self.is_broken = False
        self.has_left = False
        self.told = {spec.task: TaskState.PENDING for spec in self.specs}
        self.told_training = TrainingState.RESERVED
        self.seen_last = False

    def feed(self, event):
        self.state, actions = step(self.state, event, self.now)
        for action in actions:
            assert not self.has_left, f"{action} after the end"
            self.act(action)

    def act(self, action):
        if isinstance(action, Tell):
            self.hear(action.message)
        elif isinstance(action, Spawn):
            assert action.task not in self.pids, "a second process"
            assert action.task not in self.asked
            assert not self.told[action.task].is_final, "a finished task was started again"
            assert self.told[action.task] is TaskState.STARTING
            self.asked.add(action.task)
        elif isinstance(action, Kill) and action.task in self.asked and action.task not in self.pids:
            self.asked.discard(action.task)
            self.later(Exited(action.task, Exit(signal=action.signal), charged=False))
        elif isinstance(action, Kill) and action.signal == SIGKILL and action.task in self.pids:
            del self.pids[action.task]
            self.later(Exited(action.task, Exit(signal=9)))
        elif isinstance(action, Leave):
            assert not any(view.state.is_alive for view in self.state.tasks.values())
            assert not self.pids
            assert self.seen_last
            self.has_left = True

    def later(self, event):
        self.pending.append(event)

    def happen(self, *events):
        """As the agent does: what an action causes is told after all actions of its step."""
        self.pending = list(events)
        while self.pending:
            self.feed(self.pending.pop(0))

    def hear(self, message):
        assert not self.seen_last, f"{message} after the last word"
        if message["type"] == "task":
            state = TaskState(message["state"])
            before = self.told[message["task"]]
            assert state is before or state in TASK_TRANSITIONS[before], (before, state)
            self.told[message["task"]] = state
        elif message["type"] == "training":
            state = TrainingState(message["state"])
            assert state in TRAINING_TRANSITIONS[self.told_training], (self.told_training, state)
            self.told_training = state
            self.seen_last = bool(message.get("last"))

    @rule(secs=st.floats(0.0, 60.0))
    def wait(self, secs):
        self.now += secs
        self.happen(Tick())

    @rule()
    def wait_until_due(self):
        due = next_due(self.state)
        if due < float("inf"):
            self.now = max(self.now, due)
            self.happen(Tick())
            if not self.has_left:
                assert next_due(self.state) > self.now, "the agent would spin"

    @rule()
    def start(self):
        self.happen(self.start_event)

    @rule(task=NAMES)
    def launch(self, task):
        self.happen(Launch(task))

    @precondition(lambda self: self.asked and not self.is_broken)
    @rule(data=st.data())
    def fork(self, data):
        task = data.draw(st.sampled_from(sorted(self.asked)))
        self.asked.discard(task)
        self.pids[task] = self.next_pid
        self.next_pid += 1
        self.happen(Spawned(task, self.pids[task]))

    @precondition(lambda self: self.pids)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 75, 127, 128, -9, -15]), charged=st.booleans())
    def exit(self, data, code, charged):
        task = data.draw(st.sampled_from(sorted(self.pids)))
        del self.pids[task]
        self.happen(Exited(task, Exit(code=code) if code >= 0 else Exit(signal=-code), "", charged))

    @precondition(lambda self: self.pids)
    @rule(data=st.data(), advanced=st.booleans())
    def get_on(self, data, advanced):
        task = data.draw(st.sampled_from(sorted(self.pids)))
        self.happen(Advanced(task) if advanced else Listening(task))

    @rule(task=NAMES, kind=st.sampled_from([Listening, Advanced, Launch]))
    def say_something_odd(self, task, kind):
        if task in self.pids or kind is Launch:
            return
        if task in self.state.tasks and self.state.tasks[task].state.is_alive:
            return  # without a process nothing can listen
        self.happen(kind(task))

    @rule()
    def break_(self):
        if not self.pids:
            self.is_broken = True
            self.asked.clear()
            self.happen(Broken("cannot import x"))

    @precondition(lambda self: self.is_broken)
    @rule()
    def is_still_broken(self):
        self.asked.clear()
        self.happen(Broken("cannot import x"))

    @rule(grace=st.none() | st.floats(0.0, 40.0))
    def stop(self, grace):
        self.happen(Stop("enough", grace))

    @rule(secs=st.floats(0.0, 500.0))
    def renew(self, secs):
        self.happen(Renew(secs))

    @invariant()
    def budgets_are_kept(self):
        for spec in getattr(self, "specs", ()):
            assert self.state.tasks[spec.task].restarts <= spec.restarts

    @invariant()
    def what_was_told_is_so(self):
        for task, view in self.state.tasks.items() if hasattr(self, "state") else ():
            assert self.told[task] is view.state
            assert not (view.state.is_final and task in self.pids)
        if hasattr(self, "state"):
            assert self.told_training is self.state.training

    def teardown(self):
        """Nobody comes back: the lease ends it, within the grace times, whatever has happened before."""
        if not hasattr(self, "state"):
            return
        latest = max(self.now, self.state.lease_until) + 2 * GRACE + 10.0
        for _ in range(200):
            if self.has_left:
                return
            if self.is_broken:
                self.asked.clear()
                self.happen(Broken("cannot import x"))
            self.now = max(self.now, min(next_due(self.state), self.now + 60.0))
            self.happen(Tick())
        raise AssertionError(f"not ended at {self.now}, expected by {latest}: {self.state}")


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
