"""The example DAGs under running Airflow components: nights that are filled in, and DAGs that start each other."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live import until
from tfps_runtime.models import ModelDirectory

if TYPE_CHECKING:
    from live import Live

pytestmark = [pytest.mark.live, pytest.mark.tensorflow]

SECS = 400.0


def runs_of(live: Live, dag_id: str) -> list[dict[str, Any]]:
    """Its runs, by their start."""
    return list(live.api.get(f"/dags/{dag_id}/dagRuns?order_by=start_date")["dag_runs"])


def until_over(live: Live, dag_id: str, count: int) -> list[dict[str, Any]]:
    """Wait until so many runs of a DAG have succeeded."""

    def over() -> list[dict[str, Any]] | None:
        found = runs_of(live, dag_id)
        for run in found:
            assert run["state"] != "failed", (dag_id, live.api.task_states(dag_id, run["dag_run_id"]))
        return found if [run["state"] for run in found] == ["success"] * count else None

    return until(over, SECS, lambda: (dag_id, [run["state"] for run in runs_of(live, dag_id)]))


def test_several_nights_are_filled_in(live: Live) -> None:
    """A backfill of `nightly_digits` trains night after night, each in a directory of its own; the first is promoted."""
    models = live.folder / "nights"
    backfill = live.api.request(
        "POST",
        "/backfills",
        {
            "dag_id": "nightly_digits",
            "from_date": "2026-03-01T00:00:00Z",
            "to_date": "2026-03-02T12:00:00Z",
            "max_active_runs": 1,
            "dag_run_conf": {"steps": 20, "min_accuracy": 0.0, "model_dir": str(models)},
        },
    )
    first, second = until_over(live, "nightly_digits", 2)
    assert [run["run_type"] for run in (first, second)] == ["backfill"] * 2
    nights = [datetime.fromisoformat(run["logical_date"]) for run in (first, second)]
    assert [f"{night:%d %H:%M}" for night in nights] == ["01 02:00", "02 02:00"]
    assert first["end_date"] <= second["start_date"]

    directories = set()
    for run in (first, second):
        trained, evaluated = (
            live.api.xcom("nightly_digits", run["dag_run_id"], task)
            for task in ("training.train", "evaluate")
        )
        assert trained["global_step"] >= 20
        assert evaluated["metrics"]["accuracy"] == pytest.approx(trained["metrics"]["accuracy"])
        directories.add(os.path.dirname(trained["checkpoint"]))
    assert len(directories) == 2
    history = ModelDirectory(str(models)).history
    assert [line["provenance"]["run_id"] for line in history] == [
        run["dag_run_id"] for run in (first, second)
    ]
    assert history[0]["action"] == "promoted"
    until(
        lambda: live.api.get(f"/backfills/{backfill['id']}")["completed_at"],
        SECS,
        "Airflow closes the backfill",
    )


def test_data_start_a_training_and_a_model_its_consumer(live: Live) -> None:
    """`digits_data` starts the training; that starts its evaluation, and by the model it promotes the consumer."""
    live.api.trigger("digits_data")
    [training] = until_over(live, "digits_training", 1)
    [consumer] = until_over(live, "digits_consumer", 1)
    [evaluation] = until_over(live, "digits_evaluation", 1)
    assert [run["run_type"] for run in (training, consumer, evaluation)] == ["asset_triggered"] * 3

    trained = live.api.xcom("digits_training", training["dag_run_id"], "training.train")
    promoted = live.api.xcom("digits_training", training["dag_run_id"], "promote")
    evaluated = live.api.xcom("digits_evaluation", evaluation["dag_run_id"], "evaluate")
    used = live.api.xcom("digits_consumer", consumer["dag_run_id"], "use")
    assert evaluated["checkpoint"] == trained["checkpoint"]
    assert evaluated["metrics"]["accuracy"] == pytest.approx(trained["metrics"]["accuracy"])
    assert (promoted["version"], used) == (1, promoted["path"])
    assert Path(used, "saved_model.pb").is_file()
