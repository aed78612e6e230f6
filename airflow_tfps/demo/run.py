"""`make demo`: the main job on one machine, from three SSH hosts to the model that is promoted.

    python -m airflow_tfps.demo [--steps 1000] [--out result.json]

Embedded SSH hosts and an Airflow of its own, both below `.demo`; triggers `nightly_digits` through the REST API, shows
the training, writes `result.json`. In a terminal it then stays up until Ctrl-C. However it ends, nothing remains: no
process with the demo's home in its environment, no port, no training's lock; that is looked up, and said if it is not
so. Exit codes: 0, 1 for a failure or for something that remains, 130 when interrupted before the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from airflow_tfps.demo import example_dags
from airflow_tfps.demo.api import StackError, wait
from airflow_tfps.demo.home import HOME_VARIABLE, DemoError, alone, empty, runtime, tidy
from airflow_tfps.demo.hosts import connection_json, read_hosts
from airflow_tfps.demo.processes import listening, processes
from airflow_tfps.demo.stack import AirflowStack
from airflow_tfps.demo.view import View
from airflow_tfps.errors import TfpsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from airflow_tfps.demo.hosts import DemoHost

HOSTS = ("gpu-a", "gpu-b", "gpu-c")
INVENTORY = "gpu_lab"
"""The connection that the example DAGs name."""
DAG = "nightly_digits"
PHASES = {
    "prepare": "prepare",
    "provision": "training.provision",
    "ready": "training.ready",
    "train": "training.train",
    "downstream": "judge",
    "evaluate": "evaluate",
    "promote": "promote",
}
"""Phase of the run to the task that ends it."""
RUN_SECS = 600.0
POLL_SECS = 0.5
PATIENCE = 3
"""How often in a row Airflow may fail to answer."""
HOSTS_SECS = 30.0
STOP_SECS = 5.0
INTERRUPTED = 130
"""What a shell says of a command that SIGINT ended."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line said."""

    home: Path
    out: Path
    dags: Path
    conf: Mapping[str, Any]
    """Of the DAG run."""
    stays: bool
    """Whether it stays up after the summary."""
    setup_secs: float | None
    """What `make` took before."""


class Demo:
    """One run of the demo. `run`, then always `stop`, which may be called at any time."""

    def __init__(self, options: Options, view: View) -> None:
        self._options = options
        self._view = view
        self._home = options.home
        self._hosts: dict[str, DemoHost] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._stack: AirflowStack | None = None
        self._timings: dict[str, float] = {}
        self._ports: set[int] = set()
        self._strangers: set[int] = set()

    def run(self) -> None:
        """From nothing to the summary. Blocks. Raises TfpsError when the run fails, saying why."""
        view = self._view
        if self._options.setup_secs is not None:
            self._timings["set-up"] = self._options.setup_secs
        self._make_room()
        with view.phase(f"Starting the SSH hosts {', '.join(HOSTS)}"), self._timed("hosts"):
            self._start_hosts()
        began = time.monotonic()
        with view.phase("Starting Airflow"), self._timed("Airflow start"):
            stack = self._start_airflow()
        view.line(f"Airflow is at {stack.url}, user {stack.login[0]}, password {stack.login[1]}")
        run_id = stack.api.trigger(DAG, self._options.conf)
        view.line(f"triggered {DAG}")
        state = self._watch(stack, run_id)
        if state != "success":
            self._explain(stack, run_id)
        self._timings.update(_phases(stack, run_id))
        self._timings["the run: Airflow start to result"] = time.monotonic() - began
        found = self._result(stack, run_id)
        _write(self._options.out, found)
        view.result(found)
        view.line(f"written to {self._options.out}")

    def stop(self) -> list[str]:
        """End everything; returns what could not be ended. Idempotent."""
        mine = set(processes(str(self._home))) - self._strangers
        self._ports |= {port for _, port in listening(mine)}
        left = []
        if self._stack is not None:
            try:
                self._stack.stop()
            except StackError as error:
                left.append(str(error))
        if self._server is not None:
            self._server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(STOP_SECS)
        return left + tidy(self._home, ports=self._ports, strangers=self._strangers)

    # --- its parts ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._timings[name] = time.monotonic() - began

    def _make_room(self) -> None:
        """End what a demo that was killed has left, and empty the home."""
        tidy(self._home)
        self._strangers = set(processes(str(self._home)))
        empty(self._home)
        self._options.out.unlink(missing_ok=True)

    def _start_hosts(self) -> None:
        folder = self._home / "ssh"
        folder.mkdir()
        arguments = [argument for name in HOSTS for argument in ("--host", name)]
        with (folder / "log").open("wb") as log:
            self._server = server = subprocess.Popen(
                [sys.executable, "-m", "airflow_tfps.demo.hosts", "--home", str(folder), *arguments],
                env={**os.environ, HOME_VARIABLE: str(self._home)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us; we end it
            )
        wait(
            lambda: (folder / "hosts.json").exists() or server.poll() is not None,
            HOSTS_SECS,
            "the SSH hosts",
        )
        if server.poll() is not None:
            raise DemoError(f"the SSH hosts ended:\n{(folder / 'log').read_text('utf-8', 'replace')}")
        self._hosts = read_hosts(folder)

    def _start_airflow(self) -> AirflowStack:
        inventory = {
            name: {"ssh_conn_id": _conn_id(name), "gpus": 0, "python": sys.executable} for name in self._hosts
        }
        connections = {_conn_id(name): connection_json(host) for name, host in self._hosts.items()}
        connections[INVENTORY] = {"conn_type": "tfps", "extra": {"hosts": inventory}}
        self._stack = AirflowStack(
            self._home / "airflow", dags_folder=self._options.dags, connections=connections
        )
        try:
            self._stack.start()
        except StackError as error:
            if "address already in use" not in str(error).lower():
                raise
            self._view.line("somebody else took the port; once more")
            self._stack.start()
        return self._stack

    def _watch(self, stack: AirflowStack, run_id: str) -> str:
        """Show the run until it has ended; returns its state."""
        until, seen, failures = time.monotonic() + RUN_SECS, dict[str, str | None](), 0
        with self._view.following():
            while time.monotonic() < until:
                try:
                    state = self._look(stack, run_id, seen)
                    failures = 0
                except StackError:
                    failures += 1
                    if failures > PATIENCE:  # a machine that is short of memory may keep it from answering
                        raise
                    continue
                if state in ("success", "failed"):
                    return state
                time.sleep(POLL_SECS)
        raise DemoError(f"{DAG} did not end within {RUN_SECS:.0f} s; see {stack.home / 'logs'}")

    def _look(self, stack: AirflowStack, run_id: str, seen: dict[str, str | None]) -> str:
        """Show what has changed since `seen`; the run's state."""
        state = stack.api.run_state(DAG, run_id)
        for (task, _), now in stack.api.task_states(DAG, run_id).items():
            if now is not None and now != seen.get(task):
                self._view.task(task, now)
            seen[task] = now
        board = stack.api.xcom(DAG, run_id, PHASES["train"], "progress")
        if isinstance(board, dict):
            self._view.progress(board)
        return state

    def _explain(self, stack: AirflowStack, run_id: str) -> NoReturn:
        """Raise with the end of the log of the task that failed first."""
        tasks = stack.api.tasks(DAG, run_id)
        failed = [ti for ti in tasks.values() if ti["state"] == "failed"]
        if not failed:
            raise DemoError(f"{DAG} failed, and none of its tasks did; see {stack.home / 'logs'}")
        first = min(failed, key=lambda ti: ti["end_date"] or "")
        lines = stack.api.log(DAG, run_id, first["task_id"], first["try_number"])
        said = "\n".join(f"  {line}" for line in lines[-40:])
        raise DemoError(f"{DAG} failed in {first['task_id']}; the end of its log:\n{said}")

    def _result(self, stack: AirflowStack, run_id: str) -> dict[str, Any]:
        """What goes into result.json."""
        trained = stack.api.xcom(DAG, run_id, PHASES["train"])
        judged = stack.api.xcom(DAG, run_id, PHASES["downstream"])
        handle = stack.api.xcom(DAG, run_id, PHASES["provision"])
        promoted = stack.api.xcom(DAG, run_id, PHASES["promote"])
        return {
            "accuracy": judged["accuracy"],
            "global_step": trained["global_step"],
            "checkpoint": trained["checkpoint"],
            "host": trained["host"],
            "metrics": trained["metrics"],
            "model": {key: promoted[key] for key in ("version", "path", "host", "reason")},
            "training_id": trained["training_id"],
            "dag_id": DAG,
            "run_id": run_id,
            "timings": {name: round(secs, 1) for name, secs in self._timings.items()},
            "tasks": self._tf_tasks(handle, trained["training_id"]),
            "versions": _versions(),
            "cpus": os.cpu_count(),
        }

    def _tf_tasks(self, handle: Mapping[str, Any], training: str) -> list[dict[str, Any]]:
        """How each TF task ended, as its host has it."""
        ended: dict[str, dict[str, Any]] = {}
        for name in sorted({host for _, host, *_ in handle["tasks"]}):
            workdir = f"{self._hosts[name].home}/.tfps"
            status = runtime("status", {"training": training, "host": name, "workdir": workdir})
            ended.update({task["task"]: task for task in status.get("tasks", [])})
        return [
            {
                "task": task,
                "host": host,
                "state": ended.get(task, {}).get("state", "?"),
                "restarts": max(ended.get(task, {}).get("attempt", 1) - 1, 0),
            }
            for task, host, *_ in handle["tasks"]
        ]


def _conn_id(host: str) -> str:
    return host.replace("-", "_")


def _phases(stack: AirflowStack, run_id: str) -> dict[str, float]:
    """Seconds from the end of one phase's task to the end of the next; the first from the run's start."""
    run = stack.api.get(f"/dags/{DAG}/dagRuns/{run_id}")
    ends = {task: _time(ti["end_date"]) for (task, _), ti in stack.api.tasks(DAG, run_id).items()}
    found, before = {}, _time(run["queued_at"] or run["start_date"])
    for phase, task in PHASES.items():
        found[phase] = (ends[task] - before).total_seconds()
        before = ends[task]
    return found


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("airflow-tfps", "apache-airflow", "tensorflow", "tensorflow-cpu", "asyncssh", "paramiko"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _write(path: Path, data: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    partial.replace(path)


# --- signals, one demo at a time, the command line --------------------------------------------------------------------


class Interrupts:
    """The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt; later ones do not disturb the tidying up."""

    def __init__(self) -> None:
        self.is_over = False

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_over = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt


def parse(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m airflow_tfps.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--home", type=Path, default=".demo", help="emptied first")
    parser.add_argument("--out", type=Path, default="result.json")
    parser.add_argument("--dags", type=Path, default=example_dags(), help="instead of the example DAGs")
    parser.add_argument("--steps", type=int, help="global steps; default: the DAG's")
    parser.add_argument("--mode", choices=("sync", "async"), help="default: the DAG's")
    parser.add_argument("--exit", action="store_true", help="do not stay up after the summary")
    parser.add_argument("--started", type=float, help="when `make` began, in seconds since the epoch")
    given = parser.parse_args(argv)
    if not (given.dags / f"{DAG}.py").exists():
        parser.error(f"no {DAG}.py in {given.dags}; say --dags")
    return Options(
        home=given.home.resolve(),
        out=given.out.resolve(),
        dags=given.dags.resolve(),
        conf={key: value for key in ("steps", "mode") if (value := getattr(given, key)) is not None},
        stays=not given.exit and sys.stdin.isatty() and sys.stdout.isatty(),
        setup_secs=None if given.started is None else max(time.time() - given.started, 0.0),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    options, view = parse(argv), View()
    with Interrupts() as interrupts:
        try:
            with alone(options.home):
                return _run(options, view, interrupts)
        except DemoError as error:
            view.error(str(error))
            return 1
        except KeyboardInterrupt:
            return INTERRUPTED


def _run(options: Options, view: View, interrupts: Interrupts) -> int:
    demo, has_result, code = Demo(options, view), False, 0
    try:
        demo.run()
        has_result = True
        if options.stays:
            view.line("Ctrl-C ends it")
            signal.pause()
    except KeyboardInterrupt:
        code = 0 if has_result else INTERRUPTED
    except (TfpsError, TimeoutError, OSError) as error:
        view.error(str(error))
        code = 1
    finally:
        interrupts.is_over = True
        with view.phase("Stopping everything"):
            left = demo.stop()
    for one in left:
        view.error(f"still there: {one}")
    if not left:
        view.line("nothing is left: no process, no port, no lock")
    return 1 if left else code
