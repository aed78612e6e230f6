"""DAGs of the live suite that run for each new complete checkpoint of a directory on a host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from airflow.sdk import DAG, Asset, AssetWatcher, Param, task

from airflow_tfps.asset_triggers import CheckpointEventTrigger
from airflow_tfps.assets import evaluation_asset
from airflow_tfps.group import TrainingTaskGroup
from airflow_tfps.models import EvaluateOperator

HOME = Path(os.environ["AIRFLOW_HOME"]).parent
PROGRAMS = Path(__file__).parents[1] / "programs"


def watched(name: str, directory: Path) -> Asset:
    trigger = CheckpointEventTrigger(host="gpu_a", directory=str(directory), pin=True, existing=True)
    return Asset(name, watchers=[AssetWatcher(name="directory", trigger=trigger)])


# --- told

checkpoints = watched("live-checkpoints", HOME / "watched" / "ckpt")


@task
def look(triggering_asset_events=None) -> list:
    return [event.extra["payload"] for event in triggering_asset_events[checkpoints]]


with DAG("live_each", schedule=[checkpoints], catchup=False):
    look()

# --- evaluated while a training saves, and keeps one

SAVED = HOME / "saved" / "ckpt"
saved = watched("live-saved", SAVED)
JOB = {
    "name": "live_saving",
    "script": "../programs/stand_in.py",
    "args": ["--control={{ params.control }}", "--checkpoint-dir={checkpoint_dir}", "--keep=1"],
    "roles": {"ps": 1, "worker": 1},
    "preload": ["json"],
    "env": {"LIVE_CONTROL": "{{ params.control }}"},
    "checkpoint": {"dir": str(SAVED)},
    "timeouts": {"grace_secs": 3, "ready_secs": 120},
    "progress": r"step (?P<step>\d+) loss (?P<loss>[\d.]+)",
}
HOSTS = {"hosts": {"gpu_a": {}}, "defaults": {"gpus": 0, "ports": "{{ params.ports }}"}}

with DAG(
    "live_saving",
    schedule=None,
    params={"control": Param("", type="string"), "ports": Param("20000-29999", type="string")},
):
    TrainingTaskGroup("training", job=JOB, hosts=HOSTS)


@task
def found(triggering_asset_events=None) -> list:
    told = [event.extra["payload"] for event in triggering_asset_events[saved]]
    return [one for one in told if not one["again"]]


with DAG("live_evaluations", schedule=[saved], catchup=False):
    EvaluateOperator.partial(
        task_id="evaluate",
        command=[sys.executable, str(PROGRAMS / "look_at.py"), "{inputs.checkpoint}"],
        hosts=["gpu_a"],
        job_name="live_saving",
        outlets=[evaluation_asset("live_saving")],
        retries=0,
    ).expand(checkpoint=found())
