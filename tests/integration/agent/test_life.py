"""A training's life, from its start to the result. Real agents and processes; no TensorFlow, no SSH."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import uuid
from pathlib import Path

import pytest
from agents import wait_until
from tfps_runtime.protocol import Task

from airflow_tfps.deploy import build_runtime


@pytest.mark.parametrize("how", ["module", "pyz"])
def test_a_training_from_start_to_end(host, how):
    """Reserve, start, probe, launch, follow, result, stop; from the folder and from the one-file runtime."""
    host.has_commands = True
    if how == "pyz":
        pyz = host.workdir / "tfps.pyz"
        pyz.write_bytes(build_runtime().content)
        host.argv = [sys.executable, str(pyz)]
        del host.env["PYTHONPATH"]
    training = host.training().reserve("ps:0", "worker:0", "worker:1")
    assert training.status()["state"] == "RESERVED"
    training.start("steps=5", "chief=worker:0")
    addresses = {name: f"127.0.0.1:{port}" for name, port in training.ports.items() if name != "worker:0"}
    probe = host.ask("probe", {**training.request, "addresses": addresses, "timeout_secs": 20})
    assert (probe["missing"], probe["failed"]) == ({}, None)
    assert training.task("worker:0")["state"] == "PENDING"
    training.launch()
    follower = training.follow(logs=["worker:0"])
    follower.wait(lambda m: m.get("task") == "worker:0" and m.get("state") == "SUCCEEDED")
    assert follower.kind("result")[0]["result"]["global_step"] == 5
    assert training.status()["state"] == "SUCCEEDED"
    assert training.stop() == "SUCCEEDED"
    follower.end()
    assert follower.lines[:2] == ["worker:0 is up", "step 1 loss 1.0"]
    assert follower.lines[-1] == "the last word", "also without a newline"
    assert follower.numbers == list(range(1, len(follower.numbers) + 1))
    assert follower.kind("training")[-1]["last"] is True
    without_ready = [
        state for state in training.trainings if state != "READY"
    ]  # a worker may be quick to report
    assert without_ready == ["STARTING", "RUNNING", "SUCCEEDED", "STOPPING", "SUCCEEDED"]
    status = training.status()
    assert (status["is_alive"], status["state"]) == (False, "SUCCEEDED")
    assert training.left() == []


@pytest.mark.parametrize("comes", ["before", "after"])
def test_what_a_follower_hears_before_the_end_is_the_whole_log(training, comes):
    """A trigger leaves when it hears of the chief's end: by then every line has been told, also if it came late."""
    training.reserve("worker:0").start("steps=500", "pause=0")
    follower = None
    if comes == "before":
        follower = training.follow(logs=["worker:0"])
        follower.wait(lambda m: m["type"] == "caught_up")
    training.launch()
    if follower is None:
        training.wait("worker:0", "SUCCEEDED")
        follower = training.follow(logs=["worker:0"])
    end = follower.wait(lambda m: m.get("state") == "SUCCEEDED" and m["type"] == "task")
    before = follower.messages[: follower.messages.index(end)]
    lines = [line for m in before if m["type"] == "log" for line in m["lines"]]
    assert lines[-1] == "the last word"
    assert len([line for line in lines if line.startswith("step ")]) == 500
    follower.close()


@pytest.mark.parametrize("warm", [True, False])
def test_what_a_task_is(training, warm):
    """Its own session, its log, no input, its folder, `__main__`; no file of the agent or the nursery."""
    training.up("ps:0", {"task": "worker:0", "warm": warm})
    facts = training.facts("worker:0")
    assert facts["sid"] == facts["pid"] == training.task("worker:0")["pid"]
    assert facts["parent"] == (training.nursery if warm else training.agent)
    assert facts["stdin"] == "/dev/null"
    assert facts["name"] == "__main__"
    assert facts["cwd"] == training.paths.task_dir(Task("worker", 0))
    log = training.paths.log(Task("worker", 0))
    allowed = {"/dev/null", log}
    others = [
        f
        for f in facts["files"]
        if f not in allowed and not f.startswith("/proc/") and f != str(training.host.script)
    ]
    assert others == []
    assert facts["env"]["TF_GRPC_REUSE_PORT"] == "true"
    assert facts["env"]["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize("warm", [True, False])
def test_tf_config_arrives_byte_for_byte(training, warm):
    """No shell and no template touches it, whatever addresses look like."""
    training.reserve("ps:0", {"task": "worker:0", "warm": warm})
    odd = [
        "it's",
        'a "b"',
        "$HOME `id` $(id)",
        "back\\slash",
        "new\nline\t",
        "{task}",
        "ü€😀",
        "-x --",
        "%s %d",
    ]
    cluster = {**training.cluster, "odd": odd}
    training.start(cluster=cluster).launch()
    text = training.facts("worker:0")["tf_config"]
    assert text == json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    assert json.loads(text)["cluster"]["odd"] == odd


@pytest.mark.parametrize("warm", [True, False])
def test_arguments_and_environment(host, warm):
    """Placeholders are filled, other braces stay; a role's variables are over the job's; proxies are gone."""
    host.env.update(HTTPS_PROXY="http://proxy.example:3128", grpc_proxy="x", no_proxy="localhost")
    training = host.training().reserve(
        {"task": "worker:0", "warm": warm, "env": {"B": "role {task}", "C": "c"}}, env={"A": "a", "B": "job"}
    )
    args = (
        "name={job_name}-{task_index}",
        'json={"a": {task_index}}',
        "unknown={nobody}",
        "shell=${HOME}",
        "a b'\"\n",
    )
    training.start(*args, inputs={"train": "/data/x y"}, steps=7).launch()
    facts = training.facts("worker:0")
    assert facts["argv"] == [
        "name=worker-0",
        'json={"a": 0}',
        "unknown={nobody}",
        "shell=${HOME}",
        "a b'\"\n",
    ]
    assert (facts["env"]["A"], facts["env"]["B"], facts["env"]["C"]) == ("a", "role worker:0", "c")
    assert not {"HTTPS_PROXY", "grpc_proxy"} & set(facts["env"])
    assert facts["env"]["no_proxy"] == "localhost"


@pytest.mark.parametrize("warm", [True, False])
def test_a_secret_is_in_the_tasks_environment_and_nowhere_else(training, warm):
    """Not in a file, not in an argument list, not in the environment of the agent or the nursery."""
    secret = f"planted-{uuid.uuid4().hex}"
    training.reserve("ps:0", {"task": "worker:0", "warm": warm})
    follower = training.follow(logs=["worker:0"])
    training.start("secret=S3_KEY", secrets={"S3_KEY": secret}).launch()
    training.wait("worker:0", "RUNNING")
    assert training.facts("worker:0")["secret"] == hashlib.sha256(secret.encode()).hexdigest()
    os.kill(training.task("worker:0")["pid"], signal.SIGKILL)
    wait_until(lambda: training.states("worker:0").count("RUNNING") == 2, "it is back")
    assert secret not in json.dumps(training.status())
    for path in training.host.workdir.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    tasks = {t["pid"] for t in training.status()["tasks"]}
    for pid in training.host.marked():
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        if pid not in tasks:
            assert secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    follower.close()
    assert secret not in json.dumps(follower.messages)


def test_a_command_is_executed_as_it_is(training):
    """Any program; its arguments are filled, its end is its exit."""
    training.reserve({"task": "worker:0", "restarts": 0})
    code = "import os, sys; print('args', sys.argv[1:], os.environ['TF_CONFIG'][:9]); sys.exit(3)"
    training.start(
        program={"script": None, "args": [], "command": [sys.executable, "-c", code, "{task}", "$HOME"]}
    )
    training.launch()
    assert training.wait("worker:0", "FAILED")["exit"] == {"code": 3, "signal": None}
    assert "args ['worker:0', '$HOME'] {\"cluster" in training.log("worker:0")


def test_a_command_that_does_not_exist(training):
    """It fails like a shell's: 127, with the reason in its log."""
    training.reserve({"task": "worker:0", "restarts": 0})
    training.start(program={"script": None, "args": [], "command": ["/no/such/program"]}).launch()
    event = training.wait("worker:0", "FAILED")
    assert event["exit"]["code"] == 127
    assert "No such file or directory" in event["reason"]
    assert "No such file or directory" in training.log("worker:0")


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("size", [100_000, 400_000])
def test_a_launch_that_is_too_large_fails_the_task_and_not_the_agent(training, warm, size):
    """Linux takes no variable beyond 128 KiB, the nursery's socket no message beyond its buffer."""
    training.reserve({"task": "worker:0", "restarts": 0, "warm": warm, "env": {"LARGE": "x" * size}}, "ps:0")
    training.start().launch()
    training.wait("ps:0", "RUNNING")
    if size < 128 * 1024:
        training.wait("worker:0", "RUNNING")
    else:
        assert training.wait("worker:0", "FAILED")["exit"]["code"] == 127


@pytest.mark.parametrize("warm", [True, False])
def test_a_script_that_leaves_an_executor_running_ends(training, warm):
    """As under a plain interpreter: its threads are told to end, not waited for for ever."""
    training.reserve({"task": "worker:0", "warm": warm}).start("pool").launch()
    training.wait("worker:0", "SUCCEEDED")
    assert "from a thread" in training.log("worker:0")


@pytest.mark.parametrize(
    ("code", "exit_", "said"),
    [
        ("import sys; sys.exit('goodbye')", 1, "goodbye"),
        ("import sys; sys.exit(None)", 0, ""),
        ("raise ValueError('x')", 1, "ValueError: x"),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit"),
        ("import threading as t; t.Timer(0.3, print, ['late']).start()", 0, "late"),
        ("def f(:", 1, "SyntaxError"),
        ("import os; os.kill(os.getpid(), 11)", -11, ""),
        ("import sys; sys.stdout.write('no newline')", 0, "no newline"),
        ("print(__name__, __file__)", 0, "__main__ "),
    ],
)
def test_a_script_ends_as_under_an_interpreter(training, code, exit_, said):
    """Exit codes, tracebacks, exit functions, threads, buffers."""
    training.host.script.write_text(code)
    tasks = {"worker:0": True, "worker:1": False}  # forked, and started afresh
    training.reserve(
        *({"task": t, "restarts": 0, "warm": warm, "has_port": False} for t, warm in tasks.items())
    )
    training.start().launch()
    for task in tasks:
        event = training.wait(task, "SUCCEEDED" if exit_ == 0 else "FAILED")
        assert event["exit"] == {
            "code": exit_ if exit_ >= 0 else None,
            "signal": -exit_ if exit_ < 0 else None,
        }
        assert said in training.log(task)


def test_random_numbers_differ_between_tasks_and_restarts(host):
    """Forks share their nursery's generators: without reseeding all workers would shuffle alike."""
    training = host.training().up("worker:0", "worker:1", {"task": "worker:2", "warm": False})
    drawn = [training.facts(f"worker:{i}")["random"] for i in range(3)]
    os.kill(training.facts("worker:1")["pid"], signal.SIGKILL)
    wait_until(lambda: training.facts("worker:1")["random"] != drawn[1], "it draws others after a restart")
    assert len({*map(tuple, drawn)}) == 3
    assert len({x for numbers in drawn for x in numbers}) == 9


@pytest.mark.parametrize("warm", [True, False])
def test_random_numbers_with_a_seed_can_be_had_again(host, warm):
    """The same in the next training, for the same task and attempt; different for another task and attempt."""
    pytest.importorskip("numpy")
    drawn = []
    for _ in range(2):
        training = host.training().reserve(
            {"task": "worker:0", "warm": warm}, {"task": "worker:1", "warm": warm}, seed=7
        )
        training.start("numpy").launch()
        facts = [training.facts("worker:0"), training.facts("worker:1")]
        os.kill(facts[1]["pid"], signal.SIGKILL)
        wait_until(lambda t=training, f=facts: t.facts("worker:1")["pid"] != f[1]["pid"], "it is back")
        facts.append(training.facts("worker:1"))
        drawn.append([f["random"] + f["numpy"] for f in facts])
        training.stop(grace_secs=0)
    assert drawn[0] == drawn[1]
    assert len({x for numbers in drawn[0] for x in numbers}) == 18
