"""Runs on the bed, and the table of what was seen: `live.Run`, whose trainings live on hosts of their own.

run = live.start("faults")
training = run.until_training()
with run.row("kill -9 of ps", "it starts again in place") as row:
    os.kill(training.tasks["ps:0"][0], signal.SIGKILL)
    ...
    row.seen = "it started again"
run.finish()                # ends the training, and notes in every row of the run that nothing was left
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bed import Host, parent, start_time
from live import Live, Process, Run, Training, until
from tfps_runtime.checkpoint import Checkpoint, complete_checkpoints
from tfps_runtime.protocol import TrainingId, digest, run_dir
from tfps_runtime.reserve import is_held, read_lock

from airflow_tfps.demo.processes import describe, processes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bed import Bed

    from airflow_tfps.demo.stack import AirflowStack

CHIEF, WORKER, PS = "worker:0", "worker:1", "ps:0"


@dataclass
class Row:
    """One line of the table."""

    fault: str
    expected: str
    seen: str = ""
    secs: float = 0.0
    saved: int | None = None
    """Global step of the newest checkpoint that was complete before the fault."""
    restored: int | None = None
    """Global step with which the training went on from a checkpoint; None where nothing had to be restored."""
    left: str = "not looked at"
    is_good: bool = False


class Table:
    """All rows, from all threads; kept in a file, too, as they come."""

    def __init__(self, file: str | None = None) -> None:
        self.rows: list[Row] = []
        self._file = file
        self._lock = threading.Lock()

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)

    def save(self) -> None:
        """Write down how it stands, if there is a file."""
        if self._file:
            with self._lock:
                Path(self._file).write_text("\n".join(self.lines()) + "\n")

    def lines(self) -> list[str]:
        """As Markdown."""
        heads = ("#", "Fault", "Expected", "Seen", "s", "Restored", "Left")
        found = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for number, row in enumerate(self.rows, 1):
            seen = row.seen if row.is_good else f"**FAILED** {row.seen}"
            restored = "-" if row.restored is None else f"{row.restored} (saved {row.saved or 0})"
            cells = (number, row.fault, row.expected, seen, f"{row.secs:.1f}", restored, row.left)
            found.append(
                "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
            )
        return found


@dataclass
class BedRun(Run):
    """A run whose training lives on the bed's hosts. Processes are named by their pids on this machine."""

    live: BedLive
    rows: list[Row] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    """Every training that was ever seen."""

    @property
    def hosts(self) -> dict[str, Host]:
        return self.live.bed.hosts

    # --- rows

    @contextlib.contextmanager
    def row(self, fault: str, expected: str, of: Training | None = None) -> Iterator[Row]:
        """Note a line of the table. What was complete when it begins must be complete when it ends, and be restored.

        Of several trainings of the run, those of `of` count.
        """
        row = Row(fault, expected)
        self.rows.append(row)
        self.live.table.add(row)
        before = self.checkpoints() if of is None else complete_checkpoints(of.checkpoint_dir)
        row.saved = before[-1].global_step if before else None
        began = time.monotonic()
        try:
            yield row
            row.secs = row.secs or time.monotonic() - began
            self.check_checkpoints(before)
            if row.restored is not None:
                assert row.restored >= (row.saved or 0), (
                    f"step {row.restored} was restored, {row.saved} was complete"
                )
            assert row.seen, "nothing was noted"
        except BaseException as error:
            row.secs = row.secs or time.monotonic() - began
            row.seen = f"{row.seen} {type(error).__name__}: {str(error)[:300]}".strip()
            raise
        else:
            row.is_good = True
        finally:
            self.live.table.save()

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints in the run's folder, oldest first."""
        root = self.checkpoint_root()
        folders = [root, *root.glob("checkpoints/*")]
        return [checkpoint for folder in folders for checkpoint in complete_checkpoints(str(folder))]

    def checkpoint_root(self) -> Path:
        """Where this machine sees the checkpoints, or what is above them. A row may put another in its place."""
        return self.control

    def check_checkpoints(self, before: list[Checkpoint]) -> None:
        """The newest of them is still complete."""
        if before:
            after = {checkpoint.prefix for checkpoint in self.checkpoints()}
            assert before[-1].prefix in after, f"{before[-1].prefix} is not complete any more"

    def until_saved(self, more_than: int = -1) -> int:
        """Wait for a complete checkpoint of a higher step; its step."""

        def newest() -> int:
            return max((c.global_step for c in self.checkpoints()), default=-1)

        until(lambda: newest() > more_than, what=f"a checkpoint after step {more_than}")
        return newest()

    def finish(self, *, state: str = "success", secs: float = 150.0) -> None:
        """End the training well, wait for the run's end, and look for what is left."""
        self.tell("finish")
        self.until_over(state=state, secs=secs)
        self.until_clean()

    def until_clean(self, secs: float = 30.0) -> None:
        """Wait until nothing is left, and say so in the rows."""
        try:
            self.until_nothing_is_left(secs)
        except AssertionError as error:
            for row in self.rows:
                row.left, row.is_good = str(error)[-200:], False
            raise
        for row in self.rows:
            row.left = "nothing"
        self.live.table.save()

    # --- what Airflow says

    def said(
        self, task: str, pattern: str, *, since: float = 0.0, index: int = -1
    ) -> list[tuple[float, str]]:
        """Lines of a task's log files that match, with their times (seconds since the epoch), in order."""
        folder = self.live.stack.home / "logs" / f"dag_id={self.dag_id}" / f"run_id={self.run_id}"
        folder /= f"task_id={self.group}.{task}"
        if index >= 0:
            folder /= f"map_index={index}"
        found = []
        for path in folder.glob("attempt=*.log*"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                at = datetime.fromisoformat(record["timestamp"]).timestamp()
                text = str(record["event"]) + " ".join(
                    f" {e['exc_type']}: {e['exc_value']}" for e in record.get("error_detail") or ()
                )
                if at >= since and re.search(pattern, text):
                    found.append((at, text))
        return sorted(found)

    def until_said(
        self, task: str, pattern: str, *, since: float = 0.0, secs: float = 150.0
    ) -> tuple[float, str]:
        """Wait for the first such line."""
        return until(
            lambda: self.said(task, pattern, since=since),
            secs,
            lambda: f"{pattern!r} in {self.log(task)[-20:]}",
        )[0]

    def reason(self, task: str = "train", pattern: str = r"training \w+: ") -> str:
        """The first line of the reason with which a task failed, as Airflow's log has it last."""
        text = self.said(task, pattern)[-1][1]
        found = re.search(pattern + ".*", text)[0].splitlines()[0]
        return re.split(r"  \w+(?:Error|Exception): ", found)[0]  # what it was raised from says the same

    # --- what lives on the hosts

    def locks(self, index: int | None = None) -> list[str]:
        keys = {self.key(i) for i in (-1, 0, 1)} if index is None else {self.key(index)}
        found = []
        for host in self.hosts.values():
            for path in (host.folder / "var-tmp" / Path(run_dir()).name).glob("*.lock"):
                record = read_lock(str(path))
                if record is not None and TrainingId.parse(record.training).key in keys:
                    found.append(str(path))
        return found

    def training(self, index: int = -1) -> Training | None:
        agents: dict[str, Process] = {}
        ids: set[str] = set()
        inside = {name: host.by_inner_pid() for name, host in self.hosts.items()}
        for path in self.locks(index):
            record = read_lock(path)
            if record is None or not is_held(path):
                continue
            for (inner, started), pid in inside[record.host].items():
                if inner == record.pid:
                    agents[record.host] = (pid, started)
                    ids.add(record.training)
        self.agents.update(agents.values())
        self.seen.update(ids)
        if not agents or len(ids) > 1:
            return None
        training = TrainingId.parse(ids.pop())
        tasks: dict[str, Process] = {}
        places: dict[str, str] = {}
        for name, (inner, started) in self.noted_tasks():
            for host, table in inside.items():
                pid = table.get((inner, started))
                if pid is not None and host in agents and self._is_of(agents[host], pid):
                    tasks[name], places[name] = (pid, started), host
        directory = str((self.handle(index) or {}).get("checkpoint_dir"))
        return Training(training, agents, tasks, directory, places)

    @staticmethod
    def _is_of(agent: Process, pid: int) -> bool:
        from live import ancestors

        return agent[0] in ancestors(pid)

    def noted_tasks(self) -> list[tuple[str, Process]]:
        """Every TF task that ever ran, as a pid of its host: by its own note, or, of TensorFlow, by its agent's."""
        found = super().noted_tasks()
        for host in self.hosts.values() if not found else ():
            for path in Path(host.home).glob(f".tfps*/trainings/*/{host.name}/events.jsonl"):
                spec = json.loads(path.with_name("spec.json").read_text())
                if TrainingId.parse(spec["request"]["training"]).key == self.key():
                    events = map(json.loads, path.read_text().splitlines())
                    found += [(e["task"], (e["pid"], e["started"])) for e in events if e.get("started")]
        return found

    def living_tasks(self) -> list[tuple[str, Process]]:
        inside = [host.by_inner_pid() for host in self.hosts.values()]
        return [
            (name, (table[process], process[1]))
            for name, process in self.noted_tasks()
            for table in inside
            if process in table
        ]

    def left(self, index: int | None = None) -> list[str]:
        found = [f"lock {path}" for path in self.locks(index)]
        found += [f"agent {pid}" for pid, started in self.agents if start_time(pid) == started]
        for training in self.seen:
            for name, host in self.hosts.items():
                path = host.folder / "var-tmp" / Path(run_dir()).name / f"{digest(training, name)}.sock"
                if index is None and path.exists():
                    found.append(f"socket {path}")
        if index is None:
            found += [describe(pid) for pid in processes(f"LIVE_CONTROL={self.control}\0")]
            found += [f"{name}, process {p[0]}" for name, p in self.living_tasks()]
            if not found:
                for host in self.hosts.values():
                    found += [f"port {port} of {host.name}" for port in host.held_ports(self.ports)]
        return found

    def until_replaced(self, before: Training, *tasks: str, secs: float = 60.0) -> Training:
        """Wait until these TF tasks have other processes."""

        def changed() -> Training | None:
            found = self.training()
            if found is None or set(found.tasks) != set(before.tasks):
                return None
            return found if all(found.tasks[t] != before.tasks[t] for t in tasks) else None

        return until(changed, secs, lambda: f"{tasks} start again: {self.training()} was {before}")

    def restarted(self, before: Training, *tasks: str, secs: float = 60.0) -> Training:
        """Wait until these TF tasks have other processes; no other process of the training may have changed."""
        after = self.until_replaced(before, *tasks, secs=secs)
        assert after.agents == before.agents
        for task, process in before.tasks.items():
            assert task in tasks or after.tasks[task] == process, f"{task} was restarted, too"
        return after

    def nursery(self, training: Training, host: str) -> int:
        """Pid of the process on a host that forks the TF tasks."""
        found = [pid for pid in self.hosts[host].pids() if parent(pid) == training.agents[host][0]]
        return next(
            pid for pid in found if b"nursery" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        )

    def restored(self, training: Training) -> int:
        """The step with which the newest start of the chief began."""
        return self.starts(training)[-1]

    def starts(self, training: Training, task: str = CHIEF) -> list[int]:
        """The steps with which a TF task began or went on from a checkpoint, by its log."""
        matches = (
            re.search(r"(?:starting at step |restored .*-)(\d+)$", line)
            for line in self.task_log(training, task)
        )
        return [int(match[1]) for match in matches if match]

    def until_started(self, training: Training, task: str, *, more_than: int, secs: float = 60.0) -> None:
        """Wait until a TF task has begun, or gone on from a checkpoint, more often than that."""
        until(lambda: len(self.starts(training, task)) > more_than, secs, f"{task} goes on from a checkpoint")

    def task_log(self, training: Training, task: str) -> list[str]:
        """A TF task's log on its host."""
        home = Path(self.live.hosts[training.host(task)].home)
        role, index = task.split(":")
        for path in home.glob(f".tfps*/trainings/*/*/tasks/{role}-{index}/log"):
            spec = json.loads((path.parents[2] / "spec.json").read_text())
            if spec["request"]["training"] == str(training.id):
                return path.read_text().splitlines()
        return []

    def goes_on(self, training: Training, task: str = CHIEF, steps: int = 5, secs: float = 60.0) -> None:
        """Wait until a TF task has done some steps more."""
        count = len(self.steps(training, task))
        until(lambda: len(self.steps(training, task)) >= count + steps, secs, f"{task} goes on")


def held_python(live: BedLive) -> tuple[Path, Path]:
    """An interpreter that waits before a runtime command while a file names that command; both paths.

    While it waits there is a file `held` beside that.
    """
    folder = Path(tempfile.mkdtemp(dir=live.folder))
    python, hold = folder / "python", folder / "hold"
    python.write_text(
        "#!/bin/sh\n"
        f'while [ "$2" = "$(cat {hold} 2>/dev/null)" ] && [ -n "$2" ]; do touch {folder}/held; sleep 0.1; done\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python, hold


class BedLive(Live):
    """The components, the bed's hosts, runs, and the table."""

    run_type = BedRun

    def __init__(self, stack: AirflowStack, bed: Bed, folder: Path, table: Table) -> None:
        super().__init__(stack, bed.hosts, folder)  # type: ignore[arg-type]  only `home` is asked of them
        self.bed = bed
        self.table = table
