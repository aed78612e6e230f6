"""Airflow for the demo and the tests: API servers, scheduler, dag-processor and triggerer on one machine.

SQLite, LocalExecutor, a home of its own, everything on 127.0.0.1: Airflow's log servers, which listen on all
addresses, are off, since here the API server reads the log files themselves. Nothing runs on a schedule.

    with AirflowStack(Path("demo/airflow"), dags_folder=Path("dags"), connections={"gpu_a": {...}}) as stack:
        run_id = stack.api.trigger("linear_regression")
        stack.api.wait(lambda: stack.api.run_state("linear_regression", run_id) == "success", 120)
    assert not leftovers(Path("demo"))
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx

from airflow_tfps.demo.api import Api, StackError, wait
from airflow_tfps.demo.processes import describe, leftovers, listening, open_ports, processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

log = logging.getLogger(__name__)

COMPONENTS: Mapping[str, Sequence[str]] = {
    # Two processes: what a user does is logged from within the event loop. That waits there for SQLite's lock while a
    # task's request, which has the lock, waits for the event loop; after 5 s one fails (3.3.2, `action_logging`).
    "api-server": ("api-server", "--apps", "core"),
    "execution-api": ("api-server", "--apps", "execution"),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
"""Component to the arguments of `airflow`."""

USER = "admin"
MIGRATE_SECS = 120.0
START_SECS = 180.0
TERM_SECS = 15.0
"""A scheduler has been seen to wait for a minute on a worker that had nothing to do."""


class AirflowStack:
    """The components, each in a session of its own, with its log in `home/logs-components`.

    All methods block. `start` leaves nothing behind when it fails; `stop` may be called at any time and again.

    Args:
        home: AIRFLOW_HOME; created, and kept when the stack stops.
        dags_folder: The DAGs to serve. All are unpaused; none runs by its schedule.
        connections: Connection id to the connection as Airflow's JSON.
        env: Environment over everything else, such as `AIRFLOW__SECTION__KEY`.
        components: What to start, as `COMPONENTS`; those of it at least.
        python: Interpreter that has Airflow and this package.
    """

    def __init__(
        self,
        home: Path,
        *,
        dags_folder: Path,
        connections: Mapping[str, Mapping[str, Any]],
        env: Mapping[str, str] | None = None,
        components: Mapping[str, Sequence[str]] = COMPONENTS,
        python: str = sys.executable,
    ) -> None:
        self.home = home.absolute()
        self.dags_folder = dags_folder.absolute()
        self._connections = connections
        self._extra = dict(env or {})
        self._components = components
        self._python = python
        self._env: dict[str, str] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.RLock()
        self._is_stopping = threading.Event()
        self._keeper: threading.Thread | None = None
        self._ports: set[int] = set()
        self._port = self._execution_port = 0
        self._api: Api | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Of the UI and the API."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def login(self) -> tuple[str, str]:
        """User and password, once started."""
        passwords = json.loads((self.home / "simple_auth_manager_passwords.json.generated").read_text())
        return USER, passwords[USER]

    @property
    def api(self) -> Api:
        """The REST API, logged in, once started."""
        if self._api is None:
            raise StackError("Airflow has not been started")
        return self._api

    @property
    def environment(self) -> dict[str, str]:
        """What the components are run with, once started: for another command of `airflow`."""
        return dict(self._env)

    # --- starting and stopping ----------------------------------------------------------------------------------

    def start(self, secs: float = START_SECS) -> None:
        """Make the database, start all components, wait until they are healthy and every DAG file is read.

        Raises StackError when one ends, when a DAG has an import error, or after `secs`.
        """
        if self._children:
            return
        self._end(processes(self._mark))  # of a run that was killed
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "logs-components").mkdir(exist_ok=True)
        self._port, self._execution_port = free_port(), free_port()
        self._env = self._environment()
        try:
            self._migrate()
            for name in self._components:
                self._launch(name)
            until = time.monotonic() + secs
            self._wait_healthy(until)
            self._api = Api(self.url, *self.login)
            self._wait_dags(until)
        except BaseException:
            self.stop()
            raise
        self._is_stopping.clear()
        self._keeper = threading.Thread(target=self._keep, name="tfps-keeper", daemon=True)
        self._keeper.start()

    def stop(self) -> None:
        """End every component and whatever it started. Idempotent.

        Raises StackError if a process with this home in its environment, or a port that one opened, is left.
        """
        self._is_stopping.set()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        if self._api is not None:
            self._api.close()
            self._api = None
        self._ports |= {port for _, port in listening(processes(self._mark))}
        servers = ("api-server", "execution-api")
        self._end_components([name for name in self._components if name not in servers])
        self._end_components(servers)  # last, since tasks end through them
        self._end(processes(self._mark))
        left = [describe(pid) for pid in processes(self._mark)]
        left += [f"port {port} is still open" for port in sorted(self._ports & open_ports())]
        self._ports = set()
        if left:
            raise StackError("Airflow has left something behind: " + "; ".join(left))

    def pid(self, name: str) -> int:
        """The process id of a component, the leader of its session."""
        return self._children[name].pid

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to all processes of a component and wait until it has ended."""
        with self._lock:
            self._signal(name, number)
            self._children.pop(name).wait(TERM_SECS)

    def restart(self, name: str) -> None:
        """End a component, if it lives, and start it again. Does not wait until it is healthy."""
        with self._lock:
            self._end_components([name])
            self._launch(name)

    def _keep(self) -> None:
        """Start a component again that has ended by itself, as a service manager does.

        The scheduler of 3.3.2 ends with a StaleDataError when a run is deleted while it looks at it.
        """
        while not self._is_stopping.wait(1.0):
            with self._lock:
                for name, child in list(self._children.items()):
                    if child.poll() is not None:
                        log.warning("%s has ended with %s; starting it again", name, child.returncode)
                        self._launch(name)

    # --- parts --------------------------------------------------------------------------------------------------

    @property
    def _mark(self) -> str:
        """What stands in the environment of all our processes and of no other's."""
        return f"AIRFLOW_HOME={self.home}\0"

    def _environment(self) -> dict[str, str]:
        dropped = ("PYTHONDONTWRITEBYTECODE",)
        env = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW_") and k not in dropped}
        if not has_bytecode():
            env.setdefault("PYTHONPYCACHEPREFIX", str(self.home / "pycache"))
        env.update(
            {
                "AIRFLOW_HOME": str(self.home),
                "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags_folder),
                "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
                "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
                "AIRFLOW__CORE__PARALLELISM": "4",
                "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
                "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
                "AIRFLOW__CORE__HOSTNAME_CALLABLE": "socket.gethostname",  # the default asks the name server
                "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{self._execution_port}/execution/",
                # How late a worker may notice that a task's process has ended; every deferral waits for it.
                "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
                "AIRFLOW__API__HOST": "127.0.0.1",
                "AIRFLOW__API__PORT": str(self._port),
                "AIRFLOW__API__BASE_URL": self.url,
                "AIRFLOW__API__WORKERS": "1",
                # Where the API server asks for logs beside the files: nowhere, and not another Airflow's servers.
                "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": "1",
                "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": "1",
                "AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "False",
                "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
                "AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "5",
                "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
                "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "300",
                "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
                "NO_COLOR": "1",
                "SPT_NOENV": "1",  # setproctitle would overwrite the environment in /proc by which `stop` finds all
            }
        )
        for conn_id, connection in self._connections.items():
            env[f"AIRFLOW_CONN_{conn_id.upper()}"] = json.dumps(connection)
        env.update(self._extra)
        return env

    def _argv(self, *args: str) -> list[str]:
        return [self._python, "-m", "airflow", *args]

    def _migrate(self) -> None:
        try:
            done = subprocess.run(
                self._argv("db", "migrate"),
                env=self._env,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=MIGRATE_SECS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StackError(f"`airflow db migrate` took more than {MIGRATE_SECS:.0f} s") from None
        if done.returncode != 0:
            said = (done.stdout + done.stderr).decode("utf-8", "replace")
            raise StackError(f"`airflow db migrate` ended with exit code {done.returncode}:\n{said[-4000:]}")

    def _log(self, name: str) -> Path:
        return self.home / "logs-components" / f"{name}.log"

    def _launch(self, name: str) -> None:
        with self._log(name).open("ab") as output:
            port = {"AIRFLOW__API__PORT": str(self._execution_port)} if name == "execution-api" else {}
            self._children[name] = subprocess.Popen(
                self._argv(*self._components[name]),
                env=self._env | port,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _signal(self, name: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._children[name].pid, number)

    def _end_components(self, names: Sequence[str]) -> None:
        """SIGTERM to components side by side, SIGKILL to those that do not end."""
        left = [name for name in names if name in self._children]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for name in left:
                self._signal(name, number)
            until = time.monotonic() + TERM_SECS
            for name in tuple(left):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._children[name].wait(max(until - time.monotonic(), 0))
                    log.info("%s has ended with %s", name, self._children.pop(name).returncode)
                    left.remove(name)

    def _end(self, pids: Iterable[int]) -> None:
        """SIGKILL to what is left: tasks have sessions of their own and outlive a scheduler that was killed."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            wait(lambda: not processes(self._mark), TERM_SECS, "the processes to end")

    def _check_children(self) -> None:
        for name, child in self._children.items():
            code = child.poll()
            if code is not None:
                raise StackError(f"{name} has ended with {code}:\n{tail(self._log(name))}")

    def _wait_healthy(self, until: float) -> None:
        unhealthy: list[str] = ["the API server"]

        def is_healthy() -> bool:
            self._check_children()
            try:
                report = httpx.get(f"{self.url}/api/v2/monitor/health", timeout=5, trust_env=False).json()
            except (httpx.HTTPError, ValueError):
                return False
            unhealthy[:] = [k for k, v in report.items() if (v or {}).get("status") != "healthy"]
            if self._execution_port not in open_ports():
                unhealthy.append("execution-api")
            return not unhealthy

        try:
            wait(is_healthy, until - time.monotonic(), "")
        except TimeoutError:
            logs = "\n".join(f"{name}:\n{tail(self._log(name), 15)}" for name in self._components)
            raise StackError(f"not healthy in time: {', '.join(unhealthy)}\n{logs}") from None

    def _wait_dags(self, until: float) -> None:
        """Wait until the dag-processor has read every file with a DAG that is in the folder itself.

        What is in folders below may be programs, which `.airflowignore` keeps from it.
        """
        files = {path.name for path in self.dags_folder.glob("*.py") if _may_hold_dag(path)}

        def missing() -> set[str]:
            self._check_children()
            errors = self.api.get("/importErrors")["import_errors"]
            if errors:
                raise StackError("\n".join(f"{e['filename']}:\n{e['stack_trace']}" for e in errors))
            found = self.api.get("/dags?limit=100")["dags"]
            return files - {Path(dag["fileloc"]).name for dag in found}

        try:
            wait(lambda: not missing(), until - time.monotonic(), "")
        except TimeoutError:
            names = ", ".join(sorted(missing()))
            raise StackError(f"not read in time: {names}\n{tail(self._log('dag-processor'))}") from None


def tail(path: Path, lines: int = 40) -> str:
    """The last lines of a file."""
    return "\n".join(path.read_text("utf-8", "replace").splitlines()[-lines:]) if path.exists() else ""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def has_bytecode() -> bool:
    """Whether the installed Airflow is compiled; it starts twice as slowly otherwise."""
    spec = importlib.util.find_spec("airflow")
    if spec is None or spec.origin is None:
        return False
    source = Path(spec.origin)
    return (source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc").exists()


def _may_hold_dag(path: Path) -> bool:
    """Airflow's own test for a file that is worth importing."""
    content = path.read_bytes().lower()
    return b"dag" in content and b"airflow" in content


__all__ = ["AirflowStack", "Api", "StackError", "free_port", "leftovers", "wait"]
