"""Finding trainings on hosts, and ending them; nothing here prints."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tfps_runtime.protocol import Task, TrainingId

from airflow_tfps.calls import COMMAND_SECS, PARALLEL
from airflow_tfps.errors import CommandError, SpecError, TfpsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from airflow_tfps.hook import ClusterHook

T = TypeVar("T")
GRACE_SECS = 30.0
"""Of a training that does not say."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which trainings are meant. What is None is not asked about."""

    training: str | None = None
    """An id, or a key without its incarnation."""
    dag_id: str | None = None
    run_id: str | None = None
    group_id: str | None = None
    map_index: int | None = None

    @property
    def is_all(self) -> bool:
        return self == Selection()

    @property
    def key(self) -> str | None:
        """The only key that can be meant, if that is known."""
        return None if self.training is None else self.training.partition("#")[0]

    def matches(self, training: TrainingId) -> bool:
        if self.training is not None and self.training not in (str(training), training.key):
            return False
        parts: list[str | None] = [*training.key.split("/", 3), None, None, None, None]
        wanted = (self.dag_id, self.run_id, self.group_id)
        if any(want not in (None, part) for want, part in zip(wanted, parts[:3], strict=True)):
            return False
        return self.map_index is None or parts[3] == str(self.map_index)

    def __str__(self) -> str:
        words = [
            f"{name.replace('_', '-')} {value}" for name, value in vars(self).items() if value is not None
        ]
        return ", ".join(words) or "any"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A training with what its hosts say of it."""

    training: TrainingId
    hosts: Mapping[str, Mapping[str, Any]]
    """Host -> its status, in the inventory's order."""

    @property
    def is_alive(self) -> bool:
        return any(status["is_alive"] for status in self.hosts.values())

    @property
    def changed(self) -> float:
        """When something was last heard of it there, in seconds since the epoch."""
        return max(float(status["changed"]) for status in self.hosts.values())

    @property
    def chief_host(self) -> str | None:
        return next((host for host, status in self.hosts.items() if status["chief"]), None)

    def where(self, task: Task, host: str | None) -> list[str]:
        """The hosts that know a TF task."""
        return [
            name
            for name, status in self.hosts.items()
            if host in (None, name) and any(row["task"] == str(task) for row in status["tasks"])
        ]


def reading(host: str, read: Callable[[], T]) -> T:
    """What `read` makes of a host's answer. Raises CommandError (code `protocol`) when it has another form."""
    try:
        return read()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"[:200]
        raise CommandError(host, f"answered with what makes no sense ({problem})", code="protocol") from error


def status_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """One training of the answer of `trainings`, with the types that are taken for granted here."""
    tasks = []
    gpus = (said.get("reservation") or {}).get("gpus") or {}
    for task in said["tasks"]:
        name, attempt = str(Task.parse(task["task"])), task.get("attempt")
        step = (task.get("progress") or {}).get("global_step")
        tasks.append(
            {
                "task": name,
                "state": str(task["state"]),
                "gpus": [int(gpu) for gpu in gpus.get(name) or ()],
                "restarts": None if attempt is None else max(int(attempt) - 1, 0),
                "global_step": None if step is None else int(step),
            }
        )
    grace, lease = said.get("grace_secs"), said.get("lease_secs")
    return {
        "state": str(said["state"]),
        "reason": None if said.get("reason") is None else str(said["reason"]),
        "is_alive": said["is_alive"] is True,
        "chief": said.get("chief") is not None,
        "changed": float(said.get("changed") or 0.0),
        "grace_secs": GRACE_SECS if grace is None else float(grace),
        "lease_secs": None if lease is None else float(lease),
        "tasks": tasks,
    }


def each(
    hosts: Iterable[str], do: Callable[[str], T], *, at_once: int = PARALLEL
) -> tuple[dict[str, T], list[TfpsError]]:
    """Do something on hosts side by side; the answers of those that gave one, and what the others failed with."""
    names = list(hosts)
    answers: dict[str, T] = {}
    errors: list[TfpsError] = []
    with ThreadPoolExecutor(max(min(at_once, len(names)), 1)) as pool:
        futures = {name: pool.submit(do, name) for name in names}
        for name, future in futures.items():
            try:
                answers[name] = future.result()
            except TfpsError as error:
                errors.append(error)
    return answers, errors


def find(
    hook: ClusterHook, selection: Selection, *, ended: bool = False
) -> tuple[list[Found], list[TfpsError]]:
    """The chosen trainings on all hosts of the inventory, the living first, then the newest; and silent hosts."""

    def one(host: str) -> list[tuple[TrainingId, dict[str, Any]]]:
        request: dict[str, Any] = {"host": host, "workdir": hook.inventory[host].workdir, "ended": ended}
        if selection.key is not None:
            request["key"] = selection.key
        answer = hook.call(host, "trainings", request)
        return reading(
            host,
            lambda: [(TrainingId.parse(said["training"]), status_of(said)) for said in answer["trainings"]],
        )

    answers, errors = each(hook.inventory.names, one)
    found: dict[TrainingId, dict[str, dict[str, Any]]] = {}
    for host, statuses in answers.items():
        for training, status in statuses:
            if selection.matches(training):
                found.setdefault(training, {})[host] = status
    trainings = [Found(training=training, hosts=hosts) for training, hosts in found.items()]
    return sorted(trainings, key=lambda one: (not one.is_alive, -one.changed)), errors


def stop(
    hook: ClusterHook, found: Found, reason: str, *, grace_secs: float | None = None
) -> tuple[dict[str, str], list[TfpsError]]:
    """End a training on the hosts where it was found; host -> its last state. The chief's host first: it saves."""

    def one(host: str) -> str:
        grace = float(found.hosts[host]["grace_secs"]) if grace_secs is None else grace_secs
        request = {
            "training": str(found.training),
            "host": host,
            "workdir": hook.inventory[host].workdir,
            "reason": reason,
            "grace_secs": grace_secs,
            "timeout_secs": 2 * grace + COMMAND_SECS / 2,
        }
        answer = hook.call(host, "stop", request, timeout=2 * grace + COMMAND_SECS)
        return reading(host, lambda: str(answer["stopped"][str(found.training)]))

    chief = found.chief_host
    first, errors = each([] if chief is None else [chief], one)
    others, more = each([host for host in found.hosts if host != chief], one)
    return {**first, **others}, errors + more


def the_one(candidates: Sequence[Found], task: Task, host: str | None) -> tuple[Found, str]:
    """The training whose log is meant, and the host: the only living one with this TF task, else the newest.

    Raises SpecError when there is none, or several live.
    """
    fitting = [(found, found.where(task, host)) for found in candidates]
    fitting = [(found, hosts) for found, hosts in fitting if hosts]
    name = str(task) if host is None else task.at(host)
    if not fitting:
        raise SpecError(
            "logs", [f"no training with a TF task {name} was found; see `airflow tfps status --ended`"]
        )
    living = [found for found, _ in fitting if found.is_alive]
    if len(living) > 1:
        ids = ", ".join(str(found.training) for found in living)
        raise SpecError("logs", [f"several trainings have a {name}, say which with --training: {ids}"])
    found, hosts = fitting[0]
    return found, hosts[0]
