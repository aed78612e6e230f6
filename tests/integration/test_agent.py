"""An agent and its processes on this machine: real ones, killed in every way. No TensorFlow, no SSH.

The TF tasks run a stand-in that listens on its port, prints steps and leaves facts about itself in its folder.
Everything is started with a mark in its environment, by which each test finds what it left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tfps_runtime
from tfps_runtime import commands
from tfps_runtime.processes import Processes, _Process, start_time
from tfps_runtime.protocol import Paths, RefusedError, Task, TrainingId, run_dir
from tfps_runtime.reserve import is_held, read_lock

from airflow_tfps.deploy import build_runtime

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


@pytest.fixture
def host(tmp_path) -> Iterator[Host]:
    """A host of its own; afterwards no process, socket, lock or port of it may be left."""
    one = Host(tmp_path)
    yield one
    for training in one.trainings:
        training.stop(grace_secs=0)
    try:
        wait_until(lambda: not one.marked(), "every process is gone", 5.0)
    except AssertionError:
        left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in one.marked()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"left behind: {left}") from None
    assert [left for training in one.trainings for left in training.left()] == []


@pytest.fixture
def training(host) -> Training:
    return host.training()


# --- reserving --------------------------------------------------------------------------------------------------------


def test_reserving_twice_gives_the_same(training):
    """A second `reserve`, after a lost answer, finds the same agent with the same ports."""
    training.reserve("ps:0", "worker:0", "worker:1")
    agent = training.agent
    again = training.host.ask("reserve", training.wanted)
    assert again == training.reservation
    assert again["state"] == "RESERVED"
    assert training.agent == agent
    assert len(set(training.ports.values())) == 3


def test_reserving_from_many_sides_at_once_starts_one_agent(training):
    """Two workers of Airflow may run the same task for a moment."""
    wanted = json.dumps(
        {**training.request, "tasks": [{"task": "ps:0"}], "ports": PORTS, "lease_secs": 60}
    ).encode()
    processes = [training.host.popen("reserve") for _ in range(5)]
    answers = []
    for process in processes:
        process.stdin.write(wanted + b"\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, (out, err)
        answers.append(json.loads(out))
    assert all(answer == answers[0] for answer in answers)

    def agents() -> list[int]:  # one that came second may still be on its way out
        return [p for p in training.host.marked() if b"agent" in Path(f"/proc/{p}/cmdline").read_bytes()]

    wait_until(lambda: len(agents()) == 1, "one agent")


def test_two_trainings_never_share_a_port(host):
    """In a range with room for both, each has its own; a third finds it full and is told that it may try again."""
    ports = [25000 + os.getpid() % 4000, 25003 + os.getpid() % 4000]
    one = host.training().reserve("ps:0", "worker:0", ports=ports)
    other = host.training().reserve("ps:0", "worker:0", ports=ports)
    assert len({*one.ports.values(), *other.ports.values()}) == 4
    with pytest.raises(Refused, match="only 0 of 1 ports are free") as caught:
        host.training().reserve("ps:0", ports=ports)
    assert (caught.value.code, caught.value.transient) == ("busy", True)
    one.stop()
    host.training().reserve("ps:0", "worker:0", ports=ports)


def test_a_range_that_is_too_small_for_ever_is_not_busy(training):
    """Waiting does not make more ports: nothing to try again."""
    with pytest.raises(Refused, match="2 ports are needed") as caught:
        training.reserve("ps:0", "worker:0", ports=[25000, 25000])
    assert (caught.value.code, caught.value.transient) == ("port", False)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_strangers_port_is_skipped(training, address):
    """Whether it is taken on one address or on all, with IPv4 or IPv6."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as stranger:
        try:
            stranger.bind((address, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        stranger.listen()
        taken = stranger.getsockname()[1]
        first = min(taken, 65534)
        training.reserve("ps:0", ports=[first, first + 1])
        assert training.ports["ps:0"] != taken


def test_a_held_port_refuses_until_the_task_listens(training):
    """Nobody else can take it, and a probe says the truth about the task."""
    training.reserve("ps:0", "worker:0")
    port = training.ports["ps:0"]
    assert not is_listening(port)
    assert not is_free(port)
    training.start()
    training.wait("ps:0", "RUNNING")
    assert is_listening(port)


def test_a_refused_reservation_leaves_nothing(host):
    """A request that cannot be read, or be had: no agent, no lock."""
    training = host.training()
    for wrong in ({"tasks": 5}, {"tasks": [{"task": "../x"}]}, {"colour": "red"}, {"ports": []}):
        with pytest.raises(Refused) as caught:
            host.ask("reserve", {**training.request, "tasks": [{"task": "ps:0"}], "ports": PORTS, **wrong})
        assert caught.value.code == "bad_request", str(caught.value)
    assert not is_held(training.paths.lock)


@pytest.mark.parametrize("place", ["a file", "read-only"])
def test_a_workdir_that_cannot_be_written(host, place):
    """The refusal names the path."""
    training = host.training()
    bad = host.workdir / "bad"
    bad.write_text("") if place == "a file" else bad.mkdir(mode=0o500)
    if place == "read-only" and os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    training.request["workdir"] = str(bad)
    with pytest.raises(Refused, match=str(bad)) as caught:
        training.reserve("ps:0")
    assert caught.value.code == "workdir"


def test_a_run_directory_of_another_user_is_refused(tmp_path):
    """Whoever prepared it could put sockets and locks there; one of our own is made private."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    uid = 54321
    place = Path(f"/var/tmp/tfps-{uid}")
    code = f"import os; from tfps_runtime import reserve; os.setuid({uid}); print(reserve.ensure_run_dir())"

    def run() -> subprocess.CompletedProcess:
        env = {"PYTHONPATH": str(RUNTIME)}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )

    assert not place.exists()
    try:
        place.mkdir(mode=0o777)
        assert "is not a directory of this user" in run().stderr
        place.rmdir()
        place.symlink_to(tmp_path)
        assert "is not a directory of this user" in run().stderr
        place.unlink()
        place.write_text("")
        assert "is not a directory of this user" in run().stderr
        place.unlink()
        place.mkdir()
        os.chown(place, uid, -1)
        place.chmod(0o777)
        assert run().stdout.strip() == str(place)
        assert place.stat().st_mode & 0o777 == 0o700
    finally:
        with contextlib.suppress(FileNotFoundError):
            place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()


# --- GPUs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(host) -> Callable[[str], None]:
    """A stand-in for nvidia-smi: lines `bus, used MiB`, in any order, or a script."""
    folder = host.workdir / "nvidia"
    folder.mkdir()
    host.env["PATH"] = f"{folder}:{host.env['PATH']}"

    def provide(lines: str) -> None:
        script = folder / "nvidia-smi"
        script.write_text(lines if lines.startswith("#!") else f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
        script.chmod(0o755)

    return provide


@pytest.fixture
def buses() -> Iterator[list[str]]:
    """Bus addresses that no other test has, so that real locks do not meet; their lock files are taken away."""
    prefix = uuid.uuid4().hex[:8].upper()
    yield [f"{prefix}:0{i}:00.0" for i in range(3)]
    for path in Path(run_dir()).glob(f"gpu-{prefix.lower()}-*.lock"):
        path.unlink()


def test_two_trainings_get_different_gpus(host, gpus, buses):
    """Each GPU is held for the whole training, seen by its task alone, in bus order; a ps sees none."""
    gpus("\n".join([f"{buses[2]}, 3", f"{buses[0]}, 0", f"{buses[1]}, 12"]))
    one = host.training().up("ps:0", {"task": "worker:0", "gpus": 2})
    assert one.reservation["gpus"] == {"worker:0": [0, 1]}
    other = host.training().up("ps:0", {"task": "worker:0", "gpus": 1})
    assert other.reservation["gpus"] == {"worker:0": [2]}
    with pytest.raises(Refused, match="1 GPUs are needed, 0 of 3 are free") as caught:
        host.training().reserve({"task": "worker:0", "gpus": 1})
    assert (caught.value.code, caught.value.transient) == ("busy", True)
    assert one.facts("worker:0")["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert one.facts("worker:0")["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert one.facts("ps:0")["env"]["CUDA_VISIBLE_DEVICES"] == "-1"
    assert other.facts("worker:0")["env"]["CUDA_VISIBLE_DEVICES"] == "2"
    one.stop()
    assert host.training().reserve({"task": "worker:0", "gpus": 2}).reservation["gpus"] == {
        "worker:0": [0, 1]
    }


def test_a_gpu_that_somebody_uses_is_left_alone(host, gpus, buses):
    """Used memory tells of strangers that hold no lock of ours."""
    gpus(f"{buses[0]}, 8000\n{buses[1]}, 10\n{buses[2]}, 300")
    assert host.training().reserve({"task": "worker:0", "gpus": 1}).reservation["gpus"] == {"worker:0": [1]}
    with pytest.raises(Refused, match="4 GPUs are needed, the host has 3") as caught:
        host.training().reserve({"task": "worker:0", "gpus": 4})
    assert (caught.value.code, caught.value.transient) == ("gpu", False)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho no driver >&2; exit 9\n", "no driver"),
        ("#!/bin/sh\nexec /nonexistent\n", "nvidia-smi"),
    ],
)
def test_a_gpu_driver_that_is_broken_is_told(host, gpus, script, said):
    """And never taken for a host without GPUs."""
    gpus(script)
    with pytest.raises(Refused, match=said):
        host.training().reserve({"task": "worker:0", "gpus": 1})
    assert any(said in f for f in host.ask("preflight", {"workdir": str(host.workdir), "gpus": 1})["faults"])
    host.training().reserve("worker:0")  # without GPUs nobody asks


# --- a training's life ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["module", "pyz"])
def test_a_training_from_start_to_end(host, how):
    """Reserve, start, probe, launch, follow, result, stop; from the folder and from the one-file runtime."""
    host.has_commands = True
    if how == "pyz":
        pyz = host.workdir / "tfps.pyz"
        pyz.write_bytes(build_runtime().content)
        host.argv = [sys.executable, str(pyz)]
        del host.env["PYTHONPATH"]
    training = host.training().reserve("ps:0", "worker:0", "worker:1")
    assert training.status()["state"] == "RESERVED"
    training.start("steps=5", "chief=worker:0")
    addresses = {name: f"127.0.0.1:{port}" for name, port in training.ports.items() if name != "worker:0"}
    probe = host.ask("probe", {**training.request, "addresses": addresses, "timeout_secs": 20})
    assert (probe["missing"], probe["failed"]) == ({}, None)
    assert training.task("worker:0")["state"] == "PENDING"
    training.launch()
    follower = training.follow(logs=["worker:0"])
    follower.wait(lambda m: m.get("task") == "worker:0" and m.get("state") == "SUCCEEDED")
    assert follower.kind("result")[0]["result"]["global_step"] == 5
    assert training.status()["state"] == "SUCCEEDED"
    assert training.stop() == "SUCCEEDED"
    follower.end()
    assert follower.lines[:2] == ["worker:0 is up", "step 1 loss 1.0"]
    assert follower.lines[-1] == "the last word", "also without a newline"
    assert follower.numbers == list(range(1, len(follower.numbers) + 1))
    assert follower.kind("training")[-1]["last"] is True
    without_ready = [
        state for state in training.trainings if state != "READY"
    ]  # a worker may be quick to report
    assert without_ready == ["STARTING", "RUNNING", "SUCCEEDED", "STOPPING", "SUCCEEDED"]
    status = training.status()
    assert (status["is_alive"], status["state"]) == (False, "SUCCEEDED")
    assert training.left() == []


@pytest.mark.parametrize("comes", ["before", "after"])
def test_what_a_follower_hears_before_the_end_is_the_whole_log(training, comes):
    """A trigger leaves when it hears of the chief's end: by then every line has been told, also if it came late."""
    training.reserve("worker:0").start("steps=500", "pause=0")
    follower = None
    if comes == "before":
        follower = training.follow(logs=["worker:0"])
        follower.wait(lambda m: m["type"] == "caught_up")
    training.launch()
    if follower is None:
        training.wait("worker:0", "SUCCEEDED")
        follower = training.follow(logs=["worker:0"])
    end = follower.wait(lambda m: m.get("state") == "SUCCEEDED" and m["type"] == "task")
    before = follower.messages[: follower.messages.index(end)]
    lines = [line for m in before if m["type"] == "log" for line in m["lines"]]
    assert lines[-1] == "the last word"
    assert len([line for line in lines if line.startswith("step ")]) == 500
    follower.close()


@pytest.mark.parametrize("warm", [True, False])
def test_what_a_task_is(training, warm):
    """Its own session, its log, no input, its folder, `__main__`; no file of the agent or the nursery."""
    training.up("ps:0", {"task": "worker:0", "warm": warm})
    facts = training.facts("worker:0")
    assert facts["sid"] == facts["pid"] == training.task("worker:0")["pid"]
    assert facts["parent"] == (training.nursery if warm else training.agent)
    assert facts["stdin"] == "/dev/null"
    assert facts["name"] == "__main__"
    assert facts["cwd"] == training.paths.task_dir(Task("worker", 0))
    log = training.paths.log(Task("worker", 0))
    allowed = {"/dev/null", log}
    others = [
        f
        for f in facts["files"]
        if f not in allowed and not f.startswith("/proc/") and f != str(training.host.script)
    ]
    assert others == []
    assert facts["env"]["TF_GRPC_REUSE_PORT"] == "true"
    assert facts["env"]["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize("warm", [True, False])
def test_tf_config_arrives_byte_for_byte(training, warm):
    """No shell and no template touches it, whatever addresses look like."""
    training.reserve("ps:0", {"task": "worker:0", "warm": warm})
    odd = [
        "it's",
        'a "b"',
        "$HOME `id` $(id)",
        "back\\slash",
        "new\nline\t",
        "{task}",
        "ü€😀",
        "-x --",
        "%s %d",
    ]
    cluster = {**training.cluster, "odd": odd}
    training.start(cluster=cluster).launch()
    text = training.facts("worker:0")["tf_config"]
    assert text == json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    assert json.loads(text)["cluster"]["odd"] == odd


@pytest.mark.parametrize("warm", [True, False])
def test_arguments_and_environment(host, warm):
    """Placeholders are filled, other braces stay; a role's variables are over the job's; proxies are gone."""
    host.env.update(HTTPS_PROXY="http://proxy.example:3128", grpc_proxy="x", no_proxy="localhost")
    training = host.training().reserve(
        {"task": "worker:0", "warm": warm, "env": {"B": "role {task}", "C": "c"}}, env={"A": "a", "B": "job"}
    )
    args = (
        "name={job_name}-{task_index}",
        'json={"a": {task_index}}',
        "unknown={nobody}",
        "shell=${HOME}",
        "a b'\"\n",
    )
    training.start(*args, inputs={"train": "/data/x y"}, steps=7).launch()
    facts = training.facts("worker:0")
    assert facts["argv"] == [
        "name=worker-0",
        'json={"a": 0}',
        "unknown={nobody}",
        "shell=${HOME}",
        "a b'\"\n",
    ]
    assert (facts["env"]["A"], facts["env"]["B"], facts["env"]["C"]) == ("a", "role worker:0", "c")
    assert not {"HTTPS_PROXY", "grpc_proxy"} & set(facts["env"])
    assert facts["env"]["no_proxy"] == "localhost"


@pytest.mark.parametrize("warm", [True, False])
def test_a_secret_is_in_the_tasks_environment_and_nowhere_else(training, warm):
    """Not in a file, not in an argument list, not in the environment of the agent or the nursery."""
    secret = f"planted-{uuid.uuid4().hex}"
    training.reserve("ps:0", {"task": "worker:0", "warm": warm})
    follower = training.follow(logs=["worker:0"])
    training.start("secret=S3_KEY", secrets={"S3_KEY": secret}).launch()
    training.wait("worker:0", "RUNNING")
    assert training.facts("worker:0")["secret"] == hashlib.sha256(secret.encode()).hexdigest()
    os.kill(training.task("worker:0")["pid"], signal.SIGKILL)
    wait_until(lambda: training.states("worker:0").count("RUNNING") == 2, "it is back")
    assert secret not in json.dumps(training.status())
    for path in training.host.workdir.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    tasks = {t["pid"] for t in training.status()["tasks"]}
    for pid in training.host.marked():
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        if pid not in tasks:
            assert secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    follower.close()
    assert secret not in json.dumps(follower.messages)


def test_a_command_is_executed_as_it_is(training):
    """Any program; its arguments are filled, its end is its exit."""
    training.reserve({"task": "worker:0", "restarts": 0})
    code = "import os, sys; print('args', sys.argv[1:], os.environ['TF_CONFIG'][:9]); sys.exit(3)"
    training.start(
        program={"script": None, "args": [], "command": [sys.executable, "-c", code, "{task}", "$HOME"]}
    )
    training.launch()
    assert training.wait("worker:0", "FAILED")["exit"] == {"code": 3, "signal": None}
    assert "args ['worker:0', '$HOME'] {\"cluster" in training.log("worker:0")


def test_a_command_that_does_not_exist(training):
    """It fails like a shell's: 127, with the reason in its log."""
    training.reserve({"task": "worker:0", "restarts": 0})
    training.start(program={"script": None, "args": [], "command": ["/no/such/program"]}).launch()
    event = training.wait("worker:0", "FAILED")
    assert event["exit"]["code"] == 127
    assert "No such file or directory" in event["reason"]
    assert "No such file or directory" in training.log("worker:0")


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("size", [100_000, 400_000])
def test_a_launch_that_is_too_large_fails_the_task_and_not_the_agent(training, warm, size):
    """Linux takes no variable beyond 128 KiB, the nursery's socket no message beyond its buffer."""
    training.reserve({"task": "worker:0", "restarts": 0, "warm": warm, "env": {"LARGE": "x" * size}}, "ps:0")
    training.start().launch()
    training.wait("ps:0", "RUNNING")
    if size < 128 * 1024:
        training.wait("worker:0", "RUNNING")
    else:
        assert training.wait("worker:0", "FAILED")["exit"]["code"] == 127


@pytest.mark.parametrize("warm", [True, False])
def test_a_script_that_leaves_an_executor_running_ends(training, warm):
    """As under a plain interpreter: its threads are told to end, not waited for for ever."""
    training.reserve({"task": "worker:0", "warm": warm}).start("pool").launch()
    training.wait("worker:0", "SUCCEEDED")
    assert "from a thread" in training.log("worker:0")


@pytest.mark.parametrize(
    ("code", "exit_", "said"),
    [
        ("import sys; sys.exit('goodbye')", 1, "goodbye"),
        ("import sys; sys.exit(None)", 0, ""),
        ("raise ValueError('x')", 1, "ValueError: x"),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit"),
        ("import threading as t; t.Timer(0.3, print, ['late']).start()", 0, "late"),
        ("def f(:", 1, "SyntaxError"),
        ("import os; os.kill(os.getpid(), 11)", -11, ""),
        ("import sys; sys.stdout.write('no newline')", 0, "no newline"),
        ("print(__name__, __file__)", 0, "__main__ "),
    ],
)
def test_a_script_ends_as_under_an_interpreter(training, code, exit_, said):
    """Exit codes, tracebacks, exit functions, threads, buffers."""
    training.host.script.write_text(code)
    tasks = {"worker:0": True, "worker:1": False}  # forked, and started afresh
    training.reserve(
        *({"task": t, "restarts": 0, "warm": warm, "has_port": False} for t, warm in tasks.items())
    )
    training.start().launch()
    for task in tasks:
        event = training.wait(task, "SUCCEEDED" if exit_ == 0 else "FAILED")
        assert event["exit"] == {
            "code": exit_ if exit_ >= 0 else None,
            "signal": -exit_ if exit_ < 0 else None,
        }
        assert said in training.log(task)


def test_random_numbers_differ_between_tasks_and_restarts(host):
    """Forks share their nursery's generators: without reseeding all workers would shuffle alike."""
    training = host.training().up("worker:0", "worker:1", {"task": "worker:2", "warm": False})
    drawn = [training.facts(f"worker:{i}")["random"] for i in range(3)]
    os.kill(training.facts("worker:1")["pid"], signal.SIGKILL)
    wait_until(lambda: training.facts("worker:1")["random"] != drawn[1], "it draws others after a restart")
    assert len({*map(tuple, drawn)}) == 3
    assert len({x for numbers in drawn for x in numbers}) == 9


@pytest.mark.parametrize("warm", [True, False])
def test_random_numbers_with_a_seed_can_be_had_again(host, warm):
    """The same in the next training, for the same task and attempt; different for another task and attempt."""
    pytest.importorskip("numpy")
    drawn = []
    for _ in range(2):
        training = host.training().reserve(
            {"task": "worker:0", "warm": warm}, {"task": "worker:1", "warm": warm}, seed=7
        )
        training.start("numpy").launch()
        facts = [training.facts("worker:0"), training.facts("worker:1")]
        os.kill(facts[1]["pid"], signal.SIGKILL)
        wait_until(lambda t=training, f=facts: t.facts("worker:1")["pid"] != f[1]["pid"], "it is back")
        facts.append(training.facts("worker:1"))
        drawn.append([f["random"] + f["numpy"] for f in facts])
        training.stop(grace_secs=0)
    assert drawn[0] == drawn[1]
    assert len({x for numbers in drawn[0] for x in numbers}) == 18


# --- killing ------------------------------------------------------------------------------------------------------------------


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


# --- following --------------------------------------------------------------------------------------------------------------------


def test_following_resumes_from_any_number(training):
    """Without a gap and without a repetition, while it lives and when it is over."""
    training.up("ps:0", "worker:0", args=("steps=3", "chief=worker:0"))
    training.wait("worker:0", "SUCCEEDED")
    count = len(training.events())
    for is_over in (False, True):
        for seen in (0, 1, count // 2, count - 1, count):
            follower = training.follow(from_seq=seen)
            follower.wait(lambda m: m["type"] == "caught_up")
            if is_over:
                follower.end()
            follower.close()
            assert follower.numbers == list(range(seen + 1, count + 1))
        if not is_over:
            training.stop()
            count = len(training.events())


def test_log_lines_are_told_again_until_they_are_acknowledged(training):
    """A triggerer that restarts repeats no line that was written down, and misses none that was not."""
    training.up("worker:0", args=("steps=4", "pause=0.2"))
    first = training.follow(logs=["worker:0"])
    seen = first.wait(lambda m: m["type"] == "log" and any("step 1" in line for line in m["lines"]))
    first.send({"ack": {"task": "worker:0", "offset": seen["offset"]}})
    wait_until(lambda: os.path.exists(training.paths.acknowledged), "it is acknowledged")
    first.close(signal.SIGKILL)
    heard = first.kind("log")
    told = [line for m in heard[: heard.index(seen) + 1] for line in m["lines"]]
    second = training.follow(logs=["worker:0"])
    second.wait(lambda m: m.get("state") == "SUCCEEDED" and m["type"] == "task")
    second.close()
    everything = training.log("worker:0").splitlines()
    assert told[-1] not in second.lines
    assert told + second.lines == everything
    third = training.follow(logs=["worker:0"])
    third.wait(lambda m: m["type"] == "log")
    third.close()
    assert third.lines == second.lines, "nobody acknowledged them"


def test_the_log_of_a_dead_agent_is_told_once_it_is_acknowledged_never_again(training):
    """What was written in its last moments is not lost; it comes before the last event."""
    training.up("worker:0", args=("pause=60",))
    wait_until(lambda: "step 1" in training.log("worker:0"), "it writes")
    os.kill(training.agent, signal.SIGKILL)
    wait_until(lambda: not is_held(training.paths.lock), "it is dead")
    silent = training.follow(logs=["worker:0"])
    silent.end()
    assert silent.lines == ["worker:0 is up", "step 1 loss 1.0"]
    kinds = [m["type"] for m in silent.messages]
    assert kinds.index("log") < kinds.index("training")
    assert kinds[-1] == "gone"
    careful = training.follow(logs=["worker:0"])
    offset = careful.wait(lambda m: m["type"] == "log")["offset"]
    careful.send({"ack": {"task": "worker:0", "offset": offset}})
    careful.end()
    assert careful.lines == silent.lines
    assert training.follow(logs=["worker:0"]).end()[0]["type"] != "log"


def test_acknowledging_what_was_never_told_does_not_silence_the_log(training):
    """An offset beyond the end is a mistake: later lines still come."""
    training.up("worker:0", args=("pause=0.3",))
    follower = training.follow(logs=["worker:0"])
    follower.send({"ack": {"task": "worker:0", "offset": 10**9}})
    wait_until(lambda: os.path.exists(training.paths.acknowledged), "it is noted")
    follower.close()
    again = training.follow(logs=["worker:0"])
    again.wait(lambda m: m["type"] == "log")
    again.close()


def test_a_follower_that_never_reads_holds_up_nobody(training):
    """The agent answers others, and the task goes on; what is not taken waits in the file."""
    training.host.script.write_text(
        "import time\nfor i in range(120):\n    print('x' * 100_000, flush=True)\nprint('done', flush=True)\ntime.sleep(600)\n"
    )
    training.reserve({"task": "worker:0", "has_port": False}).start(program={"progress": None}).launch()
    with training.connect() as deaf:
        deaf.sendall(json.dumps({"command": "follow", "logs": ["worker:0"]}).encode() + b"\n")
        wait_until(lambda: training.log("worker:0").endswith("done\n"), "the task goes on")
        begun = time.monotonic()
        assert training.status()["is_alive"]
        assert time.monotonic() - begun < 3.0
        begun = time.monotonic()
        follower = training.follow(logs=["worker:0"])
        follower.wait(lambda m: m["type"] == "log" and "done" in m["lines"])
        assert time.monotonic() - begun < 15.0, "12 MB, as fast as the follower takes them"
        follower.close()
        assert (
            int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{training.agent}/status").read_text())[1]) < 100_000
        )
    training.stop(grace_secs=0)


def test_connections_that_come_and_go_do_no_harm(training):
    """A descriptor that was just closed is the next one's: the agent must not confuse them."""
    training.up("ps:0", "worker:0")
    agent = training.agent
    for _ in range(60):
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(training.connect()) for _ in range(5)]
            for client in clients:
                client.sendall(b'{"command": "follow"}\n')
            for client in clients[1:]:
                client.close()
                stack.enter_context(training.connect()).sendall(b'{"command": "status"}\n')
    assert training.agent == agent
    assert training.status()["state"] == "RUNNING"


NONSENSE = [
    b"nonsense",
    b"[]",
    b"null",
    b"{}",
    b'{"command": null}',
    b'{"command": ["start"]}',
    b'{"command": "fly"}',
    b'{"command": "start"}',
    b'{"command": "start", "request": {"training": 5}}',
    b'{"command": "start", "request": {}, "lease_secs": "soon"}',
    b'{"command": "launch"}',
    b'{"command": "launch", "task": ["x"]}',
    b'{"command": "renew"}',
    b'{"command": "renew", "lease_secs": "x"}',
    b'{"command": "renew", "lease_secs": NaN}',
    b'{"command": "renew", "lease_secs": 1e999}',
    b'{"command": "renew", "lease_secs": -1}',
    b'{"command": "renew", "lease_secs": 1' + b"0" * 400 + b"}",
    b'{"command": "reserve", "lease_secs": []}',
    b'{"command": "stop", "grace_secs": "now"}',
    b'{"command": "follow", "from_seq": -1}',
    b'{"command": "follow", "from_seq": "x"}',
    b'{"command": "follow", "logs": 5}',
    b'{"command": "follow", "logs": [["x"], {}]}',
    b'{"command": "follow", "renew": {}}',
    b'{"ack": 5}',
    b'{"ack": {"task": [], "offset": 1}}',
    b'{"ack": {"task": "ps:0", "offset": "x"}}',
    b'{"renew": null}',
    b'{"renew": true}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
]


def test_nonsense_does_not_end_the_agent(training):
    """Whatever comes over its socket is answered with an error, or passed over; everything lives on unchanged."""
    training.up("ps:0", "worker:0")
    before = training.status()
    for line in NONSENSE:
        with training.connect() as client:
            client.sendall(line + b'\n{"command": "status"}\n')
            with client.makefile() as answers:
                for text in answers:
                    answer = json.loads(text)
                    if answer.get("type") == "status":
                        break
                    assert answer["type"] in ("error", "caught_up", "task", "training", "progress"), answer
                    if answer["type"] == "error":
                        assert answer["code"] in ("bad_request", "not_found")
                assert answer["type"] == "status", line
    with (
        training.connect() as client,
        contextlib.suppress(ConnectionError),
    ):  # a line without an end is cut off
        client.sendall(b"x" * (5 << 20))
        assert client.recv(100) == b""
    after = training.status()
    assert [(t["task"], t["pid"], t["state"]) for t in after["tasks"]] == [
        (t["task"], t["pid"], t["state"]) for t in before["tasks"]
    ]
    assert after["lease_secs"] <= before["lease_secs"]


@pytest.mark.parametrize(
    "request_", [b"", b"[1]", b'{"training": 5, "host": "a", "workdir": "/w"}', b'{"training": "x#y"}']
)
@pytest.mark.parametrize("command", ["start", "status", "follow", "reserve"])
def test_commands_refuse_nonsense(host, command, request_):
    """One error line and exit code 1; never a traceback."""
    with pytest.raises(Refused) as caught:
        host.ask(command, request_)
    assert caught.value.code == "bad_request"


def test_progress_is_read_from_a_scripts_log(training):
    """By the job's pattern; the newest reaches followers and the status."""
    training.up("ps:0", "worker:0", args=("pause=0.02",))
    follower = training.follow()
    follower.wait(lambda m: m["type"] == "progress" and m["progress"]["global_step"] > 5)
    follower.close()
    newest = training.task("worker:0")["progress"]
    assert newest["loss"] == pytest.approx(1 / newest["global_step"])
    assert training.trainings[-1] == "RUNNING"


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", "1e999", "oops"])
def test_a_loss_that_is_no_number_is_progress_without_a_loss(training, loss):
    """A training that diverges must be seen, not brought down by its own log."""
    training.up("ps:0", "worker:0", args=(f"loss={loss}",))
    follower = training.follow()
    record = follower.wait(lambda m: m["type"] == "progress")["progress"]
    follower.close()
    assert record["global_step"] >= 1
    assert "loss" not in record


@pytest.mark.parametrize("pattern", ["(", "no groups", r"(?P<loss>\d+)", r"(?P<step>s)"])
def test_a_pattern_that_does_not_fit(training, pattern):
    """One that is none is refused; one that finds no step finds nothing."""
    training.reserve("ps:0", "worker:0")
    if pattern == "(":
        with pytest.raises(Refused, match="progress"):
            training.start(program={"progress": pattern})
        training.start()
    else:
        training.start(program={"progress": pattern}).launch()
        training.wait("worker:0", "RUNNING")
        wait_until(lambda: "step 9" in training.log("worker:0"), "it writes")
        assert "progress" not in training.task("worker:0")


def test_the_last_step_of_a_talkative_script_counts(training):
    """Its log grows faster than it is searched; at its end nothing of it is left out of the result."""
    training.host.script.write_text(
        "for i in range(1, 20001):\n    print('step', i, 'loss', 0.5, 'x' * 50)\n"
    )
    training.reserve({"task": "worker:0", "has_port": False}).start().launch()
    training.wait("worker:0", "SUCCEEDED")
    assert training.status()["result"]["global_step"] == 20000


def test_a_full_disk_does_not_end_a_training(training):
    """Events and progress that cannot be written are lost on disk, not for followers; killed tasks still come back."""
    training.up("ps:0", "worker:0")
    follower = training.follow(logs=["worker:0"])
    agent = training.agent
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (0, 0))  # from now on every write to a file fails
    size = os.path.getsize(training.paths.events)
    for name in ("worker:0", "ps:0"):
        os.kill(training.task(name)["pid"], signal.SIGKILL)
        follower.wait(
            lambda m, n=name: m.get("task") == n and m.get("attempt") == 2 and m["state"] == "RUNNING"
        )
    follower.wait(lambda m: m["type"] == "log" and m["lines"].count("worker:0 is up"))
    follower.send({"ack": {"task": "worker:0", "offset": follower.kind("log")[-1]["offset"]}})
    assert training.status()["state"] == "RUNNING"
    assert training.agent == agent
    follower.close()
    assert follower.numbers == list(range(1, len(follower.numbers) + 1))
    assert os.path.getsize(training.paths.events) == size


def test_stacks_on_demand(training):
    """`dump` writes the stacks of all threads to the task's log, and the task goes on."""
    training.up("ps:0", "worker:0", args=("pause=0.3",))
    pid = training.task("worker:0")["pid"]
    training.tell("dump")
    wait_until(lambda: "Current thread" in training.log("worker:0"), "the stacks are there")
    assert "standin.py" in training.log("worker:0")
    assert training.task("worker:0")["pid"] == pid


@pytest.mark.parametrize("kind", ["command", "warm", "spawned"])
def test_asking_for_stacks_kills_nobody(training, kind):
    """Neither a program that knows nothing of the signal, nor a task that has only just been started."""
    training.reserve({"task": "worker:0", "restarts": 0, "warm": kind == "warm", "has_port": False})
    if kind == "command":
        training.start(program={"script": None, "args": [], "command": ["sleep", "600"], "progress": None})
    else:
        training.start("pause=600")
    training.launch()
    pid = wait_until(lambda: training.task("worker:0").get("pid"), "it has a process")
    for _ in range(20):
        training.tell("dump")
    assert wait_until(lambda: training.event("worker:0", "RUNNING"), "it runs")["pid"] == pid
    assert is_running(pid)


def test_a_signal_reaches_a_process_that_has_no_group_yet():
    """A stop may come between the fork and the new task's first system call."""
    young = subprocess.Popen(["sleep", "600"])
    processes = Processes([], {}, warm=False, output=2)
    processes._living[young.pid] = _Process("ps:0", start_time(young.pid), is_forked=True)
    processes.signal_group("ps:0", signal.SIGTERM)
    assert young.wait(10) == -signal.SIGTERM


def test_logs_on_demand(training):
    """The last lines of any task's log, alive or not; of an unknown one nothing."""
    training.up("worker:0", args=("steps=3",))
    training.wait("worker:0", "SUCCEEDED")
    for _ in range(2):
        answer = training.host.ask("logs", {**training.request, "task": "worker:0", "lines": 2})
        assert answer["lines"] == ["step 3 loss 0.3333333333333333", "the last word"]
        training.stop()
    assert training.host.ask("logs", {**training.request, "task": "ps:7"})["lines"] == []
    with pytest.raises(Refused, match="not a TF task"):
        training.host.ask("logs", {**training.request, "task": "../../etc"})


# --- broken hosts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot import broken_module: ModuleNotFoundError"),
        (
            "raise ImportError('libcuda.so.1 is missing')",
            "cannot import broken_module: ImportError: libcuda.so.1",
        ),
        ("import sys; sys.exit(3)", "cannot import broken_module: SystemExit: 3"),
        ("def f(:", "cannot import broken_module: SyntaxError"),
        (
            "print('x' * 200_000); raise RuntimeError('late')",
            "cannot import broken_module: RuntimeError: late",
        ),
    ],
)
def test_a_module_that_does_not_import_fails_the_training(host, text, said):
    """With the module's name and the reason, not with a riddle; the traceback is in the agent's log."""
    if text is not None:
        (host.workdir / "broken_module.py").write_text(text)
    host.env["PYTHONPATH"] += f":{host.workdir}"
    training = host.training().reserve("ps:0", "worker:0", preload=["json", "broken_module"]).start()
    wait_until(lambda: "FAILED" in training.trainings, "it has failed")
    status = training.status()
    assert said in status["reason"]
    assert "broken_module" in Path(training.paths.agent_log).read_text()
    probe = {
        **training.request,
        "addresses": {"ps:0": f"127.0.0.1:{training.ports['ps:0']}"},
        "timeout_secs": 20,
    }
    assert said in host.ask("probe", probe)["failed"]
    assert training.stop() == "FAILED"


def test_modules_that_print_at_import_do_not_break_the_nursery(host):
    """The command that started the agent has long gone; what they write goes to the agent's log."""
    (host.workdir / "talkative.py").write_text(
        "import sys, time; time.sleep(0.5)\nfor s in (sys.stdout, sys.stderr):\n    print('hello ' * 20_000, file=s, flush=True)\n"
    )
    host.env["PYTHONPATH"] += f":{host.workdir}"
    training = host.training().up("ps:0", "worker:0", preload=["talkative"])
    assert Path(training.paths.agent_log).read_text().count("hello") == 40_000


def test_a_training_without_preload_needs_no_nursery(training):
    """Everything is spawned then."""
    training.up("ps:0", "worker:0", preload=[])
    assert sorted(children(training.agent)) == sorted(t["pid"] for t in training.status()["tasks"])


def test_preflight_tells_everything_at_once(host):
    """What there is and all that is missing, before anything is reserved; it makes only its own folder."""
    good = host.ask("preflight", {"workdir": str(host.workdir / "w"), "preload": ["json", "os.path"]})
    assert good["faults"] == []
    assert good["python"] == ".".join(map(str, sys.version_info[:3]))
    assert good["uid"] == os.getuid()
    assert abs(good["time"] - time.time()) < 30
    assert good["disk_free"] > 0
    assert (host.workdir / "w").stat().st_mode & 0o777 == 0o700
    (host.workdir / "file").write_text("")
    host.env["http_proxy"] = "http://proxy.example"
    request = {
        "workdir": str(host.workdir / "file" / "x"),
        "preload": ["no_such_module", "json.no.such", "a b"],
    }
    bad = host.ask("preflight", request)
    assert len(bad["faults"]) == 4
    assert str(host.workdir / "file") in bad["faults"][0]
    assert all(
        name in text
        for name, text in zip(["no_such_module", "json.no.such", "a b"], bad["faults"][1:], strict=True)
    )
    assert bad["proxies"] == ["http_proxy"]


def test_preflight_lists_the_living(training):
    """For people who wonder who holds the GPUs."""
    training.reserve("ps:0")
    assert (
        str(training.id)
        in training.host.ask("preflight", {"workdir": str(training.host.workdir)})["trainings"]
    )


def test_probing_names_what_is_missing(training):
    """A task that never listens, and an address that nobody has; with the log's end when one has failed."""
    training.reserve("ps:0", "worker:0", "worker:1").start("deaf=ps")
    addresses = {name: f"127.0.0.1:{port}" for name, port in training.ports.items() if name != "worker:0"}
    found = training.host.ask("probe", {**training.request, "addresses": addresses, "timeout_secs": 1.5})
    assert found["missing"] == {"ps:0": f"{addresses['ps:0']} does not accept connections"}
    assert found["failed"] is None


def test_probing_many_silent_addresses_takes_no_longer_than_one(training):
    """A firewall drops packets: forty seconds of silence, one after the other, would outlast every patience."""
    training.reserve("ps:0")
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # nobody accepts: once these wait, further ones get no answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        address = f"127.0.0.1:{full.getsockname()[1]}"
        request = {
            **training.request,
            "addresses": {f"worker:{i}": address for i in range(40)},
            "timeout_secs": 0.1,
        }
        begun = time.monotonic()
        assert len(training.host.ask("probe", request)["missing"]) == 40
        assert time.monotonic() - begun < 20


def test_probing_ends_at_once_when_a_task_has_failed(training):
    """Nobody waits five minutes for what cannot come."""
    training.reserve({"task": "ps:0", "restarts": 0}).start("exit=4")
    begun = time.monotonic()
    request = {
        **training.request,
        "addresses": {"ps:0": f"127.0.0.1:{training.ports['ps:0']}"},
        "timeout_secs": 60,
    }
    failed = training.host.ask("probe", request)["failed"]
    assert time.monotonic() - begun < 15
    assert failed.splitlines()[0] == "ps:0@gpu-a failed: exit code 4; the end of its log:"
    assert failed.splitlines()[-1] == "leaving with 4"


def test_sweeping_takes_what_is_dead_and_leaves_what_lives(host):
    """Locks and sockets of killed agents; nothing of a living one."""
    living, dead = host.training().reserve("ps:0"), host.training().reserve("ps:0")
    os.kill(dead.agent, signal.SIGKILL)
    wait_until(lambda: not is_held(dead.paths.lock), "it is dead")
    removed = [found["name"] for found in host.ask("sweep", {})["removed"]]
    assert {dead.paths.lock, dead.paths.socket} <= set(removed)
    assert not {living.paths.lock, living.paths.socket} & set(removed)
    assert living.status()["is_alive"]


# --- uploads -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["good", "wrong hash", "cut short", "traversal"])
def test_uploads_over_standard_input(host, kind):
    """What arrives is what was sent, or nothing."""
    content = b"print('hello')\n" * 10_000
    if kind == "traversal":
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            info = tarfile.TarInfo("../../../evil")
            info.size = 4
            archive.addfile(info, io.BytesIO(b"evil"))
        content = buffer.getvalue()
    request = {
        "workdir": str(host.workdir / "w"),
        "name": "x.py",
        "sha256": hashlib.sha256(b"other" if kind == "wrong hash" else content).hexdigest()[:16],
        "size": len(content),
        "kind": "tar" if kind == "traversal" else "file",
    }
    sent = content[:-1] if kind == "cut short" else content
    if kind == "good":
        assert Path(host.ask("put", request, sent)["path"]).read_bytes() == content
        assert host.ask("put", {**request, "only_ask": True})["is_there"]
        return
    with pytest.raises(Refused, match="damaged|cut short|does not belong"):
        host.ask("put", request, sent)
    assert list((host.workdir / "w" / "blobs").iterdir()) == []
    assert not list(host.workdir.rglob("evil"))


# --- checkpoint directories -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_directory_has_one_living_owner(host):
    """Two trainings never write the same checkpoints; the unfinished one's are taken up by its next incarnation."""
    directory, key = str(host.workdir / "ckpt"), f"test/{uuid.uuid4().hex}"
    first = host.training(key).reserve("worker:0", checkpoint_dir=directory)
    assert first.reservation["checkpoint_dir"] == directory
    with pytest.raises(Refused, match=f"{directory} is being written by training {first.id}") as caught:
        host.training(key).reserve("worker:0", checkpoint_dir=directory)
    assert (caught.value.code, caught.value.transient) == ("checkpoint_owned", True)
    first.stop()
    second = host.training(key).reserve("worker:0", checkpoint_dir=directory)
    assert second.reservation["checkpoint_dir"] == directory
    os.kill(second.agent, signal.SIGKILL)
    wait_until(lambda: not is_held(second.paths.lock), "it is dead")
    third = host.training(key).reserve("worker:0", checkpoint_dir=directory)
    assert third.reservation["checkpoint_dir"] == directory
    host.ask("sweep", {})


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_finished_directory_stays_as_it_is(host, is_fixed):
    """The next training of the key begins elsewhere, unless the script goes on in its own directory."""
    directory = str(host.workdir / "ckpt")
    seen = []
    for _ in range(3):
        training = host.training()
        training.reserve("worker:0", checkpoint_dir=directory, checkpoint_dir_is_fixed=is_fixed)
        training.start("steps=1").launch()
        training.wait("worker:0", "SUCCEEDED")
        training.stop()
        seen.append(training.reservation["checkpoint_dir"])
    assert seen == ([directory] * 3 if is_fixed else [directory, f"{directory}-2", f"{directory}-3"])


def test_a_script_that_takes_its_checkpoint_directory_away_has_succeeded(training):
    """It moves its results elsewhere as its last act."""
    directory = training.host.workdir / "ckpt"
    training.host.script.write_text("import os, shutil\nprint(os.getcwd())\nshutil.rmtree(os.getcwd())\n")
    training.reserve("worker:0", checkpoint_dir=str(directory)).start().launch()
    training.wait("worker:0", "SUCCEEDED")
    assert str(directory) in training.log("worker:0")
    assert training.stop() == "SUCCEEDED"


def test_a_checkpoint_directory_that_is_gone_is_made_again(training):
    """Somebody cleared it away between the reservation and the start of the chief."""
    directory = training.host.workdir / "ckpt"
    training.reserve("worker:0", checkpoint_dir=str(directory))
    shutil.rmtree(directory)
    training.start("steps=1").launch()
    training.wait("worker:0", "SUCCEEDED")
    assert training.stop() == "SUCCEEDED"


def test_the_same_training_after_its_end_begins_anew(training):
    """Numbers begin at 1 again, and nothing of the first life is taken for the second's."""
    training.up("ps:0", "worker:0", args=("steps=3", "chief=worker:0"))
    training.wait("worker:0", "SUCCEEDED")
    training.stop()
    training.reserve("ps:0", "worker:0")
    assert training.status()["state"] == "RESERVED"
    training.start("steps=1", "chief=worker:0").launch()
    training.wait("worker:0", "SUCCEEDED")
    assert [e["seq"] for e in training.events()] == list(range(1, len(training.events()) + 1))
    assert training.status()["result"]["global_step"] == 1
