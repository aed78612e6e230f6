"""A fresh clone has all it needs: the wheel builds from it, and Airflow finds the provider in that wheel.

The wheel is installed into an environment of its own, which has everything else from this one but not this checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock.txt").read_text("utf-8")


def run(*argv: str | Path, cwd: Path, stdin: str = "") -> str:
    """Standard output of a command that must succeed, in an environment without Airflow's and Python's variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW_", "PYTHON", "GIT_"))}
    env.update(AIRFLOW_HOME=str(cwd / "airflow"), AIRFLOW__CORE__LOAD_EXAMPLES="False")
    done = subprocess.run(
        argv, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{argv}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built by way of the sdist, from a clone of what is committed."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    folder = tmp_path_factory.mktemp("clone")
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, folder / "clone", cwd=folder)
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder / "dist",
        folder / "clone",
        cwd=folder,
    )
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment with the wheel and without this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("airflow_tfps", "_airflow_tfps", "tfps_runtime", "__pycache__")):
            (site / entry.name).symlink_to(entry)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return folder / "venv" / "bin" / "python"


def test_wheel_holds_both_packages_and_nothing_else(wheel):
    """The wheel has the two packages with their data, the example DAGs, the licence and the entry points; no tests."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"airflow_tfps", "tfps_runtime", f"{wheel.name.partition('-py3')[0]}.dist-info"}
    for wanted in (
        "airflow_tfps/py.typed",
        "airflow_tfps/plugin/static/training.html",
        "airflow_tfps/demo/dags/nightly_digits.py",
        "airflow_tfps/demo/dags/jobs/digits.yaml",
        "airflow_tfps/demo/dags/programs/digits.py",
        "tfps_runtime/training/__init__.py",
        "entry_points.txt",
        "licenses/LICENSE",
    ):
        assert any(name.endswith(wanted) for name in names), wanted
    assert not [name for name in names if "__pycache__" in name]


def test_airflow_finds_the_provider_in_the_wheel(python, tmp_path):
    """With nothing but the wheel, Airflow lists the provider, its connection type and its plugin."""
    where = run(python, "-c", "import airflow_tfps, tfps_runtime; print(airflow_tfps.__file__)", cwd=tmp_path)
    assert str(python.parents[1]) in where, "this checkout was imported"

    def airflow(*arguments: str) -> list[dict[str, str]]:
        return json.loads(run(python, "-m", "airflow", *arguments, "--output", "json", cwd=tmp_path))

    assert [p for p in airflow("providers", "list") if p["package_name"] == "airflow-tfps"]
    assert [h for h in airflow("providers", "hooks") if h["connection_type"] == "tfps"]
    assert [p for p in airflow("plugins") if p["name"] == "airflow_tfps"]


def test_the_demo_finds_its_dags_in_the_wheel(python, tmp_path):
    """`airflow tfps demo` needs no checkout: its DAGs are in the wheel, each of them is sound, and so are their jobs."""
    code = "from airflow_tfps.demo.run import parse; print(parse([]).dags)"
    dags = Path(run(python, "-c", code, cwd=tmp_path).strip())
    assert dags.is_relative_to(python.parents[1])
    assert sorted(p.name for p in dags.glob("*.py")) == sorted(p.name for p in (ROOT / "dags").glob("*.py"))
    for path in sorted(dags.glob("*.py")):
        run(python, path, cwd=tmp_path)


def test_runtime_from_the_wheel_answers(python, tmp_path):
    """The runtime that the installed wheel makes for hosts is complete: it answers `preflight`."""
    code = "from airflow_tfps.deploy import build_runtime; open('t.pyz', 'wb').write(build_runtime().content)"
    run(python, "-c", code, cwd=tmp_path)
    request = json.dumps({"workdir": str(tmp_path / "work"), "preload": ["json"]})
    report = json.loads(run(python, "t.pyz", "preflight", cwd=tmp_path, stdin=request + "\n"))
    assert report["type"] == "preflight"
    assert report["faults"] == []


def test_lock_pins_with_hashes_and_names_no_registry():
    """Every requirement of the lock has one version and hashes, and no line says where to get it."""
    lines = [line for line in LOCK.splitlines() if line and not line.lstrip().startswith("#")]
    requirements = [line for line in lines if not line.startswith(" ")]
    assert len(requirements) > 100
    assert not [line for line in requirements if "==" not in line or not line.endswith("\\")]
    assert all(line.startswith("    --hash=sha256:") for line in lines if line.startswith(" "))
    assert "://" not in LOCK
