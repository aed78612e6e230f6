"""Clusters on real SSH hosts, from both sides of Airflow: the blocking hook of workers, the follower of triggers.

Two embedded hosts, each with a home of its own; the TF tasks are stand-ins without TensorFlow.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tfps_runtime import commands
from tfps_runtime.protocol import Paths, Task, TrainingId
from tfps_runtime.reserve import is_held

from airflow_tfps import follow
from airflow_tfps.demo.hosts import DemoHost
from airflow_tfps.errors import (
    BusyError,
    CommandError,
    HostNotReadyError,
    HostUnreachableError,
    NotReadyError,
    SpecError,
)
from airflow_tfps.handle import Handle
from airflow_tfps.hook import ClusterHook, check_probes, probe_request
from airflow_tfps.inventory import Inventory
from airflow_tfps.judge import UNREACHABLE, Rules, Verdict, judge
from airflow_tfps.spec import JobSpec

STAND_IN = textwrap.dedent(
    """
    import json, os, signal, socket, sys, time

    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    config = json.loads(os.environ["TF_CONFIG"])
    role, index = config["task"]["type"], config["task"]["index"]
    me = f"{role}:{index}"
    if options.get("fails") == me:
        sys.exit("I am broken")
    if options.get("deaf") != me:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("0.0.0.0", int(config["cluster"][role][index].rpartition(":")[2])))
        server.listen()
    print(me, "is up", open(options["input"]).read() if "input" in options else "", flush=True)
    for step in range(1, int(options.get("steps", 10**9)) + 1 if me == options.get("ends", "worker:0") else 10**9):
        if role == "ps":
            signal.pause()
        print(f"step {step}", flush=True)
        time.sleep(float(options.get("pause", 0.02)))
    """
)


class Lab:
    """Two hosts, the jobs on them, and everything that was begun."""

    def __init__(self, hosts: dict[str, DemoHost], folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        (folder / "standin.py").write_text(STAND_IN)
        self.started: list[TrainingId] = []

    def inventory(self, **changes: dict) -> Inventory:
        """The hosts, with `changes` by name (dashes are underscores)."""
        hosts = {}
        for name in self.hosts:
            conn_id = name.replace("-", "_")
            hosts[name] = {
                "ssh_conn_id": conn_id,
                "address": "127.0.0.1",
                "gpus": 0,
                "python": sys.executable,
                "ports": "15000-19999",
                **changes.get(conn_id, {}),
            }
        return Inventory.from_dict({"hosts": hosts})

    def job(self, *args: str, **more) -> JobSpec:
        """One ps and one worker on each host; a test that is killed leaves them for two minutes at most."""
        timeouts = {"ready_secs": 30, "grace_secs": 5, "lease_secs": 120, **more.pop("timeouts", {})}
        return JobSpec.from_dict(
            {
                "script": "standin.py",
                "args": list(args),
                "roles": {"ps": {"count": 2, "restarts": 0}, "worker": 2},
                "preload": ["json"],
                "progress": r"step (?P<step>\d+)",
                "timeouts": timeouts,
                **more,
            },
            base_dir=self.folder,
        )

    def training(self, key: str = "") -> TrainingId:
        self.started.append(TrainingId(key or f"hook/{uuid.uuid4().hex}", uuid.uuid4().hex[:8]))
        return self.started[-1]

    def paths(self, training: TrainingId, name: str) -> Paths:
        return Paths(f"{self.hosts[name].home}/.tfps", training, name)

    def living(self, training: TrainingId) -> list[str]:
        """Hosts on which an agent of the training lives."""
        return [name for name in self.hosts if is_held(self.paths(training, name).lock)]

    def processes(self, needle: str = "") -> list[int]:
        """Living processes of these hosts, other than the servers', whose command line has `needle`."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                is_here = any(f"HOME={host.home}".encode() in environment for host in self.hosts.values())
                if is_here and state != "Z" and needle.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return found


@pytest.fixture(scope="module")
def hosts(embedded_hosts) -> dict[str, DemoHost]:
    return embedded_hosts("hook-a", "hook-b")


@pytest.fixture
def lab(hosts, tmp_path, wait_until) -> Iterator[Lab]:
    """Afterwards no agent, no task and no command of any training may be left."""
    one = Lab(hosts, tmp_path)
    yield one
    for training in one.started:
        for name in one.living(training):
            commands._stop(one.paths(training, name), {"grace_secs": 0})
    wait_until(lambda: not one.processes(), "every process is gone", 10.0)


@pytest.fixture
def hook(lab) -> Iterator[ClusterHook]:
    with ClusterHook(inventory=lab.inventory()) as one:
        yield one


def pids(hook: ClusterHook, handle: Handle) -> dict[str, int | None]:
    return {t["task"]: t.get("pid") for s in hook.status(handle).values() for t in s["tasks"]}


def rules(handle: Handle, unreachable_secs: float = 300.0) -> Rules:
    return Rules(
        tasks={str(t.task): t.host for t in handle.tasks},
        chief=str(handle.chief),
        unreachable_secs=unreachable_secs,
        exits_are_final=False,
    )


class Watcher:
    """What a trigger does: follow, note everything, acknowledge the log, stop at a verdict."""

    def __init__(self, handle: Handle, unreachable_secs: float = 300.0) -> None:
        self.handle, self.rules = handle, rules(handle, unreachable_secs)
        self.messages: list[dict] = []

    async def run(self, at: Callable[[dict], object] = lambda _: None, secs: float = 60.0) -> Verdict | None:
        """Until the verdict. `at` is called with each message; when it returns something true, stop without one."""
        async with asyncio.timeout(secs):
            async with contextlib.aclosing(follow.follow(self.handle, lease_secs=120.0)) as stream:
                async for message, follower in stream:
                    self.messages.append(message)
                    if message["type"] == "log":
                        await follower.acknowledge(message["task"], message["offset"])
                    verdict = judge(self.rules, self.messages)
                    if verdict is not None:
                        return verdict
                    if at(message):
                        return None
        raise AssertionError("following ended without a verdict")

    def numbers(self, host: str) -> list[int]:
        return [m["seq"] for m in self.messages if m["host"] == host and "seq" in m]

    @property
    def lines(self) -> list[str]:
        return [line for m in self.messages if m["type"] == "log" for line in m["lines"]]


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
    assert not lab.living(training)


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


# --- following --------------------------------------------------------------------------------------------------------


def behind(lab: Lab, relay, define, name: str = "hook-b"):
    """The inventory with one host reached through a relay that can be cut."""
    link, host = relay(lab.hosts[name])
    endpoint = define(host, name=f"relayed_{uuid.uuid4().hex[:8]}")
    return link, lab.inventory(**{name.replace("-", "_"): {"ssh_conn_id": endpoint.ssh_conn_id}})


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
    asyncio.run(follow.shorten_lease(handle, 0.5))
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
