"""The plan: which TF task runs on which host, with how many GPUs, and how it is started.

Pure and deterministic: the same job, inventory and arguments give the same plan. Touches no host, prints
well.

    plan = make_plan(job, inventory, gpus={"gpu-a": 4})
    print(plan)
    plan.on("gpu-a")        # the TF tasks of this host
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tfps_runtime.protocol import Task, TaskSpec

from airflow_tfps.errors import SpecError
from airflow_tfps.fields import nearest
from airflow_tfps.job_rules import EVALUATOR, PS, TRAINING_ROLES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from airflow_tfps.inventory import HostSpec, Inventory
    from airflow_tfps.spec import JobSpec, RoleSpec

READ_AT_IMPORT = ("TF_", "CUDA_", "OMP_", "XLA_", "LD_", "MKL_", "KMP_", "PYTHON")
"""Beginnings of variables that Python or TensorFlow reads when it starts: too late for a forked process."""


@dataclass(frozen=True, kw_only=True)
class PlannedTask:
    """A TF task and its place."""

    task: Task
    host: str
    """Name in the inventory."""
    gpus: int = 0
    is_chief: bool = False
    restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    """Of its role, over the job's."""
    spawn_reason: str | None = None
    """Why it cannot be forked from the process that has imported TensorFlow; None if it can."""

    @property
    def warm(self) -> bool:
        return self.spawn_reason is None

    @property
    def has_port(self) -> bool:
        """Whether it is in the ClusterSpec: an evaluator is not, or everyone would wait for it."""
        return self.task.role != EVALUATOR

    def to_spec(self) -> TaskSpec:
        """What its host is asked to reserve."""
        return TaskSpec(
            task=str(self.task),
            gpus=self.gpus,
            restarts=self.restarts,
            has_port=self.has_port,
            is_chief=self.is_chief,
            warm=self.warm,
            env=dict(self.env),
        )

    def __str__(self) -> str:
        return self.task.at(self.host)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All TF tasks of a job with their places, in the order of the job's roles."""

    job: str
    tasks: tuple[PlannedTask, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that are used, sorted: the order in which they are asked to reserve."""
        return tuple(sorted({planned.host for planned in self.tasks}))

    def on(self, host: str) -> tuple[PlannedTask, ...]:
        return tuple(planned for planned in self.tasks if planned.host == host)

    @property
    def chief(self) -> PlannedTask:
        return next(planned for planned in self.tasks if planned.is_chief)

    @property
    def cluster(self) -> Mapping[str, tuple[PlannedTask, ...]]:
        """The roles of the ClusterSpec, each with its TF tasks in the order of their indices."""
        roles: dict[str, tuple[PlannedTask, ...]] = {}
        for planned in self.tasks:
            if planned.has_port:
                roles[planned.task.role] = (*roles.get(planned.task.role, ()), planned)
        return roles

    def __str__(self) -> str:
        rows = [("TF TASK", "GPUS", "RESTARTS", "START", "")]
        for planned in self.tasks:
            start = "warm" if planned.spawn_reason is None else f"spawn ({planned.spawn_reason})"
            chief = "chief" if planned.is_chief else ""
            rows.append((str(planned), str(planned.gpus or "-"), str(planned.restarts), start, chief))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        tasks, hosts = _number(len(self.tasks), "TF task"), _number(len(self.hosts), "host")
        gpus = _number(sum(planned.gpus for planned in self.tasks), "GPU")
        return "\n".join([f"{self.job}: {tasks} on {hosts}, {gpus}", *lines])


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def make_plan(
    job: JobSpec,
    inventory: Inventory,
    *,
    gpus: Mapping[str, int] | None = None,
    avoid: Collection[str] = (),
    chief_host: str | None = None,
) -> Plan:
    """Place the TF tasks of a job.

    ps are spread first, over the hosts with the fewest TF tasks; then chief and workers, each to the host
    with the most free GPUs, then the fewest workers; the evaluator goes where the chief is, since that is
    where the checkpoints are. Ties are broken by the inventory's order.

    Args:
        job: The job; nothing in it may still be a template.
        inventory: The hosts.
        gpus: How many GPUs a host turned out to have, for those of which the inventory does not say it. A
            host of which neither says it is assumed to have enough.
        avoid: Hosts to take only if nothing else fits, such as one that was just unreachable.
        chief_host: Where the chief must run: a training that goes on finds its checkpoints only there.

    Raises:
        SpecError: with every fault: unknown hosts, more GPUs than there are, hosts that cannot see each
        other.
    """
    what = f"plan of job {job.name}"
    if job.is_templated:
        raise SpecError(what, ["some values are still templates; Airflow renders them when the task runs"])
    faults = list(_unknown_hosts(job, inventory, chief_host))
    if faults:
        raise SpecError(what, faults)
    chief = chief_of(job)
    floor = _Floor(inventory, gpus or {}, avoid)
    places = _place_all(job, chief, floor, chief_host)
    if places is None:
        raise SpecError(what, _what_does_not_fit(job, chief, floor, chief_host))
    tasks = tuple(
        PlannedTask(
            task=task,
            host=places[task],
            gpus=role.gpus,
            is_chief=task == chief,
            restarts=role.restarts,
            env=dict(role.env),
            spawn_reason=_spawn_reason(job, task.role, role),
        )
        for task, role in _tasks(job)
    )
    plan = Plan(job=job.name, tasks=tasks)
    faults = list(_separated(job, plan, inventory))
    if faults:
        raise SpecError(what, faults)
    return plan


def chief_of(job: JobSpec) -> Task:
    """The TF task that initialises, saves, and whose success is the training's.

    The role `chief`, else `worker:0`, else the first TF task of the first role that may train; of an evaluation, which
    has no other, the evaluator.
    """
    if set(job.roles) == {EVALUATOR}:
        return Task(EVALUATOR, 0)
    for role in (*TRAINING_ROLES, *job.roles):
        if role in job.roles and role not in (PS, EVALUATOR):
            return Task(role, 0)
    raise SpecError(f"job {job.name}", ["roles: a role beside ps and evaluator is needed"])


def _tasks(job: JobSpec) -> Iterator[tuple[Task, RoleSpec]]:
    for name, role in job.roles.items():
        yield from ((Task(name, index), role) for index in range(role.count))


def _spawn_reason(job: JobSpec, name: str, role: RoleSpec) -> str | None:
    if job.command is not None:
        return "a command is always started afresh"
    if job.launch == "spawn":
        return "launch: spawn"
    early = [variable for variable in role.env if variable.startswith(READ_AT_IMPORT)]
    return f"roles.{name}.env sets {early[0]}, which is read at the start" if early else None


# --- placing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unit:
    """TF tasks that go to one host together."""

    tasks: tuple[Task, ...]
    gpus: int
    allowed: frozenset[str]

    @property
    def role(self) -> str:
        return self.tasks[0].role


class _Floor:
    """The hosts, and what has been placed on them."""

    def __init__(self, inventory: Inventory, gpus: Mapping[str, int], avoid: Collection[str]) -> None:
        self.inventory = inventory
        self._avoid = frozenset(avoid)
        self.capacity: dict[str, float] = {
            host.name: _first(host.gpus, gpus.get(host.name), float("inf"))
            for host in inventory.hosts.values()
        }
        self._order = {name: i for i, name in enumerate(inventory.names)}
        self.clear()

    def clear(self) -> None:
        self._free = dict(self.capacity)
        self._tasks: Counter[str] = Counter()
        self._trainers: Counter[str] = Counter()

    def choose(self, unit: _Unit, *, tightest: bool) -> str | None:
        """The host for `unit`; None if it fits nowhere."""

        def preference(host: str) -> tuple[float, ...]:
            free = 0.0 if unit.gpus == 0 else self._free[host]
            trainers = 0 if unit.role == PS else self._trainers[host]
            avoided = host in self._avoid
            return avoided, free if tightest else -free, trainers, self._tasks[host], self._order[host]

        fitting = [host for host in unit.allowed if unit.gpus == 0 or self._free[host] >= unit.gpus]
        return min(fitting, key=preference, default=None)

    def put(self, unit: _Unit, host: str) -> None:
        self._free[host] -= unit.gpus
        self._tasks[host] += len(unit.tasks)
        if unit.role != PS:
            self._trainers[host] += 1


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _place_all(job: JobSpec, chief: Task, floor: _Floor, chief_host: str | None) -> dict[Task, str] | None:
    """TF task to host, or None.

    Choosing hosts one after the other may paint itself into a corner where another order does not: after the
    order that spreads well comes one that packs well, the largest and most restricted first into the tightest
    gap.
    """
    together = _units(job, chief, floor.inventory, chief_host, is_evaluator_apart=False)
    choices = [together]
    if job.checkpoint.shared and EVALUATOR in job.roles:
        choices.append(_units(job, chief, floor.inventory, chief_host, is_evaluator_apart=True))
    for units in choices:
        packed = sorted(units, key=lambda unit: (-unit.gpus, len(unit.allowed)))
        for order, tightest in ((units, False), (packed, True)):
            floor.clear()
            places = _place(order, floor, tightest=tightest)
            if places is not None:
                return places
    return None


def _place(units: list[_Unit], floor: _Floor, *, tightest: bool) -> dict[Task, str] | None:
    places = {}
    for unit in units:
        host = floor.choose(unit, tightest=tightest)
        if host is None:
            return None
        floor.put(unit, host)
        places.update(dict.fromkeys(unit.tasks, host))
    return places


def _units(
    job: JobSpec, chief: Task, inventory: Inventory, chief_host: str | None, *, is_evaluator_apart: bool
) -> list[_Unit]:
    """What is placed, in the order ps, chief (with the evaluator), the others as the job has them."""
    ps: list[_Unit] = []
    first: list[_Unit] = []
    others: list[_Unit] = []
    evaluator = Task(EVALUATOR, 0)
    for task, role in _tasks(job):
        allowed = frozenset(role.hosts or inventory.names)
        if task == chief:
            tasks: tuple[Task, ...] = (task,)
            gpus = role.gpus
            if chief_host is not None:
                allowed &= {chief_host}
            if EVALUATOR in job.roles and task != evaluator and not is_evaluator_apart:
                beside = job.roles[EVALUATOR]
                tasks, gpus = (task, evaluator), role.gpus + beside.gpus
                allowed &= frozenset(beside.hosts or inventory.names)
            first.append(_Unit(tasks, gpus, allowed))
        elif task.role == EVALUATOR and not is_evaluator_apart:
            continue
        else:
            (ps if task.role == PS else others).append(_Unit((task,), role.gpus, allowed))
    return ps + first + others


# --- what can be wrong -----------------------------------------------------------------------------------


def _unknown_hosts(job: JobSpec, inventory: Inventory, chief_host: str | None) -> Iterator[str]:
    for name, role in job.roles.items():
        for i, host in enumerate(role.hosts):
            if host not in inventory.names:
                hint = nearest(host, inventory.names) or f"; known are {', '.join(inventory.names[:20])}"
                yield f"roles.{name}.hosts[{i}]: {host} is not in the inventory{hint}"
    if chief_host is not None and chief_host not in inventory.names:
        yield (
            f"hosts: {chief_host}, where the checkpoints of this training are, is not in the inventory; "
            "add it, or clear the task to begin anew"
        )


def _what_does_not_fit(job: JobSpec, chief: Task, floor: _Floor, chief_host: str | None) -> list[str]:
    """Why nothing fits; always says something."""
    faults = []
    for name, role in job.roles.items():
        allowed = frozenset(role.hosts or floor.inventory.names)
        room = sum(floor.capacity[host] // role.gpus for host in allowed) if role.gpus else role.count
        if role.count > room:
            faults.append(
                f"roles.{name}: {role.count} TF tasks with {_number(role.gpus, 'GPU')} each are wanted, "
                f"there is room for {room:g} ({_capacities(floor, allowed)})"
            )
    total = sum(role.count * role.gpus for role in job.roles.values())
    if not faults and total > sum(floor.capacity.values()):
        exist = _capacities(floor, floor.inventory.names)
        faults.append(f"roles: {_number(total, 'GPU')} are wanted, more than there are ({exist})")
    units = _units(job, chief, floor.inventory, chief_host, is_evaluator_apart=job.checkpoint.shared)
    unit = next(unit for unit in units if chief in unit.tasks)
    is_bound = len(unit.tasks) > 1 or chief_host is not None
    if is_bound and not any(floor.capacity[host] >= unit.gpus for host in unit.allowed):
        place = (
            f"on {chief_host}, where the checkpoints are"
            if chief_host
            else "on one host, for the checkpoints"
        )
        faults.append(
            f"roles.{chief.role}: {' and '.join(map(str, unit.tasks))} must run {place}, and do not fit; "
            "mind their hosts and gpus, or write checkpoint.shared: true if all hosts see the checkpoints"
        )
    if not faults:
        known = _capacities(floor, floor.inventory.names)
        faults.append(
            f"roles: the TF tasks do not fit together on the hosts that their roles allow ({known})"
        )
    return faults


def _capacities(floor: _Floor, hosts: Collection[str]) -> str:
    known = [f"{host}: {floor.capacity[host]:g}" for host in floor.inventory.names if host in hosts]
    more = f", and {len(known) - 10} more hosts" if len(known) > 10 else ""
    return "GPUs: " + ", ".join(known[:10]) + more


def _separated(job: JobSpec, plan: Plan, inventory: Inventory) -> Iterator[str]:
    """What has to be together, or in sight of each other, and is not."""
    used = [inventory[name] for name in plan.hosts]
    near = [host for host in used if host.is_loopback]
    if near and len(near) < len(used):
        yield from (_unreachable(host) for host in near)
    if job.checkpoint.sharded and not job.checkpoint.shared:
        writers = {planned.host for planned in plan.tasks if planned.task.role == PS or planned.is_chief}
        if len(writers) > 1:
            yield (
                f"checkpoint.sharded: ps and chief are on {', '.join(sorted(writers))}, and each would write "
                "its part on its own disk; write shared: true if they see one directory, or leave sharded out"
            )


def _unreachable(host: HostSpec) -> str:
    return (
        f"hosts.{host.name}.address: {host.address} means another machine on every other host; "
        "write an address that they can reach"
    )
