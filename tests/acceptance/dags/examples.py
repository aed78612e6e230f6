"""The example DAGs themselves, as they are in `dags/`; only that none starts by its schedule, since its last night is over."""

from __future__ import annotations

import runpy
import sys
from datetime import UTC, datetime
from pathlib import Path

import airflow.sdk

EXAMPLES = Path(__file__).parents[3] / "dags"
sys.path.append(str(EXAMPLES))
decorate = airflow.sdk.dag


def dag(*, schedule=None, **arguments):
    if isinstance(schedule, str):
        arguments["end_date"] = datetime(2026, 4, 1, tzinfo=UTC)
    return decorate(schedule=schedule, **arguments)


airflow.sdk.dag = dag
try:
    for name in ("nightly_digits", "chained_digits"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
finally:
    airflow.sdk.dag = decorate
