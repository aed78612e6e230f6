"""The running compose stack, one for all its tests, and the table of what was measured.

`make compose-test` runs them. They need a Docker engine and fail without one.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from compose_stack import REPORT, ROOT, Stack, no_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT = "tfps-compose-test"
REPORT_VARIABLE = "TFPS_COMPOSE_REPORT"
"""Names a file that takes the table."""
BEGAN = time.monotonic()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Built, started and healthy; taken down at the end with all that it had."""
    why = no_engine()
    if why is not None:
        pytest.fail(why)
    dags = tmp_path_factory.mktemp("compose") / "dags"
    shutil.copytree(ROOT / "dags", dags, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(__file__).parent / "dags", dags, dirs_exist_ok=True)
    for path in (dags.parent, dags, *dags.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with Stack(PROJECT, dags=dags) as made:
        made.build()
        with REPORT.timed("started, until every service is healthy"):
            made.start()
        with REPORT.timed("all DAGs read"):
            made.wait_dags("linear_regression", "nightly_digits", "slow_regression")
        yield made


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note for each test how it ended and how long it took."""
    outcome = yield
    report = outcome.get_result()
    if item.path.parent == Path(__file__).parent and (report.when == "call" or report.failed):
        REPORT.add(
            item.name.removeprefix("test_").replace("_", " "), f"{report.outcome}, {call.duration:.0f} s"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and write it where it is wanted."""
    if not REPORT.lines:
        return
    REPORT.add("in all", f"{time.monotonic() - BEGAN:.0f} s")
    terminalreporter.section("compose")
    for line in REPORT.table():
        terminalreporter.write_line(line)
    if path := os.environ.get(REPORT_VARIABLE):
        Path(path).write_text("\n".join(REPORT.table()) + "\n", "utf-8")
