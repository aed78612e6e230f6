"""Whatever is killed, nothing outlives its agent and the others go on. Real agents and processes; no TensorFlow, no SSH."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
from agents import is_free, is_listening, is_running, stat, wait_until
from tfps_runtime.reserve import is_held


@pytest.mark.parametrize("warm", [True, False])
def test_a_killed_task_is_restarted_alone_and_at_once(training, warm):
    """Within half a second inside the agent, at the same port; the others do not notice."""
    training.up({"task": "ps:0", "warm": warm}, "worker:0", "worker:1")
    before = {t["task"]: t["pid"] for t in training.status()["tasks"]}
    killed = time.time()
    os.kill(before["ps:0"], signal.SIGKILL)
    wait_until(lambda: training.states("ps:0").count("RUNNING") == 2, "it is back")
    after = {t["task"]: t["pid"] for t in training.status()["tasks"]}
    assert after["ps:0"] != before["ps:0"]
    assert (after["worker:0"], after["worker:1"]) == (before["worker:0"], before["worker:1"])
    starting = [e for e in training.events() if e.get("task") == "ps:0" and e["state"] == "STARTING"][-1]
    assert starting["time"] - killed < 0.5
    assert starting["attempt"] == 2
    assert is_listening(training.ports["ps:0"])
    assert training.event("ps:0", "RUNNING")["pid"] == after["ps:0"]


def test_a_task_that_fails_for_good_fails_the_training(training):
    """Its budget used up, with every attempt in the events, and its last words in its log."""
    training.reserve({"task": "ps:0", "restarts": 2}).start("exit=4")
    training.wait("ps:0", "FAILED")
    assert training.states("ps:0").count("STARTING") == 3
    assert training.event("ps:0", "FAILED")["reason"] == "exit code 4, after 2 restarts"
    assert training.log("ps:0").count("leaving with 4") == 3
    status = training.status()
    assert (status["state"], status["reason"]) == ("FAILED", "ps:0: exit code 4, after 2 restarts")
    assert training.stop() == "FAILED"
    assert training.status()["reason"] == "ps:0: exit code 4, after 2 restarts"


def test_when_the_nursery_is_killed_its_tasks_die_and_come_back_uncharged(training):
    """No TF task outlives its nursery; none of them has done anything wrong."""
    training.up(
        {"task": "ps:0", "restarts": 0},
        {"task": "worker:0", "restarts": 0},
        {"task": "worker:1", "warm": False},
    )
    before = {t["task"]: t["pid"] for t in training.status()["tasks"]}
    nursery = training.nursery
    os.kill(nursery, signal.SIGKILL)
    wait_until(lambda: not is_running(before["ps:0"]) and not is_running(before["worker:0"]), "they die", 1.0)
    for task in ("ps:0", "worker:0"):
        wait_until(lambda t=task: training.states(t).count("RUNNING") == 2, f"{task} is back")
        assert [e for e in training.events() if e.get("task") == task and e["state"] == "BACKOFF"][0][
            "reason"
        ] == ("its nursery was killed")
    assert training.nursery != nursery
    assert training.task("worker:1")["pid"] == before["worker:1"], "a spawned one lives on"


def test_a_nursery_that_keeps_dying_fails_the_training(training):
    """Five of them in vain: the host is broken, nothing waits for ever, and it can be stopped."""
    training.up("ps:0", "worker:0")
    killed = set()

    def kill() -> bool:
        with contextlib.suppress(StopIteration, ProcessLookupError, AttributeError):
            if (pid := training.nursery) not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        return "FAILED" in training.trainings

    wait_until(kill, "the training has failed")
    assert len(killed) == 5
    assert "the nursery ended 5 times" in training.status()["reason"]
    assert training.stop(grace_secs=1) == "FAILED"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_when_the_agent_dies_everything_dies_with_it(training, number):
    """Within a second, by the kernel's hand; ports and locks are free, and observers are told the truth."""
    training.up("ps:0", "worker:0", {"task": "worker:1", "warm": False})
    follower = training.follow(logs=["worker:0"])
    follower.wait(lambda m: m["type"] == "caught_up")
    pids = [training.nursery, *(t["pid"] for t in training.status()["tasks"])]
    assert len(set(pids)) == 4
    os.kill(training.agent, number)
    wait_until(lambda: not any(map(is_running, pids)), "all are dead", 1.0)
    wait_until(lambda: all(map(is_free, training.ports.values())), "the ports are free", 1.0)
    assert not is_held(training.paths.lock)
    follower.end()
    assert follower.messages[-1] == {"type": "gone", "state": "LOST"}
    assert training.follow().end()[-1]["type"] == "gone"
    status = training.status()
    assert (status["state"], status["is_alive"]) == ("LOST", False)
    assert {t["task"]: t["state"] for t in status["tasks"]} == {
        "ps:0": "LOST",
        "worker:0": "LOST",
        "worker:1": "LOST",
    }
    assert training.stop() == "LOST"
    training.host.ask("sweep", {})


def test_an_agent_that_is_asked_to_end_stops_the_training(training):
    """SIGTERM, as at the machine's shutdown: tasks may save."""
    training.up("ps:0", "worker:0")
    os.kill(training.agent, signal.SIGTERM)
    wait_until(lambda: not is_held(training.paths.lock), "it has ended")
    assert training.trainings[-1] == "STOPPED"


def test_a_closed_connection_and_a_hangup_do_not_end_the_agent(training):
    """It has a session of its own and outlives the command that started it."""
    training.up("ps:0", "worker:0")
    agent = training.agent
    assert stat(agent)[3] == str(agent)
    os.kill(agent, signal.SIGHUP)
    os.kill(agent, signal.SIGINT)
    os.kill(agent, signal.SIGPIPE)
    assert training.status()["is_alive"]
    assert training.agent == agent
