"""Secrets under running Airflow components: planted, used, and looked for on both sides."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from live import Live, Run
from tfps_runtime.protocol import run_dir

pytestmark = pytest.mark.live


def test_planted_secrets_are_nowhere(live: Live) -> None:
    """A connection's key, passphrase and password and a job's secret, while it trains and after: in no process's
    arguments or environment but that of the TF tasks, in no file of the hosts or of Airflow, its database with XComs,
    rendered fields and serialized DAGs, and its logs among them.
    """
    value, word, phrase = (f"planted{uuid.uuid4().hex}" for _ in range(3))
    key = plant(live, value, word, phrase)
    needles = [n.encode() for n in (value, word, phrase, *key.splitlines()[2:6])]
    run = live.start("live_planted")
    training = run.until_training()
    tasks = {pid for pid, _ in training.tasks.values()}
    environment, arguments = holders(needles)
    assert environment == tasks, "the TF tasks have it, or the look would prove nothing"
    assert arguments == set()
    assert files_with(needles, live, run) == []
    run.tell("finish")
    run.until_over(state="success")
    assert holders(needles) == (set(), set())
    assert files_with(needles, live, run) == []
    references = files_with([b"conn:planted_store#password"], live, run)
    assert any(path.name.startswith("airflow.db") for path in references), "the look sees the database"
    run.until_nothing_is_left()


def plant(live: Live, value: str, word: str, phrase: str) -> str:
    """Put two connections into Airflow's database: a host's, with a locked key, and a store's. The key's text."""
    host = live.hosts["gpu_a"]
    with tempfile.TemporaryDirectory() as folder:
        locked, file = Path(folder, "locked"), Path(folder, "connections.json")
        shutil.copy(host.key_file, locked)
        subprocess.run(
            ["ssh-keygen", "-q", "-p", "-P", "", "-N", phrase, "-f", str(locked)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        key = locked.read_text()
        extra = {"private_key": key, "private_key_passphrase": phrase, "host_key": host.host_key}
        connections = {
            "planted_host": {
                "conn_type": "ssh",
                "host": "127.0.0.1",
                "port": host.port,
                "login": host.login,
                "password": word,
                "extra": extra,
            },
            "planted_store": {"conn_type": "http", "host": "store", "password": value},
        }
        file.write_text(json.dumps(connections))
        subprocess.run(
            [sys.executable, "-m", "airflow", "connections", "import", str(file)],
            env=live.stack.environment,
            check=True,
            capture_output=True,
            timeout=120,
        )
    return key


def holders(needles: list[bytes]) -> tuple[set[int], set[int]]:
    """Processes that have one of the needles in their environment, and in their arguments."""
    found: tuple[set[int], set[int]] = (set(), set())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for pids, name in zip(found, ("environ", "cmdline"), strict=True):
            with contextlib.suppress(OSError):
                content = Path(f"/proc/{pid}/{name}").read_bytes()
                if any(needle in content for needle in needles):
                    pids.add(int(pid))
    return found


def files_with(needles: list[bytes], live: Live, run: Run) -> list[Path]:
    """Files of Airflow, of the hosts, of the run, and of the agents that hold one of the needles."""
    found = []
    for place in (live.folder, run.control, Path(run_dir())):
        for path in place.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    content = path.read_bytes()
                    found += [path for needle in needles if needle in content]
    return found
