"""Who decides: every rule over more than one host, and that the order in which hosts are heard decides nothing."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings, strategies as st
from tfps_runtime import core
from tfps_runtime.protocol import Exit, Result, TaskSpec

from airflow_tfps.judge import UNREACHABLE, Rules, Verdict, judge

TASKS = {"ps:0": "a", "ps:1": "b", "worker:0": "a", "worker:1": "b", "worker:2": "c"}
ASYNC = Rules(tasks=TASKS, chief="worker:0")
SYNC = Rules(tasks=TASKS, chief="worker:0", mode="sync")
BACKUP = Rules(tasks=TASKS, chief="worker:0", mode="sync", replicas_to_aggregate=2)
ALL = Rules(tasks=TASKS, chief="worker:0", success_policy="all_workers")
LOCAL = Rules(tasks={"local:0": "a", "local:1": "b"}, chief="local:0", exits_are_final=False)
SCRIPT = Rules(tasks=TASKS, chief="worker:0", exits_are_final=False)
IN_GRAPH = Rules(tasks={"ps:0": "a", "tower:0": "a", "tower:1": "b"}, chief="tower:0", is_in_graph=True)

_clock = itertools.count(1)


def task(name: str, state: str, **more) -> dict:
    return {
        "type": "task",
        "task": name,
        "state": state,
        "attempt": 1,
        "host": TASKS.get(name),
        "time": next(_clock),
        **more,
    }


def failed(name: str, code: int | None = 1, **more) -> dict:
    exit_ = {"code": code, "signal": 9 if code is None else None}
    return task(name, "FAILED", exit=exit_, reason="it broke", **more)


def tower(name: str, state: str, **more) -> dict:
    return {**task("ps:0", state, **more), "task": name, "host": IN_GRAPH.tasks[name]}


def training(host: str, state: str, reason: str = "") -> dict:
    return {"type": "training", "host": host, "state": state, "reason": reason}


def gone(host: str) -> dict:
    return {"type": "gone", "host": host, "state": "LOST"}


def unreachable(host: str, secs: float) -> dict:
    return {"type": UNREACHABLE, "host": host, "secs": secs}


RESULT = {"type": "result", "host": "a", "task": "worker:0", "result": {"global_step": 7, "metrics": {}}}
CHIEF_DONE = task("worker:0", "SUCCEEDED")

# --- the rules, one by one ------------------------------------------------------------------------------------------

CASES = {
    "nothing heard": (ASYNC, [], None),
    "all run": (ASYNC, [task(name, "RUNNING") for name in TASKS], None),
    "restarts are the agents' business": (
        ASYNC,
        [task("ps:0", "BACKOFF"), task("worker:0", "BACKOFF")],
        None,
    ),
    # success
    "chief done": (ASYNC, [CHIEF_DONE], ("succeeded", None)),
    "chief done while workers run": (ASYNC, [task("worker:1", "RUNNING"), CHIEF_DONE], ("succeeded", None)),
    "chief done, then a ps breaks": (ASYNC, [CHIEF_DONE, failed("ps:0")], ("succeeded", None)),
    "chief done, its host's agent is gone": (ASYNC, [CHIEF_DONE, gone("a")], ("succeeded", None)),
    "another worker done": (ASYNC, [task("worker:1", "SUCCEEDED")], None),
    "all_workers: chief alone": (ALL, [CHIEF_DONE], None),
    "all_workers: all": (ALL, [task(f"worker:{i}", "SUCCEEDED") for i in range(3)], ("succeeded", None)),
    "all_workers: one failed": (
        ALL,
        [CHIEF_DONE, task("worker:1", "SUCCEEDED"), failed("worker:2")],
        ("failed", "worker:2@c"),
    ),
    "all_workers: the rest before the chief": (ALL, [task(f"worker:{i}", "SUCCEEDED") for i in (1, 2)], None),
    # ps and chief
    "a ps fails": (ASYNC, [failed("ps:1")], ("failed", "ps:1@b")),
    "the chief fails": (ASYNC, [failed("worker:0")], ("failed", "worker:0@a")),
    "a ps leaves too early": (ASYNC, [task("ps:0", "SUCCEEDED")], ("failed", "ps:0@a")),
    "the first failure is named": (
        ASYNC,
        [failed("ps:1"), failed("worker:0"), failed("ps:0")],
        ("failed", "ps:1@b"),
    ),
    "a lost ps": (ASYNC, [task("ps:1", "RUNNING"), gone("b")], ("failed", "ps:1@b")),
    "a lost chief": (
        Rules(tasks={"ps:0": "a", "worker:0": "b"}, chief="worker:0"),
        [gone("b")],
        ("failed", "worker:0@b"),
    ),
    # in-graph
    "in-graph: towers only serve": (IN_GRAPH, [tower("tower:1", "RUNNING")], None),
    "in-graph: the chief cannot spare a tower, whatever its role": (
        IN_GRAPH,
        [tower("tower:1", "FAILED", reason="it broke", exit={"code": 1, "signal": None})],
        ("failed", "tower:1@b"),
    ),
    "in-graph: nor one whose host is gone": (
        IN_GRAPH,
        [tower("tower:1", "RUNNING"), unreachable("b", 301)],
        ("failed", "tower:1@b"),
    ),
    "in-graph: the chief's success ends it": (IN_GRAPH, [tower("tower:0", "SUCCEEDED")], ("succeeded", None)),
    # workers
    "async goes on without a worker": (ASYNC, [failed("worker:1"), gone("c")], None),
    "sync does not": (SYNC, [failed("worker:2")], ("failed", "worker:2@c")),
    "sync without a lost one neither": (
        SYNC,
        [task("worker:2", "RUNNING"), gone("c")],
        ("failed", "worker:2@c"),
    ),
    "a backup worker may be missing": (BACKUP, [failed("worker:2")], None),
    "but not two": (BACKUP, [failed("worker:2"), failed("worker:1")], ("failed", "worker:2@c")),
    "sync: a worker that is done is not missing": (SYNC, [task("worker:2", "SUCCEEDED"), gone("c")], None),
    "sync: a worker in back-off is not missing": (SYNC, [task("worker:2", "BACKOFF")], None),
    # roles of other names
    "nobody knows what a role of its own name is for": (
        LOCAL,
        [failed("local:1", host="b")],
        ("failed", "local:1@b"),
    ),
    "one that is done is not missing": (LOCAL, [task("local:1", "SUCCEEDED", host="b")], None),
    "its host unreachable": (LOCAL, [unreachable("b", 300.0)], ("failed", "local:1@b")),
    # hosts without a connection
    "unreachable, not long": (ASYNC, [unreachable("a", 299.0)], None),
    "a ps' host unreachable": (ASYNC, [unreachable("b", 300.0)], ("failed", "ps:1@b")),
    "a worker's host unreachable, async": (ASYNC, [unreachable("c", 1e6)], None),
    "a worker's host unreachable, sync": (SYNC, [unreachable("c", 300.0)], ("failed", "worker:2@c")),
    "a worker's host unreachable, a backup left": (BACKUP, [unreachable("c", 1e6)], None),
    "one failed and one unreachable": (
        BACKUP,
        [failed("worker:1"), unreachable("c", 1e6)],
        ("failed", "worker:2@c"),
    ),
    "the same one failed and unreachable": (BACKUP, [failed("worker:2"), unreachable("c", 1e6)], None),
    "unreachable after it was done": (SYNC, [task("worker:2", "SUCCEEDED"), unreachable("c", 1e6)], None),
    "unreachable and back": (SYNC, [unreachable("c", 1e6), unreachable("c", 0.0)], None),
    "unreachable, then heard of": (SYNC, [unreachable("c", 1e6), task("worker:2", "RUNNING")], None),
    "two hosts unreachable": (BACKUP, [unreachable("b", 1.0), unreachable("c", 1e6)], None),
    # ended by others
    "stopped on one host": (ASYNC, [training("c", "STOPPED", "teardown")], ("stopped", None)),
    "expired": (ASYNC, [training("c", "EXPIRED", "nobody renewed the lease")], ("expired", None)),
    "failed on a host": (ASYNC, [training("c", "FAILED", "cannot import x")], ("failed", None)),
    "stopping is not stopped": (ASYNC, [training("c", "STOPPING", "teardown")], None),
    "stopped after the chief's success": (ASYNC, [CHIEF_DONE, training("a", "STOPPED")], ("succeeded", None)),
    # odd things
    "an unknown task": (ASYNC, [{**failed("ps:0"), "task": "ps:7"}], None),
    "an unknown type": (ASYNC, [{"type": "weather", "host": "a"}], None),
    "an unknown host is gone": (ASYNC, [gone("z")], None),
    "a task that failed does not come back": (
        ASYNC,
        [failed("ps:0"), task("ps:0", "RUNNING")],
        ("failed", "ps:0@a"),
    ),
}


@pytest.mark.parametrize(("rules", "events", "expected"), CASES.values(), ids=CASES.keys())
def test_the_verdict(rules, events, expected):
    """One line per rule of the design; the failing task is named with its host."""
    verdict = judge(rules, events)
    assert (verdict and (verdict.outcome, verdict.task)) == expected


@pytest.mark.parametrize(
    ("rules", "event", "transient"),
    [
        (ASYNC, failed("ps:0", code=1), False),
        (ASYNC, failed("ps:0", code=127), False),
        (ASYNC, failed("ps:0", code=75), True),
        (ASYNC, failed("ps:0", code=137), True),
        (ASYNC, failed("ps:0", code=None), True),
        (SCRIPT, failed("ps:0", code=1), True),
        (ASYNC, gone("a"), True),
        (ASYNC, unreachable("a", 1e6), True),
        (ASYNC, training("a", "EXPIRED"), True),
        (ASYNC, training("a", "STOPPED"), False),
        (ASYNC, training("a", "FAILED", "cannot import x"), False),
    ],
)
def test_whether_another_try_can_help(rules, event, transient):
    """A harness' exits 1-127 say that the program is wrong; signals and lost hosts may not come again."""
    verdict = judge(rules, [event])
    assert verdict is not None
    assert verdict.transient is transient


def test_the_result_and_the_reason_are_in_the_verdict():
    """What the chief left goes on to the operator, and a failure says why."""
    assert judge(ASYNC, [RESULT, CHIEF_DONE]).result == RESULT["result"]
    assert judge(ASYNC, [failed("ps:0")]).reason == "ps:0@a: it broke"
    assert judge(ASYNC, [gone("b")]).reason == "ps:1@b: the agent on its host is gone"
    assert judge(ASYNC, [unreachable("b", 310.4)]).reason == "ps:1@b: no connection to b for 310 s"
    assert judge(ASYNC, [training("c", "FAILED")]).reason == "c: the training failed"


def test_a_verdict_goes_through_a_trigger_event():
    """It is JSON between the trigger and the operator."""
    verdict = judge(ASYNC, [RESULT, CHIEF_DONE])
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


def test_what_failed_before_is_named_too():
    """Training could do without the workers; that the chief went the same way later is no coincidence."""
    before = [failed("worker:2"), failed("worker:1", None)]
    verdict = judge(ASYNC, [*before, failed("worker:0")])
    assert verdict.task == "worker:0@a"
    assert verdict.reason == "worker:0@a: it broke (before it worker:2@c: it broke; worker:1@b: it broke)"
    assert judge(ASYNC, [failed("worker:0"), failed("ps:1")]).reason == "worker:0@a: it broke"


def test_failures_are_ordered_by_when_they_happened():
    """Which host was heard first says nothing about which task broke first."""
    first, second = failed("ps:1"), failed("ps:0")
    assert judge(ASYNC, [second, first]) == judge(ASYNC, [first, second])
    assert judge(ASYNC, [second, first]).task == "ps:1@b"


# --- any history, heard in any order --------------------------------------------------------------------------------


def host_events(host: str, tasks: list[str], chief: str, choose: random.Random) -> list[dict]:
    """What the agent of a host says while its tasks live and die at random; made by the agent's own core."""
    specs = [TaskSpec(task=t, restarts=choose.choice([0, 1]), is_chief=t == chief) for t in tasks]
    state = core.AgentState(
        tasks={s.task: core.TaskView(spec=s) for s in specs},
        lease_until=choose.choice([50.0, 1e9]),
        chief_is_here=chief in tasks,
    )
    now, pending, told = 1.0, [core.Start(False, True, 1e9)], []
    if chief in tasks:
        pending.append(core.Launch(chief))
    for _ in range(30):
        now += choose.random()
        while pending:
            state, actions = core.step(state, pending.pop(0), now)
            for action in actions:
                if isinstance(action, core.Tell):
                    told.append({"seq": len(told) + 1, "time": now, "host": host, **action.message})
                elif isinstance(action, core.Spawn):
                    pending += [core.Spawned(action.task, 1), core.Listening(action.task)]
        name = choose.choice(tasks)
        pending.append(
            choose.choice(
                [
                    core.Advanced(name),
                    core.Exited(name, Exit(code=choose.choice([0, 1, 75]))),
                    core.Exited(name, Exit(signal=9)),
                    core.Finished(name, Result(global_step=5)) if name == chief else core.Tick(),
                    core.Stop("enough") if choose.random() < 0.1 else core.Tick(),
                ]
            )
        )
    told = told[: choose.randrange(len(told) + 1)]
    if choose.random() < 0.2:
        told.append(gone(host))
    return told


def mixed(hosts: list[list[dict]], choose: random.Random) -> list[dict]:
    """One way to hear them: each host's events in their order, some of them again after a reconnection."""
    queues, heard = [list(events) for events in hosts], []
    while any(queues):
        queue = choose.choice([q for q in queues if q])
        heard.append(queue.pop(0))
        if choose.random() < 0.2:
            numbered = [e for e in heard if e["host"] == heard[-1]["host"] and "seq" in e]
            heard += numbered[choose.randrange(len(numbered) + 1) :]
    return heard


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rules=st.sampled_from([ASYNC, SYNC, BACKUP, ALL, SCRIPT]),
)
def test_how_hosts_are_mixed_and_repeated_changes_nothing(seed, rules):
    """Two followers that hear the same hosts in different order, with repetitions, come to the same verdict."""
    choose = random.Random(seed)
    hosts = [
        host_events(host, [t for t, where in TASKS.items() if where == host], rules.chief, choose)
        for host in "abc"
    ]
    plain = judge(rules, [event for events in hosts for event in events])
    for _ in range(3):
        assert judge(rules, mixed(hosts, choose)) == plain


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), rules=st.sampled_from([ASYNC, SYNC, BACKUP, SCRIPT]))
def test_a_verdict_stays(seed, rules):
    """What is heard later does not turn success into failure, or the other way round."""
    choose = random.Random(seed)
    hosts = [
        host_events(host, [t for t, where in TASKS.items() if where == host], rules.chief, choose)
        for host in "abc"
    ]
    heard = mixed(hosts, choose)
    outcomes = [v.outcome for n in range(len(heard) + 1) if (v := judge(rules, heard[:n])) is not None]
    if outcomes and outcomes[0] == "succeeded":
        assert set(outcomes) == {"succeeded"}
