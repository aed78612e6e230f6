"""A nightly linear regression that is evaluated and promoted; and an evaluation that lasts, to be killed."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_tfps.group import TrainingTaskGroup
from airflow_tfps.models import EvaluateOperator, PromoteOperator, RollbackOperator

REPOSITORY = Path(__file__).parents[3]
JOB = {
    "name": "live_models",
    "program": str(REPOSITORY / "dags" / "programs" / "linear_regression.py"),
    "steps": "{{ params.steps }}",
    "start_from": "{{ params.start_from }}",
    "roles": {"ps": 1, "worker": 1},
    "hparams": {"learning_rate": 0.05, "batch_size": 32},
    "checkpoint": {"base_dir": "{{ params.control }}/checkpoints"},
    "env": {"LIVE_CONTROL": "{{ params.control }}"},
}
HOSTS = {
    "hosts": {"gpu_a": {}},
    "defaults": {"gpus": 0, "python": sys.executable, "ports": "{{ params.ports }}"},
}
PARAMS = {
    "control": Param("", type="string"),
    "ports": Param("20000-29999", type="string"),
    "steps": Param(300, type="integer"),
    "start_from": Param("none", type="string"),
    "model_dir": Param("", type="string"),
}
RETRY = {"retry_delay": timedelta(seconds=2)}

with DAG("live_models", schedule=None, params=PARAMS, default_args=RETRY):
    training = TrainingTaskGroup("training", job=JOB, hosts=HOSTS)
    evaluation = EvaluateOperator(task_id="evaluate", training=training)
    PromoteOperator(
        task_id="promote",
        evaluation=evaluation,
        metric="loss",
        higher_is_better=False,
        model_dir="{{ params.model_dir }}",
    )

with DAG("live_rollback", schedule=None, params=PARAMS, default_args=RETRY):
    RollbackOperator(task_id="rollback", hosts=HOSTS, model_dir="{{ params.model_dir }}")

with DAG("live_evaluation", schedule=None, params=PARAMS, default_args={"retries": 0}):
    EvaluateOperator(
        task_id="evaluate",
        checkpoint="/tmp/model.ckpt-1",
        command=["sleep", "600.{{ params.control.rpartition('-')[2] }}"],
        hosts=HOSTS,
    )
