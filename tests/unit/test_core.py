"""What an agent decides: histories of events as tables, and random ones that must never leave the rules."""

from __future__ import annotations

import dataclasses

import pytest
from histories import (
    AGAIN,
    CHIEF,
    DONE,
    GRACE,
    HARNESS,
    KILLED,
    LEASE,
    PS,
    SCRIPT,
    STALL,
    WORKER,
    WRONG,
    History,
    begin,
    running,
)
from tfps_runtime.core import (
    DUMP_SECS,
    MAX_BACKOFF_SECS,
    QUICK_SECS,
    SIGKILL,
    SIGTERM,
    Advanced,
    Broken,
    Dump,
    Exited,
    Finished,
    Kill,
    Launch,
    Leave,
    Listening,
    Renew,
    Spawn,
    Spawned,
    Stop,
    Tell,
    Tick,
    next_due,
)
from tfps_runtime.protocol import (
    Exit,
    Result,
    TaskSpec,
    TaskState,
    TrainingState,
)

# --- the usual way ------------------------------------------------------------------------------------------------


def test_start_begins_everything_but_the_chief():
    """The chief waits for its own command; everything else of the host is started at once."""
    history = History(begin(PS, CHIEF, WORKER)).at(0.0, HARNESS)
    assert [a.task for a in history.of(Spawn)] == ["ps:0", "worker:1"]
    assert history.task("worker:0").state is TaskState.PENDING
    assert history.trainings == ["STARTING"]


def test_a_training_that_goes_well():
    """From start to the chief's success and the stop, with every state told once and in order."""
    history = History(begin(PS, CHIEF, WORKER)).at(0.0, HARNESS).run(1.0, "ps:0", "worker:1")
    assert history.trainings == ["STARTING", "READY"]
    history.at(2.0, Launch("worker:0")).run(3.0, "worker:0")
    history.at(4.0, Advanced("worker:0"), Advanced("worker:1"))
    history.at(5.0, Finished("worker:0", Result(global_step=7)), Exited("worker:0", DONE))
    assert history.trainings == ["STARTING", "READY", "RUNNING", "SUCCEEDED"]
    assert not history.of(Leave), "ps and the other worker are the followers' to stop"
    history.at(6.0, Stop("done"), Exited("worker:1", Exit(signal=15)), Exited("ps:0", Exit(signal=15)))
    assert history.states("worker:0") == ["STARTING", "RUNNING", "SUCCEEDED"]
    assert history.states("ps:0") == ["STARTING", "RUNNING", "STOPPING", "STOPPED"]
    assert history.trainings[-2:] == ["STOPPING", "SUCCEEDED"]
    assert history.of(Tell)[-1].message["last"] is True
    assert history.actions[-1] == Leave()


def test_a_second_start_and_a_second_launch_change_nothing():
    """Commands come twice when a connection breaks."""
    history = running(PS, CHIEF)
    told = len(history.actions)
    history.at(2.0, HARNESS, Launch("worker:0"))
    assert history.actions[told:] == []


def test_the_chief_cannot_be_launched_before_the_start():
    """Without the cluster's addresses there is nothing to tell it."""
    assert History(begin(PS, CHIEF)).at(0.0, Launch("worker:0")).actions == []


@pytest.mark.parametrize(
    "event", [Launch("x:0"), Spawned("x:0", 5), Listening("x:0"), Advanced("x:0"), Exited("x:0", KILLED)]
)
def test_events_of_unknown_tasks_change_nothing(event):
    """A message that comes late, or from another version, must not end the agent."""
    history = running(PS, CHIEF)
    told = len(history.actions)
    assert history.at(2.0, event).actions[told:] == []


@pytest.mark.parametrize(
    "event", [Launch("ps:0"), Spawned("ps:0", 5), Listening("ps:0"), Advanced("ps:0"), Exited("ps:0", KILLED)]
)
def test_events_of_ended_tasks_change_nothing(event):
    """A finished task is never restarted and never moves again."""
    history = running(PS, CHIEF).at(2.0, Exited("ps:0", WRONG))
    assert history.task("ps:0").state is TaskState.FAILED
    told = len(history.actions)
    assert history.at(3.0, event, Tick()).actions[told:] == []


# --- ends of tasks ------------------------------------------------------------------------------------------------

ENDS = [
    # start, exit, charged, restarts in the spec, state after it
    (HARNESS, DONE, True, 3, "SUCCEEDED"),
    (HARNESS, WRONG, True, 3, "FAILED"),
    (HARNESS, Exit(code=127), True, 3, "FAILED"),
    (HARNESS, AGAIN, True, 3, "STARTING"),
    (HARNESS, AGAIN, True, 0, "FAILED"),
    (HARNESS, Exit(code=128), True, 3, "STARTING"),
    (HARNESS, Exit(code=255), True, 3, "STARTING"),
    (HARNESS, KILLED, True, 3, "STARTING"),
    (HARNESS, KILLED, True, 0, "FAILED"),
    (HARNESS, KILLED, False, 0, "STARTING"),
    (HARNESS, WRONG, False, 0, "STARTING"),
    (SCRIPT, WRONG, True, 3, "STARTING"),
    (SCRIPT, WRONG, True, 0, "FAILED"),
    (SCRIPT, DONE, True, 3, "SUCCEEDED"),
]


@pytest.mark.parametrize(("start", "exit_", "charged", "restarts", "state"), ENDS)
@pytest.mark.parametrize("listens", [True, False])
def test_what_becomes_of_a_task_that_ends(start, exit_, charged, restarts, state, listens):
    """Exit 0 succeeds; 75, 128 and more, signals and a script's failures are tried again within the budget."""
    spec = dataclasses.replace(WORKER, restarts=restarts)
    history = History(begin(PS, spec)).at(0.0, start, Spawned("worker:1", 7))
    if listens:
        history.at(1.0, Listening("worker:1"))
    history.at(20.0, Exited("worker:1", exit_, "", charged))
    view = history.task("worker:1")
    assert view.state.value == state
    assert view.restarts == (1 if charged and state == "STARTING" else 0)
    assert view.attempt == (2 if state == "STARTING" else 1)
    if state in ("STARTING", "FAILED"):
        assert ("BACKOFF" in history.states("worker:1")) is (state == "STARTING")


def test_the_budget_of_restarts_is_kept():
    """A task gets exactly its `restarts`, and the last failure says that they are used up."""
    history = running(PS, dataclasses.replace(WORKER, restarts=2))
    for attempt in range(3):
        now = 100.0 * (attempt + 1)
        history.at(now, Exited("worker:1", KILLED)).run(now + 1, "worker:1")
    assert history.states("worker:1")[-1] == "FAILED"
    assert history.task("worker:1").attempt == 3
    assert "killed by signal 9, after 2 restarts" in history.reason("worker:1")


def test_restarts_that_are_not_charged_are_not_counted():
    """A task whose nursery was killed has done nothing wrong."""
    history = running(PS, dataclasses.replace(WORKER, restarts=0))
    for attempt in range(10):
        now = 50.0 * (attempt + 1)
        history.at(now, Exited("worker:1", KILLED, "its nursery was killed", charged=False)).run(
            now, "worker:1"
        )
    assert history.task("worker:1").attempt == 11
    assert history.task("worker:1").restarts == 0


def test_back_off_grows_for_quick_failures_and_has_an_end():
    """The first restart comes at once, each further quick failure waits twice as long, up to the maximum."""
    history = running(PS, dataclasses.replace(WORKER, restarts=20), lease=1e9).at(0.0, Renew(1e9))
    now, waits = 1.0, []
    for _ in range(12):
        history.at(now, Exited("worker:1", KILLED))
        view = history.task("worker:1")
        waits.append(0.0 if view.due is None else round(view.due - now, 6))
        if view.due is not None:
            history.at(view.due - 0.01, Tick())
            assert history.task("worker:1").state is TaskState.BACKOFF
            assert next_due(history.state) == view.due
            now = view.due
            history.at(now, Tick())
        assert history.task("worker:1").state is TaskState.STARTING
        now += 0.1
        history.run(now, "worker:1")
    assert waits[:5] == pytest.approx([0.0, 0.5, 1.0, 2.0, 4.0])
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(MAX_BACKOFF_SECS)


@pytest.mark.parametrize("mends", ["long life", "progress"])
def test_back_off_begins_anew_after_a_good_while(mends):
    """A task that lived long, or that got on, was not failing fast."""
    history = running(PS, dataclasses.replace(WORKER, restarts=20))
    for now in (1.0, 1.2, 2.0, 4.0):
        history.at(now, Tick(), Exited("worker:1", KILLED))
    assert history.task("worker:1").quick_failures == 4
    history.at(50.0, Tick()).run(50.0, "worker:1")
    now = 50.0 + QUICK_SECS if mends == "long life" else 50.5
    if mends == "progress":
        history.at(50.4, Advanced("worker:1"))
    history.at(now, Exited("worker:1", KILLED))
    assert history.task("worker:1").state is TaskState.STARTING, "at once"


@pytest.mark.parametrize(
    ("task", "state"),
    [("ps:0", "FAILED"), ("data:0", "FAILED"), ("worker:0", "FAILED"), ("worker:1", "READY")],
)
def test_whose_failure_fails_the_training_here(task, state):
    """A ps, a role of its own name, the chief; whether it can go on without a worker is not for one host to say."""
    specs = [dataclasses.replace(s, restarts=0) for s in (PS, CHIEF, WORKER, TaskSpec(task="data:0"))]
    history = History(begin(*specs)).at(0.0, HARNESS).run(1.0, "ps:0", "worker:1", "data:0")
    if task == "worker:0":
        history.at(1.0, Launch(task))
    history.at(2.0, Exited(task, KILLED))
    assert history.state.training.value == state


def test_a_ps_that_breaks_after_the_chiefs_success_changes_nothing():
    """Success is final: the agent must neither fall over nor take it back."""
    history = running(PS, CHIEF).at(2.0, Exited("worker:0", DONE), Exited("ps:0", WRONG))
    assert history.state.training is TrainingState.SUCCEEDED
    assert history.at(3.0, Stop("done")).of(Leave)


def test_a_chief_that_succeeds_after_a_ps_has_failed_leaves_the_training_failed_here():
    """The first end counts; the verdict over both is the judge's."""
    history = running(PS, CHIEF).at(2.0, Exited("ps:0", WRONG), Exited("worker:0", DONE))
    assert history.state.training is TrainingState.FAILED
    assert history.task("worker:0").state is TaskState.SUCCEEDED


def test_two_failing_tasks_fail_the_training_once():
    """The reason is the first one's."""
    history = running(PS, CHIEF).at(2.0, Exited("ps:0", WRONG), Exited("worker:0", WRONG))
    assert history.trainings.count("FAILED") == 1
    history.at(3.0, Stop("cleaning up"))
    last = history.of(Tell)[-1].message
    assert (last["state"], last["last"]) == ("FAILED", True)
    assert last["reason"] == "ps:0: exit code 1", "and not why it was stopped afterwards"


# --- stopping -----------------------------------------------------------------------------------------------------


def test_stop_sends_sigterm_then_sigkill_and_ps_go_last():
    """The chief may be saving to its ps: those stay until nothing else lives."""
    history = running(PS, CHIEF, WORKER)
    since = len(history.actions)
    history.at(10.0, Stop("enough"))
    assert history.of(Kill, since) == [Kill("worker:0", SIGTERM), Kill("worker:1", SIGTERM)]
    history.at(10.0 + GRACE - 0.1, Tick())
    assert Kill("worker:0", SIGKILL) not in history.actions
    history.at(10.0 + GRACE, Tick())
    assert Kill("worker:0", SIGKILL) in history.actions
    history.at(41.0, Exited("worker:0", KILLED), Exited("worker:1", KILLED))
    assert history.actions[-1] == Kill("ps:0", SIGTERM)
    assert not history.of(Leave)
    history.at(42.0, Exited("ps:0", Exit(signal=15)))
    assert history.actions[-1] == Leave()
    assert history.trainings[-2:] == ["STOPPING", "STOPPED"]


def test_sigkill_is_repeated_until_the_task_is_gone():
    """A task that was just being forked when the first one came gets another."""
    history = running(WORKER, CHIEF).at(10.0, Stop("enough", grace_secs=0.0))
    for now in (10.0, 11.0, 12.0):
        assert history.of(Kill).count(Kill("worker:1", SIGKILL)) == now - 9.0
        history.at(now + 0.99, Tick()).at(now + 1.0, Tick())


def test_stop_of_a_reservation_leaves_at_once():
    """Nothing was started: nothing is waited for."""
    history = History(begin(PS, CHIEF)).at(0.0, Stop("changed my mind"))
    assert history.trainings == ["STOPPING", "STOPPED"]
    assert history.states("ps:0") == ["STOPPED"]
    assert history.actions[-1] == Leave()


def test_a_second_stop_with_less_patience_hurries_the_first():
    """Tasks that are being stopped, and ps that wait for their turn, get the shorter time."""
    history = running(PS, WORKER).at(10.0, Stop("enough")).at(11.0, Stop("now!", grace_secs=1.0))
    history.at(12.0, Tick())
    assert Kill("worker:1", SIGKILL) in history.actions
    history.at(12.1, Exited("worker:1", KILLED)).at(13.2, Tick())
    assert Kill("ps:0", SIGKILL) in history.actions
    told = history.trainings
    assert told.count("STOPPING") == 1


def test_a_second_stop_without_a_word_on_patience_changes_nothing():
    """`teardown` after `train`: the first one's grace holds."""
    history = running(PS, WORKER).at(10.0, Stop("enough"))
    told = len(history.actions)
    history.at(11.0, Stop("again"))
    assert history.actions[told:] == []


def test_exit_0_while_stopping_is_no_success():
    """A chief that was told to save and leave has not reached its last step."""
    history = running(PS, CHIEF).at(10.0, Stop("enough"), Exited("worker:0", DONE))
    assert history.task("worker:0").state is TaskState.STOPPED
    assert "SUCCEEDED" not in history.trainings


def test_a_task_without_a_process_is_withdrawn_by_a_stop():
    """It may wait for a nursery that takes minutes to import, or hangs: the agent is asked to take it back."""
    history = History(begin(PS, CHIEF)).at(0.0, HARNESS).at(1.0, Stop("enough"))
    assert history.actions[-1] == Kill("ps:0", SIGTERM)
    history.at(1.0, Exited("ps:0", Exit(signal=15), charged=False))
    assert history.states("ps:0")[-1] == "STOPPED"
    assert history.actions[-1] == Leave()


def test_a_task_that_is_forked_during_a_stop_is_ended():
    """The request to the nursery was under way when the stop came."""
    history = History(begin(PS, CHIEF)).at(0.0, HARNESS).at(1.0, Stop("enough"))
    since = len(history.actions)
    assert history.at(1.1, Spawned("ps:0", 7)).actions[since:] == [Kill("ps:0", SIGTERM)]


def test_nothing_restarts_once_a_stop_has_come():
    """Neither what waits for its back-off nor what dies meanwhile."""
    specs = [dataclasses.replace(s, restarts=9) for s in (PS, WORKER, TaskSpec(task="worker:2"))]
    history = running(*specs)
    for now in (1.0, 1.1):
        history.at(now, Exited("worker:2", KILLED)).run(now, "worker:2")
    assert history.task("worker:2").state is TaskState.BACKOFF
    since = len(history.actions)
    history.at(1.2, Stop("enough"), Exited("worker:1", KILLED), Exited("ps:0", KILLED)).at(100.0, Tick())
    assert history.of(Spawn, since) == []
    assert [history.task(s.task).state.value for s in specs] == ["STOPPED"] * 3


# --- the lease ------------------------------------------------------------------------------------------------------


def test_a_lease_that_runs_out_ends_the_training():
    """Nobody is there any more: everything stops, and the end says why."""
    history = running(PS, CHIEF, lease=50.0)
    history.at(LEASE - 0.1, Tick())
    assert not history.state.ending
    assert next_due(history.state) == pytest.approx(LEASE)
    history.at(LEASE, Tick(), Exited("worker:0", DONE), Exited("ps:0", KILLED))
    assert history.trainings[-2:] == ["STOPPING", "EXPIRED"]
    assert history.of(Tell)[-1].message["reason"] == "nobody renewed the lease"
    assert history.actions[-1] == Leave()


def test_a_renewal_counts_from_its_own_time_and_may_shorten():
    """A trigger that is killed without an answer from Airflow leaves 30 s."""
    history = running(PS, CHIEF).at(500.0, Renew(LEASE)).at(1400.0, Tick())
    assert history.state.ending is None
    history.at(1400.0, Renew(30.0)).at(1430.0, Tick())
    assert history.state.ending is not None


def test_a_renewal_does_not_stop_an_end():
    """A follower that is still there while the training ends does not keep it."""
    history = running(PS, CHIEF).at(10.0, Stop("enough"))
    until = history.state.lease_until
    assert history.at(11.0, Renew(LEASE)).state.lease_until == until


def test_when_the_lease_runs_out_ps_wait_for_a_chief_on_another_host():
    """All leases run out at the same time; the chief elsewhere is still saving to this host's ps."""
    history = running(PS, WORKER, lease=50.0).at(LEASE, Tick(), Exited("worker:1", DONE))
    assert history.task("ps:0").state is TaskState.RUNNING
    assert next_due(history.state) == pytest.approx(LEASE + GRACE)
    history.at(LEASE + GRACE, Tick())
    assert history.task("ps:0").state is TaskState.STOPPING


# --- stalls and dead nurseries -----------------------------------------------------------------------------------------


def test_a_stalled_task_is_dumped_then_killed_then_started_again():
    """The stacks tell why; the restart is charged like any other."""
    history = running(PS, CHIEF).at(2.0, Advanced("worker:0"))
    assert next_due(history.state) == pytest.approx(2.0 + STALL)
    since = len(history.actions)
    history.at(2.0 + STALL, Tick())
    assert history.of(Dump, since) == [
        Dump("ps:0"),
        Dump("worker:0"),
    ]  # what it waits for may be seen in another
    assert not history.of(Kill, since)
    history.at(2.0 + STALL + 0.5, Tick())
    assert len(history.of(Dump, since)) == 2
    history.at(2.0 + STALL + DUMP_SECS, Tick())
    assert history.of(Kill, since) == [Kill("worker:0", SIGKILL)]
    history.at(106.0, Exited("worker:0", KILLED))
    assert history.task("worker:0").restarts == 1


def test_two_that_stall_together_are_dumped_once_and_both_are_killed():
    """The same stacks twice would only make the log longer; a later stall has its own."""
    history = running(CHIEF, WORKER).at(2.0, Advanced("worker:0")).at(3.0, Advanced("worker:1"))
    since = len(history.actions)
    for after in (2.0, 3.0, 2.0 + DUMP_SECS, 3.0 + DUMP_SECS):
        history.at(after + STALL, Tick())
    assert history.of(Dump, since) == [Dump("worker:0"), Dump("worker:1")]
    assert {kill.task for kill in history.of(Kill, since)} == {"worker:0", "worker:1"}
    told = [a.message for a in history.of(Tell, since) if a.message.get("stalled")]
    assert [message["task"] for message in told] == ["worker:0", "worker:1"]


def test_progress_after_the_dump_saves_the_task():
    """It was slow, not stuck."""
    history = running(PS, CHIEF).at(1.0 + STALL, Tick(), Advanced("worker:0")).at(10.0 + STALL, Tick())
    assert not history.of(Kill)


def test_a_worker_is_not_stuck_before_the_chief_can_have_started():
    """The chief is started when Airflow has a slot for it, which may be hours later."""
    history = History(begin(PS, WORKER)).at(0.5, HARNESS, Renew(1e6)).run(1.0, "ps:0", "worker:1")
    history.at(50 * STALL, Tick())
    assert not history.of(Dump)
    history.at(50 * STALL, Advanced("worker:1")).at(51 * STALL, Tick())
    assert history.of(Dump) == [Dump("ps:0"), Dump("worker:1")]


@pytest.mark.parametrize(
    ("spec", "start"),
    [
        (PS, HARNESS),
        (TaskSpec(task="evaluator:0", has_port=False), HARNESS),
        (CHIEF, SCRIPT),
        (WORKER, SCRIPT),
    ],
)
def test_what_never_counts_as_stalled(spec, start):
    """A ps reports nothing, an evaluator waits for checkpoints, and of a script without a pattern nothing is known."""
    others = [s for s in (PS, CHIEF) if s.task != spec.task]
    history = running(spec, *others, start=start).at(0.0, Renew(1e6)).at(2.0, Advanced(spec.task))
    for s in others:
        history.at(10 * STALL, Advanced(s.task))
    history.at(10 * STALL + 1, Tick())
    assert not [a for a in history.of(Tell) if a.message.get("stalled") and a.message["task"] == spec.task]


def test_a_broken_host_fails_the_training_and_what_was_never_started():
    """A module that does not import: no process will ever come."""
    history = History(begin(PS, CHIEF, WORKER)).at(0.0, HARNESS, Broken("cannot import nonsense"))
    assert [history.task(t).state.value for t in ("ps:0", "worker:1", "worker:0")] == [
        "FAILED",
        "FAILED",
        "PENDING",
    ]
    assert history.trainings[-1] == "FAILED"
    assert history.reason("ps:0") == "cannot import nonsense"
    history.at(1.0, Launch("worker:0"))
    assert history.task("worker:0").state is TaskState.PENDING, "nothing is started any more"
    assert history.at(2.0, Stop("done")).actions[-1] == Leave()


@pytest.mark.parametrize("when", ["before the start", "after the stop", "after another failure"])
def test_a_broken_host_never_keeps_a_training_from_ending(when):
    """Whatever came first: a task that has no process and never will gets out of the way."""
    history = History(begin(PS, CHIEF, WORKER))
    if when == "before the start":
        history.at(0.0, Broken("no"), HARNESS)
    elif when == "after the stop":
        history.at(0.0, HARNESS).at(1.0, Stop("enough"), Broken("no"))
    else:
        history.at(0.0, HARNESS, Spawned("ps:0", 7), Exited("ps:0", WRONG), Broken("no"))
    history.at(2.0, Stop("enough"))
    assert history.actions[-1] == Leave()
