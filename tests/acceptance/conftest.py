"""Running Airflow components and three SSH hosts for the live suite; its cases run side by side.

A case that takes `live` shares the components with others and has a run, a folder and ports of its own. A case
marked `alone` does something to a component and runs by itself, after the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import pytest

from airflow_tfps.demo.hosts import connection_json, read_hosts
from airflow_tfps.demo.processes import describe, processes
from airflow_tfps.demo.stack import AirflowStack, leftovers

sys.path.insert(0, str(Path(__file__).parent))

from live import Live, stop_agents, until

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = ("gpu_a", "gpu_b", "gpu_c")
SIDE_BY_SIDE = int(os.environ.get("TFPS_LIVE_CASES", "4"))
HERE = Path(__file__).parent

GPU_LAB = {
    "conn_type": "tfps",
    "extra": {
        "hosts": {name.replace("_", "-"): {"ssh_conn_id": name} for name in HOSTS},
        "defaults": {"gpus": 0, "python": sys.executable, "ports": "29000-29099"},
    },
}
"""The connection that the example DAGs name, with ports that no other case gets."""

COMPONENTS = {
    # What the defaults wait for: a trigger of a dead triggerer is taken up after this long (default 30 s).
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "12",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
    # A pause ends the triggers of assets when the file is read again (stack: after 300 s).
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "15",
    # A stack of ours starts nothing by itself; here an asset does.
    "AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "True",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: changes components that other cases need")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Live cases come after all other tests, which would compete with the components; those marked `alone` last."""

    def rank(item: pytest.Item) -> int:
        if "live" not in getattr(item, "fixturenames", ()):
            return 0
        return 1 if item.get_closest_marker("alone") is None else 2

    items.sort(key=rank)


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    hosts_home = folder / "hosts"
    arguments = [argument for name in HOSTS for argument in ("--host", name)]
    server = subprocess.Popen(
        [sys.executable, "-m", "airflow_tfps.demo.hosts", "--home", str(hosts_home), *arguments],
        start_new_session=True,
    )
    try:
        until((hosts_home / "hosts.json").exists, 60, "the SSH hosts")
        hosts = read_hosts(hosts_home)
        stack = AirflowStack(
            folder / "airflow",
            dags_folder=HERE / "dags",
            connections={**{n: connection_json(h) for n, h in hosts.items()}, "gpu_lab": GPU_LAB},
            env=COMPONENTS,
        )
        running = Live(stack, hosts, folder)
        with stack:
            yield running
        left = stop_agents(running.runs)
    finally:
        server.terminate()
        server.wait(30)
    until(lambda: not processes(str(folder)), 15, f"everything ends: {leftovers(folder)}")
    assert not left, left
    assert not leftovers(folder), [describe(pid) for pid in processes(str(folder))]


# --- side by side ---------------------------------------------------------------------------------------------------


class Together:
    """Starts all selected cases that share the components when the first of them is to run."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[str, Future[object]] = {}

    def run(self, item: pytest.Function) -> None:
        if item.nodeid not in self._futures:
            self._pool = self._pool or ThreadPoolExecutor(SIDE_BY_SIDE)
            running = item.funcargs["live"]
            for other in item.session.items:
                if (
                    is_shared(other) and other.path.parent == item.path.parent
                ):  # whose components are the same
                    given = other.callspec.params if hasattr(other, "callspec") else {}
                    self._futures[other.nodeid] = self._pool.submit(other.obj, live=running, **given)
        self._futures[item.nodeid].result()


TOGETHER = Together()


def is_shared(item: pytest.Item) -> TypeGuard[pytest.Function]:
    if not isinstance(item, pytest.Function) or "live" not in item.fixturenames:
        return False
    return item.get_closest_marker("alone") is None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Wait for a case that is already under way; pytest calls the others itself."""
    if not is_shared(pyfuncitem):
        return None
    TOGETHER.run(pyfuncitem)
    return True
