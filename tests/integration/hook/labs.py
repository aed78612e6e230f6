"""Hosts, jobs and watchers for the tests of the hook and of its followers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path

from tfps_runtime.protocol import Paths, TrainingId
from tfps_runtime.reserve import is_held

from airflow_tfps import follow
from airflow_tfps.demo.hosts import DemoHost
from airflow_tfps.handle import Handle
from airflow_tfps.hook import ClusterHook
from airflow_tfps.inventory import Inventory
from airflow_tfps.judge import Rules, Verdict, judge
from airflow_tfps.spec import JobSpec

STAND_IN = textwrap.dedent(
    """
    import json, os, signal, socket, sys, time

    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    config = json.loads(os.environ["TF_CONFIG"])
    role, index = config["task"]["type"], config["task"]["index"]
    me = f"{role}:{index}"
    if options.get("early") == me:
        sys.exit(0)
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


def behind(lab: Lab, relay, define, name: str = "hook-b"):
    """The inventory with one host reached through a relay that can be cut."""
    link, host = relay(lab.hosts[name])
    endpoint = define(host, name=f"relayed_{uuid.uuid4().hex[:8]}")
    return link, lab.inventory(**{name.replace("-", "_"): {"ssh_conn_id": endpoint.ssh_conn_id}})
