"""Airflow's own parts that die: the training does not notice."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bed_runs import held_python
from live import until
from tfps_runtime.reserve import read_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bed_runs import BedLive, BedRun
    from live import Training

pytestmark = [pytest.mark.faults, pytest.mark.alone]

CHIEF_LINE = r"\[worker:0@\w+\] step (\d+) "


@pytest.fixture(scope="module")
def followed(live: BedLive) -> Iterator[tuple[BedRun, Training]]:
    """A training that goes on through everything that happens to Airflow."""
    run = live.start("faults")
    yield run, run.until_training()
    run.finish()


def logged(run: BedRun) -> list[int]:
    """The chief's steps in the task log, in the order in which they were written."""
    return [int(re.search(CHIEF_LINE, line)[1]) for _, line in run.said("train", CHIEF_LINE)]


def until_caught_up(run: BedRun, training: Training) -> None:
    """Wait until the task log has all but what was printed in the last second."""
    until(lambda: max(logged(run), default=0) >= run.steps(training)[-1] - 10, what="the task log goes on")


@pytest.mark.quick
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_triggerer(live: BedLive, followed: tuple[BedRun, Training], number: signal.Signals) -> None:
    """However the triggerer ends, the training does not notice, and the next triggerer goes on."""
    run, training = followed
    until_caught_up(run, training)
    with run.row(
        f"{number.name} of the triggerer", "the training goes on, the next triggerer follows it"
    ) as row:
        before = logged(run)
        live.stack.kill("triggerer", number)
        run.goes_on(training, steps=20)  # printed while nobody listens
        live.stack.restart("triggerer")
        until_caught_up(run, training)
        after = logged(run)
        assert run.training() == training
        assert len(set(after)) == len(after), "a line was repeated"
        lost = set(range(before[-1], after[-1])) - set(after)
        # A killed triggerer may have acknowledged lines that it had not written yet.
        assert len(lost) <= (20 if number is signal.SIGKILL else 0), f"{len(lost)} lines were lost"
        row.seen = f"no process changed; {len(after) - len(before)} lines more in the log, none twice, {len(lost)} lost"


def test_trigger_moves(live: BedLive, followed: tuple[BedRun, Training]) -> None:
    """A trigger that Airflow gives to another triggerer is killed where it was: the training goes on."""
    run, training = followed
    until_caught_up(run, training)
    database = live.stack.home / "airflow.db"
    with run.row("the trigger is given to another triggerer, and back", "the training goes on") as row:
        before = max(logged(run))
        trigger = run.task("train")["trigger"]["id"]
        with closing(sqlite3.connect(database, timeout=30)) as db, db:
            db.execute(
                "insert into job (id, job_type, state, latest_heartbeat, hostname) "
                "values (99999, 'TriggererJob', 'running', datetime('now', '+1 hour'), 'elsewhere')"
            )
            assert db.execute("update trigger set triggerer_id = 99999 where id = ?", [trigger]).rowcount == 1
        run.until_said("train", "the trigger has moved")
        with closing(sqlite3.connect(database, timeout=30)) as db, db:
            db.execute("delete from job where id = 99999")
            db.execute("update trigger set triggerer_id = null where triggerer_id = 99999")
        # A triggerer that gets a trigger for the second time writes its log file anew (3.3.2).
        until(lambda: max(logged(run), default=0) > before + 10, what="the task log goes on")
        assert run.training() == training
        assert run.state("train") == "deferred"
        row.seen = "no process changed, the task log went on"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_scheduler(live: BedLive, followed: tuple[BedRun, Training], number: signal.Signals) -> None:
    """However the scheduler ends, the training does not notice."""
    run, training = followed
    with run.row(f"{number.name} of the scheduler, which is started again", "the training goes on") as row:
        began = time.time()
        live.stack.kill("scheduler", number)
        run.goes_on(training, steps=20)
        live.stack.restart("scheduler")
        until(lambda: scheduler_beats(live, began), what="the scheduler is back")
        run.goes_on(training)
        assert run.training() == training
        assert run.state("train") == "deferred"
        row.seen = "no process changed"


def scheduler_beats(live: BedLive, since: float) -> bool:
    health = live.api.get("/monitor/health")["scheduler"]
    beat = health.get("latest_scheduler_heartbeat")
    return (
        health["status"] == "healthy"
        and beat is not None
        and datetime.fromisoformat(beat).timestamp() > since
    )


def worker_pids(instance_id: str) -> list[int]:
    """Processes that name a task instance on their command line: the worker's and the task's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if instance_id.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill_worker(run: BedRun, task: str) -> None:
    """SIGKILL to the worker of a running task, and to the task's process."""
    pids = until(lambda: worker_pids(run.task(task)["id"]), what=f"the worker of {task}")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_worker_killed_during_provision(live: BedLive) -> None:
    """Two hosts are reserved when the worker dies: the next try stops that and begins anew."""
    python, hold = held_python(live)
    hold.write_text("reserve")
    run = live.start("faults", python_c=str(python))
    with run.row(
        "SIGKILL of the Airflow worker during provision",
        "the retry begins anew, nothing of the first is left",
    ) as row:
        until(hold.with_name("held").exists, what="provision is held")
        first = {read_lock(path).training for path in run.locks()}
        assert len(first) == 1
        kill_worker(run, "provision")
        hold.unlink()
        training = run.until_training(secs=240)
        assert str(training.id) not in first
        run.goes_on(training)
        assert {read_lock(path).training for path in run.locks()} == {str(training.id)}
        row.seen = f"try {run.task('provision')['try_number']} of provision brought up another incarnation"
    run.finish()


def test_worker_killed_during_resume(live: BedLive) -> None:
    """The chief has finished when the worker that clears up dies: the next try finds that, and has the result."""
    python, hold = held_python(live)
    run = live.start("faults", python_c=str(python))
    training = run.until_training()
    run.until_saved()
    with run.row(
        "SIGKILL of the Airflow worker while train resumes to clear up", "the retry has the result"
    ) as row:
        hold.write_text("stop")
        run.tell("finish")
        until(
            lambda: hold.with_name("held").exists() and run.state("train") == "running", what="train resumes"
        )
        kill_worker(run, "train")
        hold.unlink()
        run.until_over(state="success", secs=240)
        assert run.xcom("train")["training_id"] == str(training.id)
        row.seen = f"try {run.task('train')['try_number']} of train found that the chief had finished"
    run.until_clean()
