"""Checkpoints that start DAG runs, under running Airflow components."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live import until
from tfps_runtime.checkpoint import verify
from tfps_runtime.pins import pins

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


def watch(live: Live, *, is_paused: bool) -> None:
    live.api.request("PATCH", "/dags/live_each", {"is_paused": is_paused})


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


def is_watched(live: Live) -> bool:
    """Whether Airflow has the trigger."""
    with closing(sqlite3.connect(live.stack.home / "airflow.db", timeout=30)) as db:
        found = db.execute("select count(*) from trigger where classpath like '%CheckpointEventTrigger'")
        return found.fetchone() != (0,)
