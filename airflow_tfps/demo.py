"""`make demo`: the main job on one machine, from three SSH hosts to the model that is judged.

    python -m airflow_tfps.demo [--steps 1000] [--out result.json]

Embedded SSH hosts and an Airflow of its own, both below `.demo`; triggers `nightly_digits` through the REST API, shows
the training, writes `result.json`. In a terminal it then stays up until Ctrl-C. However it ends, nothing remains: no
process with the demo's home in its environment, no port, no training's lock; that is looked up, and said if it is not
so. Exit codes: 0, 1 for a failure or for something that remains, 130 when interrupted before the result.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from tfps_runtime.protocol import LockRecord, ProtocolError, run_dir

from airflow_tfps.demo_api import StackError, wait
from airflow_tfps.demo_hosts import connection_json, read_hosts
from airflow_tfps.demo_processes import describe, listening, open_ports, processes
from airflow_tfps.demo_stack import AirflowStack
from airflow_tfps.demo_view import View
from airflow_tfps.errors import TfpsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from airflow_tfps.demo_hosts import DemoHost

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
}
"""Phase of the run to the task that ends it."""
RUN_SECS = 600.0
HOSTS_SECS = 30.0
GRACE_SECS = 5.0
"""For a training that is still there when the demo ends."""
HOME_VARIABLE = "TFPS_DEMO_HOME"
"""In the environment of the SSH hosts' process."""


class DemoError(TfpsError):
    """The demo cannot go on; the message says why and what to do."""


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
                self._server.wait(GRACE_SECS)
        return left + self._tidy()

    # --- its parts ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._timings[name] = time.monotonic() - began

    def _make_room(self) -> None:
        """End what a demo that was killed has left, and empty the home."""
        self._tidy()
        # Another program may have the path in its environment, as a shell has in OLDPWD.
        self._strangers = set(processes(str(self._home)))
        for entry in self._home.iterdir():
            if entry.name != "lock":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self._options.out.unlink(missing_ok=True)

    def _start_hosts(self) -> None:
        folder = self._home / "hosts"
        folder.mkdir()
        arguments = [argument for name in HOSTS for argument in ("--host", name)]
        with (folder / "log").open("wb") as log:
            self._server = server = subprocess.Popen(
                [sys.executable, "-m", "airflow_tfps.demo_hosts", "--home", str(folder), *arguments],
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
        api, until, seen = stack.api, time.monotonic() + RUN_SECS, dict[str, str | None]()
        try:
            while time.monotonic() < until:
                state = api.run_state(DAG, run_id)
                for (task, _), now in api.task_states(DAG, run_id).items():
                    if now != seen.get(task) and now not in (None, "scheduled", "queued"):
                        self._view.line(f"{task:<20} {now}")
                    seen[task] = now
                board = api.xcom(DAG, run_id, PHASES["train"], "progress")
                if isinstance(board, dict):
                    self._view.progress(board)
                if state in ("success", "failed"):
                    return state
                time.sleep(0.5)
        finally:
            self._view.end_progress()
        raise DemoError(f"{DAG} did not end within {RUN_SECS:.0f} s; see {stack.home / 'logs'}")

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
        return {
            "accuracy": judged["accuracy"],
            "global_step": trained["global_step"],
            "checkpoint": trained["checkpoint"],
            "host": trained["host"],
            "metrics": trained["metrics"],
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
            status = _runtime("status", {"training": training, "host": name, "workdir": workdir})
            ended.update({task["task"]: task for task in status.get("tasks", [])})
        return [
            {
                "TF task": task,
                "host": host,
                "state": ended.get(task, {}).get("state", "?"),
                "restarts": max(ended.get(task, {}).get("attempt", 1) - 1, 0),
            }
            for task, host, *_ in handle["tasks"]
        ]

    # --- nothing remains ------------------------------------------------------------------------------------------

    def _tidy(self) -> list[str]:
        """End servers and trainings of this home, whoever started them; returns what remains."""
        for mark in (f"{HOME_VARIABLE}={self._home}\0", f"AIRFLOW_HOME={self._home}/"):
            _kill(mark)
        for record in _trainings(self._home):
            request = {"training": record.training, "host": record.host, "workdir": record.workdir}
            _runtime("stop", {**request, "reason": "the demo ends", "grace_secs": GRACE_SECS})
        # What the hosts run for us has its home directory there.
        with contextlib.suppress(TimeoutError):
            wait(lambda: not processes(f"HOME={self._home}/"), GRACE_SECS, "the hosts' commands")
        _kill(f"HOME={self._home}/")
        if _trainings(self._home):
            _runtime("sweep", {})
        left = [describe(pid) for pid in processes(str(self._home)) if pid not in self._strangers]
        left += [f"port {port} is still open" for port in sorted(self._ports & open_ports())]
        left += [f"the lock of {record.training} on {record.host}" for record in _trainings(self._home)]
        return left


def _conn_id(host: str) -> str:
    return host.replace("-", "_")


def _kill(mark: str) -> None:
    """SIGKILL to every process that has `mark` in its environment, and wait for their ends."""
    for pid in processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        wait(lambda: not processes(mark), GRACE_SECS, "processes to end")


def _trainings(home: Path) -> list[LockRecord]:
    """The locks of trainings whose hosts live below `home`."""
    found = []
    for path in Path(run_dir()).glob("*.lock"):
        with contextlib.suppress(OSError, ProtocolError):
            record = LockRecord.loads(path.read_text("utf-8"))
            if Path(record.workdir).is_relative_to(home):
                found.append(record)
    return found


def _runtime(command: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Call the on-host runtime here, where all demo hosts are; its last answer, empty if it gave none."""
    done = subprocess.run(
        [sys.executable, "-m", "tfps_runtime", command],
        input=json.dumps(request).encode() + b"\n",
        capture_output=True,
        check=False,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    return dict(json.loads(lines[-1])) if lines else {}


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


@contextlib.contextmanager
def alone(home: Path) -> Iterator[None]:
    """Hold the home's lock. Raises DemoError when another demo does."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            pid = lock.read().strip() or "unknown"
            raise DemoError(
                f"another demo runs in {home} (process {pid}): end it with Ctrl-C, or with `kill {pid}`, first"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def parse(argv: Sequence[str] | None) -> Options:
    checkout = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(prog="python -m airflow_tfps.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--home", type=Path, default=checkout / ".demo", help="emptied first")
    parser.add_argument("--out", type=Path, default=checkout / "result.json")
    parser.add_argument("--dags", type=Path, default=checkout / "dags", help="folder with the example DAGs")
    parser.add_argument("--steps", type=int, help="global steps; default: the DAG's")
    parser.add_argument("--mode", choices=("sync", "async"), help="default: the DAG's")
    parser.add_argument("--exit", action="store_true", help="do not stay up after the summary")
    parser.add_argument("--started", type=float, help="when `make` began, in seconds since the epoch")
    given = parser.parse_args(argv)
    if not (given.dags / f"{DAG}.py").exists():
        parser.error(f"no {DAG}.py in {given.dags}: run it from a checkout, or say --dags")
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
    has_result = False
    with Interrupts() as interrupts:
        try:
            with alone(options.home):
                demo = Demo(options, view)
                try:
                    demo.run()
                    has_result = True
                    if options.stays:
                        view.line("Ctrl-C ends it")
                        signal.pause()
                    code = 0
                except KeyboardInterrupt:
                    code = 0 if has_result else 130
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
        except DemoError as error:
            view.error(str(error))
            return 1


if __name__ == "__main__":
    sys.exit(main())
