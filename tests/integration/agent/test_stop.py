"""Stopping, and the lease that stops what nobody follows. Real agents and processes; no TensorFlow, no SSH."""

from __future__ import annotations

import json
import time
import uuid

from agents import is_running, wait_until

# --- stopping -----------------------------------------------------------------------------------------------------------------


def test_what_ignores_sigterm_is_gone_after_the_grace_time(training):
    """With its children, and with theirs that made themselves a session of their own."""
    training.host.has_commands = True
    training.up("ps:0", "worker:0", args=("ignore_term=worker", "grandchild", "daemon"))
    pids = set(training.host.marked())
    assert len(pids) == 2 + 2 * 3, "agent, nursery, two tasks with two children each"
    begun = time.monotonic()
    assert training.stop(grace_secs=1.0) == "STOPPED"
    assert time.monotonic() - begun < 1.0 + 1.0 + 1.5, "grace + 1 s, and the command's own start"
    wait_until(lambda: not [p for p in pids if is_running(p)], "all are gone, the agent as the last", 1.0)
    assert [
        e["exit"]["signal"] for e in training.events() if e.get("state") == "STOPPED" and "exit" in e
    ] == [9, 15]


def test_a_stop_lets_tasks_save(training):
    """SIGTERM first; whoever leaves by itself is not waited for."""
    training.up("ps:0", "worker:0")
    begun = time.monotonic()
    assert training.stop() == "STOPPED"
    assert time.monotonic() - begun < 4.0
    assert training.trainings[-2:] == ["STOPPING", "STOPPED"]
    assert training.events()[-1]["reason"] == "the test is over"


def test_stopping_twice_and_from_two_sides(training):
    """The second waits for the same end; a third, afterwards, finds nothing to do."""
    training.up("ps:0", "worker:0", args=("ignore_term",))
    first = training.host.popen("stop")
    first.stdin.write(json.dumps({**training.request, "grace_secs": 30}).encode() + b"\n")
    first.stdin.close()
    wait_until(lambda: "STOPPING" in training.trainings, "it is being stopped")
    begun = time.monotonic()
    assert training.stop(grace_secs=0.5) == "STOPPED"
    assert time.monotonic() - begun < 10.0, "the more impatient one counts"
    assert json.loads(first.stdout.read())["stopped"] == {str(training.id): "STOPPED"}
    first.wait()
    first.stdout.close()
    first.stderr.close()
    assert training.stop() == "STOPPED"


def test_stopping_while_the_nursery_still_imports(host):
    """Tasks that only wait to be forked are taken back: nobody waits for an import that hangs."""
    (host.workdir / "slow_module.py").write_text("import time; time.sleep(600)\n")
    host.env["PYTHONPATH"] += f":{host.workdir}"
    training = host.training().reserve("ps:0", "worker:0", preload=["slow_module"]).start().launch()
    assert training.states("ps:0") == ["STARTING"]
    begun = time.monotonic()
    assert training.stop(grace_secs=30) == "STOPPED"
    assert time.monotonic() - begun < 4.0
    assert training.states("ps:0") == ["STARTING", "STOPPING", "STOPPED"]


def test_stopping_what_is_not_there(host):
    """No error: it is as gone as one could wish."""
    training = host.training()
    assert training.stop() == "UNKNOWN"
    assert training.status()["state"] == "UNKNOWN"
    assert host.ask("stop", {"key": "no/such/key", "host": host.name})["stopped"] == {}
    assert training.follow().end()[-1] == {"type": "gone", "state": "UNKNOWN"}


def test_stopping_by_key_ends_every_incarnation_and_nothing_else(host):
    """Of this host's name; neither another key nor another named host on the same machine."""
    key = f"test/{uuid.uuid4().hex}"
    ours = [host.training(key).reserve("ps:0") for _ in range(2)]
    elsewhere = host.training(key, name="gpu-b").reserve("ps:0")
    longer = host.training(f"{key}/more").reserve("ps:0")
    stopped = host.ask("stop", {"key": key, "host": host.name, "reason": "teardown"})["stopped"]
    assert stopped == {str(t.id): "STOPPED" for t in ours}
    assert all(t.left() == [] for t in ours)
    assert elsewhere.status()["is_alive"]
    assert longer.status()["is_alive"]


# --- the lease ------------------------------------------------------------------------------------------------------------------


def test_a_reservation_that_nobody_takes_up_ends(training):
    """By itself, with everything that it held."""
    training.reserve("ps:0", lease_secs=0.5)
    wait_until(lambda: training.left() == [], "it has ended", 10.0)
    assert training.trainings == ["STOPPING", "EXPIRED"]
    assert training.status()["state"] == "EXPIRED"


def test_a_training_that_nobody_follows_ends(training):
    """The lease of `start` runs out: the tasks are told to save, everything stops."""
    training.reserve("ps:0", "worker:0").start(lease_secs=1.0).launch()
    wait_until(lambda: training.left() == [], "it has ended", 20.0)
    assert training.trainings[-2:] == ["STOPPING", "EXPIRED"]
    assert training.events()[-1]["reason"] == "nobody renewed the lease"
    assert training.states("worker:0")[-2:] == ["STOPPING", "STOPPED"]


def test_who_renews_the_lease_and_who_does_not(training):
    """`start`, `follow` and `renew` do; looking at it does not keep a training alive."""
    training.reserve("ps:0", lease_secs=500.0)
    assert 490 < training.status()["lease_secs"] <= 500
    training.start(lease_secs=400.0)
    assert 390 < training.status()["lease_secs"] <= 400
    follower = training.follow(renew=300.0)
    follower.wait(lambda m: m["type"] == "caught_up")
    assert 290 < training.status()["lease_secs"] <= 300
    follower.send({"renew": 700.0})
    wait_until(lambda: training.status()["lease_secs"] > 600, "the follower renewed it")
    follower.close()
    training.tell("renew", lease_secs=100.0)
    before = training.status()["lease_secs"]
    training.host.ask("logs", {**training.request, "task": "ps:0"})
    training.follow().close()
    assert training.status()["lease_secs"] <= before <= 100
