"""Trainings under running Airflow components, driven through the REST API: what people clear, mark and kill.

The rules are those of "Retry, clear, kill" in the documentation. Every case ends with no process, lock or port left.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sqlite3
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live import Live, Run, Training, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.live

KILL_SECS = 15.0
"""A training that the user ends is gone on all hosts within this time."""


# --- running to the end ---------------------------------------------------------------------------------------------


def test_normal_run(live: Live) -> None:
    """A run trains on three hosts, the next task gets its result, and nothing is left."""
    run = live.start("live_watched")
    training = run.until_training()
    assert {training.host(task) for task in training.tasks} == {"gpu_a", "gpu_b", "gpu_c"}
    run.until_state("checkpoint", "success")
    run.tell("finish")
    run.until_over(state="success")
    result = run.xcom("train")
    assert result["training_id"] == str(training.id)
    assert result["finished"] is True
    assert result["global_step"] == run.steps(training)[-1]
    assert result["checkpoint"] == f"{training.checkpoint_dir}/model.ckpt-{result['global_step']}"
    assert live.api.xcom(run.dag_id, run.run_id, "use") == result["global_step"]
    run.until_nothing_is_left()


def test_no_worker_slot_is_held(live: Live) -> None:
    """While the training runs no process works on the task; while the task started it there was one."""
    run = live.start()
    seen = []

    def is_deferred() -> bool:
        instance = run.task("train")
        seen.extend(workers_of(instance["id"]))
        return instance["state"] == "deferred" and run.training() is not None

    until(is_deferred, what="train is deferred")
    run.until_training()
    assert seen
    assert not workers_of(run.task("train")["id"])
    run.tell("finish")
    run.until_over(state="success")
    run.until_nothing_is_left()


def workers_of(instance_id: str) -> list[str]:
    """Command lines of processes that name a task instance."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if instance_id in words:
            found.append(words)
    return found


# --- clearing -------------------------------------------------------------------------------------------------------


def test_clear_train_while_it_is_deferred(live: Live) -> None:
    """The old incarnation goes, a new one continues from its checkpoint, and the old trigger's end spares it.

    That trigger hears of its end from Airflow or, where provision was faster, from the hosts.
    """
    run = live.start()
    old = run.until_training()
    run.until_step(old, 15)
    until(lambda: "[worker:0@" in str(run.log_files("train")), what="the trigger follows")
    run.clear("train")
    new = run.until_training(other_than=old)
    run.until_gone(old)
    assert new.checkpoint_dir == old.checkpoint_dir
    ends = ("ended by the user", "a new training of the same key begins")
    until(
        lambda: any(end in str(run.log_files("train", 1)) for end in ends),
        what="the old trigger's end",
    )
    run.until_step(new, run.steps(new)[-1] + 20)
    assert run.training() == new
    assert run.steps(new)[0] > 10
    run.tell("finish")
    run.until_over(state="success")
    assert run.xcom("train")["training_id"] == str(new.id)
    run.until_nothing_is_left()


def test_clear_train_after_success(live: Live) -> None:
    """A training that had finished begins anew, in a checkpoint directory of its own."""
    run = live.start()
    first = run.until_training()
    run.until_step(first, 15)
    run.tell("finish")
    run.until_over(state="success")
    run.untell("finish")
    run.clear("train")
    second = run.until_training(other_than=first)
    run.until_step(second, 1)
    assert second.checkpoint_dir != first.checkpoint_dir
    assert run.steps(second)[0] == 1
    run.tell("finish")
    run.until_over(state="success")
    run.until_nothing_is_left()


def test_clear_ready_after_success(live: Live) -> None:
    """Clearing a task before train, when train is over, starts no process for nobody."""
    run = live.start()
    run.until_training()
    run.tell("finish")
    run.until_over(state="success")
    noted = run.noted_tasks()
    run.clear("ready")
    until(lambda: run.run_state() == "running", what="the run goes on")
    run.until_over(state="success")
    assert run.noted_tasks() == noted
    run.until_nothing_is_left()


def test_clear_failed_only(live: Live) -> None:
    """Train runs again alone: it brings the cluster back, continues, and cleans up without a teardown."""
    run = live.start()
    first = run.until_training()
    run.until_step(first, 15)
    run.mark("train", "failed")
    run.until_over(state="failed")
    run.until_nothing_is_left()
    teardowns = run.task("teardown")["try_number"]
    assert run.clear("train", only_failed=True, downstream=True) == [
        ("training.done", -1),
        ("training.train", -1),
    ]
    second = run.until_training(other_than=first)
    run.until_step(second, 1)
    assert run.steps(second)[0] > 10
    run.tell("finish")
    run.until_over(state="success")
    assert run.task("teardown")["try_number"] == teardowns
    run.until_nothing_is_left()


def test_mark_failed_before_the_cluster_is_back(live: Live) -> None:
    """A train that waits for a cluster of its own making takes it down when it is marked failed."""
    run = live.start()
    run.until_training()
    run.mark("train", "failed")
    run.until_over(state="failed")
    run.until_nothing_is_left()
    run.tell("deaf-ps-0")
    run.clear("train", only_failed=True)
    run.until_state("train", "deferred")
    until(run.training, what="a new incarnation")
    attempt = run.task("train")["try_number"]
    until(lambda: " starting" in str(run.log_files("train", attempt)), what="the trigger")
    run.mark("train", "failed")
    run.until_nothing_is_left(KILL_SECS)


def test_clear_the_sensor_while_train_is_deferred(live: Live) -> None:
    """Clearing the checkpoint sensor runs provision again, which adopts the training: no process changes."""
    run = live.start("live_watched")
    training = run.until_training()
    run.until_state("checkpoint", "success")
    run.clear("checkpoint")
    until(lambda: run.task("provision")["try_number"] == 2, what="provision runs again")
    run.until_state("provision", "success")
    run.until_state("checkpoint", "success")
    assert run.training() == training
    run.tell("finish")
    run.until_over(state="success")
    assert run.xcom("train")["training_id"] == str(training.id)
    run.until_nothing_is_left()


def test_clear_one_index_of_a_mapped_group(live: Live) -> None:
    """Clearing train of one map index replaces its training; the other's processes do not change."""
    run = live.start("live_mapped", group="sweep.training")
    first, other = run.until_training(0), run.until_training(1)
    run.clear("train", index=0)
    second = run.until_training(0, other_than=first)
    run.until_gone(first)
    until(lambda: run.task("provision", 1)["try_number"] == 2, what="the other's provision runs again")
    run.until_state("provision", "success", index=1)
    assert run.training(1) == other
    run.tell("finish")
    run.until_over(state="success")
    assert run.xcom("train", index=0)["training_id"] == str(second.id)
    assert run.xcom("train", index=1)["training_id"] == str(other.id)
    run.until_nothing_is_left()


# --- ending by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["failed", "success"])
def test_mark_train_while_it_is_deferred(live: Live, state: str) -> None:
    """Whatever the user marks train as, its training is gone from all hosts soon."""
    run = live.start()
    run.until_training()
    run.mark("train", state)
    run.until_nothing_is_left(KILL_SECS)
    run.until_over(state=state)


def test_run_marked_failed(live: Live) -> None:
    """A run that the user fails ends its training."""
    run = live.start()
    run.until_training()
    live.api.set_run_state(run.dag_id, run.run_id, "failed")
    run.until_nothing_is_left(KILL_SECS)


# --- provision ------------------------------------------------------------------------------------------------------


def ports_are_taken(folder: Path, stack: ExitStack) -> tuple[dict[str, object], str]:
    """The second host has no port left; the first had been reserved."""
    del folder
    held = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = held.getsockname()[1]
    return {"ports_b": f"{port}-{port}", "queue_secs": 1}, "ports are free"


def upload_fails(folder: Path, stack: ExitStack) -> tuple[dict[str, object], str]:
    """One host cannot take the program."""
    del stack
    (folder / "workdir").mkdir()
    (folder / "workdir" / "blobs").write_text("in the way")
    return {"workdir_b": str(folder / "workdir")}, "blobs"


def python_is_missing(folder: Path, stack: ExitStack) -> tuple[dict[str, object], str]:
    """One host has no such interpreter."""
    del stack
    return {"python_b": str(folder / "no-such-python")}, "no-such-python"


@pytest.mark.parametrize("fault", [ports_are_taken, upload_fails, python_is_missing])
def test_provision_fails_half_way(
    live: Live, fault: Callable[[Path, ExitStack], tuple[dict[str, object], str]]
) -> None:
    """A provision that cannot have all its hosts gives back what it had, and says which host and why."""
    folder = live.folder / fault.__name__
    folder.mkdir()
    with ExitStack() as stack:
        params, message = fault(folder, stack)
        run = live.start("live_once", **params)
        run.until_over(state="failed")
        assert run.state("provision") == "failed"
        assert not run.left()
        log = "\n".join(run.log("provision"))
        assert "gpu_b" in log
        assert message in log


def test_provision_waits_for_ports(live: Live) -> None:
    """A second run waits, holding nothing and no worker slot, while the first has the ports; then it trains."""
    first = live.start(ports_count=4)
    first.until_training()
    second = live.start(ports=first.ports)
    second.until_state("provision", "deferred")
    assert not second.locks()
    first.tell("finish")
    first.until_over(state="success")
    second.until_training()
    second.tell("finish")
    second.until_over(state="success")
    second.until_nothing_is_left()
    first.until_nothing_is_left()


# --- failures while it trains ---------------------------------------------------------------------------------------


def test_chief_is_killed(live: Live) -> None:
    """A chief that is killed starts again in place and continues; nobody else notices."""
    run = live.start()
    training = run.until_training()
    run.until_step(training, 15)
    os.kill(training.tasks["worker:0"][0], signal.SIGKILL)
    after = until(lambda: changed(run, training, "worker:0"), what="the chief starts again")
    assert after.agents == training.agents
    assert {k: v for k, v in after.tasks.items() if k != "worker:0"} == {
        k: v for k, v in training.tasks.items() if k != "worker:0"
    }
    run.tell("finish")
    run.until_over(state="success")
    assert run.task("train")["try_number"] == 1
    run.until_nothing_is_left()


def changed(run: Run, before: Training, task: str) -> Training | None:
    """The training, when all its TF tasks live and this one has another process."""
    found = run.training()
    if found is None or set(found.tasks) != set(before.tasks):
        return None
    return found if found.tasks[task] != before.tasks[task] else None


def test_chief_fails_for_good(live: Live) -> None:
    """When the chief's restarts are used up train fails, and says which TF task, its exit and its last words."""
    run = live.start("live_once", restarts=0)
    training = run.until_training()
    run.tell("exit-worker-0", "3")
    run.until_over(state="failed")
    log = "\n".join(run.log("train"))
    assert f"worker:0@{training.host_names['worker:0']}: exit code 3" in log
    assert "told to fail" in log.partition("the end of the log of worker:0")[2]
    run.until_nothing_is_left()


def test_agent_is_killed(live: Live) -> None:
    """With the agent of the chief's host die its TF tasks; the retry of train continues from the checkpoint."""
    run = live.start()
    first = run.until_training()
    run.until_step(first, 15)
    os.kill(first.agents[first.host("worker:0")][0], signal.SIGKILL)
    second = run.until_training(other_than=first)
    run.until_gone(first)
    run.until_step(second, 1)
    assert run.steps(second)[0] > 10
    assert run.task("train")["try_number"] == 2
    run.tell("finish")
    run.until_over(state="success")
    run.until_nothing_is_left()


# --- the triggerer --------------------------------------------------------------------------------------------------


@dataclass
class Followed:
    """A training that goes on through everything that happens to the triggerer, and its task log."""

    run: Run
    training: Training
    in_flight: set[int] = field(default_factory=set)
    """Steps that a triggerer may have had in hand, and acknowledged, when it was killed."""

    def logged(self) -> dict[str, list[int]]:
        """The chief's steps in each file of the task log, repeated ones included; a triggerer writes one file."""
        found = {}
        for name, lines in self.run.log_files("train").items():
            matches = [re.search(r"\[worker:0@\w+\] step (\d+) ", line) for line in lines]
            found[name] = [int(match[1]) for match in matches if match]
        return found

    def last(self) -> int:
        return max((max(steps, default=0) for steps in self.logged().values()), default=0)

    def printed(self) -> int:
        return self.run.steps(self.training)[-1]

    def until_caught_up(self) -> None:
        """Wait until the task log has all but what was printed in the last second."""
        until(lambda: self.last() >= self.printed() - 10, what="the task log goes on")

    def check(self) -> None:
        """No process has changed; the task log has every line in order, none twice, none lost but in a kill."""
        assert self.run.training() == self.training
        assert self.run.state("train") == "deferred"
        steps = [step for steps in self.logged().values() for step in steps]
        assert steps == sorted(set(steps))
        assert set(range(1, steps[-1])) - set(steps) <= self.in_flight


@pytest.fixture(scope="module")
def followed(live: Live) -> Iterator[Followed]:
    run = live.start()
    yield Followed(run, run.until_training())
    run.tell("finish")
    run.until_over(state="success")
    run.until_nothing_is_left()


@pytest.mark.alone
def test_slots_while_training(live: Live, followed: Followed) -> None:
    """With one training and nothing else no slot of the pool is occupied."""
    followed.until_caught_up()
    followed.check()
    pool = live.api.get("/pools/default_pool")
    assert pool["deferred_slots"] == 1
    assert pool["occupied_slots"] == 0


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_triggerer_restarts(live: Live, followed: Followed, number: signal.Signals) -> None:
    """However the triggerer ends, the next one goes on: no process changes and no log line is repeated."""
    followed.until_caught_up()
    before = followed.last()
    live.stack.kill("triggerer", number)
    followed.in_flight.update(range(before, followed.printed() + 1))
    followed.run.until_step(followed.training, followed.printed() + 10)  # printed while nobody listens
    live.stack.restart("triggerer")
    followed.until_caught_up()
    followed.check()


@pytest.mark.alone
def test_trigger_moves(live: Live, followed: Followed) -> None:
    """A trigger that Airflow gives to another triggerer is killed where it was: the training goes on."""
    run, database = followed.run, live.stack.home / "airflow.db"
    followed.until_caught_up()
    trigger = run.task("train")["trigger"]["id"]
    with closing(sqlite3.connect(database, timeout=30)) as db, db:
        db.execute(
            "insert into job (id, job_type, state, latest_heartbeat, hostname) "
            "values (99999, 'TriggererJob', 'running', datetime('now', '+1 hour'), 'elsewhere')"
        )
        assert db.execute("update trigger set triggerer_id = 99999 where id = ?", [trigger]).rowcount == 1
    until(lambda: "the trigger has moved" in str(run.log_files("train")), what="the trigger's kill")
    before = followed.last()
    with closing(sqlite3.connect(database, timeout=30)) as db, db:
        db.execute("delete from job where id = 99999")
        db.execute("update trigger set triggerer_id = null where triggerer_id = 99999")
    until(lambda: followed.last() > before + 10, what="the task log goes on")
    # A triggerer that gets a trigger for the second time writes its log file anew (3.3.2).
    newest = max(followed.logged().values(), key=lambda steps: max(steps, default=0))
    assert newest == list(range(before + 1, before + 1 + len(newest)))
    assert run.training() == followed.training
    assert run.state("train") == "deferred"


@pytest.mark.alone
def test_run_deleted(live: Live) -> None:
    """A deleted run has no teardown: the trigger ends the training."""
    run = live.start()
    run.until_training()
    live.stack.kill(
        "scheduler", signal.SIGTERM
    )  # it ends by itself when a run is gone that it looks at (3.3.2)
    live.api.set_run_state(run.dag_id, run.run_id, "queued")  # a running run cannot be deleted
    live.api.delete_run(run.dag_id, run.run_id)
    run.until_nothing_is_left(KILL_SECS)
    live.stack.restart("scheduler")
