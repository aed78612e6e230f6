"""Where scripts run in tests: forked from the product's own nursery, or under its agents through `ClusterHook`.

`Stage` imports TensorFlow once for a whole test session and forks whatever tests want, as an agent's nursery does.
`Airflowless` is a training as Airflow runs it (ensure, launch, follow, judge, stop) without Airflow's scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfps_runtime.launch import Launch
from tfps_runtime.placeholders import fill, values_for
from tfps_runtime.processes import Processes
from tfps_runtime.protocol import (
    CONTEXT_VARIABLE,
    CheckpointOptions,
    Exit,
    Kind,
    Program,
    Progress,
    Result,
    Task,
    TaskContext,
    TrainingId,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from airflow_tfps.handle import Handle
    from airflow_tfps.hook import ClusterHook
    from airflow_tfps.inventory import Inventory
    from airflow_tfps.judge import Verdict
    from airflow_tfps.spec import JobSpec

SECS = 90.0
"""How long a test waits for what takes a second on an idle machine."""


def until(condition: Callable[[], Any], what: str | Callable[[], str], secs: float = SECS) -> Any:
    """Poll until `condition` returns something true, and return it."""
    deadline = time.monotonic() + secs
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {secs:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)
    return result


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


# --- forked from one nursery ------------------------------------------------------------------------------------------


@dataclass
class Forked:
    """A process on the stage."""

    stage: Stage
    name: str
    log_path: Path
    pid: int | None = None
    exit: Exit | None = None
    ended: float | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace") if self.log_path.exists() else ""

    def wait(self, secs: float = SECS) -> Exit:
        self.stage.until(lambda: self.exit is not None, lambda: f"{self.name} ends\n{self.log[-3000:]}", secs)
        assert self.exit is not None
        return self.exit

    def wait_for(self, text: str, secs: float = SECS) -> None:
        """Until the log holds `text`."""
        self.stage.until(
            lambda: text in self.log, lambda: f"{self.name} says {text!r}\n{self.log[-3000:]}", secs
        )

    def kill(self) -> None:
        if self.exit is None and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()


class Stage:
    """The product's nursery, shared by all tests of a session: one import of TensorFlow."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._output = os.open(directory / "nursery", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._processes = Processes(["tensorflow", "numpy"], {}, warm=True, output=self._output)
        self._living: dict[str, Forked] = {}
        self._count = 0

    @property
    def pid(self) -> int:
        """The nursery's own."""
        assert self._processes._nursery is not None
        return self._processes._nursery.pid

    def pump(self) -> None:
        """Take in what the nursery says."""
        spawned, ended = self._processes.hear()
        assert self._processes.broken is None, self._processes.broken
        for name, pid in spawned:
            self._living[name].pid = pid
        for name, exit_, _, _ in ended:
            process = self._living.pop(name)
            process.exit, process.ended = exit_, time.monotonic()

    def until(self, condition: Callable[[], Any], what: str | Callable[[], str], secs: float = SECS) -> Any:
        def pumped() -> Any:
            self.pump()
            return condition()

        return until(pumped, what, secs)

    def start(
        self,
        program: Path | Program,
        *args: str,
        directory: Path,
        name: str = "alone",
        env: Mapping[str, str] | None = None,
        compat: str | None = None,
    ) -> Forked:
        """Fork a process that runs the program in `directory`; its log is there, too."""
        if isinstance(program, Path):
            program = Program(script=str(program))
        self._count += 1
        process = Forked(
            self, f"{name}#{self._count}", directory / f"{name.replace(':', '-')}-{self._count}.log"
        )
        self._living[process.name] = process
        launch = Launch(
            task=process.name,
            log=str(process.log_path),
            directory=str(directory),
            program=program,
            argv=args,
            env=dict(env or {}),
            compat=compat,
        )
        self._processes.launch(launch, warm=True)
        self.until(lambda: process.pid is not None or process.exit is not None, f"{name} starts")
        return process

    def close(self) -> None:
        for process in list(self._living.values()):
            process.kill()
        if self._processes.channel is not None:
            self._processes.channel.close()  # upon which the nursery ends
        nursery = self._processes._nursery
        if nursery is not None:
            nursery.wait(20)
        os.close(self._output)


@dataclass
class ScriptCluster:
    """A script on a cluster of forked processes, without an agent: the test starts, kills and restarts them."""

    stage: Stage
    directory: Path
    script: Path
    args: Sequence[str]
    cluster: Mapping[str, Sequence[str]]
    compat: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    tasks: dict[str, Forked] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        for name in names:
            task = Task.parse(name)
            values = values_for(
                task, host="here", cluster=self.cluster, checkpoint_dir=str(self.directory / "checkpoints")
            )
            config = {"cluster": self.cluster, "task": {"type": task.role, "index": task.index}}
            self.tasks[name] = self.stage.start(
                self.script,
                *(fill(argument, values) for argument in self.args),
                directory=self.directory,
                name=name,
                env={"TF_CONFIG": json.dumps(config), **self.env},
                compat=self.compat,
            )

    def start_all(self) -> None:
        self.start(*(f"{role}:{i}" for role, at in self.cluster.items() for i in range(len(at))))

    def wait(self, *names: str, secs: float = SECS) -> None:
        """Until these have ended with exit code 0."""
        for name in names:
            exit_ = self.tasks[name].wait(secs)
            assert exit_ == Exit(code=0), f"{name}: {exit_}\n{self.tasks[name].log[-4000:]}"

    def close(self) -> None:
        for process in self.tasks.values():
            process.kill()


@dataclass
class ProgramCluster(ScriptCluster):
    """A harness program on such a cluster. `fields` are of its TaskContext."""

    fields: Mapping[str, Any] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        for name in names:
            place = self.directory / name.replace(":", "-")
            place.mkdir()
            context = TaskContext(
                task=name,
                host="here",
                cluster={role: list(addresses) for role, addresses in self.cluster.items()},
                chief="worker:0",
                program=str(self.script),
                checkpoint=CheckpointOptions(str(self.directory / "checkpoints")),
                progress_path=str(place / "progress.jsonl"),
                result_path=str(place / "result.json"),
                **self.fields,
            )
            (place / "context.json").write_text(context.dumps())
            self.tasks[name] = self.stage.start(
                Program(module=str(self.script)),
                directory=place,
                name=name,
                env={CONTEXT_VARIABLE: str(place / "context.json")},
            )

    def progress(self, name: str) -> list[Progress]:
        path = self.directory / name.replace(":", "-") / "progress.jsonl"
        return [Progress.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def result(self) -> Result:
        return Result.loads((self.directory / "worker-0" / "result.json").read_text())


# --- as Airflow runs it -----------------------------------------------------------------------------------------------


class Airflowless:
    """A training through `ClusterHook`, followed and judged as the trigger does."""

    def __init__(self, hook: ClusterHook, job: JobSpec, key: str) -> None:
        self.hook = hook
        self.job = job
        self.training = TrainingId(key, secrets.token_hex(4))
        self.handle: Handle = None  # type: ignore[assignment]
        self.messages: list[dict[str, Any]] = []
        self.verdict: Verdict | None = None
        self.ended: float | None = None
        self._error: BaseException | None = None

    def ensure(self) -> None:
        self.handle = self.hook.ensure(self.job, self.training)

    def launch(self) -> None:
        self.hook.launch(self.handle)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            asyncio.run(self._judge())
        except BaseException as error:  # noqa: BLE001  told to whoever waits
            self._error = error

    async def _judge(self) -> None:
        from airflow_tfps.follow import follow
        from airflow_tfps.judge import judge
        from airflow_tfps.triggers import _rules

        rules = _rules(self.handle)
        messages = follow(self.handle, lease_secs=120.0)
        try:
            async for message, _ in messages:
                self.messages.append({**message, "heard": time.monotonic()})
                if message["type"] in (Kind.TASK, Kind.TRAINING, Kind.RESULT, Kind.GONE):
                    self.verdict = judge(rules, self.messages)
                    if self.verdict is not None:
                        self.ended = time.monotonic()
                        return
        finally:
            await messages.aclose()

    def run(self, secs: float = SECS) -> Verdict:
        """Bring it up, train, and wait for the verdict."""
        self.ensure()
        self.launch()
        return self.wait(secs)

    def wait(self, secs: float = SECS) -> Verdict:
        self.until(lambda: self.verdict, "a verdict", secs)
        assert self.verdict is not None
        return self.verdict

    def until(self, condition: Callable[[], Any], what: str, secs: float = SECS) -> Any:
        def checked() -> Any:
            if self._error is not None:
                raise self._error
            return condition()

        def words() -> str:
            return "\n".join([what, *self.transitions, *map(self._tail, self.handle.tasks)])

        return until(checked, words, secs)

    def _tail(self, placed: Any) -> str:
        return f"--- {placed.label}\n" + "\n".join(self.log(str(placed.task)).splitlines()[-25:])

    @property
    def transitions(self) -> list[str]:
        """`worker:1 BACKOFF exit code 1`, … in the order in which they were heard."""
        return [
            " ".join(str(m.get(key, "")) for key in ("task", "state", "reason")).strip()
            for m in list(self.messages)
            if m["type"] in (Kind.TASK, Kind.TRAINING)
        ]

    def progress(self, task: str) -> list[dict[str, Any]]:
        """Records of a TF task, from its file on the host."""
        path = Path(self._paths(task).progress(Task.parse(task)))
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def step(self, task: str) -> int:
        records = self.progress(task)
        return int(records[-1]["global_step"]) if records else -1

    def log(self, task: str) -> str:
        path = Path(self._paths(task).log(Task.parse(task)))
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def pid(self, task: str) -> int:
        host = self.handle.of(Task.parse(task)).host
        rows = self.hook.status(self.handle)[host]["tasks"]
        return next(int(row["pid"]) for row in rows if row["task"] == task)

    def kill(self, task: str) -> None:
        os.killpg(self.pid(task), signal.SIGKILL)

    def _paths(self, task: str) -> Any:
        paths = self.handle.paths(self.handle.of(Task.parse(task)).host)
        from dataclasses import replace

        return replace(paths, workdir=os.path.expanduser(paths.workdir))

    def stop(self) -> None:
        if self.handle is not None:
            self.hook.stop(self.handle, "the test is over", grace_secs=0)


@contextlib.contextmanager
def airflowless(
    inventory: Inventory, job: Mapping[str, Any], base_dir: Path, key: str
) -> Iterator[Airflowless]:
    """A training of a job; whatever it started is gone afterwards."""
    from airflow_tfps.hook import ClusterHook
    from airflow_tfps.spec import JobSpec

    with ClusterHook(inventory=inventory) as hook:
        training = Airflowless(hook, JobSpec.from_dict(job, base_dir=base_dir), key)
        try:
            yield training
        finally:
            training.stop()


def numbers(lines: Iterable[str], pattern: Any) -> list[tuple[str, ...]]:
    """The groups of a regular expression in each line that matches."""
    return [found.groups() for line in lines if (found := pattern.search(line))]
