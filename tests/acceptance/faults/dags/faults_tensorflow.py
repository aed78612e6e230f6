"""The bundled linear regression on the bed: TensorFlow's own connections between hosts, synchronous."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_tfps.group import TrainingTaskGroup

JOB = {
    "name": "linear_regression",
    "program": os.environ["TFPS_BED_TENSORFLOW_PROGRAM"],
    "mode": "sync",
    "steps": "{{ params.steps }}",
    "roles": {
        "ps": {"count": 1, "restarts": 5, "hosts": ["gpu_a"]},
        "worker": {"count": 2, "restarts": 5, "hosts": ["gpu_b", "gpu_c"]},
    },
    "hparams": {"learning_rate": 0.05, "batch_size": 32, "step_secs": 0.05},
    "checkpoint": {
        "base_dir": "{{ params.control }}/checkpoints",
        "save_checkpoint_secs": 2,
        "max_to_keep": 1000,
    },
    "timeouts": {"grace_secs": 10, "stall_secs": 15},
    "env": {"LIVE_CONTROL": "{{ params.control }}"},
}

with DAG(
    "faults_tensorflow",
    schedule=None,
    params={
        "control": Param("", type="string"),
        "ports": Param("20000-29999", type="string"),
        "steps": Param(1_000_000, type="integer"),
    },
    default_args={"retry_delay": timedelta(seconds=2)},
):
    python = os.environ["TFPS_BED_PYTHON"]
    TrainingTaskGroup(
        "training",
        job=JOB,
        hosts={
            "hosts": {"gpu_a": {}, "gpu_b": {}, "gpu_c": {}},
            "defaults": {"gpus": 0, "python": python, "ports": "{{ params.ports }}"},
        },
    )
