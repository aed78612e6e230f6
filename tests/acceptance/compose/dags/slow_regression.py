"""A training that lasts long enough for something to die under it: every step of a worker takes a tenth of a second."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import Param, dag

from airflow_tfps.group import TrainingTaskGroup


@dag(
    schedule=None,
    params={"steps": Param(1000, type="integer")},
    default_args={"retry_delay": timedelta(seconds=5)},
)
def slow_regression() -> None:
    TrainingTaskGroup(
        "training", job="jobs/slow_regression.yaml", hosts="gpu_lab", steps="{{ params.steps }}"
    )


slow_regression()
