"""Checkpoints that start DAG runs, under running Airflow components."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live import until
from tfps_runtime.checkpoint import complete_checkpoints, verify
from tfps_runtime.pins import pins, pins_dir

from airflow_tfps.hook import ClusterHook
from airflow_tfps.inventory import Inventory

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from bundles import delete, save

if TYPE_CHECKING:
    from live import Live

pytestmark = pytest.mark.live


def told(live: Live) -> list[dict[str, Any]]:
    """What finished runs of the DAG were given, oldest first."""
    found = []
    runs = live.api.get("/dags/live_each/dagRuns?order_by=start_date")["dag_runs"]
    for run in runs:
        if run["state"] == "success":
            found += live.api.xcom("live_each", run["dag_run_id"], "look")
        assert run["state"] != "failed", run
    return found


def watch(live: Live, dag_id: str = "live_each", *, is_paused: bool) -> None:
    live.api.request("PATCH", f"/dags/{dag_id}", {"is_paused": is_paused})


def test_each_new_checkpoint_starts_a_run(live: Live) -> None:
    """Once, pinned; also over a pause, in which the trigger ends and Airflow forgets it but for the asset's state."""
    directory = live.folder / "watched" / "ckpt"
    directory.parent.mkdir()
    directory.mkdir()
    for step in (1, 2):
        save(directory, step)
        until(lambda step=step: len(told(live)) >= step, what="a run for each checkpoint")
        delete(directory / f"model.ckpt-{step}")
    watch(live, is_paused=True)
    until(lambda: not is_watched(live), what="the trigger ends")
    save(directory, 3)
    watch(live, is_paused=False)
    until(lambda: len(told(live)) >= 3, what="a run for the third")
    found = told(live)
    # What was told a moment before the trigger ended is told again.
    assert list(dict.fromkeys(one["global_step"] for one in found)) == [1, 2, 3]
    for one in found:
        assert one["host"] == "gpu_a"
        assert verify(one["checkpoint"]).size == 1000
    watch(live, is_paused=True)
    until(lambda: not is_watched(live), what="the trigger ends")
    assert len({one["pin"]["owner"] for one in found}) == 1
    with ClusterHook(inventory=Inventory.load(["local"])) as hook:  # which also ends the host's watcher
        assert len(hook.release_pins("local", **found[0]["pin"])) == 3
    assert pins(str(directory)) == []


def is_watched(live: Live, asset: str = "live-checkpoints") -> bool:
    """Whether Airflow has the trigger of an asset."""
    question = """
        select count(*) from trigger join asset_watcher on trigger_id = trigger.id join asset on asset_id = asset.id
        where asset.name = ?
    """
    with closing(sqlite3.connect(live.stack.home / "airflow.db", timeout=30)) as db:
        return db.execute(question, (asset,)).fetchone() != (0,)


def evaluated(live: Live) -> list[dict[str, Any]]:
    """What the evaluations have returned; none may have failed, and none been skipped for which there was something."""
    results = []
    for run in live.api.get("/dags/live_evaluations/dagRuns")["dag_runs"]:
        for (task, index), ti in live.api.tasks("live_evaluations", run["dag_run_id"]).items():
            is_empty = ti["state"] == "skipped" and index == -1  # a run that was only told again
            assert is_empty or ti["state"] not in ("failed", "skipped", "up_for_retry", "upstream_failed"), ti
            if task == "evaluate" and ti["state"] == "success":
                results.append(live.api.xcom("live_evaluations", run["dag_run_id"], task, map_index=index))
    return results


def test_every_checkpoint_of_a_training_is_evaluated(live: Live) -> None:
    """Saved each second, kept until the next is there: each is evaluated from its pin, and no pin is left."""
    directory = live.folder / "saved" / "ckpt"
    directory.parent.mkdir()
    run = live.start("live_saving")
    training = run.until_training(tasks=2)
    run.until_step(training, 40)
    run.tell("finish")
    run.until_over(state="success")
    last = run.steps(training)[-1]
    wanted = {*range(10, last, 10), last}
    assert [c.global_step for c in complete_checkpoints(str(directory))] == [last]

    def steps() -> set[int]:
        return {one["global_step"] for one in evaluated(live)}

    until(lambda: steps() == wanted, 240, lambda: f"evaluated {sorted(steps())} of {sorted(wanted)}")
    for one in evaluated(live):
        assert one["metrics"] == {"step": one["global_step"]}
        assert Path(one["checkpoint"]).parent.parent == Path(pins_dir(str(directory)))
        assert one["pin"] is None
        assert json.loads(Path(one["metrics_path"]).read_text())["metrics"] == one["metrics"]
    watch(live, "live_evaluations", is_paused=True)
    until(lambda: not is_watched(live, "live-saved"), what="the trigger ends")
    assert pins(str(directory)) == []
    run.until_nothing_is_left()
    with ClusterHook(inventory=Inventory.load(["local"])) as hook:  # which ends the host's watcher
        hook.release_pins("local", str(directory), f"asset/gpu_a/{directory}")
    assert not Path(pins_dir(str(directory))).exists()
