"""The handle: which training, placed where. JSON that goes through XCom; versioned, without secrets.

Imports `spec`, `inventory` and `protocol`. 100 hosts fit into 20 KB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfps_runtime.protocol import VERSION, Paths, Task, TrainingId, is_text

from airflow_tfps.errors import SpecError
from airflow_tfps.fields import show
from airflow_tfps.inventory import HostSpec, Inventory
from airflow_tfps.spec import JobSpec

EVALUATOR = "evaluator"
"""The role that is never in the ClusterSpec: everyone would wait for it."""


@dataclass(frozen=True, kw_only=True)
class PlacedTask:
    """A TF task with its place."""

    task: Task
    host: str
    port: int | None
    gpus: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        return self.task.at(self.host)


@dataclass(frozen=True, kw_only=True)
class Handle:
    """A training that has a place on hosts."""

    training: TrainingId
    job: JobSpec
    inventory: Inventory
    tasks: tuple[PlacedTask, ...]
    chief: Task
    checkpoint_dir: str
    """On the chief's host."""
    blobs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """`program`, `script` or an input's name -> its content's hash and file name."""
    since: float | None = None
    """With a fixed directory: when this training took it, by its host's clock (epoch). What is older is another's."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts in use, sorted."""
        return tuple(sorted({t.host for t in self.tasks}))

    @property
    def chief_host(self) -> str:
        return self.of(self.chief).host

    def of(self, task: Task) -> PlacedTask:
        return next(t for t in self.tasks if t.task == task)

    def on(self, host: str) -> tuple[PlacedTask, ...]:
        return tuple(t for t in self.tasks if t.host == host)

    def spec(self, host: str) -> HostSpec:
        return self.inventory[host]

    @property
    def cluster(self) -> dict[str, list[str]]:
        """TensorFlow's ClusterSpec: role to addresses, in the order of the indices; without an evaluator."""
        addresses: dict[str, list[str]] = {}
        for placed in sorted(self.tasks, key=lambda t: t.task):
            if placed.task.role != EVALUATOR:
                assert placed.port is not None
                endpoint = self.spec(placed.host).endpoint(placed.port)
                addresses.setdefault(placed.task.role, []).append(endpoint)
        return addresses

    def address(self, placed: PlacedTask) -> str:
        return self.cluster[placed.task.role][placed.task.index]

    def request(self, host: str) -> dict[str, Any]:
        """What every command about this training on that host begins with."""
        return {"training": str(self.training), "host": host, "workdir": self.spec(host).workdir}

    def paths(self, host: str) -> Paths:
        return Paths(self.spec(host).workdir, self.training, host)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; what has its default is left out."""
        since = {} if self.since is None else {"since": self.since}
        return {
            **since,
            "version": VERSION,
            "training": str(self.training),
            "job": self.job.to_dict(),
            "base_dir": str(self.job.base_dir) if self.job.base_dir is not None else None,
            "inventory": self.inventory.to_dict(),
            "tasks": [[str(t.task), t.host, t.port, list(t.gpus)] for t in self.tasks],
            "chief": str(self.chief),
            "checkpoint_dir": self.checkpoint_dir,
            "blobs": {k: list(v) for k, v in self.blobs.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Handle:
        """Read a handle. Raises SpecError when it is none."""
        if not isinstance(data, Mapping):
            got = "nothing" if data is None else type(data).__name__
            raise SpecError("handle", [f"a handle of ProvisionClusterOperator is needed, got {got}"])
        version = data.get("version")
        if version not in (VERSION, VERSION - 1):
            shown = "None" if version is None else show(version)
            raise SpecError("handle", [f"version {shown} is not understood; clear the provision task"])
        try:
            base_dir = data.get("base_dir")
            inventory = Inventory.from_dict(data["inventory"])
            tasks = tuple(_placed(*row, inventory=inventory) for row in data["tasks"])
            chief = Task.parse(data["chief"])
            if not any(placed.task == chief for placed in tasks):
                raise ValueError(f"the chief {chief} has no place")
            _check_roles(tasks)
            if not isinstance(data["checkpoint_dir"], str) or not is_text(data["checkpoint_dir"]):
                raise TypeError("checkpoint_dir is not text")
            return cls(
                training=TrainingId.parse(data["training"]),
                job=JobSpec.from_dict(data["job"], base_dir=None if base_dir is None else Path(base_dir)),
                inventory=inventory,
                tasks=tasks,
                chief=chief,
                checkpoint_dir=data["checkpoint_dir"],
                blobs={str(key): tuple(map(str, blob)) for key, blob in data.get("blobs", {}).items()},
                since=None if data.get("since") is None else float(data["since"]),
            )
        except SpecError as error:
            raise SpecError("handle", [f"it is damaged: {fault}" for fault in error.faults]) from error
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise SpecError("handle", [f"it is damaged: {error}"[:400]]) from error


def _check_roles(tasks: Sequence[PlacedTask]) -> None:
    """Each role's TF tasks are numbered from 0 on and have ports: ClusterSpec lists them. Raises ValueError."""
    indices: dict[str, list[int]] = {}
    for placed in tasks:
        indices.setdefault(placed.task.role, []).append(placed.task.index)
        if placed.port is None and placed.task.role != EVALUATOR:
            raise ValueError(f"{placed.task} has no port")
    for role, found in indices.items():
        if sorted(found) != list(range(len(found))):
            raise ValueError(f"the TF tasks of role {role} are not numbered from 0 on")


def _placed(
    task: object, host: object, port: object, gpus: Sequence[object], *, inventory: Inventory
) -> PlacedTask:
    """One row of a handle's `tasks`. Raises ValueError or TypeError."""
    if port is not None and not (isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536):
        raise TypeError(f"no port: {show(port)}")
    if not isinstance(task, str) or not isinstance(host, str) or host not in inventory.names:
        raise ValueError(f"no place of a TF task: {show(task)} on {show(host)}")
    if not isinstance(gpus, (list, tuple)) or not all(
        isinstance(gpu, int) and not isinstance(gpu, bool) and 0 <= gpu < 65536 for gpu in gpus
    ):
        raise ValueError(f"no GPUs of {task}: {show(gpus)}")
    return PlacedTask(task=Task.parse(task), host=host, port=port, gpus=tuple(gpus))
