"""`make demo`: SSH hosts and an Airflow of its own on one machine; the tests use them too.

`run` is the demo itself. `hosts` serves SSH hosts, `stack` runs Airflow, `api` talks to it; `home` is the
demo's folder and what must not be left of it, `processes` finds that out, `view` is what people see.
"""

from pathlib import Path


def example_dags() -> Path:
    """The folder with the example DAGs: beside this file in an installed wheel, `dags` in a checkout."""
    installed = Path(__file__).parent / "dags"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "dags"
