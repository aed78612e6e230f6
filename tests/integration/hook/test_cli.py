"""`airflow tfps` against real SSH hosts: what is shown is what is there, and what is ended has ended.

Most commands run in this process, through Airflow's own parser; one as a program, as people call it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import yaml
from labs import Lab
from tfps_runtime.protocol import training_key
from tfps_runtime.reserve import read_lock

from airflow_tfps.hook import ClusterHook


class Terminal:
    """Calls `airflow tfps` with the lab's hosts; what was printed, and the exit code."""

    def __init__(self, lab: Lab, capsys) -> None:
        from airflow.cli.cli_parser import get_parser

        self._parser = get_parser()
        self._capsys = capsys
        self.hosts = lab.folder / "hosts.yaml"
        self.hosts.write_text(yaml.safe_dump(lab.inventory().to_dict()))
        self.err = ""

    def __call__(self, *words: str, code: int = 0) -> str:
        self._capsys.readouterr()
        args = self._parser.parse_args(["tfps", *words, "--hosts", str(self.hosts)])
        with pytest.raises(SystemExit) as caught:
            args.func(args)
        out, self.err = self._capsys.readouterr()
        assert caught.value.code == code, (out, self.err)
        return out

    def rows(self, *words: str, code: int = 0) -> list[dict]:
        return json.loads(self(*words, "--output", "json", code=code))


@pytest.fixture
def tfps(lab, capsys, monkeypatch) -> Terminal:
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "")
    return Terminal(lab, capsys)


@pytest.fixture
def handle(lab, hook):
    """A training of a mapped group, all of it running."""
    key = training_key("cli_dag", f"run_{uuid.uuid4().hex}", "sweep.training", 3)
    handle = hook.ensure(lab.job("pause=0.05"), lab.training(key))
    hook.launch(handle)
    return handle


def test_airflow_knows_the_commands(tmp_path):
    """The installed `airflow` lists them, and says in its help what they do."""
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    airflow = str(Path(sys.executable).with_name("airflow"))
    done = subprocess.run(
        [airflow, "tfps", "sweep", "--help"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Never a checkpoint" in done.stdout
    done = subprocess.run(
        [airflow, "tfps", "plan", "none.yaml"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "none.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_status_shows_each_tf_task(tfps, hook, handle, lab, wait_until):
    """State, host, restarts and step of every TF task; a selection that fits nothing shows nothing."""
    dag, run, group, index = handle.training.key.split("/")
    exact = ("-d", dag, "-r", run, "-g", group, "-m", index)
    worker = next(t for t in hook.status(handle)["hook-b"]["tasks"] if t["task"].startswith("worker"))
    os.kill(worker["pid"], signal.SIGKILL)
    wait_until(
        lambda: (
            all(
                row["state"] == "RUNNING" and row["restarts"] in (0, 1) for row in tfps.rows("status", *exact)
            )
            and sum(row["restarts"] for row in tfps.rows("status", *exact)) == 1
        ),
        "it was restarted",
    )
    rows = tfps.rows("status", *exact)
    assert {(row["task"], row["host"]) for row in rows} == {(str(t.task), t.host) for t in handle.tasks}
    assert {row["training"] for row in rows} == {str(handle.training)}
    assert next(row["restarts"] for row in rows if row["task"] == worker["task"]) == 1
    assert all(row["lease_secs"] > 0 for row in rows)
    text = tfps("status", "--training", str(handle.training))
    assert all(f"{task.task}" in text for task in handle.tasks)
    assert "RUNNING" in text
    assert tfps("status", "-d", dag, "-r", "another") == ""
    assert "no training was found" in tfps.err
    hook.stop(handle, "the test is over", grace_secs=0)
    assert tfps.rows("status", *exact) == []
    ended = tfps.rows("status", *exact, "--ended")
    assert {row["training_state"] for row in ended} == {"STOPPED"}
    assert "the test is over" in tfps.err


def test_looking_renews_no_lease(tfps, hook, handle):
    """Somebody who only looks keeps no training alive."""
    hook.renew(handle, 50.0)
    tfps("status")
    tfps("logs", "worker:0", "--training", str(handle.training))
    [left] = {row["lease_secs"] < 50.0 for row in tfps.rows("status", "--training", str(handle.training))}
    assert left


def test_logs(tfps, hook, handle, wait_until):
    """The end of a log, by TF task, with or without its host; of an ended training as well."""
    of = ("--training", str(handle.training))
    wait_until(lambda: "step 3" in tfps("logs", "worker:0", *of), "it trains")
    assert tfps("logs", "worker:0", *of, "-n", "100000").startswith("worker:0 is up")
    [last] = tfps("logs", handle.of(handle.chief).label, *of, "-n", "1").splitlines()
    assert last.startswith("step ")
    hook.stop(handle, "the test is over", grace_secs=0)
    assert "worker:0 is up" in tfps("logs", "worker:0", *of, "-n", "100000")
    assert tfps("logs", "worker:7", *of, code=1) == ""
    assert "no training with a TF task worker:7 was found" in tfps.err


def test_following_a_log(tfps, lab, hook, handle, wait_until):
    """Every line once and in order, until the training ends; the reader of Airflow's log misses none."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    words = [
        "tfps",
        "logs",
        "worker:0",
        "-t",
        str(handle.training),
        "-n",
        "2",
        "-f",
        "--hosts",
        str(tfps.hosts),
    ]
    airflow = str(Path(sys.executable).with_name("airflow"))
    with subprocess.Popen(
        [airflow, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as one:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(map(str.strip, one.stdout)))
        reader.start()
        wait_until(lambda: len(lines) > 20, "lines come", 60)
        hook.stop(handle, "the test is over", grace_secs=0)
        assert one.wait(20) == 0
        reader.join()
        assert "the training is STOPPED: the test is over" in one.stderr.read()
    steps = [int(line.split()[1]) for line in lines]
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_stopping_a_training_ends_it_and_no_other(tfps, lab, hook, handle):
    """On all its hosts, the chief's first; what was asked for by key is every incarnation of it."""
    other = hook.ensure(lab.job(), lab.training(), wait=False)
    rows = tfps.rows("stop", "--training", handle.training.key)
    assert {row["host"]: row["state"] for row in rows} == {"hook-a": "STOPPED", "hook-b": "STOPPED"}
    assert rows[0]["host"] == handle.chief_host
    assert lab.living(handle.training) == []
    assert lab.living(other.training) == ["hook-a", "hook-b"]
    [reason] = {status["reason"] for status in hook.status(handle).values()}
    assert reason.startswith("stopped from the command line by ")
    assert tfps.rows("stop", "--training", handle.training.key) == []
    tfps("stop", "--training", str(other.training), "--grace-secs", "0")
    assert lab.living(other.training) == []


def test_a_host_that_cannot_be_reached(tfps, lab, handle, monkeypatch):
    """The others are shown, and stopped; the exit code says that something may be left."""
    inventory = lab.inventory().to_dict()
    monkeypatch.setenv(
        "AIRFLOW_CONN_NOWHERE", json.dumps({"conn_type": "ssh", "host": "127.0.0.1", "port": 1})
    )
    inventory["hosts"]["lost"] = {"ssh_conn_id": "nowhere", "address": "127.0.0.9"}
    tfps.hosts.write_text(yaml.safe_dump(inventory))
    rows = tfps.rows("status", "--training", str(handle.training), code=1)
    assert {row["host"] for row in rows} == {"hook-a", "hook-b"}
    assert tfps.err.startswith("lost: ")
    rows = tfps.rows("stop", "--training", str(handle.training), code=1)
    assert {row["host"] for row in rows} == {"hook-a", "hook-b"}
    assert lab.living(handle.training) == []


def test_sweeping(tfps, lab, handle):
    """What was removed, where, and how much; a dry run removes nothing, a living training is left alone."""
    part = Path(lab.hosts["hook-b"].home) / ".tfps" / "bin" / "tmpx.tmp"
    part.write_text("half a runtime")
    os.utime(part, (1, 1))
    wanted = {"host": "hook-b", "what": "upload", "name": str(part), "bytes": 14}
    assert wanted in tfps.rows("sweep", "--dry-run")
    assert part.exists()
    assert wanted not in tfps.rows("sweep", "--dry-run", "--upload-hours", "10000000")
    assert wanted in tfps.rows("sweep")
    assert "hook-b: " in tfps.err
    assert " removed, " in tfps.err
    assert not part.exists()
    assert lab.living(handle.training) == ["hook-a", "hook-b"]


def test_preflight(tfps, lab, monkeypatch):
    """What each host has, the fingerprint of the key that it showed, and what it lacks."""
    rows = {row["host"]: row for row in tfps.rows("preflight")}
    assert {row["state"] for row in rows.values()} == {"ready"}
    for name, row in rows.items():
        public = lab.hosts[name].host_key
        shown = subprocess.run(
            ["ssh-keygen", "-lf", "-"], input=public, capture_output=True, text=True, check=True
        )
        assert row["host_key"].split()[-1] in shown.stdout or row["host_key"] in shown.stdout
        assert row["python"] == ".".join(map(str, sys.version_info[:3]))
        assert row["tensorflow"].startswith("2.")
    (lab.folder / "job.yaml").write_text(
        "script: standin.py\nroles: {ps: 1, worker: 1}\npreload: [no_such_module]\n"
    )
    tfps("preflight", "--job", str(lab.folder / "job.yaml"), code=1)
    assert "hook-a: " in tfps.err
    assert "no_such_module" in tfps.err


def test_preflight_says_how_to_trust_a_host(tfps, lab, monkeypatch):
    """An unknown key: its fingerprint, and what to write where."""
    from airflow_tfps.demo.hosts import connection_json

    connection = connection_json(lab.hosts["hook-a"])
    del connection["extra"]["host_key"]
    monkeypatch.setenv("AIRFLOW_CONN_HOOK_A", json.dumps(connection))
    rows = tfps.rows("preflight", code=1)
    assert [row["host"] for row in rows] == ["hook-b"]
    assert "is not known" in tfps.err
    assert "SHA256:" in tfps.err
    assert '"host_key"' in tfps.err


def test_checkpoints(tfps, lab):
    """The complete ones, by global step; none is no error."""
    folder = Path(lab.hosts["hook-a"].home) / "ckpt"
    folder.mkdir()
    assert tfps.rows("checkpoints", str(folder), "--host", "hook-a") == []
    code = (
        "import sys, tensorflow.compat.v1 as tf\n"
        "with tf.Graph().as_default(), tf.Session() as s:\n"
        "    v = tf.get_variable('v', [], initializer=tf.zeros_initializer()); s.run(v.initializer)\n"
        "    for step in (10, 9): tf.train.Saver([v]).save(s, sys.argv[1] + '/model.ckpt', step)\n"
    )
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run([sys.executable, "-c", code, str(folder)], env=env, check=True, capture_output=True)
    rows = tfps.rows("checkpoints", str(folder), "--host", "hook-a")
    assert [(row["global_step"], row["checkpoint"]) for row in rows] == [
        (9, f"{folder}/model.ckpt-9"), (10, f"{folder}/model.ckpt-10")
    ]  # fmt: skip
    assert rows[0]["time"].startswith(time.strftime("%Y-"))


def test_a_training_whose_agent_was_killed(tfps, lab, hook, handle, wait_until):
    """It is not among the living; with --ended it is LOST there, and its log can still be read."""
    os.kill(read_lock(lab.paths(handle.training, "hook-a").lock).pid, signal.SIGKILL)
    of = ("--training", str(handle.training))
    wait_until(lambda: lab.living(handle.training) == ["hook-b"], "it is dead")
    assert {row["host"] for row in tfps.rows("status", *of)} == {"hook-b"}
    states = {row["host"]: row["training_state"] for row in tfps.rows("status", *of, "--ended")}
    assert states["hook-a"] == "LOST"
    with ClusterHook(inventory=lab.inventory()) as another:
        another.stop(handle, "the test is over", grace_secs=0)
