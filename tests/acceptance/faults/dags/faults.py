"""DAGs of the fault matrix: a stand-in training on three hosts, in the shapes that the rows need.

Each run has a folder of its own (`control`), by which its training is told what to do, and ports of its own.
"""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, task_group

from airflow_tfps.group import TrainingTaskGroup

PARAMS = {
    "control": Param("", type="string"),
    "ports": Param("20000-29999", type="string"),
    "restarts": Param(2, type="integer"),
    "grace_secs": Param(3, type="integer"),
    "stall_secs": Param(600, type="integer"),
    "lease_secs": Param(3600, type="integer"),
    "unreachable_secs": Param(300, type="integer"),
    "queue_secs": Param(300, type="integer"),
    "ready_secs": Param(120, type="integer"),
    "directory": Param("", type="string"),
    "workdir_b": Param("~/.tfps", type="string"),
    **{f"python_{letter}": Param(os.environ["TFPS_BED_PYTHON"], type="string") for letter in "abc"},
}
JOB: dict[str, Any] = {
    "name": "stand_in",
    "script": os.environ["TFPS_BED_PROGRAM"],
    "args": ["--control={{ params.control }}", "--checkpoint-dir={checkpoint_dir}"],
    "roles": {
        "ps": {"count": 1, "restarts": "{{ params.restarts }}", "hosts": ["gpu_a"]},
        "worker": {"count": 2, "restarts": "{{ params.restarts }}", "hosts": ["gpu_b", "gpu_c"]},
    },
    "preload": ["json"],
    "env": {"LIVE_CONTROL": "{{ params.control }}"},
    "checkpoint": {"base_dir": "{{ params.directory or params.control }}/checkpoints"},
    "timeouts": {
        "grace_secs": "{{ params.grace_secs }}",
        "ready_secs": "{{ params.ready_secs }}",
        "queue_secs": "{{ params.queue_secs }}",
        "stall_secs": "{{ params.stall_secs }}",
        "lease_secs": "{{ params.lease_secs }}",
        "unreachable_secs": "{{ params.unreachable_secs }}",
    },
    "progress": r"step (?P<step>\d+) loss (?P<loss>[\d.]+)",
}
INVENTORY = {
    "hosts": {
        "gpu_a": {"python": "{{ params.python_a }}"},
        "gpu_b": {"python": "{{ params.python_b }}", "workdir": "{{ params.workdir_b }}"},
        "gpu_c": {"python": "{{ params.python_c }}"},
    },
    "defaults": {"gpus": 0, "ports": "{{ params.ports }}"},
}
RETRY = {"retry_delay": timedelta(seconds=2)}
FIXED = copy.deepcopy(JOB)
FIXED["checkpoint"] = {"dir": "{{ params.directory }}"}

with DAG("faults", schedule=None, params=PARAMS, default_args=RETRY):
    TrainingTaskGroup("training", job=JOB, hosts=INVENTORY)

with DAG("faults_once", schedule=None, params=PARAMS, default_args={"retries": 0}):
    TrainingTaskGroup("training", job=JOB, hosts=INVENTORY)

with DAG(
    "faults_slow_retry", schedule=None, params=PARAMS, default_args={"retry_delay": timedelta(seconds=90)}
):
    TrainingTaskGroup("training", job=JOB, hosts=INVENTORY)

with DAG("faults_fixed", schedule=None, params=PARAMS, default_args={"retries": 0}):
    TrainingTaskGroup("training", job=FIXED, hosts=INVENTORY)

with DAG("faults_fixed_elsewhere", schedule=None, params=PARAMS, default_args={"retries": 0}):
    ELSEWHERE = copy.deepcopy(FIXED)
    ELSEWHERE["roles"]["worker"] = {"count": 1, "hosts": ["gpu_c"]}
    TrainingTaskGroup("training", job=ELSEWHERE, hosts=INVENTORY)

with DAG("faults_evaluator", schedule=None, params=PARAMS, default_args=RETRY):
    EVALUATED = copy.deepcopy(JOB)
    EVALUATED["roles"]["evaluator"] = {"count": 1, "restarts": "{{ params.restarts }}", "hosts": ["gpu_c"]}
    TrainingTaskGroup("training", job=EVALUATED, hosts=INVENTORY)

with DAG("faults_mapped", schedule=None, params=PARAMS, default_args=RETRY):

    @task_group
    def sweep(number: int) -> None:
        TrainingTaskGroup("training", job=JOB, hosts=INVENTORY)

    sweep.expand(number=[0, 1])

with DAG(
    "faults_timeout", schedule=None, params=PARAMS, default_args=RETRY, dagrun_timeout=timedelta(seconds=110)
):
    TrainingTaskGroup("training", job=JOB, hosts=INVENTORY)

with DAG(
    "faults_execution_timeout",
    schedule=None,
    params=PARAMS,
    default_args={**RETRY, "execution_timeout": timedelta(seconds=30)},
):
    TrainingTaskGroup("training", job=JOB, hosts=INVENTORY)
