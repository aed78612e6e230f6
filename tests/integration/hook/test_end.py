"""Ending a training on every host, over links that break. Real SSH hosts, agents and processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid

import pytest
from labs import Lab, behind

from airflow_tfps import follow
from airflow_tfps.errors import (
    HostUnreachableError,
)
from airflow_tfps.handle import Handle
from airflow_tfps.hook import ClusterHook

# --- ending -----------------------------------------------------------------------------------------------------------


def stop_blocking(lab: Lab, handle: Handle) -> str:
    """The worker's way; returns the error's text."""
    with ClusterHook(inventory=handle.inventory) as hook:
        try:
            hook.stop(handle, "enough", grace_secs=1)
        except HostUnreachableError as error:
            return str(error)
    return ""


def stop_async(lab: Lab, handle: Handle) -> str:
    """The trigger's way."""
    return "; ".join(map(str, asyncio.run(follow.stop(handle, "enough")).values()))


@pytest.mark.parametrize("stop", [stop_blocking, stop_async])
def test_stopping_ends_everything_on_every_host(lab, hook, stop):
    """From a worker and from a trigger alike, and twice as well as once."""
    handle = hook.ensure(lab.job(), lab.training(), wait=False)
    hook.launch(handle)
    for _ in range(2):
        assert stop(lab, handle) == ""
        assert not lab.living(handle.training)
    reasons = {s["reason"] for s in hook.status(handle).values()}
    assert reasons == {"enough"}


def test_stopping_names_the_host_that_cannot_be_reached(lab, relay, define):
    """After the others were stopped; only their own lease is left to it."""
    link, inventory = behind(lab, relay, define)
    with ClusterHook(inventory=inventory) as hook:
        handle = hook.ensure(lab.job(), lab.training(), chief_host="hook-a", wait=False)
    link.close()
    for stop in (stop_blocking, stop_async):
        text = stop(lab, handle)
        assert "hook-b" in text
        assert "hook-a" not in text
        assert lab.living(handle.training) == ["hook-b"]


def test_stopping_by_key_needs_no_handle(lab, hook):
    """`teardown` finds every incarnation on every host of the inventory, and nothing of another key."""
    key = f"hook/{uuid.uuid4().hex}"
    trainings = [lab.training(key), lab.training(key), lab.training()]
    for training, host in zip(trainings, ("hook-a", "hook-b", "hook-a"), strict=True):
        hook.ensure(lab.job(), training, wait=False, chief_host=host)
    with ClusterHook(inventory=lab.inventory()) as another:
        found = another.stop_key(key, "teardown", grace_secs=1)
        assert set(found) == {"hook-a", "hook-b"}
        assert all(set(ids) == {str(t) for t in trainings[:2]} for ids in found.values())
        assert all(set(ids.values()) == {"STOPPED"} for ids in found.values())
        assert [lab.living(t) for t in trainings] == [[], [], ["hook-a", "hook-b"]]
        assert another.stop_key(key, "again") == {"hook-a": {}, "hook-b": {}}


def test_who_only_looks_keeps_nothing_and_a_trigger_without_an_answer_shortens_the_lease(lab, hook):
    """Watching renews no lease and takes no log away; when the lease is over the hosts end everything themselves."""
    handle = hook.ensure(lab.job(timeouts={"grace_secs": 1}), lab.training(), wait=False)
    hook.renew(handle, 500.0)
    before = hook.status(handle)
    assert all(400 < s["lease_secs"] <= 500 for s in before.values())

    async def look() -> list[dict]:
        async with contextlib.aclosing(follow.follow(handle, lease_secs=None)) as stream:
            messages = []
            async for message, _ in stream:
                messages.append(message)
                if sum(m["type"] == "caught_up" for m in messages) == 2:
                    return messages
        return []

    messages = asyncio.run(look())
    assert {m["host"] for m in messages} == {"hook-a", "hook-b"}
    assert not [m for m in messages if m["type"] == "log"]
    assert hook.status(handle)["hook-a"]["lease_secs"] <= before["hook-a"]["lease_secs"]
    asyncio.run(follow.renew(handle, 0.5))
    deadline = time.monotonic() + 30
    while lab.living(handle.training):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {s["state"] for s in hook.status(handle).values()} == {"EXPIRED"}


# --- broken links -----------------------------------------------------------------------------------------------------


def test_a_command_whose_connection_breaks_is_an_error(lab, relay, define):
    """Whatever the command did: without its answer nothing is taken for done."""
    link, inventory = behind(lab, relay, define)
    with ClusterHook(inventory=inventory) as hook:
        handle = hook.ensure(lab.job(), lab.training(), chief_host="hook-a", wait=False)
        assert set(hook.status(handle)) == {"hook-a", "hook-b"}
        link.cut()
        with pytest.raises(HostUnreachableError, match="hook-b"):
            hook.status(handle)
    with ClusterHook(inventory=inventory) as hook:
        assert {s["is_alive"] for s in hook.status(handle).values()} == {True}, "the training lives on"


def test_what_could_not_be_brought_up_is_cleared_away_over_a_new_connection(lab, relay, define):
    """The connection breaks while the cluster comes up: the reservation must not wait for its lease."""
    training = lab.training()
    link, inventory = behind(lab, relay, define)

    def cut() -> None:
        deadline = time.monotonic() + 30
        while not lab.processes("\0probe\0") and time.monotonic() < deadline:
            time.sleep(0.02)
        link.cut()

    cutter = threading.Thread(target=cut)
    cutter.start()
    with ClusterHook(inventory=inventory) as hook, pytest.raises(HostUnreachableError, match="hook-b"):
        hook.ensure(lab.job("deaf=ps:0"), training, chief_host="hook-a")
    cutter.join()
    assert not lab.living(training)


def test_the_connection_form_says_what_is_wrong(lab):
    """For people who set up a connection: every host is looked at, the reason is shown."""
    with ClusterHook(inventory=lab.inventory()) as hook:
        assert hook.test_connection() == (True, "2 hosts are ready: hook-a, hook-b")
    with ClusterHook(inventory=lab.inventory(hook_b={"python": "/no/python"})) as hook:
        is_good, text = hook.test_connection()
    assert not is_good
    assert "/no/python" in text
