"""A TF task that hangs: the stacks of all TF tasks, on all hosts, before it is killed. Real SSH hosts, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap

import pytest
from labs import STAND_IN, Lab, Watcher
from tfps_runtime.protocol import Task

from airflow_tfps import follow
from airflow_tfps.progress import Board

HANGS = textwrap.dedent(
    """
    import os

    def never_comes():
        while not os.path.exists("go on"):
            time.sleep(0.05)

    if role == "ps":
        while True:
            time.sleep(1)
    for step in range(1, 6):
        print(f"step {step}", flush=True)
        time.sleep(0.05)
    if me == "worker:1" and not os.path.exists("hung"):
        open("hung", "w").close()
        never_comes()
    while True:
        step += 1
        print(f"step {step}", flush=True)
        time.sleep(0.05)
    """
)


@pytest.fixture
def handle(lab: Lab, hook):
    """worker:1, on another host than the chief, hangs after five steps, once."""
    (lab.folder / "hangs.py").write_text(STAND_IN.partition("for step in")[0] + HANGS)
    job = lab.job(script="hangs.py", timeouts={"stall_secs": 2})
    handle = hook.ensure(job, lab.training())
    assert handle.of(Task.parse("worker:1")).host != handle.chief_host
    hook.launch(handle)
    return handle


def stacks(hook, handle) -> dict[str, int]:
    """How often each TF task has dumped its stacks."""
    return {
        str(t.task): sum("most recent call first" in line for line in hook.log_tail(handle, t.task, 10_000))
        for t in handle.tasks
    }


def test_a_stall_dumps_every_tf_task_on_every_host(hook, handle, wait_until):
    """Also where nothing hangs; then the stalled one alone is started again, and the training goes on."""
    watcher = Watcher(handle)

    def restarted(message: dict) -> bool:
        return (
            message.get("task") == "worker:1"
            and message.get("attempt") == 2
            and message["state"] == "RUNNING"
        )

    asyncio.run(watcher.run(at=restarted))
    [told] = [m for m in watcher.messages if m.get("stalled")]
    assert (told["task"], told["reason"]) == ("worker:1", "no progress for 2 s: stacks dumped, killed next")
    assert all(stacks(hook, handle).values()), stacks(hook, handle)
    assert any("never_comes" in line for line in hook.log_tail(handle, Task.parse("worker:1"), 10_000))
    attempts = {t["task"]: t["attempt"] for s in hook.status(handle).values() for t in s["tasks"]}
    assert attempts == {"ps:0": 1, "ps:1": 1, "worker:0": 1, "worker:1": 2}
    board = Board(handle)
    lines = [line for message in watcher.messages for line in board.see(message)]
    assert "worker:1@hook-b RUNNING (no progress for 2 s: stacks dumped, killed next)" in lines


def test_a_stall_of_the_past_dumps_nothing(hook, handle, wait_until):
    """A follower that comes later hears of it as history: nobody is asked again. Who only watches never asks."""
    wait_until(
        lambda: any(
            t["task"] == "worker:1" and t["attempt"] == 2 for t in hook.status(handle)["hook-b"]["tasks"]
        ),
        "it was restarted without a follower",
    )
    before = stacks(hook, handle)
    there = {str(t.task) for t in handle.on("hook-b")}
    assert {task for task, count in before.items() if count} == there

    async def look(lease_secs: float | None) -> None:
        seen: list[dict] = []
        async with (
            asyncio.timeout(60),
            contextlib.aclosing(follow.follow(handle, lease_secs=lease_secs)) as stream,
        ):
            async for message, _ in stream:
                seen.append(message)
                stalled = next((i for i, m in enumerate(seen) if m.get("stalled")), len(seen))
                hosts = [m["host"] for m in seen[stalled:] if m["type"] == "progress"]
                if hosts.count("hook-a") > 20 and hosts.count("hook-b") > 20:
                    return

    asyncio.run(look(120.0))
    asyncio.run(look(None))
    assert stacks(hook, handle) == before
