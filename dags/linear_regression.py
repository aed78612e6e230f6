"""The shortest useful training DAG: y = 2x + 10, found by two workers and a parameter server.

`gpu_lab` is an Airflow connection of type `tfps`: its `hosts` name the machines, each an ssh connection. The job file
beside this one names the program and the TF tasks. Trigger it from the UI and watch the log of `training.train`.
"""

from __future__ import annotations

from airflow.sdk import Param, dag

from airflow_tfps.group import TrainingTaskGroup


@dag(
    schedule=None,
    params={
        "steps": Param(400, type="integer", minimum=1, title="Global steps"),
        "mode": Param("async", enum=["async", "sync"], title="Mode"),
    },
    doc_md=__doc__,
    tags=["tfps", "tutorial"],
)
def linear_regression() -> None:
    TrainingTaskGroup(
        "training",
        job="jobs/linear_regression.yaml",
        hosts="gpu_lab",
        steps="{{ params.steps }}",
        mode="{{ params.mode }}",
    )


linear_regression()
