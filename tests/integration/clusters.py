"""TensorFlow clusters on loopback, for tests and benchmarks: TF tasks forked from one process that has imported it.

Run as a script this file is that process: it reads requests from stdin, forks, and tells of exits on stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfps_runtime.protocol import CheckpointOptions, Progress, Result, TaskContext

if TYPE_CHECKING:
    from collections.abc import Callable

DAGS = Path(__file__).parents[2] / "dags"
LINEAR_REGRESSION = DAGS / "programs" / "linear_regression.py"
DIGITS = DAGS / "programs" / "digits.py"
CHIEF, WORKER, PS = "worker:0", "worker:1", "ps:0"


# --- the process that forks ---------------------------------------------------------------------------------------


def nursery() -> None:
    """Import TensorFlow once, then fork a process for each line on stdin."""
    import select

    import tensorflow as tf  # noqa: F401

    before = len(os.listdir("/proc/self/task"))
    import tfps_runtime.training
    from tensorflow.python.eager import context

    say = lambda **message: print(json.dumps(message), flush=True)  # noqa: E731
    say(
        ready=True,
        new_threads=len(os.listdir("/proc/self/task")) - before,
        python_threads=threading.active_count(),
        is_runtime_initialised=context.context()._context_handle is not None,
        imported=tfps_runtime.training.__name__,
    )
    while True:
        readable, _, _ = select.select([0], [], [], 0.02)
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                say(exited=pid, code=os.waitstatus_to_exitcode(status))
        if readable:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become(request)
            say(forked=pid)


def _become(request: dict[str, Any]) -> None:
    code = 99
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request.get("env", {}))
        if "call" in request:
            code = _call(request)
        else:
            import tfps_runtime.training

            code = tfps_runtime.training.main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(request: dict[str, Any]) -> int:
    import traceback

    try:
        spec = importlib.util.spec_from_file_location(Path(request["file"]).stem, request["file"])
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        value = getattr(module, request["call"])(*request["args"])
    except BaseException:  # noqa: BLE001  the process's outermost frame
        traceback.print_exc()
        return 1
    Path(request["answer"]).write_text(json.dumps(value))
    return 0


@dataclass
class Process:
    """A forked process and its log."""

    pid: int
    log_path: Path
    exits: dict[int, int]

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        return self.exits.get(self.pid)

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def wait(self, secs: float = 30.0) -> int:
        until(lambda: self.code is not None, secs, f"{self.log_path} still runs\n{self.log[-4000:]}")
        assert self.code is not None
        return self.code

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def until(condition: Callable[[], object], secs: float, why: str) -> None:
    """Poll until `condition` returns something true."""
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline, f"after {secs} s: {why}"
        time.sleep(0.01)


class Nursery:
    """Talks to the process that forks."""

    def __init__(self, log: Path) -> None:
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
            )
        self.exits: dict[int, int] = {}
        self._forked: queue.Queue[int] = queue.Queue()
        line = self._process.stdout.readline()
        assert line, log.read_text()
        self.greeting = json.loads(line)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            message = json.loads(line)
            if "forked" in message:
                self._forked.put(message["forked"])
            else:
                self.exits[message["exited"]] = message["code"]

    def fork(self, log: Path, **request: Any) -> Process:
        self._process.stdin.write(json.dumps({"log": str(log), **request}) + "\n")
        self._process.stdin.flush()
        return Process(self._forked.get(timeout=10), log, self.exits)

    def begin(self, function: Callable[..., Any], *args: Any, directory: Path) -> tuple[Process, Path]:
        """Run a function of a module in a fork; gives the process and where it will write what it returns (JSON)."""
        name = f"{function.__name__}-{random.getrandbits(32):08x}"
        answer = directory / f"{name}.json"
        process = self.fork(
            directory / f"{name}.log",
            file=function.__code__.co_filename,
            call=function.__name__,
            args=args,
            answer=str(answer),
        )
        return process, answer

    def call(self, function: Callable[..., Any], *args: Any, directory: Path, secs: float = 30.0) -> Any:
        """Run a function of a module in a fork; gives what it returns (JSON), or fails with its traceback."""
        process, answer = self.begin(function, *args, directory=directory)
        code = process.wait(secs)
        assert code == 0, f"exit {code}: {process.log}"
        return json.loads(answer.read_text())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=10)


# --- clusters --------------------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass
class Training:
    """A cluster on loopback, without an agent: the test starts, kills and restarts its tasks."""

    forks: Nursery
    directory: Path
    fields: dict[str, Any]
    cluster: dict[str, list[str]]
    chief: str = CHIEF
    tasks: dict[str, Process] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def start(self, *tasks: str) -> None:
        for task in tasks:
            self.attempts[task] = attempt = self.attempts.get(task, -1) + 1
            place = self.directory / task.replace(":", "-")
            place.mkdir(exist_ok=True)
            context = TaskContext(
                task=task,
                host="local",
                cluster=self.cluster,
                chief=self.chief,
                checkpoint=CheckpointOptions(
                    directory=str(self.checkpoints),
                    save_checkpoint_secs=self.fields.get("save_checkpoint_secs", 60.0),
                    save_summaries_secs=1.0,
                ),
                progress_path=str(place / "progress.jsonl"),
                result_path=str(place / "result.json"),
                attempt=attempt,
                **{k: v for k, v in self.fields.items() if k != "save_checkpoint_secs"},
            )
            (place / "context.json").write_text(context.dumps())
            env = {"TFPS_CONTEXT": str(place / "context.json")}
            self.tasks[task] = self.forks.fork(place / f"log-{attempt}", env=env)

    def start_all(self) -> None:
        self.start(
            *(f"{role}:{i}" for role, addresses in self.cluster.items() for i in range(len(addresses)))
        )

    def kill(self, task: str) -> None:
        self.tasks[task].signal(signal.SIGKILL)
        self.tasks[task].wait()

    def wait(self, *tasks: str, secs: float = 30.0) -> list[int]:
        """Wait until the TF tasks have ended; gives their exit codes. With a wrong one, look at `logs`."""
        return [self.tasks[task].wait(secs) for task in tasks]

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {task}\n{process.log[-3000:]}" for task, process in self.tasks.items())

    def progress(self, task: str) -> list[Progress]:
        path = self.directory / task.replace(":", "-") / "progress.jsonl"
        return [Progress.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def step(self, task: str) -> int:
        return self.progress(task)[-1].global_step if self.progress(task) else -1

    def await_step(self, task: str, step: int, secs: float = 20.0) -> None:
        until(
            lambda: self.step(task) >= step,
            secs,
            f"{task} is at {self.step(task)}, not {step}\n"
            + "\n".join(f"{t}\n{p.log[-1500:]}" for t, p in self.tasks.items()),
        )

    @property
    def result(self) -> Result:
        place = self.chief.replace(":", "-")
        return Result.loads((self.directory / place / "result.json").read_text())


class Trainings:
    """Makes trainings below a directory; `close` kills whatever they started."""

    def __init__(self, forks: Nursery, directory: Path) -> None:
        self._forks = forks
        self._directory = directory
        self._made: list[Training] = []

    def __call__(
        self,
        program: Path | str = LINEAR_REGRESSION,
        *,
        ps: int = 1,
        workers: int = 2,
        roles: dict[str, int] | None = None,
        chief: str = CHIEF,
        **fields: Any,
    ) -> Training:
        directory = self._directory / f"training-{len(self._made)}"
        directory.mkdir()
        if isinstance(program, str):
            (directory / "program.py").write_text(textwrap.dedent(program))
            program = directory / "program.py"
        roles = {"ps": ps, "worker": workers} if roles is None else roles
        ports = iter(free_ports(sum(roles.values())))
        cluster = {
            role: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for role, count in roles.items() if count
        }
        fields = {"program": str(program), "seed": 7, "mode": "async", **fields}
        self._made.append(Training(self._forks, directory, fields, cluster, chief))
        return self._made[-1]

    def close(self) -> None:
        for training in self._made:
            for process in training.tasks.values():
                process.signal(signal.SIGKILL)
        for training in self._made:
            for process in training.tasks.values():
                process.wait()


if __name__ == "__main__":
    nursery()
