"""What the live suite drives and looks at: runs of its DAGs, their trainings' processes, locks and ports.

run = live.start("live")                    # a run with a folder and ports of its own
training = run.until_training()             # train is deferred and every process prints
live.api.set_task_state(...)
run.until_nothing_is_left(15)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tfps_runtime.protocol import TrainingId, run_dir, training_key
from tfps_runtime.reserve import is_held, read_lock

from airflow_tfps.demo.processes import open_ports, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from airflow_tfps.demo.hosts import DemoHost
    from airflow_tfps.demo.stack import AirflowStack, Api

T = TypeVar("T")

SECS = 150.0
"""For anything that takes Airflow a few tasks; the machine may have two cores and much to do."""
POLL_SECS = 0.4
PORTS_PER_RUN = 8
FIRST_PORT = 21000

Process = tuple[int, int]
"""Pid and start time: names a process for good."""


def until(condition: Callable[[], T], secs: float = SECS, what: str | Callable[[], object] = "") -> T:
    """Poll until `condition` returns something true, and return it."""
    deadline = time.monotonic() + secs
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {secs:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(POLL_SECS)
    return found


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[19])


@dataclass(frozen=True)
class Training:
    """A living incarnation: its agents (host -> process) and its TF tasks (`worker:0` -> process)."""

    id: TrainingId
    agents: Mapping[str, Process]
    tasks: Mapping[str, Process]
    checkpoint_dir: str
    host_names: Mapping[str, str]
    """TF task -> host."""

    def host(self, task: str) -> str:
        return self.host_names[task]


@dataclass
class Run:
    """A run of a DAG with one TrainingTaskGroup, `group`."""

    live: Live
    dag_id: str
    run_id: str
    control: Path
    ports: range
    group: str = "training"
    agents: set[Process] = field(default_factory=set)
    """Every agent that was ever seen."""

    @property
    def api(self) -> Api:
        return self.live.api

    # --- what Airflow says

    def states(self) -> dict[tuple[str, int], str | None]:
        return self.api.task_states(self.dag_id, self.run_id)

    def state(self, task: str, index: int = -1) -> str | None:
        return self.states().get((f"{self.group}.{task}", index))

    def task(self, task: str, index: int = -1) -> dict[str, Any]:
        return self.api.tasks(self.dag_id, self.run_id)[f"{self.group}.{task}", index]

    def until_state(self, task: str, *states: str, index: int = -1, secs: float = SECS) -> str:
        """Wait until a task of the group has one of these states; fails at once when it has failed instead."""

        def reached() -> str | None:
            found = self.state(task, index)
            if found in ("failed", "upstream_failed") and found not in states:
                log = "\n".join(self.log(task, index=index)[-40:])
                raise AssertionError(f"{task} is {found}: {self.states()}\n{log}")
            return found if found in states else None

        return until(reached, secs, lambda: f"{task} of {self.dag_id} {states}: {self.states()}")

    def until_over(self, *, state: str | None = None, secs: float = SECS) -> str:
        """Wait until the run has ended; its state, which must be `state` when that is given."""
        until(
            lambda: self.run_state() in ("success", "failed"),
            secs,
            lambda: f"{self.dag_id} ends: {self.states()}",
        )
        found = self.run_state()
        assert state in (None, found), f"the run is {found}: {self.states()}"
        return found

    def run_state(self) -> str:
        return self.api.run_state(self.dag_id, self.run_id)

    def log(self, task: str, attempt: int | None = None, index: int = -1) -> list[str]:
        """The task's log of a try, by default the newest."""
        attempt = self.task(task, index)["try_number"] if attempt is None else attempt
        if attempt == 0:  # it never ran
            return []
        return self.api.log(self.dag_id, self.run_id, f"{self.group}.{task}", attempt, index)

    def log_files(self, task: str, attempt: int | None = None, index: int = -1) -> dict[str, list[str]]:
        """The task's log files as they lie on disk, name to lines: Airflow's API leaves repeated lines out."""
        folder = self.live.stack.home / "logs" / f"dag_id={self.dag_id}" / f"run_id={self.run_id}"
        folder /= f"task_id={self.group}.{task}"
        if index >= 0:
            folder /= f"map_index={index}"
        files = sorted(folder.glob(f"attempt={'*' if attempt is None else attempt}.log*"))
        return {f.name: [json.loads(line)["event"] for line in f.read_text().splitlines()] for f in files}

    def xcom(self, task: str, key: str = "return_value", index: int = -1) -> Any:
        return self.api.xcom(self.dag_id, self.run_id, f"{self.group}.{task}", key, index)

    def clear(
        self, task: str, index: int = -1, *, only_failed: bool = False, downstream: bool = False
    ) -> list[tuple[str, int]]:
        """Clear a task of the group; what will run again."""
        name = f"{self.group}.{task}"
        chosen = (name, index) if index >= 0 else name
        return sorted(
            self.api.clear(self.dag_id, self.run_id, [chosen], only_failed=only_failed, downstream=downstream)
        )

    def mark(self, task: str, state: str, index: int = -1) -> None:
        self.api.set_task_state(self.dag_id, self.run_id, f"{self.group}.{task}", state, index)

    # --- telling the stand-in

    def tell(self, name: str, content: str = "") -> None:
        (self.control / f"{name}.partial").write_text(content)
        (self.control / f"{name}.partial").rename(self.control / name)

    def untell(self, name: str) -> None:
        (self.control / name).unlink()

    # --- what lives on the hosts

    def key(self, index: int = -1) -> str:
        return training_key(self.dag_id, self.run_id, self.group, index)

    def locks(self, index: int | None = None) -> list[str]:
        """Lock files of this run's trainings, held or not; of one map index, or of all."""
        found = []
        keys = {self.key(i) for i in (-1, 0, 1)} if index is None else {self.key(index)}
        for path in Path(run_dir()).glob("*.lock"):
            record = read_lock(str(path))
            if record is not None and TrainingId.parse(record.training).key in keys:
                found.append(str(path))
        return found

    def training(self, index: int = -1) -> Training | None:
        """The living incarnation; None when there is none, and while one takes the other's place."""
        agents: dict[str, Process] = {}
        ids: set[str] = set()
        for path in self.locks(index):
            record = read_lock(path)
            started = None if record is None else start_time(record.pid)
            if record is not None and started is not None and is_held(path):
                agents[record.host] = (record.pid, started)
                ids.add(record.training)
        self.agents.update(agents.values())
        if not agents or len(ids) > 1:
            return None
        training = TrainingId.parse(ids.pop())
        hosts = {pid: host for host, (pid, _) in agents.items()}
        tasks, places = {}, {}
        for name, process in self.living_tasks():
            for pid in ancestors(process[0]):
                if pid in hosts:
                    tasks[name], places[name] = process, hosts[pid]
        directory = str((self.handle(index) or {}).get("checkpoint_dir"))
        return Training(training, agents, tasks, directory, places)

    def handle(self, index: int = -1) -> dict[str, Any] | None:
        return self.xcom("provision", index=index)

    def noted_tasks(self) -> list[tuple[str, Process]]:
        """Every TF task that ever ran, as each noted it itself."""
        found = []
        for path in (self.control / "pids").glob("*-*-*[0-9]"):
            role, index, pid = path.name.split("-")
            found.append((f"{role}:{index}", (int(pid), int(path.read_text()))))
        return found

    def living_tasks(self) -> list[tuple[str, Process]]:
        return [(name, p) for name, p in self.noted_tasks() if start_time(p[0]) == p[1]]

    def until_training(
        self, index: int = -1, *, other_than: Training | None = None, tasks: int = 3, secs: float = SECS
    ) -> Training:
        """Wait until train is deferred, all `tasks` of its (another) incarnation live, and it is followed."""

        def found() -> Training | None:
            if self.until_state("train", "deferred", index=index) != "deferred":
                return None
            training = self.training(index)
            if training is None or len(training.tasks) < tasks:
                return None
            if other_than is not None and training.id == other_than.id:
                return None
            logs = self.log_files("train", self.task("train", index)["try_number"], index)
            return (
                training if any("[worker:0@" in line for lines in logs.values() for line in lines) else None
            )

        return until(found, secs, lambda: f"the training of {self.dag_id}: {self.states()}")

    def until_step(self, training: Training, step: int) -> None:
        """Wait until the chief of this incarnation has done a global step."""
        until(lambda: (self.steps(training) or [0])[-1] >= step, what=f"step {step}")

    def steps(self, training: Training, task: str = "worker:0") -> list[int]:
        """The steps in a TF task's own log on its host."""
        home = Path(self.live.hosts[training.host(task)].home)
        role, index = task.split(":")
        found = []
        for path in home.glob(f".tfps*/trainings/*/*/tasks/{role}-{index}/log"):
            spec = json.loads((path.parents[2] / "spec.json").read_text())
            if spec["request"]["training"] == str(training.id):
                lines = path.read_text().splitlines()
                found += [int(line.split()[1]) for line in lines if line.startswith("step ")]
        return found

    def left(self, index: int | None = None) -> list[str]:
        """What is left of this run's trainings: processes, locks, and with no map index given, ports."""
        found = [f"lock {path}" for path in self.locks(index)]
        found += [f"agent {pid}" for pid, started in self.agents if start_time(pid) == started]
        if index is None:
            found += [f"process {pid}" for pid in processes(f"LIVE_CONTROL={self.control}\0")]
            found += [f"{name}, process {p[0]}" for name, p in self.living_tasks()]
            found += [f"port {port} is held" for port in self.ports if not is_free(port)]
            found += [f"port {port} is open" for port in open_ports().intersection(self.ports)]
        return found

    def until_gone(self, training: Training, secs: float = 30.0) -> None:
        """Wait until no process of an incarnation is left."""
        all_of_it = {*training.agents.values(), *training.tasks.values()}
        until(lambda: not any(start_time(p) == t for p, t in all_of_it), secs, f"{training.id} is gone")

    def until_nothing_is_left(self, secs: float = 30.0) -> None:
        deadline = time.monotonic() + secs
        while left := self.left():
            assert time.monotonic() < deadline, f"left of {self.dag_id} after {secs:g} s: {left}"
            time.sleep(0.1)


class Live:
    """The components, the hosts, and runs. Methods may be called from several threads."""

    run_type: type[Run] = Run

    def __init__(self, stack: AirflowStack, hosts: Mapping[str, DemoHost], folder: Path) -> None:
        self.stack = stack
        self.hosts = hosts
        self.folder = folder
        self._numbers = itertools.count()
        self._runs = itertools.count()
        self._lock = threading.Lock()
        self.runs: list[Run] = []

    @property
    def api(self) -> Api:
        return self.stack.api

    def take_ports(self, count: int = PORTS_PER_RUN) -> range:
        """Ports that no other run gets."""
        with self._lock:
            first = FIRST_PORT + next(self._numbers) * PORTS_PER_RUN
        return range(first, first + count)

    def start(
        self,
        dag_id: str = "live",
        *,
        group: str = "training",
        ports: range | None = None,
        ports_count: int = PORTS_PER_RUN,
        **params: Any,
    ) -> Run:
        """Trigger a run, with ports of its own or with `ports`."""
        mine = self.take_ports(ports_count) if ports is None else ports
        with self._lock:
            control = self.folder / f"run-{next(self._runs)}"
        control.mkdir()
        conf = {"control": str(control), "ports": f"{mine[0]}-{mine[-1]}", **params}
        run_id = self.api.trigger(dag_id, conf)
        run = self.run_type(self, dag_id, run_id, control, mine, group)
        self.runs.append(run)
        return run


def ancestors(pid: int) -> list[int]:
    """The process and all above it."""
    found = []
    with contextlib.suppress(OSError):
        while pid > 0:
            found.append(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return found


def is_free(port: int) -> bool:
    """Whether nobody holds a port, listening or not; connections that linger in TIME_WAIT do not count."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def stop_agents(runs: Iterable[Run]) -> list[str]:
    """At the very end: SIGTERM to every agent of these runs that still lives; what that was."""
    found = []
    for run in runs:
        for path in run.locks():
            record = read_lock(path)
            if record is not None and is_held(path):
                found.append(f"{run.dag_id}: agent {record.pid} of {record.training} on {record.host}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, 15)
    return found
