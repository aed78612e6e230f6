"""Sensors: they wait, deferred, and never stop anything.

Imported by DAG files: nothing heavy at import.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from airflow_tfps.operators import (
    DEFER_SLACK_SECS,
    RETRIES,
    RETRY_DELAY,
    TRAIN_IS_OVER,
    airflow_errors,
    train_state,
)
from airflow_tfps.triggers import CheckpointTrigger, ReadyTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class ClusterReadySensor(BaseSensorOperator):
    """Wait until every TF task of the cluster but the chief listens and can be reached from every host that needs it.

    Fails with the names of what is missing after the job's `ready_secs`, or at once when a TF task has failed; then it
    is not retried.

    Args:
        handle: What ProvisionClusterOperator returned.
    """

    template_fields: Sequence[str] = ("handle",)
    template_fields_renderers = {"handle": "json"}  # noqa: RUF012  Airflow's form
    ui_color = "#d5f0dc"

    def __init__(
        self,
        *,
        handle: Any,
        retries: int = RETRIES,
        retry_delay: timedelta | float = RETRY_DELAY,
        **kwargs: Any,
    ) -> None:
        super().__init__(retries=retries, retry_delay=retry_delay, **kwargs)
        self.handle = handle

    def execute(self, context: Context) -> None:
        from airflow_tfps.handle import Handle

        with airflow_errors():
            handle = Handle.from_json(self.handle)
        if train_state(self, context) in TRAIN_IS_OVER:
            self.log.info("train has ended: nobody waits for the cluster")
            return
        self.defer(
            trigger=ReadyTrigger(handle=self.handle),
            method_name="ready",
            timeout=timedelta(seconds=handle.job.timeouts.ready_secs + DEFER_SLACK_SECS),
        )

    def ready(self, context: Context, event: Mapping[str, Any]) -> None:
        """Resume with what the trigger found."""
        del context
        if not event.get("ready"):
            raise AirflowFailException(str(event.get("reason")))
        self.log.info("every TF task is up")


class CheckpointSensor(BaseSensorOperator):
    """Wait for a complete checkpoint; returns `{"checkpoint", "global_step", "host", "size", "time"}`.

    A checkpoint counts when its state, index and every shard are there in full. Inside a TrainingTaskGroup it ends when
    `train` is over and nothing newer is complete: skipped, saying so.

    Args:
        training: Handle of a training, or what TrainOperator returned; its directory is watched on the chief's host.
        checkpoint_dir: Instead: a directory of `host`.
        host: ssh connection id, or `local` for this machine; with `checkpoint_dir`.
        which: `latest` takes the next complete one, `final` the one that a finished training left.
        min_step: Only a global step of at least this.
        newer_than: Only checkpoints written after this time (seconds since the epoch).
        hosts: Inventory that holds the training's hosts, for `training` that is a TrainOperator's result.
    """

    template_fields: Sequence[str] = ("training", "checkpoint_dir", "host", "min_step", "newer_than", "hosts")
    ui_color = "#e9def5"

    def __init__(
        self,
        *,
        training: Any = None,
        checkpoint_dir: str | None = None,
        host: str = "local",
        which: Literal["latest", "final"] = "latest",
        min_step: int | str | None = None,
        newer_than: float | str | None = None,
        hosts: Any = None,
        base_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.training = training
        self.checkpoint_dir = checkpoint_dir
        self.host = host
        self.which = which
        self.min_step = min_step
        self.newer_than = newer_than
        self.hosts = hosts
        self.base_dir = base_dir

    def execute(self, context: Context) -> None:  # noqa: ARG002  Airflow's form
        with airflow_errors():
            where = self._where()
        since = float(self.newer_than) if self.newer_than is not None else 0.0
        self.defer(
            trigger=CheckpointTrigger(
                host=where["host"],
                directory=where["directory"],
                training=where.get("training"),
                which=self.which,
                min_step=int(self.min_step) if self.min_step is not None else 0,
                newer_than=since,
                train_task_id=self._train_task_id(),
                deadline=time.time() + self.timeout,
            ),
            method_name="found",
            timeout=timedelta(seconds=self.timeout + DEFER_SLACK_SECS),
        )

    def found(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any]:
        """Resume with a checkpoint, or with the reason why there will be none."""
        del context
        if event.get("checkpoint") is not None:
            return dict(event["checkpoint"])
        reason = str(event.get("reason"))
        if event.get("skip") or self.soft_fail:
            raise AirflowSkipException(reason)
        if event.get("transient", True):
            raise AirflowException(reason)
        raise AirflowFailException(reason)

    def _where(self) -> dict[str, Any]:
        """Host (as its inventory describes it) and directory to watch. Raises SpecError."""
        from airflow_tfps.errors import SpecError
        from airflow_tfps.handle import Handle
        from airflow_tfps.inventory import Inventory
        from airflow_tfps.spec_files import folder_of

        if (self.training is None) == (self.checkpoint_dir is None):
            raise SpecError("CheckpointSensor", ["exactly one of training and checkpoint_dir is needed"])
        if self.checkpoint_dir is not None:
            inventory = Inventory.load([self.host])
            return {"host": inventory.to_dict(), "directory": self.checkpoint_dir}
        if isinstance(self.training, Mapping) and "tasks" in self.training:
            handle = Handle.from_json(self.training)
            host = handle.inventory.subset([handle.chief_host])
            return {
                "host": host.to_dict(),
                "directory": handle.checkpoint_dir,
                "training": handle.to_json() if self.which == "final" else None,
            }
        if not isinstance(self.training, Mapping) or not self.training.get("checkpoint"):
            raise SpecError("CheckpointSensor", ["training: neither a handle nor a result with a checkpoint"])
        if self.hosts is None:
            raise SpecError(
                "CheckpointSensor", ["hosts: needed to find the host that a TrainOperator's result names"]
            )
        inventory = Inventory.load(self.hosts, base_dir=Path(folder_of(self)))
        directory = self.training["checkpoint"].rpartition("/")[0]
        return {"host": inventory.subset([self.training["host"]]).to_dict(), "directory": directory}

    def _train_task_id(self) -> str | None:
        """The TrainOperator of the same group, if there is one."""
        from airflow_tfps.operators import TrainOperator

        group = self.task_group
        if group is None or group.group_id is None:
            return None
        return next((t.task_id for t in group.children.values() if isinstance(t, TrainOperator)), None)
