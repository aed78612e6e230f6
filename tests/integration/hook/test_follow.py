"""Following a training over lost links, killed agents and new followers. Real SSH hosts, agents and processes."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from labs import Watcher, behind

from airflow_tfps.hook import ClusterHook
from airflow_tfps.judge import UNREACHABLE


@pytest.mark.parametrize("how", ["the connection is cut", "its command is killed"])
def test_following_goes_on_over_a_lost_connection(lab, relay, define, how):
    """Numbers without a gap or a repetition, every line of the log once, and no success out of a silence."""
    link, inventory = behind(lab, relay, define, "hook-a")
    with ClusterHook(inventory=inventory) as hook:
        handle = hook.ensure(
            lab.job("steps=60", "pause=0.05"), lab.training(), chief_host="hook-a", wait=False
        )
        hook.launch(handle)
        watcher, cuts = Watcher(handle), []

        def cut(message: dict) -> None:
            step = watcher.lines.index("step 5") if "step 5" in watcher.lines else None
            if step is not None and not cuts:
                cuts.append(message)
                if how == "the connection is cut":
                    link.cut()
                else:
                    for pid in lab.processes("\0follow\0"):
                        os.kill(pid, signal.SIGKILL)

        verdict = asyncio.run(watcher.run(cut))
        assert verdict.outcome == "succeeded"
        assert cuts
        for host in handle.hosts:
            numbers = watcher.numbers(host)
            assert numbers == list(range(1, len(numbers) + 1))
        assert watcher.lines == ["worker:0 is up ", *(f"step {i}" for i in range(1, 61))]
        lost = [m for m in watcher.messages if m["type"] == UNREACHABLE and m["host"] == "hook-a"]
        assert lost
        assert lost[-1]["secs"] == 0.0, "and it says that it is back"
    with ClusterHook(inventory=inventory) as another:
        another.stop(handle, "the test is over")


def test_a_new_follower_repeats_no_line_of_the_log(lab, hook):
    """A triggerer that restarts goes on where the last one was."""
    handle = hook.ensure(lab.job("steps=40", "pause=0.05"), lab.training(), wait=False)
    hook.launch(handle)
    first, second = Watcher(handle), Watcher(handle)
    assert asyncio.run(first.run(lambda _: "step 9" in first.lines)) is None
    assert asyncio.run(second.run()).outcome == "succeeded"
    told = first.lines + second.lines
    assert told[-1] == "step 40"
    assert len(told) - len(set(told)) <= len(first.messages[-1].get("lines", [])), (
        "but for what was on its way"
    )
    assert set(told) == {"worker:0 is up ", *(f"step {i}" for i in range(1, 41))}
    hook.stop(handle, "the test is over")


def test_a_host_that_stays_away_fails_the_try(lab, relay, define):
    """After `unreachable_secs`, as something that another try may mend; never as a success."""
    link, inventory = behind(lab, relay, define)
    with ClusterHook(inventory=inventory) as hook:
        handle = hook.ensure(lab.job(), lab.training(), chief_host="hook-a", wait=False)
        hook.launch(handle)
        watcher = Watcher(handle, unreachable_secs=1.5)

        def cut(message: dict) -> None:
            if message["type"] == "caught_up" and message["host"] == "hook-b":
                link.close()

        verdict = asyncio.run(watcher.run(cut))
    assert (verdict.outcome, verdict.transient) == ("failed", True)
    assert verdict.task == "ps:1@hook-b"
    assert "no connection to hook-b" in verdict.reason


def test_a_killed_agent_is_told_as_gone(lab, hook):
    """The kernel took its tasks with it; the verdict names the first that is missed."""
    handle = hook.ensure(lab.job(), lab.training(), wait=False)
    hook.launch(handle)
    watcher = Watcher(handle)

    def kill(message: dict) -> None:
        if message["type"] == "caught_up" and message["host"] == "hook-b":
            from tfps_runtime.reserve import read_lock

            os.kill(read_lock(lab.paths(handle.training, "hook-b").lock).pid, signal.SIGKILL)

    verdict = asyncio.run(watcher.run(kill))
    assert (verdict.outcome, verdict.task, verdict.transient) == ("failed", "ps:1@hook-b", True)
    assert hook.status(handle)["hook-b"]["state"] == "LOST"
    assert hook.stop(handle, "the test is over")["hook-b"] == "LOST"
