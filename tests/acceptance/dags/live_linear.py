"""The bundled linear regression, slow enough to be killed on the way."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_tfps.group import TrainingTaskGroup

REPOSITORY = Path(__file__).parents[3]
JOB = {
    "name": "linear_regression",
    "program": str(REPOSITORY / "dags" / "programs" / "linear_regression.py"),
    "mode": "{{ params.mode }}",
    "steps": "{{ params.steps }}",
    "roles": {"ps": 1, "worker": 2},
    "hparams": {"learning_rate": 0.05, "batch_size": 32, "step_secs": 0.05},
    "checkpoint": {"base_dir": "{{ params.control }}/checkpoints", "save_checkpoint_secs": 2},
    "timeouts": {"grace_secs": 10},
    "env": {"LIVE_CONTROL": "{{ params.control }}"},
}

with DAG(
    "live_linear",
    schedule=None,
    params={
        "control": Param("", type="string"),
        "ports": Param("20000-29999", type="string"),
        "mode": Param("async", enum=["async", "sync"]),
        "steps": Param(600, type="integer"),
    },
    default_args={"retry_delay": timedelta(seconds=2)},
):
    TrainingTaskGroup(
        "training",
        job=JOB,
        hosts={
            "hosts": {"gpu_a": {}},
            "defaults": {"gpus": 0, "python": sys.executable, "ports": "{{ params.ports }}"},
        },
    )
