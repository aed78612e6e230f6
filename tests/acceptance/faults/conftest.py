"""The bed, Airflow outside it, and the table of what was seen, for the fault matrix.

`live` is here what it is for the live suite, on other hosts; how cases run side by side is that suite's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_tfps.demo.processes import describe, processes
from airflow_tfps.demo.stack import AirflowStack, leftovers

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import bed as beds
from bed_runs import BedLive, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir()) / "tfps-faults"
"""Always the same one, so that what a killed run has left is found."""
TABLE_VARIABLE = "TFPS_FAULTS_TABLE"
"""Names a file that takes the table, row by row."""
TABLE = Table(os.environ.get(TABLE_VARIABLE))
KEEP_VARIABLE = "TFPS_FAULTS_KEEP"
"""Names a folder that takes Airflow's logs and the hosts' files, to look at."""

COMPONENTS = {
    # What the defaults wait for: half a minute for a dead triggerer, five minutes for a dead worker.
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "12",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    # Which Python the hosts run, and what: names on all of them.
    "TFPS_BED_PYTHON": sys.executable,
    "TFPS_BED_PROGRAM": str(HERE.parent / "programs" / "stand_in.py"),
    "TFPS_BED_TENSORFLOW_PROGRAM": str(HERE.parents[2] / "dags" / "programs" / "linear_regression.py"),
}


@pytest.fixture(scope="session")
def bed() -> Iterator[beds.Bed]:
    """Three hosts; skips where there can be none."""
    why = beds.missing()
    if why is not None:
        pytest.skip(f"no bed: {why}")
    with beds.Bed(FOLDER) as made:
        yield made


@pytest.fixture(scope="session")
def live(bed: beds.Bed) -> Iterator[BedLive]:
    stack = AirflowStack(
        FOLDER / "airflow",
        dags_folder=HERE / "dags",
        connections={name: bed.connection(name) for name in bed.hosts},
        env=COMPONENTS,
    )
    running = BedLive(stack, bed, FOLDER, TABLE)
    with stack:
        yield running
        left = [path for run in running.runs for path in run.locks()]
        left += until_idle(bed)
    assert not left, left
    if os.environ.get(KEEP_VARIABLE):
        shutil.copytree(FOLDER, os.environ[KEEP_VARIABLE], dirs_exist_ok=True, ignore_dangling_symlinks=True)
    assert not leftovers(stack.home), [describe(pid) for pid in processes(str(stack.home))]


def until_idle(bed: beds.Bed) -> list[str]:
    """Wait until nothing runs on the hosts but their sshd; what else does. No command of ours may be left either."""
    found: list[str] = []

    def is_idle() -> bool:
        idle = ("sshd", "init.py")
        running = [describe(pid) for host in bed.hosts.values() for pid in host.pids()]
        found[:] = [process for process in running if not any(name in process for name in idle)]
        return not found

    with contextlib.suppress(beds.BedError):
        beds.wait(is_idle, 30, "the hosts are idle")
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    if not TABLE.rows:
        return
    lines = TABLE.lines()
    terminalreporter.section("faults")
    for line in lines:
        terminalreporter.write_line(line)
