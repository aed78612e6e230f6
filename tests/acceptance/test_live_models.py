"""Evaluation and promotion under running Airflow components: nights one after the other, a rollback, a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live import Run, until
from tfps_runtime.models import ModelDirectory
from tfps_runtime.protocol import TrainingId, run_dir
from tfps_runtime.reserve import is_held, read_lock

if TYPE_CHECKING:
    from live import Live

pytestmark = pytest.mark.live

SECS = 300.0


def start_night(live: Live, date: str, **params: object) -> Run:
    """A run of a logical date."""
    first = live.start("live_rollback", model_dir="/nowhere")  # only for a folder and ports of its own
    conf = {"control": str(first.control), "ports": f"{first.ports[0]}-{first.ports[-1]}", **params}
    run_id = live.api.trigger("live_models", conf, date)
    run = Run(live, "live_models", run_id, first.control, first.ports)
    live.runs.append(run)
    return run


def task_log(run: Run, task: str) -> str:
    number = run.api.tasks(run.dag_id, run.run_id)[task, -1]["try_number"]
    return "\n".join(run.api.log(run.dag_id, run.run_id, task, number))


@pytest.mark.tensorflow
def test_nights_are_promoted_only_if_better(live: Live) -> None:
    """The first night is promoted, a bad one skipped with its reason, a third begins with the weights of the second.

    A rollback in Airflow restores the former model, and the evaluations' metrics lie beside the checkpoints.
    """
    models = live.folder / "models"
    directory = ModelDirectory(str(models))

    first = start_night(live, "2026-03-01T02:00:00Z", model_dir=str(models), steps=20)
    first.until_over(state="success", secs=SECS)
    promoted = first.api.xcom("live_models", first.run_id, "promote")
    assert (promoted["version"], promoted["former"]) == (1, None)
    evaluated = first.api.xcom("live_models", first.run_id, "evaluate")
    assert evaluated["metrics"] == pytest.approx(first.xcom("train")["metrics"])
    assert json.loads(Path(evaluated["metrics_path"]).read_text())["metrics"] == evaluated["metrics"]

    second = start_night(live, "2026-03-02T02:00:00Z", model_dir=str(models), steps=2)
    second.until_over(state="success", secs=SECS)
    assert second.states()["promote", -1] == "skipped"
    assert "not promoted: loss" in task_log(second, "promote")
    assert os.readlink(models / "current") == "1"

    third = start_night(live, "2026-03-03T02:00:00Z", model_dir=str(models), steps=200, start_from="previous")
    third.until_over(state="success", secs=SECS)
    assert f"starting from {second.xcom('train')['checkpoint']}" in "\n".join(third.log("provision"))
    assert os.readlink(models / "current") == "2"
    last = directory.history[-1]
    assert last["former_value"] == pytest.approx(evaluated["metrics"]["loss"])
    assert last["provenance"]["logical_date"].startswith("2026-03-03T02:00:00")

    back = live.start("live_rollback", model_dir=str(models))
    back.until_over(state="success", secs=SECS)
    assert os.readlink(models / "current") == "1"
    assert [e["action"] for e in directory.history] == ["promoted", "refused", "promoted", "rolled_back"]
    for run in (first, second, third):
        run.until_nothing_is_left()
    events = live.api.get("/assets/events?limit=100&order_by=-timestamp")["asset_events"]
    told = {
        event["uri"]: event["extra"] for event in reversed(events) if event["source_run_id"] == third.run_id
    }
    assert {
        "tfps://training/live_models",
        "tfps://evaluation/live_models",
        "tfps://model/live_models",
    } == set(told)
    assert told["tfps://model/live_models"]["version"] == 2


def evaluations(run: Run) -> list[int]:
    """Pids of the run's evaluations' agents that live."""
    found = []
    for path in Path(run_dir()).glob("*.lock"):
        record = read_lock(str(path))
        if record is not None and is_held(str(path)):
            key = TrainingId.parse(record.training).key
            if key == f"{run.dag_id}/{run.run_id}/evaluate":
                found.append(record.pid)
    return found


@pytest.mark.parametrize("how", ["failed", "success", "clear"])
def test_an_ended_evaluation_leaves_nothing(live: Live, how: str) -> None:
    """Marked failed or success, or cleared, a deferred evaluation ends on its host; cleared, another one runs."""
    run = live.start("live_evaluation", group="evaluate")

    def state() -> str | None:
        return run.states().get(("evaluate", -1))

    until(lambda: state() == "deferred" and evaluations(run), SECS, run.states)
    until(lambda: "evaluator:0@gpu_a RUNNING" in task_log(run, "evaluate"), SECS, "it is followed")
    (agent,) = evaluations(run)
    if how == "clear":
        live.api.clear(run.dag_id, run.run_id, ["evaluate"])
        until(lambda: state() == "deferred" and evaluations(run) not in ([], [agent]), SECS, "another one")
        until(lambda: agent not in evaluations(run), 30, "the old one ends")
        until(lambda: "evaluator:0@gpu_a RUNNING" in task_log(run, "evaluate"), SECS, "that one is followed")
        how = "failed"
    live.api.set_task_state(run.dag_id, run.run_id, "evaluate", how)
    until(lambda: not evaluations(run), 30, "the evaluation ends")
    run.until_over(state=how, secs=SECS)
    run.until_nothing_is_left()
