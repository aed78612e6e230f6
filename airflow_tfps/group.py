"""One line in a DAG: the task group that provisions, waits, trains and tears down.

    training = TrainingTaskGroup("training", hosts="gpu_lab", job="jobs/ctr.yaml", steps="{{ params.steps }}")
    training.output     # {"global_step": …, "checkpoint": …, "metrics": …}

The job is read when the DAG is parsed, so a typo is an import error of the DAG that names its place in the YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import TaskGroup

from airflow_tfps.inventory import Inventory
from airflow_tfps.operators import ProvisionClusterOperator, TeardownClusterOperator, TrainOperator
from airflow_tfps.sensors import CheckpointSensor, ClusterReadySensor
from airflow_tfps.spec import JobSpec
from airflow_tfps.templates import is_template

if TYPE_CHECKING:
    from collections.abc import Mapping


class TrainingTaskGroup(TaskGroup):
    """`provision >> ready >> train >> teardown`, teardown as Airflow's teardown of the setup `provision`.

    Attributes `provision`, `ready`, `train`, `teardown` (and `checkpoint` with `watch_checkpoints`) are the tasks;
    `done` is an empty task after train, on which depends what comes after the group; `output` is train's result.
    With `job_name`, the job's name unless that is a template, the training's end is an event of the asset
    `tfps://training/NAME`.

    Args:
        group_id: Name of the group; part of the training's key.
        job: Job file (relative to the DAG file), mapping or JobSpec. Raises SpecError with every fault.
        hosts: Inventory file, Airflow connection id, list of ssh connection ids, mapping or Inventory.
        hparams: Merged over the job's.
        inputs: Merged over the job's; outputs of tasks become edges of the DAG.
        steps: Instead of the job's.
        mode: Instead of the job's.
        watch_checkpoints: Add a sensor that succeeds at the first complete checkpoint, beside train.
        **task_group_kwargs: As for TaskGroup.
    """

    def __init__(
        self,
        group_id: str,
        *,
        job: str | Path | Mapping[str, Any] | JobSpec,
        hosts: str | list[str] | Mapping[str, Any] | Inventory,
        hparams: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        steps: int | str | None = None,
        mode: str | None = None,
        watch_checkpoints: bool = False,
        **task_group_kwargs: Any,
    ) -> None:
        super().__init__(group_id, **task_group_kwargs)
        folder = Path(self.dag.fileloc).parent if self.dag is not None and self.dag.fileloc else Path()
        spec = JobSpec.load(job, base_dir=folder, templated=True)
        place = _hosts(hosts, folder)
        self.job_name: str | None = None if is_template(spec.name) else spec.name
        may_go_on = spec.start_from == "previous" or is_template(spec.start_from)
        with self:
            self.provision = ProvisionClusterOperator(
                task_id="provision",
                job=spec.to_dict(),
                hosts=place,
                hparams=hparams,
                inputs=inputs,
                steps=steps,
                mode=mode,
                base_dir=str(spec.base_dir or folder),
                job_name=self.job_name if may_go_on else None,
            )
            self.ready = ClusterReadySensor(task_id="ready", handle=self.provision.output)
            self.train = TrainOperator(task_id="train", handle=self.provision.output, job_name=self.job_name)
            self.teardown = TeardownClusterOperator(
                task_id="teardown", handle=self.provision.output, hosts=place, base_dir=str(folder)
            )
            # Airflow takes a teardown that may fail the run for the only task that counts, and a run whose `train` has
            # failed for a success: hence one more leaf.
            self.done = EmptyOperator(task_id="done")
            self.provision >> self.ready >> self.train >> self.done
            self.train >> self.teardown.as_teardown(setups=self.provision, on_failure_fail_dagrun=True)
            if watch_checkpoints:
                self.checkpoint = CheckpointSensor(task_id="checkpoint", training=self.provision.output)
                self.ready >> self.checkpoint >> self.teardown

    @property
    def output(self) -> Any:
        """The result of `train`, as an XComArg."""
        return self.train.output


def _hosts(hosts: Any, folder: Path) -> Any:
    """`hosts` in a form that Airflow can render: files by their absolute path on this machine, no objects."""
    if isinstance(hosts, Inventory):
        return hosts.to_dict()
    if isinstance(hosts, str) and hosts.endswith((".yaml", ".yml")):
        return str(folder / hosts)
    return hosts
