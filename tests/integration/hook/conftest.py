"""SSH hosts and a hook on them for the hook's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tfps_runtime import commands

from airflow_tfps.demo.hosts import DemoHost
from airflow_tfps.hook import ClusterHook

sys.path.insert(0, str(Path(__file__).parent))

from labs import Lab


@pytest.fixture(scope="module")
def hosts(embedded_hosts) -> dict[str, DemoHost]:
    return embedded_hosts("hook-a", "hook-b")


@pytest.fixture
def lab(hosts, tmp_path, wait_until) -> Iterator[Lab]:
    """Afterwards no agent, no task and no command of any training may be left."""
    one = Lab(hosts, tmp_path)
    yield one
    for training in one.started:
        for name in one.living(training):
            commands._stop(one.paths(training, name), {"grace_secs": 0})
    wait_until(lambda: not one.processes(), "every process is gone", 10.0)


@pytest.fixture
def hook(lab) -> Iterator[ClusterHook]:
    with ClusterHook(inventory=lab.inventory()) as one:
        yield one
