"""Following: events, logs, acknowledgements, slow and lost followers. Real agents and processes; no TensorFlow, no SSH."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from agents import Refused, is_running, wait_until
from tfps_runtime.processes import Processes, _Process, start_time
from tfps_runtime.reserve import is_held


def test_following_resumes_from_any_number(training):
    """Without a gap and without a repetition, while it lives and when it is over."""
    training.up("ps:0", "worker:0", args=("steps=3", "chief=worker:0"))
    training.wait("worker:0", "SUCCEEDED")
    count = len(training.events())
    for is_over in (False, True):
        for seen in (0, 1, count // 2, count - 1, count):
            follower = training.follow(from_seq=seen)
            follower.wait(lambda m: m["type"] == "caught_up")
            if is_over:
                follower.end()
            follower.close()
            assert follower.numbers == list(range(seen + 1, count + 1))
        if not is_over:
            training.stop()
            count = len(training.events())


def test_log_lines_are_told_again_until_they_are_acknowledged(training):
    """A triggerer that restarts repeats no line that was written down, and misses none that was not."""
    training.up("worker:0", args=("steps=4", "pause=0.2"))
    first = training.follow(logs=["worker:0"])
    seen = first.wait(lambda m: m["type"] == "log" and any("step 1" in line for line in m["lines"]))
    first.send({"ack": {"task": "worker:0", "offset": seen["offset"]}})
    wait_until(lambda: os.path.exists(training.paths.acknowledged), "it is acknowledged")
    first.close(signal.SIGKILL)
    heard = first.kind("log")
    told = [line for m in heard[: heard.index(seen) + 1] for line in m["lines"]]
    second = training.follow(logs=["worker:0"])
    second.wait(lambda m: m.get("state") == "SUCCEEDED" and m["type"] == "task")
    second.close()
    everything = training.log("worker:0").splitlines()
    assert told[-1] not in second.lines
    assert told + second.lines == everything
    third = training.follow(logs=["worker:0"])
    third.wait(lambda m: m["type"] == "log")
    third.close()
    assert third.lines == second.lines, "nobody acknowledged them"


def test_the_log_of_a_dead_agent_is_told_once_it_is_acknowledged_never_again(training):
    """What was written in its last moments is not lost; it comes before the last event."""
    training.up("worker:0", args=("pause=60",))
    wait_until(lambda: "step 1" in training.log("worker:0"), "it writes")
    os.kill(training.agent, signal.SIGKILL)
    wait_until(lambda: not is_held(training.paths.lock), "it is dead")
    silent = training.follow(logs=["worker:0"])
    silent.end()
    assert silent.lines == ["worker:0 is up", "step 1 loss 1.0"]
    kinds = [m["type"] for m in silent.messages]
    assert kinds.index("log") < kinds.index("training")
    assert kinds[-1] == "gone"
    careful = training.follow(logs=["worker:0"])
    offset = careful.wait(lambda m: m["type"] == "log")["offset"]
    careful.send({"ack": {"task": "worker:0", "offset": offset}})
    careful.end()
    assert careful.lines == silent.lines
    assert training.follow(logs=["worker:0"]).end()[0]["type"] != "log"


def test_acknowledging_what_was_never_told_does_not_silence_the_log(training):
    """An offset beyond the end is a mistake: later lines still come."""
    training.up("worker:0", args=("pause=0.3",))
    follower = training.follow(logs=["worker:0"])
    follower.send({"ack": {"task": "worker:0", "offset": 10**9}})
    wait_until(lambda: os.path.exists(training.paths.acknowledged), "it is noted")
    follower.close()
    again = training.follow(logs=["worker:0"])
    again.wait(lambda m: m["type"] == "log")
    again.close()


def test_a_follower_that_never_reads_holds_up_nobody(training):
    """The agent answers others, and the task goes on; what is not taken waits in the file."""
    training.host.script.write_text(
        "import time\nfor i in range(120):\n    print('x' * 100_000, flush=True)\nprint('done', flush=True)\ntime.sleep(600)\n"
    )
    training.reserve({"task": "worker:0", "has_port": False}).start(program={"progress": None}).launch()
    with training.connect() as deaf:
        deaf.sendall(json.dumps({"command": "follow", "logs": ["worker:0"]}).encode() + b"\n")
        wait_until(lambda: training.log("worker:0").endswith("done\n"), "the task goes on")
        begun = time.monotonic()
        assert training.status()["is_alive"]
        assert time.monotonic() - begun < 3.0
        begun = time.monotonic()
        follower = training.follow(logs=["worker:0"])
        follower.wait(lambda m: m["type"] == "log" and "done" in m["lines"])
        assert time.monotonic() - begun < 15.0, "12 MB, as fast as the follower takes them"
        follower.close()
        assert (
            int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{training.agent}/status").read_text())[1]) < 100_000
        )
    training.stop(grace_secs=0)


def test_connections_that_come_and_go_do_no_harm(training):
    """A descriptor that was just closed is the next one's: the agent must not confuse them."""
    training.up("ps:0", "worker:0")
    agent = training.agent
    for _ in range(60):
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(training.connect()) for _ in range(5)]
            for client in clients:
                client.sendall(b'{"command": "follow"}\n')
            for client in clients[1:]:
                client.close()
                stack.enter_context(training.connect()).sendall(b'{"command": "status"}\n')
    assert training.agent == agent
    assert training.status()["state"] == "RUNNING"


NONSENSE = [
    b"nonsense",
    b"[]",
    b"null",
    b"{}",
    b'{"command": null}',
    b'{"command": ["start"]}',
    b'{"command": "fly"}',
    b'{"command": "start"}',
    b'{"command": "start", "request": {"training": 5}}',
    b'{"command": "start", "request": {}, "lease_secs": "soon"}',
    b'{"command": "launch"}',
    b'{"command": "launch", "task": ["x"]}',
    b'{"command": "renew"}',
    b'{"command": "renew", "lease_secs": "x"}',
    b'{"command": "renew", "lease_secs": NaN}',
    b'{"command": "renew", "lease_secs": 1e999}',
    b'{"command": "renew", "lease_secs": -1}',
    b'{"command": "renew", "lease_secs": 1' + b"0" * 400 + b"}",
    b'{"command": "reserve", "lease_secs": []}',
    b'{"command": "stop", "grace_secs": "now"}',
    b'{"command": "follow", "from_seq": -1}',
    b'{"command": "follow", "from_seq": "x"}',
    b'{"command": "follow", "logs": 5}',
    b'{"command": "follow", "logs": [["x"], {}]}',
    b'{"command": "follow", "renew": {}}',
    b'{"ack": 5}',
    b'{"ack": {"task": [], "offset": 1}}',
    b'{"ack": {"task": "ps:0", "offset": "x"}}',
    b'{"renew": null}',
    b'{"renew": true}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
]


def test_nonsense_does_not_end_the_agent(training):
    """Whatever comes over its socket is answered with an error, or passed over; everything lives on unchanged."""
    training.up("ps:0", "worker:0")
    before = training.status()
    for line in NONSENSE:
        with training.connect() as client:
            client.sendall(line + b'\n{"command": "status"}\n')
            with client.makefile() as answers:
                for text in answers:
                    answer = json.loads(text)
                    if answer.get("type") == "status":
                        break
                    assert answer["type"] in ("error", "caught_up", "task", "training", "progress"), answer
                    if answer["type"] == "error":
                        assert answer["code"] in ("bad_request", "not_found")
                assert answer["type"] == "status", line
    with (
        training.connect() as client,
        contextlib.suppress(ConnectionError),
    ):  # a line without an end is cut off
        client.sendall(b"x" * (5 << 20))
        assert client.recv(100) == b""
    after = training.status()
    assert [(t["task"], t["pid"], t["state"]) for t in after["tasks"]] == [
        (t["task"], t["pid"], t["state"]) for t in before["tasks"]
    ]
    assert after["lease_secs"] <= before["lease_secs"]


@pytest.mark.parametrize(
    "request_", [b"", b"[1]", b'{"training": 5, "host": "a", "workdir": "/w"}', b'{"training": "x#y"}']
)
@pytest.mark.parametrize("command", ["start", "status", "follow", "reserve"])
def test_commands_refuse_nonsense(host, command, request_):
    """One error line and exit code 1; never a traceback."""
    with pytest.raises(Refused) as caught:
        host.ask(command, request_)
    assert caught.value.code == "bad_request"


def test_progress_is_read_from_a_scripts_log(training):
    """By the job's pattern; the newest reaches followers and the status."""
    training.up("ps:0", "worker:0", args=("pause=0.02",))
    follower = training.follow()
    follower.wait(lambda m: m["type"] == "progress" and m["progress"]["global_step"] > 5)
    follower.close()
    newest = training.task("worker:0")["progress"]
    assert newest["loss"] == pytest.approx(1 / newest["global_step"])
    assert training.trainings[-1] == "RUNNING"


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", "1e999", "oops"])
def test_a_loss_that_is_no_number_is_progress_without_a_loss(training, loss):
    """A training that diverges must be seen, not brought down by its own log."""
    training.up("ps:0", "worker:0", args=(f"loss={loss}",))
    follower = training.follow()
    record = follower.wait(lambda m: m["type"] == "progress")["progress"]
    follower.close()
    assert record["global_step"] >= 1
    assert "loss" not in record


@pytest.mark.parametrize("pattern", ["(", "no groups", r"(?P<loss>\d+)", r"(?P<step>s)"])
def test_a_pattern_that_does_not_fit(training, pattern):
    """One that is none is refused; one that finds no step finds nothing."""
    training.reserve("ps:0", "worker:0")
    if pattern == "(":
        with pytest.raises(Refused, match="progress"):
            training.start(program={"progress": pattern})
        training.start()
    else:
        training.start(program={"progress": pattern}).launch()
        training.wait("worker:0", "RUNNING")
        wait_until(lambda: "step 9" in training.log("worker:0"), "it writes")
        assert "progress" not in training.task("worker:0")


def test_the_last_step_of_a_talkative_script_counts(training):
    """Its log grows faster than it is searched; at its end nothing of it is left out of the result."""
    training.host.script.write_text(
        "for i in range(1, 20001):\n    print('step', i, 'loss', 0.5, 'x' * 50)\n"
    )
    training.reserve({"task": "worker:0", "has_port": False}).start().launch()
    training.wait("worker:0", "SUCCEEDED")
    assert training.status()["result"]["global_step"] == 20000


def test_a_full_disk_does_not_end_a_training(training):
    """Events and progress that cannot be written are lost on disk, not for followers; killed tasks still come back."""
    training.up("ps:0", "worker:0")
    follower = training.follow(logs=["worker:0"])
    agent = training.agent
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (0, 0))  # from now on every write to a file fails
    size = os.path.getsize(training.paths.events)
    for name in ("worker:0", "ps:0"):
        os.kill(training.task(name)["pid"], signal.SIGKILL)
        follower.wait(
            lambda m, n=name: m.get("task") == n and m.get("attempt") == 2 and m["state"] == "RUNNING"
        )
    follower.wait(lambda m: m["type"] == "log" and m["lines"].count("worker:0 is up"))
    follower.send({"ack": {"task": "worker:0", "offset": follower.kind("log")[-1]["offset"]}})
    assert training.status()["state"] == "RUNNING"
    assert training.agent == agent
    follower.close()
    assert follower.numbers == list(range(1, len(follower.numbers) + 1))
    assert os.path.getsize(training.paths.events) == size


def test_stacks_on_demand(training):
    """`dump` writes the stacks of all threads to the task's log, and the task goes on."""
    training.up("ps:0", "worker:0", args=("pause=0.3",))
    pid = training.task("worker:0")["pid"]
    training.tell("dump")
    wait_until(lambda: "Current thread" in training.log("worker:0"), "the stacks are there")
    assert "standin.py" in training.log("worker:0")
    assert training.task("worker:0")["pid"] == pid


@pytest.mark.parametrize("kind", ["command", "warm", "spawned"])
def test_asking_for_stacks_kills_nobody(training, kind):
    """Neither a program that knows nothing of the signal, nor a task that has only just been started."""
    training.reserve({"task": "worker:0", "restarts": 0, "warm": kind == "warm", "has_port": False})
    if kind == "command":
        training.start(program={"script": None, "args": [], "command": ["sleep", "600"], "progress": None})
    else:
        training.start("pause=600")
    training.launch()
    pid = wait_until(lambda: training.task("worker:0").get("pid"), "it has a process")
    for _ in range(20):
        training.tell("dump")
    assert wait_until(lambda: training.event("worker:0", "RUNNING"), "it runs")["pid"] == pid
    assert is_running(pid)


def test_a_signal_reaches_a_process_that_has_no_group_yet():
    """A stop may come between the fork and the new task's first system call."""
    young = subprocess.Popen(["sleep", "600"])
    processes = Processes([], {}, warm=False, output=2)
    processes._living[young.pid] = _Process("ps:0", start_time(young.pid), is_forked=True)
    processes.signal_group("ps:0", signal.SIGTERM)
    assert young.wait(10) == -signal.SIGTERM


def test_logs_on_demand(training):
    """The last lines of any task's log, alive or not; of an unknown one nothing."""
    training.up("worker:0", args=("steps=3",))
    training.wait("worker:0", "SUCCEEDED")
    for _ in range(2):
        answer = training.host.ask("logs", {**training.request, "task": "worker:0", "lines": 2})
        assert answer["lines"] == ["step 3 loss 0.3333333333333333", "the last word"]
        training.stop()
    assert training.host.ask("logs", {**training.request, "task": "ps:7"})["lines"] == []
    with pytest.raises(Refused, match="not a TF task"):
        training.host.ask("logs", {**training.request, "task": "../../etc"})
