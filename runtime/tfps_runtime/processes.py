"""The processes of an agent: its nursery, the TF tasks, and whatever those left behind.

Standard library only. The agent is a child subreaper, so that every orphan below it becomes its child and can be found.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from tfps_runtime.launch import LAUNCH_VARIABLE, Launch, clean_environment, enter, without_environment
from tfps_runtime.nursery import MAX_MESSAGE
from tfps_runtime.orphans import AGENT_VARIABLE, agent_mark, start_time
from tfps_runtime.protocol import Exit

MAX_NURSERIES = 5
MAX_LAUNCH = 128 * 1024
"""Bytes of one launch: a message of the nursery's socket must fit into its buffer."""


def runtime_location() -> str:
    """The `.pyz`, or the folder, that this runtime was loaded from."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def runtime_argv(*arguments: str) -> list[str]:
    """The command line that runs this runtime with this interpreter."""
    location = runtime_location()
    if os.path.isdir(location):
        return [sys.executable, "-u", "-m", "tfps_runtime", *arguments]
    return [sys.executable, "-u", location, *arguments]


def children_of(parent: int) -> list[int]:
    """Pids of the living (not zombie) children of a process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{name}/stat", "rb") as file,
            ):
                fields = file.read().rsplit(b")", 1)[1].split()
                if int(fields[1]) == parent and fields[0] != b"Z":
                    found.append(int(name))
    return found


@dataclass
class _Process:
    task: str
    started: Optional[int]
    is_forked: bool


class Processes:
    """Starts, signals and reaps. Every method returns at once."""

    def __init__(
        self, preload: Sequence[str], env: dict[str, str], *, warm: bool, output: int, umask: int = -1
    ) -> None:
        """`output`: descriptor for what the nursery writes to its standard output and error.

        `umask`: of the TF tasks; -1 is this process's own.
        """
        self._preload = list(preload)
        self._output = output
        self._umask = umask
        self._env = clean_environment(env)
        location = runtime_location()
        self._env["PYTHONPATH"] = os.pathsep.join(p for p in (location, self._env.get("PYTHONPATH")) if p)
        self._env[AGENT_VARIABLE] = agent_mark(os.getpid())
        self._nursery: Optional[subprocess.Popen[bytes]] = None
        self.channel: Optional[socket.socket] = None
        self._is_ready = False
        self._queue: list[tuple[str, bytes]] = []
        self._asked: set[str] = set()
        self._living: dict[int, _Process] = {}
        self._nurseries = 0
        self.ready_secs: Optional[float] = None
        self.broken: Optional[str] = None
        if warm:
            self._start_nursery()

    # --- starting

    def _start_nursery(self) -> None:
        self._nurseries += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = runtime_argv("nursery", str(theirs.fileno()), str(os.getpid()), *self._preload)
        self._nursery = subprocess.Popen(
            argv,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            umask=self._umask,
        )
        theirs.close()
        ours.setblocking(False)
        self.channel, self._is_ready = ours, False

    def launch(self, launch: Launch, *, warm: bool, argv: Optional[Sequence[str]] = None) -> Optional[int]:
        """Start a TF task. A warm one is forked by the nursery, as soon as that is ready; else the pid is returned.

        Raises OSError or SubprocessError when the command cannot be executed, ValueError for too long a launch.
        """
        if warm:
            message = json.dumps({"launch": launch.to_json()}).encode()
            if len(message) > MAX_LAUNCH:
                raise ValueError(
                    f"arguments and environment of {launch.task} take {len(message)} bytes, more than {MAX_LAUNCH}"
                )
            self._queue.append((launch.task, message))
            self._feed()
            return None
        env = {**self._env, **launch.env, AGENT_VARIABLE: self._env[AGENT_VARIABLE]}
        if argv is None:
            argv = runtime_argv("task")
            env[LAUNCH_VARIABLE] = without_environment(launch)
        me = os.getpid()
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            umask=self._umask,
            preexec_fn=lambda: enter(launch, me),  # noqa: PLW1509  the agent has one thread
        )
        process.returncode = 0  # reaped by `reap`, not by subprocess
        self._living[process.pid] = _Process(launch.task, start_time(process.pid), is_forked=False)
        return process.pid

    def _feed(self) -> None:
        while self._queue and self._is_ready and self.channel is not None:
            task, message = self._queue[0]
            try:
                self.channel.send(message)
            except (BlockingIOError, ConnectionError):
                return
            del self._queue[0]
            self._asked.add(task)

    def withdraw(self, task: str) -> bool:
        """Forget a launch that the nursery has not been asked for yet; whether there was one."""
        left = [one for one in self._queue if one[0] != task]
        is_withdrawn = len(left) < len(self._queue)
        self._queue = left
        return is_withdrawn

    # --- what has happened

    def hear(self) -> tuple[list[tuple[str, int]], list[tuple[str, Exit, str, bool]]]:
        """What the nursery said: (task, pid) of new processes; (task, exit, reason, charged) of ended ones."""
        spawned: list[tuple[str, int]] = []
        ended: list[tuple[str, Exit, str, bool]] = []
        while self.channel is not None:
            try:
                data = self.channel.recv(MAX_MESSAGE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.channel.close()
                self.channel = None
                break
            message: dict[str, Any] = json.loads(data)
            if "ready" in message:
                self._is_ready, self.ready_secs = True, message["ready"]
            elif "broken" in message:
                self.broken = message["broken"]
            elif "spawned" in message:
                task, pid = message["spawned"], message["pid"]
                self._asked.discard(task)
                self._living[pid] = _Process(task, start_time(pid), is_forked=True)
                spawned.append((task, pid))
            elif "exited" in message:
                process = self._living.pop(message["exited"], None)
                if process is not None:
                    self._kill_session(message["exited"])
                    exit_ = Exit(code=message.get("code"), signal=message.get("signal"))
                    ended.append((process.task, exit_, "", True))
        self._feed()
        return spawned, ended

    def reap(self) -> list[tuple[str, Exit, str, bool]]:
        """Collect dead children: spawned tasks, a dead nursery with its tasks, adopted orphans."""
        ended: list[tuple[str, Exit, str, bool]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            exit_ = (
                Exit(signal=os.WTERMSIG(status))
                if os.WIFSIGNALED(status)
                else Exit(code=os.WEXITSTATUS(status))
            )
            if self._nursery is not None and pid == self._nursery.pid:
                self._nursery.returncode = 0
                ended.extend(self._nursery_died(exit_))
                continue
            process = self._living.pop(pid, None)
            if process is None:
                continue  # an orphan of a task
            self._kill_session(pid)
            if process.is_forked:  # only a dead nursery leaves its tasks to us
                ended.append((process.task, exit_, "its nursery was killed", False))
            else:
                ended.append((process.task, exit_, "", True))
        return ended

    def _nursery_died(self, exit_: Exit) -> list[tuple[str, Exit, str, bool]]:
        _, ended = self.hear()
        if self.channel is not None:
            self.channel.close()
        self.channel, self._nursery, self._is_ready = None, None, False
        ended.extend((task, exit_, "its nursery was killed", False) for task in self._asked)
        self._asked.clear()
        # Its last word may have been of a task whose death, as our child, was seen before that.
        for pid, process in list(self._living.items()):
            if process.is_forked and start_time(pid) is None:
                del self._living[pid]
                ended.append((process.task, exit_, "its nursery was killed", False))
        if self.broken is None:
            if self._nurseries >= MAX_NURSERIES:
                self.broken = f"the nursery ended {self._nurseries} times, last by {exit_}"
            else:
                self._start_nursery()
        return ended

    # --- ending

    def signal_group(self, task: str, number: int) -> None:
        """Signal the task's whole process group, if the process is still the one that was started."""
        for pid, process in self._living.items():
            if process.task == task and start_time(pid) == process.started:
                try:
                    os.killpg(pid, number)
                except ProcessLookupError:  # so young that it has no group of its own yet
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

    def signal_leader(self, task: str, number: int) -> None:
        for pid, process in self._living.items():
            if process.task == task and start_time(pid) == process.started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def started(self, pid: int) -> Optional[int]:
        process = self._living.get(pid)
        return None if process is None else process.started

    @staticmethod
    def _kill_session(leader: int) -> None:
        """Kill what is left of a dead task's process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)

    def end_all(self, secs: float = 5.0) -> list[int]:
        """Kill and reap everything below the agent; returns the pids that would not go. Blocks up to `secs`."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self._nurseries = MAX_NURSERIES  # no new one
        self.broken = self.broken or "ending"
        until = time.monotonic() + secs
        while True:
            self.reap()
            left = children_of(os.getpid())
            if not left or time.monotonic() > until:
                return left
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
