"""Airflow finds the provider, shows its connection form, and pays little for importing it.

These look at the installed package (`make setup`); Airflow runs in processes of its own, without a database.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata, resources
from pathlib import Path

import jsonschema
import pytest
import yaml

from airflow_tfps.get_provider_info import get_provider_info

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
HEAVY = ("asyncssh", "fastapi", "httpx", "numpy", "paramiko", "rich", "sklearn", "tensorflow")
INFO = get_provider_info()


@pytest.fixture
def run(tmp_path):
    """Run Python with an Airflow home of its own; returns what it printed as JSON on its last line."""

    def run(*arguments: str) -> object:
        env = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW_")}
        env.update(AIRFLOW_HOME=str(tmp_path), AIRFLOW__CORE__LOAD_EXAMPLES="False")
        done = subprocess.run(
            [sys.executable, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("name", ["provider_info.schema.json", "provider.yaml.schema.json"])
def test_info_fits_airflows_schema(name):
    """What we tell Airflow is what its schemas, the one it checks with and the strict one, ask for."""
    schema = json.loads((resources.files("airflow") / name).read_text("utf-8"))
    info = dict(INFO)
    if name == "provider.yaml.schema.json":  # of the file that Airflow's own providers are generated from
        info.update(
            {"source-date-epoch": 0, "state": "ready", "lifecycle": "production", "versions": ["0.1.0"]}
        )
    errors = [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(info)]
    assert not errors


def test_package_name_is_the_canonical_one():
    """Airflow refuses all providers when one's package name is not its distribution's normalised name."""
    canonical = re.sub(r"[-_.]+", "-", PROJECT["name"]).lower()
    assert INFO["package-name"] == canonical == metadata.metadata("airflow-tfps")["Name"]


def test_everything_named_exists():
    """Each module and class that the provider info names can be imported, and the hook belongs to its connection."""
    kinds = ("operators", "sensors", "hooks", "triggers")
    modules = [module for kind in kinds for entry in INFO[kind] for module in entry["python-modules"]]
    assert len(modules) == len(set(modules)) >= len(kinds)
    for module in modules:
        importlib.import_module(module)
    for connection in INFO["connection-types"]:
        module, _, name = connection["hook-class-name"].rpartition(".")
        hook = getattr(importlib.import_module(module), name)
        assert (hook.conn_type, hook.hook_name) == (connection["connection-type"], connection["hook-name"])


@pytest.mark.parametrize("group", ["apache_airflow_provider", "airflow.plugins"])
def test_entry_points_are_installed(group):
    """The installed package has the entry points of pyproject.toml, and they load."""
    wanted = PROJECT["entry-points"][group]
    ours = {e.name: e for e in metadata.entry_points(group=group) if e.dist and e.dist.name == "airflow-tfps"}
    assert {name: entry.value for name, entry in ours.items()} == wanted
    for entry in ours.values():
        assert entry.load() is not None


def test_airflow_lists_the_provider(run):
    """`airflow providers list` shows the package and its version."""
    found = run("-m", "airflow", "providers", "list", "--output", "json")
    versions = {provider["package_name"]: provider["version"] for provider in found}
    assert versions["airflow-tfps"] == PROJECT["version"]


def test_connection_form_has_our_fields(run):
    """The UI's description of connection forms has type `tfps` with `hosts` and `defaults` and without a host."""
    form = run(
        "-c",
        "import json\n"
        "from airflow.api_fastapi.core_api.services.ui.connections import HookMetaService\n"
        "forms = {form.connection_type: form for form in HookMetaService.hook_meta_data()}\n"
        "print(json.dumps(forms['tfps'].model_dump()))",
    )
    assert form["hook_class_name"] == "airflow_tfps.hook.ClusterHook"
    assert {n: f["schema"]["format"] for n, f in form["extra_fields"].items()} == {
        "hosts": "multiline",
        "defaults": "multiline",
    }
    assert form["standard_fields"]["host"]["hidden"] is True


def test_form_fields_are_what_an_inventory_reads():
    """The examples in the form's descriptions are inventories."""
    from airflow_tfps.inventory import Inventory

    texts = [field["description"] for field in INFO["connection-types"][0]["conn-fields"].values()]
    short, long = re.findall(r"(\{gpu-a: .*?\})(?: -|\.$)", texts[0])
    (defaults,) = re.findall(r"(\{.*\})", texts[1])

    class Connection:
        conn_type, host, extra = "ssh", "10.0.0.1", None

    hosts = Inventory.load(
        {"hosts": yaml.safe_load(short), "defaults": yaml.safe_load(defaults)},
        get_connection=lambda name: type("C", (Connection,), {"host": f"{name}.example"}),
    )
    assert [host.gpus for host in hosts.hosts.values()] == [4, 4]
    assert hosts["gpu-a"].python == yaml.safe_load(defaults)["python"]
    (host,) = Inventory.load(yaml.safe_load(long), get_connection=lambda _: Connection).hosts.values()
    assert host.address == yaml.safe_load(long)["gpu-a"]["address"]


@pytest.mark.parametrize("module", ["plugin", "group", "operators", "sensors", "triggers"])
def test_importing_is_light(run, module):
    """What every DAG, and every Airflow process, imports brings in nothing heavy beyond Airflow's own modules."""
    before, after = run(
        "-c",
        "import json, sys\n"
        "import airflow.sdk, airflow.sdk.plugins_manager, airflow.triggers.base\n"
        "before = sorted(sys.modules)\n"
        f"import airflow_tfps.{module}\n"
        "print(json.dumps([before, sorted(sys.modules)]))",
    )
    brought = set(after) - set(before)
    assert f"airflow_tfps.{module}" in brought
    assert not {name.partition(".")[0] for name in brought} & set(HEAVY)


OPTIONAL = {"google_crc32c"}
"""Taken where it is there."""


def test_runtime_imports_the_standard_library_only():
    """What runs on a host, the training harness apart, imports nothing that a bare Python does not have."""
    root = ROOT / "runtime" / "tfps_runtime"
    paths = [path for path in root.rglob("*.py") if "training" not in path.relative_to(root).parts]
    assert len(paths) > 10
    foreign = {
        f"{path.relative_to(root)}: {name}"
        for path in paths
        for name in _imports(ast.parse(path.read_text("utf-8")))
        if name not in {*sys.stdlib_module_names, "tfps_runtime", *OPTIONAL}
    }
    assert not foreign


def _imports(tree: ast.AST):
    """Top-level names of the modules that code imports, outside `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        yield from _imports(node)
