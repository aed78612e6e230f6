"""Sensors: they wait, deferred, and never stop anything.

Imported by DAG files: nothing heavy at import.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
)

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

    from airflow_tfps.inventory import Inventory


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


CURSOR_KEY = "tfps_checkpoints"
"""Key in the task state store: what a sensor for every checkpoint has found so far, over deferrals and retries."""
AT_MOST = 20
"""So many checkpoints a sensor takes, and pins."""


class CheckpointSensor(BaseSensorOperator):
    """Wait for a complete checkpoint; returns `{"checkpoint", "global_step", "host", "size", "time"}`.

    A checkpoint counts when its index and every shard are there in full. When the `train` of its training is over and
    nothing newer is complete, the sensor ends: skipped, saying so.

    With `which="every"` it returns a list of them, each also with `pin`, as soon as `train` is over, `at_most` are
    found, or the time is over. On a host each is pinned the moment it is complete: it stays, whatever the trainer
    keeps, until it is released (`ClusterHook.release_pins`) or nobody has renewed it for a week. What was found is
    kept over deferrals and retries.

    Args:
        training: Handle of a training, or what TrainOperator returned; its directory is watched on the chief's host.
        checkpoint_dir: Instead: a directory of `host`, or a URL of object storage.
        host: ssh connection id, or `local` for the triggerer's machine; with `checkpoint_dir`.
        which: `latest` takes the next complete one, `every` all of them, `final` the one that a finished training left.
        min_step: Only a global step of at least this.
        newer_than: Only checkpoints written after this time (seconds since the epoch).
        at_most: With `every`: how many, 20 at most.
        hosts: Inventory that holds `host`, or the host of a `training` that is a TrainOperator's result.
        base_dir: What a relative path of an inventory is relative to; default: the DAG's folder.
        poll_secs: Between two looks into object storage.
    """

    template_fields: Sequence[str] = ("training", "checkpoint_dir", "host", "min_step", "newer_than", "hosts")
    ui_color = "#e9def5"

    def __init__(
        self,
        *,
        training: Any = None,
        checkpoint_dir: str | None = None,
        host: str = "local",
        which: Literal["latest", "every", "final"] = "latest",
        min_step: int | str | None = None,
        newer_than: float | str | None = None,
        at_most: int = AT_MOST,
        hosts: Any = None,
        base_dir: str | None = None,
        poll_secs: float = 30.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.training = training
        self.checkpoint_dir = checkpoint_dir
        self.host = host
        self.which = which
        self.min_step = min_step
        self.newer_than = newer_than
        self.at_most = at_most
        self.hosts = hosts
        self.base_dir = base_dir
        self.poll_secs = poll_secs

    def execute(self, context: Context) -> Any:
        self._check()
        return self._wait(context, time.time() + self.timeout)

    def _check(self) -> None:
        from airflow_tfps.errors import SpecError

        faults = []
        if self.which not in ("latest", "every", "final"):
            faults.append(f"which: {self.which!r} is none of latest, every, final")
        if not 1 <= self.at_most <= AT_MOST:
            faults.append(f"at_most: from 1 to {AT_MOST}, is {self.at_most}")
        for name, kind, what in (
            ("min_step", int, "an integer"),
            ("newer_than", float, "a number of seconds"),
        ):
            value = getattr(self, name)
            try:
                is_wrong = isinstance(value, bool) or not math.isfinite(kind(0 if value is None else value))
            except (TypeError, ValueError, OverflowError):
                is_wrong = True
            if is_wrong:
                faults.append(f"{name}: {what} is needed, is {value!r}")
        with airflow_errors():
            if faults:
                raise SpecError("CheckpointSensor", faults)

    def _wait(self, context: Context, deadline: float) -> NoReturn:
        with airflow_errors():
            where = self._where()
        every = self.which == "every"
        kept = self._kept(context) if every else []
        train_task_id, train_run = self._train_task(context)
        newer_than = 0.0 if self.newer_than is None else float(self.newer_than)
        self.defer(
            trigger=CheckpointTrigger(
                host=where["host"],
                directory=where["directory"],
                training=where.get("training"),
                which=self.which,
                min_step=0 if self.min_step is None else int(self.min_step),
                newer_than=max(newer_than, where.get("since") or 0.0),
                train_task_id=train_task_id,
                train_run=train_run,
                deadline=deadline,
                after=_cursor(kept),
                pin=self._owner(context) if every else None,
                room=self.at_most - len(kept),
                poll_secs=self.poll_secs,
            ),
            method_name="found_some" if every else "found",
            kwargs={"deadline": deadline} if every else None,
            timeout=timedelta(seconds=max(deadline - time.time(), 0.0) + DEFER_SLACK_SECS),
        )

    def found(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any]:
        """Resume with a checkpoint, or with the reason why there will be none."""
        del context
        if event.get("checkpoint") is not None:
            return dict(event["checkpoint"])
        raise self._end(event)

    def found_some(self, context: Context, event: Mapping[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Resume with some of every checkpoint: keep them, and wait for more unless it is over."""
        kept = self._kept(context)
        for one in event.get("checkpoints") or []:
            if one in kept:  # Airflow may deliver an event twice
                continue
            self.log.info("found %s (global step %s)", one["checkpoint"], one["global_step"])
            if one.get("host") is not None and one.get("pin") is None:
                self.log.warning("%s is not pinned: its trainer may delete it", one["checkpoint"])
            kept.append(one)
        store = context["task_state_store"]
        store.set(CURSOR_KEY, [*kept])
        reason = event.get("reason")
        if reason is None and len(kept) < self.at_most:
            self._wait(context, deadline)
        if not kept or "transient" in event:
            raise self._end(event)
        self.log.info(
            "%d checkpoints; %s", len(kept), reason or f"that is all that is taken ({self.at_most})"
        )
        store.delete(CURSOR_KEY)
        return kept

    def _end(self, event: Mapping[str, Any]) -> AirflowException:
        """What to raise when there is no checkpoint."""
        reason = str(event.get("reason"))
        if event.get("skip") or self.soft_fail:
            return AirflowSkipException(reason)
        if event.get("late"):
            return AirflowSensorTimeout(reason)
        return AirflowException(reason) if event.get("transient", True) else AirflowFailException(reason)

    def _kept(self, context: Context) -> list[dict[str, Any]]:
        kept: Any = context["task_state_store"].get(CURSOR_KEY)
        return list(kept or [])

    def _owner(self, context: Context) -> str:
        """For whom checkpoints are pinned: this task in this run."""
        from tfps_runtime.protocol import training_key

        ti = context["ti"]
        index = -1 if ti.map_index is None else ti.map_index
        return training_key(ti.dag_id, ti.run_id, self.task_id, index)

    def _where(self) -> dict[str, Any]:
        """Host (as its inventory describes it) and directory to watch. Raises SpecError."""
        from airflow_tfps.errors import SpecError
        from airflow_tfps.handle import Handle
        from airflow_tfps.inventory import Inventory
        from airflow_tfps.spec_files import folder_of
        from airflow_tfps.watch import is_object_storage

        if (self.training is None) == (self.checkpoint_dir is None):
            raise SpecError("CheckpointSensor", ["exactly one of training and checkpoint_dir is needed"])
        if self.checkpoint_dir is not None:
            if is_object_storage(self.checkpoint_dir):
                return {"host": None, "directory": self.checkpoint_dir}
            inventory = Inventory.load(self.hosts or [self.host], base_dir=folder_of(self))
            return {"host": _only(inventory, self.host), "directory": self.checkpoint_dir}
        if isinstance(self.training, Mapping) and "tasks" in self.training:
            handle = Handle.from_json(self.training)
            host = handle.inventory.subset([handle.chief_host])
            return {
                "host": host.to_dict(),
                "directory": handle.checkpoint_dir,
                "training": handle.to_json() if self.which == "final" else None,
                "since": handle.since,
            }
        if not isinstance(self.training, Mapping) or not self.training.get("checkpoint"):
            raise SpecError("CheckpointSensor", ["training: neither a handle nor a result with a checkpoint"])
        hosts = (self.training.get("origin") or {}).get("hosts") if self.hosts is None else self.hosts
        if hosts is None:
            raise SpecError(
                "CheckpointSensor", ["hosts: needed to find the host that a TrainOperator's result names"]
            )
        inventory = Inventory.load(hosts, base_dir=folder_of(self))
        directory = self.training["checkpoint"].rpartition("/")[0]
        return {"host": _only(inventory, self.training["host"]), "directory": directory}

    def _train_task(self, context: Context) -> tuple[str | None, dict[str, Any] | None]:
        """The task that trains, and where it is, if not in this run and map index; None if nobody knows.

        It is the TrainOperator of the same group, or that of the training's key: in another group, or another DAG,
        where a TrainingTaskGroup calls it `train`.
        """
        from tfps_runtime.protocol import parse_key

        from airflow_tfps.operators import TrainOperator

        group = self.task_group
        if group is not None and group.group_id is not None:
            for task in group.children.values():
                if isinstance(task, TrainOperator):
                    return task.task_id, None
        if not isinstance(self.training, Mapping):
            return None, None
        key = parse_key(
            str(self.training.get("training", self.training.get("training_id"))).rpartition("#")[0]
        )
        if key is None:
            return None, None
        dag_id, run_id, group_id, index = key
        place = {"dag_id": dag_id, "run_id": run_id, "map_index": index}
        dag = self.get_dag()
        if dag is None or dag_id != context["ti"].dag_id:
            return f"{group_id}.train", place
        for task in dag.tasks:
            if isinstance(task, TrainOperator) and getattr(task.task_group, "group_id", None) == group_id:
                return task.task_id, place
        return None, None


def _only(inventory: Inventory, host: str) -> dict[str, Any]:
    from airflow_tfps.errors import SpecError

    if host not in inventory.hosts:
        raise SpecError("CheckpointSensor", [f"host: {host} is not in the inventory"])
    return inventory.subset([host]).to_dict()


def _cursor(kept: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Where to go on after the checkpoints that were found."""
    if not kept:
        return None
    return {"global_step": max(c["global_step"] for c in kept), "time": max(c["time"] for c in kept)}
