"""DAGs of the live suite: a stand-in training in the shapes that a user may clear, kill and mark.

Each run has a folder of its own (`control`), by which its training is told what to do, and ports of its own.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param, task, task_group

from airflow_tfps.group import TrainingTaskGroup

HOSTS = ("gpu_a", "gpu_b", "gpu_c")
PARAMS = {
    "control": Param("", type="string"),
    "ports": Param("20000-29999", type="string"),
    "ports_b": Param("", type="string"),
    "python_b": Param("python3", type="string"),
    "workdir_b": Param("~/.tfps", type="string"),
    "restarts": Param(2, type="integer"),
    "queue_secs": Param(300, type="integer"),
}
JOB = {
    "name": "stand_in",
    "script": "../programs/stand_in.py",
    "args": ["--control={{ params.control }}", "--checkpoint-dir={checkpoint_dir}"],
    "roles": {
        "ps": {"count": 1, "restarts": "{{ params.restarts }}"},
        "worker": {"count": 2, "restarts": "{{ params.restarts }}"},
    },
    "preload": ["json"],
    "env": {"LIVE_CONTROL": "{{ params.control }}"},
    "checkpoint": {"base_dir": "{{ params.control }}/checkpoints"},
    "timeouts": {"grace_secs": 3, "ready_secs": 120, "queue_secs": "{{ params.queue_secs }}"},
    "progress": r"step (?P<step>\d+) loss (?P<loss>[\d.]+)",
}
INVENTORY = {
    "hosts": {
        "gpu_a": {},
        "gpu_b": {
            "ports": "{{ params.ports_b or params.ports }}",
            "python": "{{ params.python_b }}",
            "workdir": "{{ params.workdir_b }}",
        },
        "gpu_c": {},
    },
    "defaults": {"gpus": 0, "ports": "{{ params.ports }}"},
}
RETRY = {"retry_delay": timedelta(seconds=2)}


@task
def use(result: dict) -> int:
    return int(result["global_step"])


with DAG("live", schedule=None, params=PARAMS, default_args=RETRY):
    TrainingTaskGroup("training", job=JOB, hosts=INVENTORY)

with DAG("live_once", schedule=None, params=PARAMS, default_args={"retries": 0}):
    TrainingTaskGroup("training", job=JOB, hosts=INVENTORY)

with DAG("live_watched", schedule=None, params=PARAMS, default_args=RETRY):
    use(TrainingTaskGroup("training", job=JOB, hosts=INVENTORY, watch_checkpoints=True).output)

with DAG("live_mapped", schedule=None, params=PARAMS, default_args=RETRY):

    @task_group
    def sweep(number: int) -> None:
        TrainingTaskGroup("training", job=JOB, hosts=INVENTORY, hparams=None)

    sweep.expand(number=[0, 1])
