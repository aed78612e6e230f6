"""Evaluate every checkpoint while the training goes on: one DAG trains, another runs for each new checkpoint.

1. `digits_watched` trains in a directory that stays the same, on the host `gpu-a`; each run goes on from where the last
   one has ended. The chief saves every five seconds and keeps one checkpoint.
2. `digits_checkpoints` is scheduled on the asset `digits-checkpoints`, whose watcher has `gpu-a` tell of each complete
   checkpoint, and pin it: so the trainer cannot take it away before it has been evaluated. A run evaluates the one that
   started it, or several side by side, each on `gpu-a`, with the job's program and hparams. A pin is released when its
   checkpoint has been evaluated.

`digits_checkpoints` is paused at first: as long as it is not, the triggerer keeps a connection to `gpu-a`.
"""

from __future__ import annotations

import os
from pathlib import Path

from airflow.sdk import Asset, AssetWatcher, Param, dag, task
from digits_files import write_digits

from airflow_tfps.asset_triggers import CheckpointEventTrigger
from airflow_tfps.assets import evaluation_asset
from airflow_tfps.group import TrainingTaskGroup
from airflow_tfps.models import EvaluateOperator

DATA = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")) / "data" / "watched-digits"
HOST = "gpu-a"
JOB = "jobs/watched_digits.yaml"
NAME = "digits-watched"

checkpoints = Asset(
    "digits-checkpoints",
    watchers=[
        AssetWatcher(
            name="directory",
            trigger=CheckpointEventTrigger(
                hosts="gpu_lab", host=HOST, directory="~/checkpoints/digits-watched", pin=True
            ),
        )
    ],
)


@dag(
    schedule=None,
    catchup=False,
    max_active_runs=1,  # two trainings cannot write to one directory
    params={"steps": Param(3000, type="integer", minimum=1, title="Global steps to add")},
    doc_md=__doc__,
    tags=["tfps", "tutorial"],
)
def digits_watched() -> None:
    @task
    def prepare() -> dict[str, str]:
        """Write `train.npz` and `eval.npz`."""
        return write_digits(DATA)

    data = prepare()
    TrainingTaskGroup(
        "training",
        job=JOB,
        hosts="gpu_lab",
        inputs={"train": data["train"], "eval": data["eval"]},
        steps="+{{ params.steps }}",
    )


@dag(
    schedule=[checkpoints],
    catchup=False,
    is_paused_upon_creation=True,
    doc_md=__doc__,
    tags=["tfps", "tutorial"],
)
def digits_checkpoints() -> None:
    @task
    def found(*, triggering_asset_events: dict | None = None) -> list[dict]:
        """The checkpoints that started this run: where each lies, its global step, its pin."""
        told = [event.extra["payload"] for event in triggering_asset_events[checkpoints]]
        return [one for one in told if not one["again"]]

    EvaluateOperator.partial(
        task_id="evaluate",
        job=JOB,
        hosts="gpu_lab",
        inputs={"eval": str(DATA / "eval.npz")},
        job_name=NAME,
        outlets=[evaluation_asset(NAME)],  # of a mapped task it must be said
    ).expand(checkpoint=found())


digits_watched()
digits_checkpoints()
