"""Bringing a cluster up: `ensure`, readiness, sweeping. Real SSH hosts, agents and processes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from labs import STAND_IN, Watcher, pids
from tfps_runtime.protocol import Task

from airflow_tfps import follow
from airflow_tfps.errors import (
    BusyError,
    CommandError,
    HostNotReadyError,
    NotReadyError,
    SpecError,
)
from airflow_tfps.handle import Handle
from airflow_tfps.hook import ENSURE_LEASE_SECS, ClusterHook
from airflow_tfps.inventory import Inventory
from airflow_tfps.readiness import check_probes, probe_request
from airflow_tfps.spec import JobSpec
from airflow_tfps.triggers import ReadyTrigger

# --- bringing a cluster up --------------------------------------------------------------------------------------------


def test_ensuring_twice_finds_the_same_cluster(lab, hook):
    """An Airflow task that runs again, or another worker: equal handles, the same processes."""
    job, training = lab.job(), lab.training()
    first = hook.ensure(job, training)
    before = pids(hook, first)
    assert lab.living(training) == ["hook-a", "hook-b"]
    assert all(before[name] for name in ("ps:0", "ps:1", "worker:1"))
    assert before["worker:0"] is None, "the chief waits"
    with ClusterHook(inventory=lab.inventory()) as another:
        second = another.ensure(job, training)
        assert second == first
        assert Handle.from_json(second.to_json()) == first
        assert pids(another, second) == before
    hook.stop(first, "the test is over")


@pytest.mark.parametrize("where", ["ssh", "local"])
def test_a_training_from_ensure_to_stop(lab, where, monkeypatch):
    """Over SSH and on this very machine: the cluster comes up, the chief runs to its end, everything goes."""
    inventory = lab.inventory()
    if where == "local":
        monkeypatch.setenv("HOME", lab.hosts["hook-a"].home)
        local = {"ssh_conn_id": "local", "address": "127.0.0.1", "gpus": 0, "python": sys.executable}
        inventory = Inventory.from_dict({"hosts": {"hook-a": {**local, "ports": "15000-19999"}}})
    (lab.folder / "data.txt").write_text("and has its data")
    job = lab.job("steps=3", "input={inputs.train}", inputs={"train": "data.txt"})
    with ClusterHook(inventory=inventory) as hook:
        handle = hook.ensure(job, lab.training(), chief_host="hook-a")
        assert handle.chief_host == "hook-a"
        hook.launch(handle)
        verdict = asyncio.run(Watcher(handle).run())
        assert (verdict.outcome, verdict.result["global_step"]) == ("succeeded", 3)
        hook.launch(handle)  # again: nothing happens
        assert hook.result(handle)["global_step"] == 3
        states = hook.stop(handle, "the chief has finished")
        assert states == {host: "SUCCEEDED" if host == "hook-a" else "STOPPED" for host in handle.hosts}
        assert not lab.living(handle.training)
        assert hook.stop(handle, "again") == states
        assert {s["is_alive"] for s in hook.status(handle).values()} == {False}
        said = ["worker:0 is up and has its data", "step 1", "step 2", "step 3"]
        assert hook.log_tail(handle, handle.chief, 4) == said, "logs outlive the training"
        assert hook.log_tail(handle, handle.chief, 2) == said[-2:]


def test_the_runtime_and_the_program_are_brought_once(lab, hook, caplog):
    """Both are named by their contents: a second training, and a second hook, upload nothing."""
    caplog.set_level(logging.INFO, "airflow_tfps")
    name = f"once_{uuid.uuid4().hex}.py"
    (lab.folder / name).write_text(STAND_IN + f"# {name}\n")
    for host in lab.hosts.values():
        for path in Path(host.home, ".tfps/bin").glob("*.pyz"):
            path.unlink()
    for one in (hook, ClusterHook(inventory=lab.inventory())):
        with one:
            handle = one.ensure(lab.job(script=name), lab.training(), wait=False)
            one.stop(handle, "the test is over", grace_secs=0)
    said = [record.getMessage() for record in caplog.records]
    for host in lab.hosts:
        assert len([m for m in said if m.startswith(f"{host}: installing the runtime")]) == 1
        assert len([m for m in said if m.startswith(f"{host}: uploading {name}")]) == 1


def test_an_interpreter_that_is_not_there(lab):
    """Named with its host before anything is held anywhere."""
    training = lab.training()
    inventory = lab.inventory(hook_b={"python": "/no/such/python"})
    with ClusterHook(inventory=inventory) as hook, pytest.raises(HostNotReadyError, match="hook-b") as caught:
        hook.ensure(lab.job(), training)
    assert "/no/such/python" in str(caught.value)
    assert caught.value.host == "hook-b"
    assert not lab.living(training)


def test_a_module_that_is_not_there(lab, hook):
    """Each host that lacks it would say so; one is enough, with the interpreter that lacks it."""
    training = lab.training()
    with pytest.raises(HostNotReadyError, match=r"has no module no_such_module") as caught:
        hook.ensure(lab.job(preload=["json", "no_such_module"]), training)
    assert sys.executable in str(caught.value)
    assert not lab.living(training)


@pytest.mark.parametrize("kind", ["too small", "taken"])
def test_a_refusal_on_the_second_host_releases_the_first(lab, kind):
    """Ports that do not suffice: nothing stays held on the host that had said yes."""
    training = lab.training()
    with socket.socket() as stranger:
        stranger.bind(("0.0.0.0", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        ports = f"{port}-{port}" if kind == "too small" else f"{port}-{port + 1}"
        inventory = lab.inventory(hook_b={"ports": ports})
        with ClusterHook(inventory=inventory) as hook:
            expected = CommandError if kind == "too small" else BusyError
            with pytest.raises(expected, match="hook-b: .* ports are") as caught:
                hook.ensure(lab.job(), training)
            assert caught.value.transient is (kind == "taken")
            assert not lab.living(training)
            assert Path(lab.paths(training, "hook-a").events).exists(), "the first had said yes"


def test_a_job_that_cannot_run_touches_no_host(lab):
    """A missing file is found on the worker; not even a connection is made."""
    inventory = lab.inventory(hook_a={"ssh_conn_id": "nowhere"})
    with ClusterHook(inventory=inventory) as hook, pytest.raises(SpecError, match="missing.py"):
        hook.ensure(lab.job(script="missing.py"), lab.training())


def test_a_ps_that_never_listens_is_named(lab, hook):
    """With the host that cannot reach it; and what could not be brought up is taken away again."""
    training = lab.training()
    timeouts = {"ready_secs": 3}
    with pytest.raises(NotReadyError) as caught:
        hook.ensure(lab.job("deaf=ps:1", timeouts=timeouts), training)
    text = str(caught.value)
    assert "ps:1@hook-b cannot be reached from hook-a" in text
    assert "ps:1@hook-b cannot be reached from hook-b" in text
    assert "ps:0" not in text
    assert "worker" not in text
    assert not lab.living(training)


def test_a_task_that_fails_at_once_is_named_with_its_log(lab, hook):
    """Long before the time for readiness is over."""
    training, begun = lab.training(), time.monotonic()
    timeouts = {"ready_secs": 300}
    with pytest.raises(NotReadyError, match="ps:1@hook-b failed: exit code 1") as caught:
        hook.ensure(lab.job("fails=ps:1", timeouts=timeouts), training)
    assert time.monotonic() - begun < 60
    assert str(caught.value).splitlines()[-1] == "I am broken"
    assert caught.value.transient, "nobody defined a script's exit codes"
    assert not lab.living(training)


@pytest.mark.parametrize(
    ("exits", "is_transient"),
    [([1], False), ([75], True), ([137], True), ([-9], True), ([None], True), ([75, 2], False)],
)
def test_a_wrong_program_is_not_tried_again(lab, exits, is_transient):
    """What ended before it listened decides as it does later: the harness's own exit codes say what they mean."""
    job = JobSpec.from_dict({"program": "standin.py", "roles": {"ps": 1, "worker": 1}}, base_dir=lab.folder)
    place = {"training": "a/b/c#00000000", "job": job.to_dict(), "inventory": lab.inventory().to_dict()}
    tasks = [["ps:0", "hook-a", 15000, []], ["worker:0", "hook-b", 15000, []]]
    handle = Handle.from_json(
        {"version": 1, **place, "tasks": tasks, "chief": "worker:0", "checkpoint_dir": "/x"}
    )
    probes = {}
    for number, (host, code) in enumerate(zip(lab.hosts, exits, strict=False)):
        is_signal = code is not None and code < 0
        ended = {"code": None if is_signal else code, "signal": 9 if is_signal else None}
        probes[host] = {"missing": {}, "failed": f"{host} failed", "time": 5.0 - number}
        if code is not None:
            probes[host]["exit"] = ended
    with pytest.raises(NotReadyError) as caught:
        check_probes(handle, probes)
    assert caught.value.transient is is_transient
    assert str(caught.value).splitlines()[0] == f"{list(lab.hosts)[len(exits) - 1]} failed", (
        "the first to fail"
    )


def test_readiness_as_a_worker_and_as_a_trigger_see_it(lab, hook):
    """`train` only looks before it decides to wait without a worker slot; the deferred window asks the same."""
    handle = hook.ensure(lab.job("deaf=ps:1"), lab.training(), wait=False)
    begun = time.monotonic()
    with pytest.raises(NotReadyError, match="ps:1@hook-b"):
        hook.wait_ready(handle, timeout=0)
    assert time.monotonic() - begun < 15

    async def ask() -> dict[str, dict]:
        return {
            host: await follow.probe(handle, host, probe_request(handle, host, 2.0), timeout=2.0)
            for host in handle.hosts
        }

    with pytest.raises(NotReadyError, match="ps:1@hook-b cannot be reached from hook-a"):
        check_probes(handle, asyncio.run(ask()))
    assert lab.living(handle.training) == ["hook-a", "hook-b"], "neither has ended anything"


def test_secrets_reach_the_tasks_and_no_file(lab, hook, monkeypatch):
    """From Airflow's connection over standard input; neither the handle nor the hosts' disks hold the value."""
    secret = f"planted{uuid.uuid4().hex}"
    monkeypatch.setenv("AIRFLOW_CONN_MINIO", f'{{"conn_type": "http", "password": "{secret}"}}')
    code = "import hashlib, os, time; print(hashlib.sha256(os.environ['S3_KEY'].encode()).hexdigest()); time.sleep(600)"
    (lab.folder / "hashes.py").write_text(code)
    job = lab.job(script="hashes.py", secrets={"S3_KEY": "conn:minio#password"})
    handle = hook.ensure(job, lab.training(), wait=False)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    deadline = time.monotonic() + 30
    while hook.log_tail(handle, Task("worker", 1)) != [digest]:
        assert time.monotonic() < deadline
    assert secret not in str(handle.to_json())
    for host in lab.hosts.values():
        for path in Path(host.home).rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes()


def test_a_training_in_which_a_worker_is_through_is_ready(lab, hook):
    """Whoever finds it again must not wait for a port that nobody will ever open any more."""
    handle = hook.ensure(lab.job("steps=1", "ends=worker:1", "pause=2"), lab.training())
    deadline = time.monotonic() + 30
    while hook.status(handle)["hook-b"]["tasks"][1]["state"] != "SUCCEEDED":
        assert time.monotonic() < deadline
    hook.wait_ready(handle, timeout=0)
    assert hook.ensure(handle.job, handle.training) == handle


# --- sweeping -----------------------------------------------------------------------------------------------------


def test_ensure_begins_with_a_sweep(lab, hook, caplog):
    """What dead trainings left on its hosts goes before anything is brought, and the log says so."""
    caplog.set_level(logging.INFO, "airflow_tfps")
    home = Path(lab.hosts["hook-a"].home)
    old = home / ".tfps" / "trainings" / "gone-0123456789ab" / "hook-a"
    old.mkdir(parents=True)
    (old / "events.jsonl").write_text("x" * 100)
    for path in (old / "events.jsonl", old):
        os.utime(path, (1, 1))
    handle = hook.ensure(lab.job(), lab.training(), wait=False)
    assert not old.parent.exists()
    assert any("hook-a: swept " in record.getMessage() for record in caplog.records)
    hook.stop(handle, "the test is over", grace_secs=0)


def test_sweeping_all_hosts(lab, hook):
    """Each host of the inventory answers for itself; a dry run removes nothing."""
    part = Path(lab.hosts["hook-b"].home) / ".tfps" / "bin" / "tmpx.tmp"
    hook.preflight()
    part.write_text("half a runtime")
    os.utime(part, (1, 1))
    told = hook.sweep(dry_run=True)
    assert [found["name"] for found in told["hook-b"]["removed"] if found["what"] == "upload"] == [str(part)]
    assert part.exists()
    assert hook.sweep(["hook-a"]).keys() == {"hook-a"}
    assert hook.sweep()["hook-b"]["bytes"] >= 14
    assert not part.exists()


def test_a_worker_that_is_through_before_it_listens_is_not_waited_for(lab, hook):
    """Its host says so, which the others cannot know; the trigger then asks those again, without it."""
    handle = hook.ensure(lab.job("steps=1", "early=worker:1"), lab.training(), wait=False)

    async def ready() -> dict[str, Any]:
        trigger = ReadyTrigger(handle=handle.to_json())
        return [event.payload async for event in trigger.run()][0]

    assert asyncio.run(asyncio.wait_for(ready(), 15)) == {"ready": True}


def test_a_probe_ends_when_nobody_waits_for_its_answer(lab, hook):
    """A trigger that is cancelled leaves no command behind on the host."""
    handle = hook.ensure(lab.job("deaf=ps:0"), lab.training(), wait=False)

    async def ask_and_leave() -> None:
        request = probe_request(handle, "hook-a", 600)
        task = asyncio.create_task(follow.probe(handle, "hook-a", request, timeout=600))
        while not lab.processes("\0probe\0"):  # noqa: ASYNC110  another process sets no event here
            await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(ask_and_leave())
    deadline = time.monotonic() + 15
    while lab.processes("\0probe\0"):
        assert time.monotonic() < deadline


def test_what_a_killed_ensure_had_started_ends_soon(lab, hook):
    """Only when every host has started is the lease a long one."""
    handle = hook.ensure(lab.job(), lab.training(), wait=False, lease_secs=5000.0)
    assert all(4000 < s["lease_secs"] <= 5000 for s in hook.status(handle).values())
    seen = []

    class Dying(ClusterHook):
        def renew(self, handle: Handle, lease_secs: float) -> None:
            seen.extend(s["lease_secs"] for s in self.status(handle).values())
            raise SystemExit  # as near as it gets to a worker that is killed here

    with Dying(inventory=lab.inventory()) as dying, pytest.raises(SystemExit):
        dying.ensure(lab.job(), lab.training(), wait=False, lease_secs=5000.0)
    assert len(seen) == 2
    assert max(seen) <= ENSURE_LEASE_SECS
