"""Processes of a training that die: each is replaced, or the try fails and the retry continues."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from bed_runs import CHIEF, PS, WORKER
from live import start_time, until

if TYPE_CHECKING:
    from bed_runs import BedLive, BedRun
    from live import Training

pytestmark = pytest.mark.faults

EVENT_SECS = 2.0
"""Between the death of a process and the line about it in Airflow's log."""


@pytest.mark.quick
def test_tf_tasks_and_nursery(live: BedLive) -> None:
    """One training survives the deaths of its ps, its chief, its worker and a nursery, one after the other."""
    run = live.start("faults", restarts=3)
    training = run.until_training()
    run.until_saved()
    for name, task in (("ps", PS), ("the chief", CHIEF), ("a worker", WORKER)):
        expected = "starts again in place, nothing else does; training goes on"
        with run.row(f"kill -9 of {name}", expected) as row:
            killed = time.time()
            os.kill(training.tasks[task][0], signal.SIGKILL)
            training = run.restarted(training, task)
            run.goes_on(training)
            row.secs = time.time() - killed
            noticed = run.until_said("train", f"{task}@.*(killed by signal 9)", since=killed)[0] - killed
            assert noticed <= EVENT_SECS, f"in Airflow's log after {noticed:.1f} s"
            row.seen = f"restarted in place, training went on; in Airflow's log after {noticed:.2f} s"
            if task == CHIEF:
                row.restored = run.restored(training)
    with run.row(
        "kill -9 of a nursery", "its TF tasks die with it and start again, not charged for it"
    ) as row:
        host = training.host(CHIEF)
        os.kill(run.nursery(training, host), signal.SIGKILL)
        training = run.restarted(training, CHIEF)
        run.goes_on(training)
        run.until_said("train", f"{CHIEF}@.*its nursery was killed")
        row.restored = run.restored(training)
        row.seen = "the chief started again out of a new nursery; training went on"
    assert run.task("train")["try_number"] == 1
    run.finish()


def next_try(run: BedRun, before: Training) -> Training:
    """Wait for the incarnation that takes the place of a dead one, and until that is gone."""
    after = run.until_training(other_than=before)
    run.until_gone(before)
    run.goes_on(after)
    return after


@pytest.mark.quick
def test_agent_and_everything(live: BedLive) -> None:
    """Without its agent a host has lost the training: the try fails, the retry continues from the checkpoint."""
    run = live.start("faults")
    first = run.until_training()
    run.until_saved()
    with run.row("kill -9 of the agent on the chief's host", "its TF tasks die; the retry continues") as row:
        killed = time.time()
        os.kill(first.agents[first.host(CHIEF)][0], signal.SIGKILL)
        second = next_try(run, first)
        noticed = run.until_said("train", "the agent is gone", since=killed)[0] - killed
        assert noticed <= EVENT_SECS, f"in Airflow's log after {noticed:.1f} s"
        row.restored = run.restored(second)
        row.seen = f"{run.reason()}; the next try continued"
    with run.row("kill -9 of every process of the training", "the retry continues") as row:
        for pid, _ in (*second.agents.values(), *second.tasks.values()):
            with contextlib.suppress(ProcessLookupError):  # it died with another
                os.kill(pid, signal.SIGKILL)
        third = next_try(run, second)
        row.restored = run.restored(third)
        row.seen = f"{run.reason()}; the next try continued"
    assert run.task("train")["try_number"] == 3
    run.finish()


def test_evaluator(live: BedLive) -> None:
    """An evaluator is started again like the others, and nobody waits for it."""
    run = live.start("faults_evaluator")
    training = run.until_training()
    until(lambda: "evaluator:0" in (run.training() or training).tasks, what="the evaluator")
    training = run.training() or training
    with run.row("kill -9 of the evaluator", "starts again in place, nothing else does") as row:
        os.kill(training.tasks["evaluator:0"][0], signal.SIGKILL)
        training = run.restarted(training, "evaluator:0")
        run.goes_on(training)
        row.seen = "restarted in place, training went on"
    run.finish()


def test_two_on_one_host(live: BedLive) -> None:
    """Two trainings have the same hosts and range of ports; when one loses a host's agent the other does not notice."""
    first = live.start("faults")
    second = live.start("faults", ports=first.ports)
    one, two = first.until_training(), second.until_training()
    with first.row(
        "two trainings on the same hosts; kill -9 of one's agent", "the other does not notice"
    ) as row:
        os.kill(one.agents["gpu_c"][0], signal.SIGKILL)
        until(lambda: start_time(one.tasks[WORKER][0]) is None, what="the worker dies with its agent")
        first.until_said("train", "gpu_c: the agent is gone")
        second.goes_on(two)
        assert second.training() == two
        first.goes_on(one)  # asynchronous: without that worker
        row.seen = "the other's processes and steps did not change; the first went on without its worker"
    second.tell("finish")
    first.tell("finish")
    for run in (first, second):
        run.until_over(state="success")
        run.until_clean()
