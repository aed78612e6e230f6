"""How soon a training goes on after `kill -9` of its ps, its chief, a worker: warm, with TensorFlow and the harness.

    python tests/benchmarks/recovery.py [--kills 5] [--mode async|sync]

1 ps + 2 workers on one host (`local` transport); each in turn is killed `--kills` times in one training. Medians:

- of ps: from the kill to the first global step above the restored one, bound 3 s;
- of chief or worker: from the kill to that TF task's own next step, bound 3 s;
- of each: from the kill to the agent's new start of it, bound 0.5 s. No other process may have changed.

The harness records at most two steps a second, so the first two may be half a second too long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_tfps.handle import Handle
    from airflow_tfps.hook import ClusterHook

JOB = Path(__file__).parents[2] / "dags" / "jobs" / "linear_regression.yaml"
PS, CHIEF, WORKER = "ps:0", "worker:0", "worker:1"
STEP_BOUND, START_BOUND = 3.0, 0.5
PATIENCE_SECS = 60.0
QUICK_SECS = 10.0
"""A TF task that ends sooner after its start counts as failing at once (`tfps_runtime.core.QUICK_SECS`)."""
POLL_SECS = 0.005


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` returns something true. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE_SECS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(POLL_SECS)
    return found


@dataclass
class Watched:
    """A training on this machine, seen through the files that it writes."""

    hook: ClusterHook
    handle: Handle

    @property
    def directory(self) -> Path:
        return Path(self.handle.paths("here").directory)

    def pids(self) -> dict[str, int]:
        """TF task -> pid, of those that live."""
        tasks = self.hook.status(self.handle)["here"]["tasks"]
        return {task["task"]: task["pid"] for task in tasks if "pid" in task}

    def records(self, task: str) -> list[dict[str, Any]]:
        path = self.directory / "tasks" / task.replace(":", "-") / "progress.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def restored(self) -> list[int]:
        """Global steps that the chief has restored, in order."""
        log = (self.directory / "tasks" / CHIEF.replace(":", "-") / "log").read_text()
        return [int(step) for step in re.findall(r"restored \S*model\.ckpt-(\d+)", log)]

    def started(self, task: str, after: float) -> float | None:
        """When the agent started a TF task for the first time after a moment."""
        for line in (self.directory / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event.get("task") == task and event.get("state") == "STARTING" and event["time"] > after:
                return float(event["time"])
        return None

    def newest_start(self, task: str) -> float | None:
        """When the agent started a TF task last."""
        started, newest = self.started(task, 0.0), None
        while started is not None:
            newest, started = started, self.started(task, started)
        return newest

    def next_step(self, task: str, after: float, above: int = -1) -> float | None:
        """When a TF task reported the first step above one, after a moment."""
        for record in self.records(task):
            if record["time"] > after and record["global_step"] > above:
                return float(record["time"])
        return None

    def kill(self, victim: str) -> tuple[float, float]:
        """Kill a TF task; seconds until its new start and until the step that counts."""
        before = self.pids()
        count = len(self.restored())
        killed = time.time()
        os.kill(before[victim], signal.SIGKILL)
        started = until(lambda: self.started(victim, killed), f"{victim} starts again")
        if victim == PS:
            until(lambda: len(self.restored()) > count, "the chief restores")
            stepped = until(lambda: self.next_step(CHIEF, time.time() - 1, self.restored()[-1]), "a step")
        else:
            stepped = until(lambda: self.next_step(victim, started), f"a step of {victim}")
        after = self.pids()
        changed = [task for task in before if after.get(task) != before[task]]
        if changed != [victim]:
            raise RuntimeError(f"killed was {victim}, another process have {changed}")
        return started - killed, stepped - killed

    def settle(self, victim: str) -> None:
        """Wait until all train, a checkpoint has been written since, and the victim is no task that fails at once.

        Of those the agent puts off the next start: that is not what is measured.
        """
        until(
            lambda: time.time() - (self.newest_start(victim) or time.time()) > QUICK_SECS, f"{victim} lives"
        )
        now = time.time()
        for task in (CHIEF, WORKER):
            until(lambda task=task: self.next_step(task, now), f"{task} trains")
        saved = self.saved()
        until(lambda: self.saved() != saved, "a checkpoint")

    def saved(self) -> str:
        path = Path(self.handle.checkpoint_dir) / "checkpoint"
        return path.read_text() if path.exists() else ""


def main() -> int:
    """Print each kill and the medians; exit code 1 beyond a bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--mode", choices=["async", "sync"], default="async")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tfps-bench-") as folder:
        os.environ.setdefault("AIRFLOW_HOME", f"{folder}/airflow")
        return measure(Path(folder), arguments.kills, arguments.mode)


def measure(folder: Path, kills: int, mode: str) -> int:
    from tfps_runtime.protocol import TrainingId

    from airflow_tfps.hook import ClusterHook
    from airflow_tfps.inventory import Inventory
    from airflow_tfps.spec import JobSpec

    host = {"ssh_conn_id": "local", "python": sys.executable, "workdir": str(folder / "work"), "gpus": 0}
    inventory = Inventory.load({"hosts": {"here": host}})
    job = JobSpec.from_file(JOB).to_dict()
    job.update(
        mode=mode,
        steps=10_000_000,
        roles={r: {"count": n, "restarts": 100} for r, n in (("ps", 1), ("worker", 2))},
    )
    job["hparams"]["step_secs"] = 0.02
    job["checkpoint"] = {"base_dir": str(folder / "checkpoints"), "save_checkpoint_secs": 1.0}
    is_good = True
    with ClusterHook(inventory=inventory) as hook:
        spec = JobSpec.from_dict(job, base_dir=JOB.parent)
        handle = hook.ensure(spec, TrainingId("benchmark/run/recovery", secrets.token_hex(4)))
        try:
            hook.launch(handle)
            watched = Watched(hook, handle)
            until(lambda: watched.next_step(CHIEF, 0), "the first step")
            for victim in (PS, CHIEF, WORKER):
                found = []
                for _ in range(kills):
                    watched.settle(victim)
                    found.append(watched.kill(victim))
                    print(
                        f"{victim}: started again after {found[-1][0]:.3f} s, stepped after {found[-1][1]:.2f} s",
                        flush=True,
                    )
                start, step = (statistics.median(column) for column in zip(*found, strict=True))
                is_good = is_good and start <= START_BOUND and step <= STEP_BOUND
                print(
                    f"{mode}, median of {kills}, kill -9 of {victim}: started again after {start:.3f} s "
                    f"(bound {START_BOUND}), stepped after {step:.2f} s (bound {STEP_BOUND}); no other process changed"
                )
        finally:
            hook.stop(handle, "measured", grace_secs=0)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
