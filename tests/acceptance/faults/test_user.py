"""What a user does to a run: whatever it is, a training that nobody waits for is gone from all hosts soon."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from bed_runs import CHIEF, held_python
from live import until

from airflow_tfps.hook import ENSURE_LEASE_SECS
from airflow_tfps.operators import UNHEARD_LEASE_SECS

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed_runs import BedLive, BedRun

pytestmark = pytest.mark.faults

KILL_SECS = 15.0
"""A training that the user ends is gone on all hosts within this time."""


@pytest.mark.quick
def test_mark_failed(live: BedLive) -> None:
    """Marked failed while it is deferred, train takes everything with it."""
    run = live.start("faults")
    run.until_training()
    run.until_saved()
    with run.row(
        "mark failed while deferred", f"nothing is left on any host within {KILL_SECS:.0f} s"
    ) as row:
        began = time.monotonic()
        run.mark("train", "failed")
        run.until_nothing_is_left(KILL_SECS)
        row.secs = time.monotonic() - began
        row.seen = f"every process, lock and port was gone after {row.secs:.1f} s"
    run.until_over(state="failed")
    run.until_clean()


def gone(run: BedRun, fault: str, act: Callable[[], object], secs: float = KILL_SECS, note: str = "") -> None:
    """A row: do something to the run, and wait until nothing of it is left on any host."""
    with run.row(fault, f"nothing is left on any host within {secs:.0f} s") as row:
        began = time.monotonic()
        act()
        run.until_nothing_is_left(secs)
        row.secs = time.monotonic() - began
        row.seen = f"gone after {row.secs:.1f} s{note}"


# --- while train is deferred -----------------------------------------------------------------------------------------


def test_clear_with_downstream(live: BedLive) -> None:
    """Clearing provision and what is after it replaces the training; the new one continues."""
    run = live.start("faults")
    first = run.until_training()
    run.until_saved()
    with run.row(
        "clear provision with downstream while train is deferred", "a new incarnation continues"
    ) as row:
        run.clear("provision", downstream=True)
        second = run.until_training(other_than=first)
        run.until_gone(first)
        run.goes_on(second)
        row.restored = run.restored(second)
        row.seen = "the old incarnation was gone, the new one continued"
    run.finish()


def test_clear_downstream_of_train(live: BedLive) -> None:
    """Clearing train with what is after it does the same; the old trigger's kill spares the new incarnation."""
    run = live.start("faults")
    first = run.until_training()
    run.until_saved()
    with run.row("clear train with downstream while it is deferred", "a new incarnation continues") as row:
        run.clear("train", downstream=True)
        second = run.until_training(other_than=first)
        run.until_gone(first)
        run.goes_on(second, steps=30)
        assert run.training() == second
        row.restored = run.restored(second)
        row.seen = "the old incarnation was gone, the new one continued"
    run.finish()


def test_one_of_two(live: BedLive) -> None:
    """Of a mapped group one index is marked failed, then cleared; the other's processes do not change."""
    run = live.start("faults_mapped", group="sweep.training")
    first, other = run.until_training(0), run.until_training(1)
    run.until_saved()
    with run.row(
        "mapped group: one index marked failed while deferred", "its training is gone, the other stays"
    ) as row:
        began = time.monotonic()
        run.mark("train", "failed", 0)
        run.until_gone(first, KILL_SECS)
        until(lambda: not run.locks(0), KILL_SECS, lambda: f"{run.locks(0)}")
        row.secs = time.monotonic() - began
        run.goes_on(other)
        assert run.training(1) == other
        row.seen = f"gone after {row.secs:.1f} s; the other's processes did not change"
    with run.row(
        "mapped group: clear failed only", "train of that index alone runs again and continues", of=first
    ) as row:
        until(lambda: run.state("teardown", 0) in ("success", "failed"), what="its teardown")
        cleared = run.clear("train", 0, only_failed=True, downstream=True)
        assert ("sweep.training.train", 0) in cleared, cleared
        assert ("sweep.training.train", 1) not in cleared, cleared
        second = run.until_training(0, other_than=first)
        run.goes_on(second)
        assert run.training(1) == other
        row.restored = run.restored(second)
        row.seen = "it continued; the other's processes did not change"
    run.tell("finish")
    until(lambda: run.state("train", 0) == run.state("train", 1) == "success", what="both have finished")
    run.until_over()
    run.until_clean()


def test_dagrun_timeout(live: BedLive) -> None:
    """A run that times out skips its teardown: the trigger ends the training."""
    run = live.start("faults_timeout")
    run.until_training()
    with run.row(
        "dagrun_timeout while train is deferred", "the training is gone, although teardown is skipped"
    ) as row:
        run.until_over(state="failed")
        began = time.monotonic()
        run.until_nothing_is_left(KILL_SECS)
        row.secs = time.monotonic() - began
        row.seen = f"gone {row.secs:.1f} s after the run had failed; teardown was {run.state('teardown')}"
    run.until_clean()


def test_execution_timeout(live: BedLive) -> None:
    """Airflow does not count the time in which a task is deferred: the training goes on."""
    run = live.start("faults_execution_timeout")
    training = run.until_training()
    began = time.monotonic()
    with run.row(
        "execution_timeout of 30 s passes while train is deferred", "nothing happens, as Airflow has it"
    ) as row:
        while time.monotonic() - began < 35:
            run.goes_on(training)
        assert run.training() == training
        assert run.state("train") == "deferred"
        row.seen = "no process changed, training went on"
    run.finish()


def test_success_by_hand(live: BedLive) -> None:
    """Marked success, train takes everything with it like marked failed."""
    run = live.start("faults")
    run.until_training()
    run.until_saved()
    gone(run, "mark success while deferred", lambda: run.mark("train", "success"))
    run.until_over(state="success")
    run.until_clean()


# --- while train is running or up for retry ---------------------------------------------------------------------------


def test_mark_failed_while_running(live: BedLive) -> None:
    """Marked failed while it works on the hosts, train leaves the rest to teardown."""
    run, release = held(live, "train", "status")
    gone_when_released(
        run, "mark failed while train is running", lambda: run.mark("train", "failed"), release
    )
    run.until_over(state="failed")
    run.until_clean()


def test_clear_while_running(live: BedLive) -> None:
    """Cleared while it works on the hosts, train runs again, with a training that takes the place of the old."""
    run, release = held(live, "train", "status")
    with run.row("clear train while it is running", "it runs again, and trains") as row:
        first = run.task("train")["try_number"]
        run.clear("train")
        release()
        # Until then it may be the first try's chief that one sees.
        until(
            lambda: run.task("train")["try_number"] > first and run.state("train") == "deferred",
            what="train runs again",
        )
        training = run.until_training()
        run.goes_on(training)
        row.seen = "it trained"
    run.finish()


def test_provision_marked_failed_while_running(live: BedLive) -> None:
    """A provision that is marked failed in the midst of it gives back what it can; the hosts' leases do the rest."""
    run, release = held(live, "provision", "reserve")
    until(lambda: len(run.locks()) >= 2, what="two hosts are reserved")
    gone_when_released(
        run,
        "mark failed while provision is running (no teardown comes after it)",
        lambda: run.mark("provision", "failed"),
        release,
        secs=ENSURE_LEASE_SECS + 10,
    )
    run.until_over(state="failed")
    run.until_clean()


def held(live: BedLive, task: str, command: str) -> tuple[BedRun, Callable[[], None]]:
    """A run whose task is in the midst of a command on gpu_c; call what comes with it to let that go on."""
    python, hold = held_python(live)
    run = live.start("faults", python_c=str(python))
    if task == "train":
        run.until_state("ready", "success")
    hold.write_text(command)
    until(lambda: run.state(task) == "running" and hold.with_name("held").exists(), what=f"{task} is held")
    return run, lambda: hold.unlink(missing_ok=True)


def gone_when_released(
    run: BedRun,
    fault: str,
    act: Callable[[], object],
    release: Callable[[], None],
    secs: float = KILL_SECS + 15,
) -> None:
    def both() -> None:
        act()
        release()

    gone(run, fault, both, secs=secs, note=", the host that hung included")


@pytest.mark.parametrize("action", ["failed", "success", "clear"])
def test_up_for_retry(live: BedLive, action: str) -> None:
    """Between two tries nothing lives; whatever the user does then, nothing comes back for nobody."""
    run = live.start("faults_slow_retry")
    first = run.until_training()
    run.until_saved()
    name = {"clear": "clear"}.get(action, f"mark {action}")
    expected = "trains at once, and continues" if action == "clear" else "no process comes back"
    with run.row(f"{name} while train is up for retry", expected) as row:
        os.kill(first.agents[first.host(CHIEF)][0], signal.SIGKILL)
        until(lambda: run.state("train") == "up_for_retry", what="train is up for retry")
        run.until_gone(first)
        if action == "clear":
            run.clear("train")
            second = run.until_training(other_than=first)
            run.goes_on(second)
            row.restored = run.restored(second)
            row.seen = "a new incarnation continued"
        else:
            run.mark("train", action)
            run.until_over(state=action)
            run.until_nothing_is_left(KILL_SECS)
            row.seen = "nothing came back"
    if action == "clear":
        run.finish()
    else:
        run.until_clean()


# --- the moments in between -------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_marked_before_the_trigger_starts(live: BedLive) -> None:
    """A train that runs alone is marked failed before its trigger has started: the hosts end it themselves."""
    run = live.start("faults_once")
    run.until_training()
    run.until_saved()
    run.mark("train", "failed")
    run.until_over(state="failed")
    run.until_nothing_is_left(KILL_SECS)
    live.stack.kill("triggerer")
    run.clear("train", only_failed=True)
    secs = UNHEARD_LEASE_SECS + 20
    try:
        until(lambda: run.state("train") == "deferred" and run.training(), what="train is deferred")
        # For the ps and the worker it had to wait: now it waits for a trigger that tells it that they are there.
        gone(
            run,
            "cleared alone, marked failed before its trigger starts",
            lambda: run.mark("train", "failed"),
            secs,
        )
    finally:
        live.stack.restart("triggerer")
    run.until_clean()


def test_waiting_provision_marked_failed(live: BedLive) -> None:
    """A provision that waits for ports holds nothing, and nothing comes of it when it is marked failed."""
    first = live.start("faults", ports_count=1)
    first.until_training()
    second = live.start("faults", ports=first.ports)
    second.until_state("provision", "deferred")
    second.ports = range(0)  # they are the first one's
    gone(
        second,
        "mark failed while provision waits for ports",
        lambda: second.mark("provision", "failed"),
        note="",
    )
    second.until_over(state="failed")
    second.until_clean()
    first.finish()


# --- the whole DAG ----------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_pause(live: BedLive) -> None:
    """While its DAG is paused a training goes on and ends; Airflow hears of it when it is unpaused."""
    run = live.start("faults_once")
    training = run.until_training()
    with run.row("the DAG is paused while train is deferred; the chief ends", "resumes when unpaused") as row:
        live.api.request("PATCH", f"/dags/{run.dag_id}", {"is_paused": True})
        run.goes_on(training, steps=20)
        run.tell("finish")
        run.until_said("train", rf"{CHIEF}@\w+ SUCCEEDED")
        live.api.request("PATCH", f"/dags/{run.dag_id}", {"is_paused": False})
        run.until_over(state="success")
        assert run.xcom("train")["training_id"] == str(training.id)
        row.seen = "it trained and ended while paused; the result came after"
    run.until_clean()


@pytest.mark.alone
def test_delete_mapped_run(live: BedLive) -> None:
    """A deleted run has no teardown: the triggers end both of its trainings."""
    run = live.start("faults_mapped", group="sweep.training")
    run.until_training(0)
    run.until_training(1)
    live.stack.kill(
        "scheduler", signal.SIGTERM
    )  # it ends by itself when a run is gone that it looks at (3.3.2)
    live.api.set_run_state(run.dag_id, run.run_id, "queued")  # a running run cannot be deleted
    gone(run, "mapped group: the run is deleted", lambda: live.api.delete_run(run.dag_id, run.run_id))
    live.stack.restart("scheduler")
    run.until_clean()
