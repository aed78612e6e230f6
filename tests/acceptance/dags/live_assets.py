"""A DAG of the live suite that runs for each new complete checkpoint of a directory on a host."""

from __future__ import annotations

import os
from pathlib import Path

from airflow.sdk import DAG, Asset, AssetWatcher, task

from airflow_tfps.asset_triggers import CheckpointEventTrigger

WATCHED = Path(os.environ["AIRFLOW_HOME"]).parent / "watched" / "ckpt"

checkpoints = Asset(
    "live-checkpoints",
    watchers=[
        AssetWatcher(
            name="directory",
            trigger=CheckpointEventTrigger(host="gpu_a", directory=str(WATCHED), pin=True, existing=True),
        )
    ],
)


@task
def look(triggering_asset_events=None) -> list:
    return [event.extra["payload"] for event in triggering_asset_events[checkpoints]]


with DAG("live_each", schedule=[checkpoints], catchup=False):
    look()
