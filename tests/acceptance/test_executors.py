"""The nightly training under the executors of a team: nothing of it relies on SQLite or on one machine's worker.

LocalExecutor with SQLite is what `test_demo` and the live suite run. Here PostgreSQL and Redis are processes of the
test's own; all of Airflow's components, SSH, TensorFlow and the hosts are real. Docker is not needed; with it, and with
workers that share no file but DAGs, data and logs, `make compose-test` does the same.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from services import Postgres, Redis, missing

from airflow_tfps.demo.api import wait
from airflow_tfps.demo.hosts import connection_json, read_hosts
from airflow_tfps.demo.processes import leftovers
from airflow_tfps.demo.stack import COMPONENTS, AirflowStack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = [pytest.mark.live, pytest.mark.tensorflow]

ROOT = Path(__file__).parents[2]
HOSTS = ("gpu_a", "gpu_b", "gpu_c")
DAG = "nightly_digits"
RUN_SECS = 300.0


def worker(name: str, folder: Path) -> tuple[str, ...]:
    """Arguments of a Celery worker beside another on one machine."""
    where = ("--celery-hostname", f"{name}@%h", "--pid", str(folder / f"{name}.pid"))
    return ("celery", "worker", "--skip-serve-logs", "--concurrency", "2", *where)


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[Mapping[str, object]]:
    """Three SSH hosts and the inventory, as connections."""
    arguments = [argument for name in HOSTS for argument in ("--host", name)]
    server = subprocess.Popen(
        [sys.executable, "-m", "airflow_tfps.demo.hosts", "--home", str(folder), *arguments],
        start_new_session=True,
    )
    try:
        wait((folder / "hosts.json").exists, 60, "the SSH hosts")
        found = {name: connection_json(host) for name, host in read_hosts(folder).items()}
        inventory = {name: {"gpus": 0, "python": sys.executable} for name in found}
        yield {**found, "gpu_lab": {"conn_type": "tfps", "extra": {"hosts": inventory}}}
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.parametrize("executor", ["LocalExecutor", "CeleryExecutor"])
def test_nightly_digits_with_postgres(executor: str, tmp_path: Path) -> None:
    """Prepared, trained, judged, evaluated and promoted, with PostgreSQL; with Celery, two workers and Redis, too."""
    is_celery = executor == "CeleryExecutor"
    why = missing("postgresql", *(["redis-server"] if is_celery else []))
    if why is not None:
        pytest.skip(why)
    with contextlib.ExitStack() as running:
        database = running.enter_context(Postgres())
        env = {"AIRFLOW__CORE__EXECUTOR": executor, "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database.url}
        components = dict(COMPONENTS)
        if is_celery:
            broker = running.enter_context(Redis())
            env["AIRFLOW__CELERY__BROKER_URL"] = broker.url
            env["AIRFLOW__CELERY__RESULT_BACKEND"] = f"db+{database.url}"
            components |= {name: worker(name, tmp_path) for name in ("worker-a", "worker-b")}
        stack = AirflowStack(
            tmp_path / "airflow",
            dags_folder=ROOT / "dags",
            connections=running.enter_context(hosts(tmp_path / "hosts")),
            env=env,
            components=components,
        )
        running.enter_context(stack)
        run_id = stack.api.trigger(DAG, {"steps": 300, "min_accuracy": 0.8})
        wait(lambda: stack.api.run_state(DAG, run_id) in ("success", "failed"), RUN_SECS, DAG)
        states = stack.api.task_states(DAG, run_id)
        assert stack.api.run_state(DAG, run_id) == "success", states
        assert stack.api.xcom(DAG, run_id, "judge")["accuracy"] >= 0.8
        assert states["promote", -1] == "success"
        assert not (stack.home / "airflow.db").exists()
        tasks = stack.api.tasks(DAG, run_id).values()
        assert {task["executor"] for task in tasks} <= {None, executor}
        if is_celery:
            said = [
                (stack.home / "logs-components" / f"{name}.log").read_text()
                for name in ("worker-a", "worker-b")
            ]
            assert any("succeeded" in text for text in said), said
    assert not leftovers(tmp_path)
