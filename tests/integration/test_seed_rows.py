"""Every system of the field runs: one test for each, real TensorFlow on loopback.

Scripts (`scripts/`) are written as they were for TensorFlow 1. Those under `airflowless` run as Airflow runs them, with
agents, restarts and a verdict; the others are forked from one nursery that all tests share, the product's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from sklearn.datasets import load_digits
from stage import airflowless, numbers
from tfps_runtime.protocol import Exit

from airflow_tfps.errors import BusyError
from airflow_tfps.inventory import Inventory

pytestmark = pytest.mark.tensorflow

SCRIPTS = Path(__file__).with_name("scripts")
DAGS = Path(__file__).parents[2] / "dags"
CLUSTER_FLAGS = ("--job_name={job_name}", "--ps_hosts={ps_hosts}", "--worker_hosts={worker_hosts}")
ENDS_WITHIN = 5.0
"""Seconds from the last step of any mode to the end of its processes."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Scikit-learn's digits in a folder, as `dags/own_script.py` prepares them."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = load_digits(return_X_y=True)
    pixels = (images * (255 / 16)).astype("uint8")
    np.savez(folder / "train.npz", x=pixels[:1437], y=labels[:1437])
    np.savez(folder / "test.npz", x=pixels[1437:], y=labels[1437:])
    return folder


def own_script(digits: Path, *, steps: int, **flags: object) -> dict:
    """The job of `dags/own_script.py` with some flags changed."""
    job = yaml.safe_load((DAGS / "jobs" / "own_script.yaml").read_text())
    given = dict(argument.split("=", 1) for argument in job["args"])
    given.update({f"--{name}": str(value) for name, value in flags.items()})
    args = [f"{name}={value}" for name, value in given.items()]
    return {**job, "args": args, "steps": steps, "inputs": {"digits": str(digits)}}


# --- S1 to S4: one process --------------------------------------------------------------------------------------------


def test_s01_threads_and_queues_make_input_while_the_step_runs(stage, tmp_path):
    """A queue runner halves the time of a script whose input takes as long as its step, and its threads are joined."""
    secs = {}
    for style in ("--nofeed", "--feed"):
        script = stage.start(SCRIPTS / "queue_input.py", style, directory=tmp_path, compat="tf1")
        assert script.wait() == Exit(code=0), script.log
        ((secs[style],),) = numbers(script.log.splitlines(), re.compile(r"took ([\d.]+) s, loss \d"))
        threads = (
            2 if style == "--nofeed" else 0
        )  # one that fills the queue, one that closes it when asked to stop
        assert f"joined {threads} threads\n" in script.log
    print(f"30 steps of 0.04 s: {secs['--nofeed']} s with a queue, {secs['--feed']} s feeding")
    assert float(secs["--nofeed"]) < 0.75 * float(secs["--feed"])


def test_s02_ops_go_where_they_are_pinned_and_a_missing_device_is_one_line(stage, tmp_path):
    """Placements are in the log; without soft placement the log ends with one line that names op and device."""
    for target in ("--server", "--noserver"):
        soft = stage.start(SCRIPTS / "devices.py", "--soft", target, directory=tmp_path, compat="tf1")
        hard = stage.start(SCRIPTS / "devices.py", "--nosoft", target, directory=tmp_path, compat="tf1")
        assert (soft.wait(), hard.wait()) == (Exit(code=0), Exit(code=1)), soft.log + hard.log
        assert re.search(
            r"^b: \(Const\): /job:localhost/replica:0/task:0/device:CPU:0$", soft.log, re.MULTILINE
        )
        assert "[2. 4.]" in soft.log
        last = hard.log.splitlines()[-1]
        assert last.startswith("InvalidArgumentError: Cannot assign a device for operation b:"), hard.log[
            -2000:
        ]
        assert "/device:GPU:0" in last


@pytest.fixture
def three_gpus(tmp_path, monkeypatch, here) -> Inventory:
    """This machine with an nvidia-smi that reports three GPUs, of which the second is somebody else's."""
    tools = tmp_path / "bin"
    tools.mkdir()
    rows = r"00000000:F7:00.0, 0\n00000000:F8:00.0, 9000\n00000000:F9:00.0, 0\n"
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    host = here.hosts["here"]
    spec = {"ssh_conn_id": "local", "python": host.python, "workdir": host.workdir}
    return Inventory.load({"hosts": {"here": spec}})


def test_s03_each_worker_sees_a_free_gpu_of_its_own_and_the_ps_none(tmp_path, three_gpus):
    """Two workers get the two free ones of three GPUs, numbered as PCI does; a third GPU is not to be had."""
    (tmp_path / "look.py").write_text(
        textwrap.dedent(
            """
            import json, os, signal, socket
            config = json.loads(os.environ["TF_CONFIG"])
            task = config["task"]
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(("", int(config["cluster"][task["type"]][task["index"]].rpartition(":")[2])))
            server.listen()
            print("sees", os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"], flush=True)
            if (task["type"], task["index"]) != ("worker", 0):
                signal.pause()
            """
        )
    )
    job = {"script": "look.py", "launch": "spawn", "preload": []}
    with airflowless(
        three_gpus, {**job, "roles": {"ps": 1, "worker": {"count": 2, "gpus": 1}}}, tmp_path, "seeds/s03/free"
    ) as training:
        assert training.run().outcome == "succeeded"
        seen = {str(t.task): training.log(str(t.task)).strip() for t in training.handle.tasks}
        assert seen == {
            "ps:0": "sees -1 PCI_BUS_ID",
            "worker:0": "sees 0 PCI_BUS_ID",
            "worker:1": "sees 2 PCI_BUS_ID",
        }
    with (
        airflowless(
            three_gpus, {**job, "roles": {"worker": {"count": 3, "gpus": 1}}}, tmp_path, "seeds/s03/busy"
        ) as training,
        pytest.raises(BusyError, match="3 GPUs are needed, 2 of 3 are free"),
    ):
        training.ensure()


def test_s03_memory_options_reach_the_sessions(tmp_path, three_gpus):
    """`session` becomes the ConfigProto of each worker's sessions: GPU memory, soft placement, its log."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import os
            import numpy as np
            import tensorflow.compat.v1 as tf
            from tfps_runtime.training import TRAIN, Model


            class Tell(tf.train.SessionRunHook):
                def after_create_session(self, session, coord):
                    gpu = session._config.gpu_options
                    print("growth", gpu.allow_growth, "fraction", gpu.per_process_gpu_memory_fraction)
                    print("sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)


            def input_fn(mode, params, shard):
                if mode == TRAIN:
                    return iter(lambda: (np.ones(4, np.float32), np.ones(4, np.float32)), None)


            def model_fn(features, labels, mode, params):
                weight = tf.get_variable("weight", [])
                with tf.device("/device:GPU:0"):
                    product = tf.multiply(features, weight, name="product")
                return Model(
                    loss=tf.reduce_mean(tf.square(product - labels)),
                    optimizer=tf.train.GradientDescentOptimizer(0.1),
                    hooks=[Tell()],
                )
            """
        )
    )
    job = {
        "program": "program.py",
        "roles": {"ps": 1, "worker": {"count": 2, "gpus": 1}},
        "steps": 200,
        "session": {
            "allow_soft_placement": True,
            "log_device_placement": True,
            "gpu_options": {"allow_growth": True, "per_process_gpu_memory_fraction": 0.5},
        },
    }
    with airflowless(three_gpus, job, tmp_path, "seeds/s03/memory") as training:
        assert training.run().outcome == "succeeded"
        for worker, gpu in (("worker:0", 0), ("worker:1", 2)):
            log, index = training.log(worker), worker.partition(":")[2]
            assert "growth True fraction 0.5" in log
            assert f"sees {gpu}\n" in log
            assert f"product: (Mul): /job:worker/replica:0/task:{index}/device:CPU:0" in log


def test_s04_a_cluster_in_one_process(stage, tmp_path, digits):
    """A script with a local server runs, and with `run --local` any program: a harness program, a cluster's script."""
    alone = stage.start(SCRIPTS / "one_process.py", directory=tmp_path, compat="tf1")
    assert alone.wait() == Exit(code=0), alone.log
    assert "Hello from one process\n" in alone.log

    main = tmp_path / "main.py"
    main.write_text('import sys\nfrom tfps_runtime import local\nsys.exit(local.main("run", sys.argv[1:]))\n')
    program = DAGS / "programs" / "linear_regression.py"
    harness = stage.start(main, str(program), "--local", "--steps=300", "--seed=1", directory=tmp_path)
    assert harness.wait() == Exit(code=0), harness.log
    result, _ = json.JSONDecoder().raw_decode(harness.log[harness.log.rindex("\n{\n") + 1 :])
    assert result["global_step"] == 300
    assert abs(result["metrics"]["weight"] - 2) < 0.1

    flags = own_script(digits, steps=60)["args"]
    script = stage.start(
        main,
        str(DAGS / "programs" / "dist_digits.py"),
        *("--local", "--script", "--compat=tf1", "--steps=60"),
        *(f"--input=digits={digits}", f"--checkpoint-dir={tmp_path / 'saved'}", "--", *flags),
        directory=tmp_path,
    )
    assert script.wait() == Exit(code=0), script.log
    assert re.search(r"^After 40 training steps \((39|40) global steps\)", script.log, re.MULTILINE)
    result = json.loads((tmp_path / "saved" / "result.json").read_text())
    assert result["global_step"] in (60, 61)
    assert Path(result["checkpoint"] + ".index").parent == tmp_path / "saved"


# --- S5, S6: ops on other tasks ---------------------------------------------------------------------------------------


def test_s05_ops_of_one_task_run_on_another_of_a_job_with_any_name(tmp_path, here):
    """A job `local` of two tasks: task 0 is the chief and computes on task 1, which is stopped when that is done."""
    shutil.copy(SCRIPTS / "placement.py", tmp_path)
    job = {
        "script": "placement.py",
        "compat": "tf1",
        "args": ["{job_name}", "{task_index}", "{local_hosts}"],
        "roles": {"local": 2},
    }
    with airflowless(here, job, tmp_path, "seeds/s05/training") as training:
        verdict = training.run()
        assert verdict.outcome == "succeeded", training.transitions
        log = training.log("local:0")
        assert "the answer is 42" in log
        assert re.search(r"^there: \(Const\): /job:local/replica:0/task:1/device:CPU:0$", log, re.MULTILINE)
        assert re.search(r"^here: \(Mul\): /job:local/replica:0/task:0/device:CPU:0$", log, re.MULTILINE)
        for index in (0, 1):
            (told,) = re.findall(r"^TF_CONFIG (.*)$", training.log(f"local:{index}"), re.MULTILINE)
            assert json.loads(told) == json.dumps(
                {"cluster": training.handle.cluster, "task": {"type": "local", "index": index}}
            )
        training.stop()
        states = {r["task"]: r["state"] for r in training.hook.status(training.handle)["here"]["tasks"]}
        assert states == {"local:0": "SUCCEEDED", "local:1": "STOPPED"}


def test_s06_in_graph_one_client_drives_workers_that_only_serve(script_cluster):
    """The chief builds and feeds both workers' towers; they run there, and the line is found."""
    flags = ["--job_name={job_name}", "--task_index={task_index}"]
    flags += [f"--{role}_hosts={{{role}_hosts}}" for role in ("ps", "worker", "chief")]
    cluster = script_cluster(SCRIPTS / "in_graph.py", *flags, ps=1, worker=2, chief=1)
    cluster.start_all()
    cluster.wait("chief:0")
    log = cluster.tasks["chief:0"].log
    ((step, weight, bias),) = numbers(
        log.splitlines(), re.compile(r"step: (\d+), weight: ([\d.]+), bias: ([\d.]+)")
    )
    assert int(step) == 200
    assert abs(float(weight) - 2) < 0.1
    assert abs(float(bias) - 10) < 0.1
    for i in (0, 1):
        assert f"tower_{i}/loss: (Mean): /job:worker/replica:0/task:{i}/device:CPU:0" in log
    assert "weight: (VariableV2): /job:ps/replica:0/task:0/device:CPU:0\n" in log
    assert cluster.tasks["ps:0"].exit is cluster.tasks["worker:0"].exit is None


# --- S7, S8: the two scripts of the field -----------------------------------------------------------------------------


def test_s07_asynchronous_mnist_script_survives_its_ps(here, digits):
    """The example's script runs unmodified; when its ps is killed its workers crash, are restarted, and go on.

    The chief restores the last checkpoint, the regular expression finds the progress of all that, the script's
    `result.json` is the result, and the processes end soon after the last step.
    """
    job = own_script(digits, steps=900, save_secs=1)
    with airflowless(here, job, DAGS / "jobs", "seeds/s07/training") as training:
        training.ensure()
        training.launch()
        saved = Path(training.handle.checkpoint_dir)
        training.until(lambda: training.step("worker:0") > 100, "100 steps")
        training.until(lambda: len(list(saved.glob("model.ckpt-*.index"))) > 1, "a checkpoint")
        training.kill("ps:0")
        verdict = training.wait()
        ended = time.monotonic()
        assert verdict.outcome == "succeeded", training.transitions
        backoffs = [line for line in training.transitions if " BACKOFF " in line]
        assert "ps:0 BACKOFF killed by signal 9" in backoffs
        assert "worker:0 BACKOFF exit code 1" in backoffs
        assert "worker:1 BACKOFF exit code 1" in backoffs
        assert "Restoring parameters from" in training.log("worker:0")

        steps = [record["global_step"] for record in training.progress("worker:0")]
        assert steps[-1] >= 800
        assert training.progress("worker:0")[-1]["loss"] > 0
        assert verdict.result["global_step"] >= 900
        assert verdict.result["metrics"]["accuracy"] > 0.8
        assert Path(verdict.result["checkpoint"] + ".index").parent == saved
        assert Path(verdict.result["checkpoint"] + ".index").exists()
        heard = [m["heard"] for m in training.messages if m["type"] == "progress"]
        assert ended - max(heard) < ENDS_WITHIN


def test_s08_synchronous_mnist_script_ends_with_its_last_step(script_cluster, digits):
    """The same script with `--issync=1`: a global step for a local one of each worker, and no hang at the end.

    That holds from when both are there: TensorFlow's optimizer lets the first worker take the tokens of the second.
    """
    args = own_script(digits, steps=200, issync=1)["args"]
    values = {"{inputs.digits}": str(digits), "{steps}": "200"}
    args = [f"{name}={values.get(value, value)}" for name, value in (a.split("=", 1) for a in args)]
    cluster = script_cluster(DAGS / "programs" / "dist_digits.py", *args, ps=2, worker=2)
    cluster.start_all()
    chief = cluster.tasks["worker:0"]
    chief.wait_for("accuracy")
    last = time.monotonic()
    cluster.wait("worker:0", "worker:1")
    assert max(cluster.tasks[name].ended for name in ("worker:0", "worker:1")) - last < ENDS_WITHIN
    for worker in ("worker:0", "worker:1"):
        rows = numbers(
            cluster.tasks[worker].log.splitlines(),
            re.compile(r"After (\d+) training steps \((\d+) global steps\)"),
        )
        (local, step), (last_local, last_step) = (
            (int(a), int(b)) for a, b in (rows[len(rows) // 2], rows[-1])
        )
        assert last_local - local >= 60
        assert abs((last_local - local) - (last_step - step)) <= 4, rows
    result = json.loads((cluster.directory / "result.json").read_text())
    assert 200 <= result["global_step"] <= 202
    assert result["metrics"]["accuracy"] > 0.7


# --- S9, S10: stragglers and dead workers -----------------------------------------------------------------------------

SLOW = """
import time
import numpy as np
import tensorflow.compat.v1 as tf
from tfps_runtime.training import TRAIN, Model


def input_fn(mode, params, shard):
    return batches(params["secs"][shard.index]) if mode == TRAIN else None


def batches(secs):
    while True:
        time.sleep(secs)
        x = np.random.randn(8).astype(np.float32)
        yield x, 2 * x + 10


def model_fn(features, labels, mode, params):
    weight, bias = tf.get_variable("weight", []), tf.get_variable("bias", [])
    loss = tf.reduce_mean(tf.square(features * weight + bias - labels))
    return Model(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.1))
"""


def test_s09_backup_workers_do_not_wait_for_the_slow_one(script_cluster, tmp_path):
    """Two of three gradients make a step: 60 steps take less time than 20 of the slow worker's, and all three end."""
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    slow_secs = 1.0
    fields = {
        "mode": "sync",
        "replicas_to_aggregate": 2,
        "steps": 60,
        "hparams": {"secs": [0.02, 0.02, slow_secs]},
    }
    cluster = script_cluster(program, fields=fields, ps=1, worker=3)
    cluster.start_all()
    cluster.wait("worker:0", "worker:1", "worker:2")
    assert cluster.result.global_step == 60
    first, last = cluster.progress("worker:0")[0], cluster.progress("worker:0")[-1]
    assert last.time - first.time < 20 * slow_secs
    assert cluster.progress("worker:2")[-1].local_step < 40
    ended = [cluster.tasks[f"worker:{i}"].ended for i in range(3)]
    assert max(ended) - min(ended) < ENDS_WITHIN


def test_s10_training_goes_on_without_a_dead_worker(script_cluster, tmp_path):
    """One of three workers is killed for good: the last step is reached, and is the sum of what the three did."""
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    fields = {"mode": "async", "steps": 500, "hparams": {"secs": [0.01] * 3}}
    cluster = script_cluster(program, fields=fields, ps=1, worker=3)
    cluster.start_all()
    workers = [f"worker:{i}" for i in range(3)]
    cluster.stage.until(
        lambda: all(cluster.progress(w) and cluster.progress(w)[-1].local_step > 20 for w in workers),
        "20 steps",
    )
    cluster.tasks["worker:2"].kill()
    cluster.wait("worker:0", "worker:1")
    done = [cluster.progress(worker)[-1].local_step for worker in workers]
    # The dead one made some steps after its last record, which came within half a second of its end; one of the living
    # may have made its last after the chief's last save.
    assert sum(done) - 1 <= cluster.result.global_step <= sum(done) + 60
    assert 500 <= cluster.result.global_step <= 502
    assert min(done[:2]) > done[2] > 20


# --- S11, S12 ---------------------------------------------------------------------------------------------------------


def linear(steps: int, **changes: object) -> dict:
    job = {
        "script": "linear.py",
        "compat": "tf1",
        "args": [*CLUSTER_FLAGS, "--task_index={task_index}", "--steps={steps}"],
        "roles": {"ps": 1, "worker": 2},
        "steps": steps,
        "progress": r"step: (?P<step>\d+), .* loss: (?P<loss>[\d.]+)",
        **changes,
    }
    job["args"] = [*job["args"], f"--issync={job.pop('issync', 0)}"]
    return job


LINE = re.compile(r"step: (\d+), weight: (\S+), bias: (\S+), loss")


def test_s11_line_script_is_found_and_resumed_warm_and_spawned(tmp_path, here):
    """Synchronous and forked, then asynchronous and spawned: the second training goes on where the first one ended.

    The script's logdir is `./checkpoint/`, and nobody told it anything else.
    """
    shutil.copy(SCRIPTS / "linear.py", tmp_path)
    checkpoint = {"dir": str(tmp_path / "line")}
    with airflowless(
        here, linear(300, issync=1, checkpoint=checkpoint), tmp_path, "seeds/s11/training"
    ) as training:
        assert training.run().outcome == "succeeded", training.transitions
        chief, worker = training.log("worker:0"), training.log("worker:1")
        assert "beginning at global step 0\n" in chief
        rows = numbers(chief.splitlines(), LINE)
        assert abs(float(rows[-1][1]) - 2) < 0.2
        assert abs(float(rows[-1][2]) - 10) < 0.3
        # It may come late: the chief takes its tokens until then.
        assert len(numbers(worker.splitlines(), LINE)) >= 5
        assert list((tmp_path / "line" / "checkpoint").glob("model.ckpt-30[01].index"))
        assert training.step("worker:0") >= 280

    with airflowless(
        here, linear(600, launch="spawn", checkpoint=checkpoint), tmp_path, "seeds/s11/training"
    ) as training:
        assert training.run(180).outcome == "succeeded", training.transitions
        assert re.search(r"beginning at global step 30[01]\n", training.log("worker:0"))
        rows = numbers(training.log("worker:0").splitlines(), LINE)
        assert int(rows[0][0]) > 300
        assert abs(float(rows[0][1]) - 2) < 0.3
        assert abs(float(rows[0][2]) - 10) < 0.3


def test_s12_many_tasks_on_many_hosts(tmp_path, embedded_hosts):
    """Thirty TF tasks come up on five SSH hosts, each with the same cluster and its own place in it, byte for byte."""
    names = [f"many-{letter}" for letter in "abcde"]
    hosts = embedded_hosts(*names)
    specs = {
        name: {
            "ssh_conn_id": name.replace("-", "_"),
            "python": sys.executable,
            "workdir": str(tmp_path / name),
            "gpus": 0,
        }
        for name in hosts
    }
    (tmp_path / "meet.py").write_text(MEET)
    awkward = "a 'quoted' \"word\", $HOME \\ {braces} \N{SNOWMAN}\ttab; `true`"
    job = {
        "script": "meet.py",
        "launch": "spawn",
        "preload": [],
        "roles": {"ps": 5, "worker": 25},
        "env": {"AWKWARD": awkward},
    }
    with airflowless(Inventory.load({"hosts": specs}), job, tmp_path, "seeds/s12/training") as training:
        started = time.monotonic()
        training.ensure()
        print(f"30 TF tasks on 5 hosts were ready after {time.monotonic() - started:.1f} s")
        training.launch()
        assert training.wait().outcome == "succeeded", training.transitions
        assert "met 30 tasks" in training.log("worker:0")
        placed = training.handle.tasks
        assert {t.host for t in placed} == set(names)
        assert len({(t.host, t.port) for t in placed}) == 30
        for each in placed:
            told = dict(
                line.split(" ", 1) for line in training.log(str(each.task)).splitlines() if " " in line
            )
            config = {
                "cluster": training.handle.cluster,
                "task": {"type": each.task.role, "index": each.task.index},
            }
            assert json.loads(told["TF_CONFIG"]) == json.dumps(config)
            assert json.loads(told["AWKWARD"]) == awkward
        training.stop()
        for host, status in training.hook.status(training.handle).items():
            assert {row["state"] for row in status["tasks"]} <= {"STOPPED", "SUCCEEDED"}, host


MEET = """
import json, os, signal, socket, time
for name in ("TF_CONFIG", "AWKWARD"):
    print(name, json.dumps(os.environ[name]), flush=True)
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind(("", int(config["cluster"][task["type"]][task["index"]].rpartition(":")[2])))
server.listen(100)
if (task["type"], task["index"]) != ("worker", 0):
    signal.pause()
met = 0
for addresses in config["cluster"].values():
    for address in addresses:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), 10).close()
        met += 1
print("met", met, "tasks", flush=True)
"""
