"""A host on this machine, agents on it, and what follows them: for tests that call the runtime itself.

The TF tasks run a stand-in that listens on its port, prints steps and leaves facts about itself in its folder.
Everything is started with a mark in its environment, by which each test finds what it left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import tfps_runtime
from tfps_runtime import commands
from tfps_runtime.protocol import Paths, RefusedError, Task, TrainingId
from tfps_runtime.reserve import read_lock

RUNTIME = Path(tfps_runtime.__file__).parents[1]
PORTS = (15000, 19999)
PROGRESS = r"step (?P<step>\d+)(?: loss (?P<loss>\S+))?"

STAND_IN = textwrap.dedent(
    """
    import hashlib, json, os, random, signal, socket, subprocess, sys, time

    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    config = json.loads(os.environ["TF_CONFIG"])
    role, index = config["task"]["type"], config["task"]["index"]
    me = f"{role}:{index}"

    def has(name):  # an option for all, or for `name=ps:0` alone
        return name in options and options[name] in ("", me, role)

    if has("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name, alone in (("grandchild", False), ("daemon", True)):
        if has(name):
            code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            subprocess.Popen([sys.executable, "-c", code], start_new_session=alone)
    facts = {"pid": os.getpid(), "argv": sys.argv[1:], "tf_config": os.environ["TF_CONFIG"], "cwd": os.getcwd(),
             "random": [random.random() for _ in range(3)], "stdin": os.path.realpath("/proc/self/fd/0"),
             "name": __name__, "sid": os.getsid(0), "parent": os.getppid(),
             "files": sorted(os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))}
    if "numpy" in options:
        import numpy.random
        facts["numpy"] = list(numpy.random.random(3))
    if "secret" in options:
        facts["secret"] = hashlib.sha256(os.environ[options["secret"]].encode()).hexdigest()
    else:
        facts["env"] = dict(os.environ)
    with open("facts.tmp", "w") as file:
        json.dump(facts, file)
    os.rename("facts.tmp", "facts.json")
    if "exit" in options and not has("alive"):
        print("leaving with", options["exit"], flush=True)
        sys.exit(int(options["exit"]))
    if has("pool"):
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        pool.submit(print, "from a thread", flush=True).result()
        sys.exit(0)
    if role in config["cluster"] and not has("deaf"):
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("0.0.0.0", int(config["cluster"][role][index].rpartition(":")[2])))
        server.listen()
    print(f"{me} is up", flush=True)
    step = int(options.get("from", 0))
    while role != "ps" or "steps" not in options:
        step += 1
        if role != "ps":
            print(f"step {step} loss {options.get('loss', 1 / step)}", flush=True)
        if options.get("steps") == str(step) and me == options.get("chief", me):
            print("the last word", end="", flush=True)
            sys.exit(0)
        time.sleep(float(options.get("pause", 0.02)))
    signal.pause()
    """
)


def wait_until(condition: Callable[[], object], what: str, secs: float = 20.0):
    deadline = time.monotonic() + secs
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {secs:g} s: {what}"
        time.sleep(0.01)
    return found


def stat(pid: int) -> list[str]:
    """State, parent, group, session … of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_running(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"])


def children(pid: int) -> list[int]:
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and stat(int(p))[1:2] == [str(pid)]]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_free(port: int) -> bool:
    """Whether anybody could take the port, plainly."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


class Refused(Exception):
    """What a command refused; `code` and the text."""

    def __init__(self, message: dict) -> None:
        super().__init__(message["message"])
        self.code, self.transient = message["code"], message["transient"]


class Host:
    """Runs commands as an SSH session would; remembers what was reserved."""

    def __init__(self, workdir: Path, name: str = "gpu-a") -> None:
        self.workdir, self.name = workdir, name
        self.mark = f"TFPS_TEST={uuid.uuid4().hex}"
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(workdir),
            "PYTHONPATH": str(RUNTIME),
            "PYTHONPYCACHEPREFIX": os.environ.get("PYTHONPYCACHEPREFIX", str(workdir / "pycache")),
            "TFPS_TEST": self.mark.partition("=")[2],
        }
        self.argv = [sys.executable, "-m", "tfps_runtime"]
        self.has_commands = False
        """Whether trainings are spoken to by commands, as from afar, and not by this process."""
        self.trainings: list[Training] = []
        self.script = workdir / "standin.py"
        self.script.write_text(STAND_IN)

    def popen(self, command: str, **keywords) -> subprocess.Popen:
        return subprocess.Popen(
            [*self.argv, command],
            env=self.env,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **keywords,
        )

    def say(self, command: str, request: object, content: bytes = b"") -> list[dict]:
        """All lines of the answer. Raises Refused."""
        line = request if isinstance(request, bytes) else json.dumps(request).encode()
        with self.popen(command) as process:
            out, err = process.communicate(line + b"\n" + content, 60)
        messages = [json.loads(text) for text in out.splitlines()]
        if messages and messages[-1].get("type") == "error":
            assert process.returncode == 1
            raise Refused(messages[-1])
        assert process.returncode == 0, err.decode()
        return messages

    def ask(self, command: str, request: object, content: bytes = b"") -> dict:
        [answer] = self.say(command, request, content)
        return answer

    def training(self, key: str | None = None, name: str | None = None) -> Training:
        training = TrainingId(key or f"test/{uuid.uuid4().hex}", uuid.uuid4().hex[:8])
        self.trainings.append(Training(self, training, name or self.name))
        return self.trainings[-1]

    def marked(self) -> list[int]:
        """Living processes that this test has started, in whatever way."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes() and is_running(int(pid)):
                    found.append(int(pid))
        return found


class Training:
    """One training on a host, from its reservation to its end."""

    def __init__(self, host: Host, training: TrainingId, name: str) -> None:
        self.host, self.id, self.name = host, training, name
        self.paths = Paths(str(host.workdir), training, name)
        self.request = {"training": str(training), "host": name, "workdir": str(host.workdir)}
        self.tasks: list[dict] = []
        self.ports: dict[str, int] = {}

    def reserve(self, *tasks: str | dict, chief: str | None = "worker:0", **more) -> Training:
        """Tasks are names, or names with more; `restarts` defaults to 1 here."""
        self.tasks = [{"restarts": 1, **({"task": t} if isinstance(t, str) else t)} for t in tasks]
        for task in self.tasks:
            task.setdefault("is_chief", task["task"] == chief)
        self.wanted = {
            **self.request,
            "tasks": self.tasks,
            "ports": PORTS,
            "preload": ["json"],
            "grace_secs": 5.0,
            "lease_secs": 60.0,
            **more,
        }
        self.reservation = self.host.ask("reserve", self.wanted)
        self.ports = self.reservation["ports"]
        return self

    @property
    def cluster(self) -> dict[str, list[str]]:
        cluster: dict[str, list[str]] = {}
        for name in sorted(self.ports, key=Task.parse):
            cluster.setdefault(Task.parse(name).role, []).append(f"127.0.0.1:{self.ports[name]}")
        return cluster

    def tell(self, command: str, **more) -> dict:
        """What the on-host command would tell the agent, without starting an interpreter for it. Raises Refused."""
        if self.host.has_commands:
            return self.host.ask(command, {**self.request, **more})
        try:
            if command == "status":
                return commands.look(self.paths)
            if command == "stop":
                return {"stopped": {str(self.id): commands._stop(self.paths, more)}}
            return commands.ask(self.paths, {"command": command, **more})
        except RefusedError as error:
            raise Refused(error.to_json()) from None

    def start(self, *args: str, program: dict | None = None, lease_secs: float = 60.0, **more) -> Training:
        request = {
            "training": str(self.id),
            "cluster": self.cluster,
            "chief": "worker:0",
            "program": {
                "script": str(self.host.script),
                "args": args,
                "progress": PROGRESS,
                **(program or {}),
            },
            "checkpoint": {"directory": str(self.host.workdir / "ckpt")},
            **more,
        }
        self.tell("start", request=request, lease_secs=lease_secs)
        return self

    def launch(self, task: str = "worker:0") -> Training:
        self.tell("launch", task=task)
        return self

    def up(self, *tasks: str | dict, args: tuple[str, ...] = (), **more) -> Training:
        """Reserved, started, launched, and every task runs."""
        self.reserve(*tasks, **more).start(*args)
        if any(task["is_chief"] for task in self.tasks):
            self.launch()
        for task in self.tasks:
            self.wait(task["task"], "RUNNING")
        return self

    def status(self) -> dict:
        return self.tell("status")

    def task(self, name: str) -> dict:
        return next((t for t in self.status()["tasks"] if t["task"] == name), {"state": None})

    def wait(self, task: str, state: str, secs: float = 20.0) -> dict:
        return wait_until(
            lambda: (t := self.event(task, state)) and t, f"{task} is {state}: {self.log(task)}", secs
        )

    def event(self, task: str, state: str) -> dict | None:
        """The last event of a task, if it is of this state."""
        events = [e for e in self.events() if e["type"] == "task" and e["task"] == task]
        return events[-1] if events and events[-1]["state"] == state else None

    def events(self) -> list[dict]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in Path(self.paths.events).read_text().splitlines()]
        return []

    def states(self, task: str) -> list[str]:
        return [e["state"] for e in self.events() if e.get("task") == task and e["type"] == "task"]

    @property
    def trainings(self) -> list[str]:
        return [e["state"] for e in self.events() if e["type"] == "training"]

    def stop(self, **more) -> str:
        return self.tell("stop", reason="the test is over", **more)["stopped"][str(self.id)]

    def follow(self, **more) -> Follower:
        return Follower(self.host, {**self.request, **more})

    def log(self, task: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return Path(self.paths.log(Task.parse(task))).read_text()
        return ""

    def facts(self, task: str) -> dict:
        path = Path(self.paths.task_dir(Task.parse(task))) / "facts.json"
        return json.loads(wait_until(path.exists, f"facts of {task}: {self.log(task)}") and path.read_text())

    @property
    def agent(self) -> int:
        return read_lock(self.paths.lock).pid

    @property
    def nursery(self) -> int:
        return next(p for p in children(self.agent) if b"nursery" in Path(f"/proc/{p}/cmdline").read_bytes())

    def connect(self) -> socket.socket:
        return commands.reach(self.paths)

    def left(self) -> list[str]:
        """What is still held of the training."""
        files = [p for p in (self.paths.lock, self.paths.socket) if os.path.exists(p)]
        return [*files, *(f"port {p}" for p in self.ports.values() if not is_free(p))]


class Follower:
    """A `follow` command with everything that it has said."""

    def __init__(self, host: Host, request: dict) -> None:
        self.process = host.popen("follow")
        self.messages: list[dict] = []
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.messages.append(json.loads(line))

    def send(self, message: dict) -> None:
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, condition: Callable[[dict], object], what: str = "a message", secs: float = 20.0) -> dict:
        return wait_until(lambda: next(filter(condition, list(self.messages)), None), what, secs)

    def kind(self, kind: str) -> list[dict]:
        return [m for m in list(self.messages) if m["type"] == kind]

    @property
    def lines(self) -> list[str]:
        return [line for m in self.kind("log") for line in m["lines"]]

    @property
    def numbers(self) -> list[int]:
        return [m["seq"] for m in list(self.messages) if "seq" in m]

    def end(self, secs: float = 20.0) -> list[dict]:
        """Wait until it ends by itself."""
        self.process.wait(secs)
        self._reader.join(secs)
        return self.messages

    def close(self, number: int | None = None) -> None:
        """Leave: close its input, as a lost connection does, or kill it."""
        if number is None:
            self.process.stdin.close()
        else:
            self.process.send_signal(number)
        self.end()
        self.process.stdout.close()
        self.process.stderr.close()
