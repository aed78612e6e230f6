"""The agent: one process per training and host, which holds the reservation and looks after the TF tasks.

Standard library only. It outlives the connection that started it. `core.step` decides; the loop here turns files,
signals and sockets into events and carries out actions. Every TF task dies with it, by the kernel's hand.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import Any, Optional

from tfps_runtime import core
from tfps_runtime.assignment import assign, working_directory
from tfps_runtime.followers import Connection, Followers, integer, seconds
from tfps_runtime.launch import PR_SET_CHILD_SUBREAPER, prctl
from tfps_runtime.orphans import TRAINING_VARIABLE
from tfps_runtime.processes import Processes, runtime_location
from tfps_runtime.protocol import (
    VERSION,
    Exit,
    Kind,
    LockRecord,
    Paths,
    ProtocolError,
    RefusedError,
    Reservation,
    ReserveRequest,
    Result,
    StartRequest,
    Task,
    TaskState,
    TrainingId,
    TrainingState,
    check_place,
    dump,
    is_text,
    load,
)
from tfps_runtime.reserve import (
    GpuLock,
    Lock,
    Port,
    change_owner,
    ensure_run_dir,
    hold_gpus,
    hold_ports,
    own_checkpoint_dir,
    refusal,
)
from tfps_runtime.scripts import LogScanner, result_of
from tfps_runtime.tails import Acknowledged, LogFile, ProgressFile
from tfps_runtime.whole import write_whole

QUIET_SECS, BUSY_SECS, STARTING_SECS = 1.0, 0.1, 0.03
"""How long the loop sleeps when nothing comes: without TF tasks, with some, while one is starting."""


class Agent:
    """The world around `core.step`. Raises RefusedError when the reservation cannot be had."""

    def __init__(self, request: ReserveRequest) -> None:
        login_umask = os.umask(0o077)  # for the TF tasks, which may write for others; nothing of ours is
        self.request = request
        self.training = TrainingId.parse(request.training)
        self.paths = Paths(check_place(request.host, request.workdir), self.training, request.host)
        check_names(request)
        ensure_run_dir()
        self.lock = Lock.acquire(
            self.paths.lock, LockRecord(str(self.training), request.host, self.paths.workdir, os.getpid())
        )
        self.ports: dict[str, Port] = {}
        self.gpu_locks: list[GpuLock] = []
        try:
            names = [t.task for t in request.tasks if t.has_port]
            self.ports = hold_ports(names, request.ports, str(self.training) + request.host)
            gpus, self.gpu_locks = hold_gpus({t.task: t.gpus for t in request.tasks if t.gpus})
            directory = request.checkpoint_dir
            if directory is not None:
                directory = own_checkpoint_dir(
                    os.path.expanduser(directory),
                    self.paths,
                    is_fixed=request.checkpoint_dir_is_fixed,
                    lease_secs=request.lease_secs,
                )
            os.makedirs(self.paths.directory, mode=0o700, exist_ok=True)
        except BaseException:
            self.release()
            raise
        self.reservation = Reservation(
            training=str(self.training),
            host=request.host,
            ports={name: port.number for name, port in self.ports.items()},
            gpus=gpus,
            workdir=self.paths.workdir,
            checkpoint_dir=directory,
        )
        self._write_spec()
        for task in request.tasks:
            os.makedirs(self.paths.task_dir(task.name), mode=0o700, exist_ok=True)

        self.state = core.AgentState(
            tasks={t.task: core.TaskView(spec=t) for t in request.tasks},
            lease_until=time.monotonic() + request.lease_secs,
            grace_secs=request.grace_secs,
            stall_secs=request.stall_secs,
            chief_is_here=any(t.is_chief for t in request.tasks),
        )
        self._owned_until = self.state.lease_until
        """Until then, on the monotonic clock, the checkpoint directory is ours by its owner file."""
        self.start_request: Optional[StartRequest] = None
        self.events: list[dict[str, Any]] = []
        self._happening: list[core.Event] = []
        # An earlier life of the same incarnation ended before this one began; sequence numbers begin anew.
        self._events_fd = os.open(
            self.paths.events, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600
        )
        self.output = os.open(self.paths.agent_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.logs = {t.task: LogFile(self.paths.log(t.name)) for t in request.tasks}
        self.progress = {t.task: ProgressFile(self.paths.progress(t.name)) for t in request.tasks}
        self._scanners: dict[str, LogScanner] = {}
        self.acknowledged = Acknowledged(self.paths.acknowledged)
        self.followers = Followers(self.logs.__getitem__)
        self.selector = selectors.DefaultSelector()
        self._is_leaving = False
        self._is_behind = False
        """Whether a follower takes more of a log at once."""
        self._listen()
        self._watch_signals()
        self.processes = Processes(
            request.preload,
            {**request.env, TRAINING_VARIABLE: request.training},
            warm=any(t.warm for t in request.tasks) and bool(request.preload),
            output=self.output,
            umask=login_umask,
        )
        self._channel: Optional[socket.socket] = None

    # --- set-up and end

    def _write_spec(self, *uses: str) -> None:
        """Write down what was asked and granted, and what a sweep must leave: the runtime and `uses`."""
        record = {
            "version": VERSION,
            "request": self.request.to_json(),
            "reservation": self.reservation.to_json(),
            "uses": sorted({runtime_location(), *uses}),
        }
        write_whole(self.paths.spec, dump(record) + "\n")

    def _listen(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.paths.socket)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.paths.socket)
        os.chmod(self.paths.socket, 0o600)
        self.listener.listen(64)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, "listener")

    def _watch_signals(self) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._wake, writer = os.pipe()
        for fd in (self._wake, writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writer)
        self._terminated = False
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_terminated", True))
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(self._wake, selectors.EVENT_READ, "signal")

    def release(self) -> None:
        """Let go of everything held, the lock last."""
        for port in self.ports.values():
            port.release()
        for gpu in self.gpu_locks:
            gpu.release()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.paths.socket)
        self.lock.release()

    # --- the loop

    def run(self) -> None:
        """Serve until the training has ended and been stopped, or the lease has run out. Blocks."""
        try:
            while not self._is_leaving:
                self._wait()
                self._look()
            self.listener.close()
            left = self.processes.end_all()
            if left:
                sys.stderr.write(f"could not end {left}\n")
            self.followers.finish(5.0, lambda _: True)
            if not left:
                self._note_in_checkpoint_dir(ended=True)
        finally:
            self.processes.end_all()
            self.release()

    def _wait(self) -> None:
        if self.processes.channel is not self._channel:
            if self._channel is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self.selector.unregister(self._channel)
            self._channel = self.processes.channel
            if self._channel is not None:
                self.selector.register(self._channel, selectors.EVENT_READ, "nursery")
        states = [view.state for view in self.state.tasks.values()]
        pause = QUIET_SECS
        if any(s.is_alive for s in states):
            pause = BUSY_SECS
        if TaskState.STARTING in states:
            pause = STARTING_SECS
        pause = 0.0 if self._is_behind else min(pause, max(core.next_due(self.state) - time.monotonic(), 0.0))
        for key, mask in self.selector.select(pause):
            if key.data == "listener":
                self._accept()
            elif key.data == "signal":
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            elif isinstance(key.data, Connection):
                if mask & selectors.EVENT_WRITE:
                    key.data.flush()
                if mask & selectors.EVENT_READ:
                    self._receive(key.data)

    def _look(self) -> None:
        """Turn what has happened in the world into events."""
        spawned, ended = self.processes.hear()
        for task, pid in spawned:
            self.happen(core.Spawned(task, pid))
        self._read_progress()
        for task, exit_, reason, charged in ended + self.processes.reap():
            self._ended(task, exit_, reason, charged=charged)
        if self.processes.broken is not None:
            self.happen(core.Broken(self.processes.broken))
        self._find_listening()
        if self._terminated:
            self.happen(core.Stop("the agent was asked to end"))
        self.happen(core.Tick())
        for task, log in self.logs.items():
            if self.state.tasks[task].state.is_alive:
                log.rotate_if_large()
        self._is_behind = self.followers.push_logs(self._is_over)
        self.followers.beat({"lease_secs": round(self.state.lease_until - time.monotonic(), 1)})
        for connection in self.followers.forget_closed():
            self._forget(connection)
        for connection in self.followers.connections:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.waiting else 0)
            self.selector.modify(connection.sock, wanted, connection)

    def _is_over(self, task: str) -> bool:
        """Whether nobody writes to the task's log at present."""
        return not self.state.tasks[task].state.is_alive

    def _forget(self, connection: Connection) -> None:
        # A closed socket cannot be looked up by its descriptor any more.
        for key in list(self.selector.get_map().values()):
            if key.data is connection:
                self.selector.unregister(key.fileobj)

    def happen(self, event: core.Event) -> None:
        """Let the core decide about an event, and do what it says; what that makes happen is decided after it."""
        self._happening.append(event)
        if len(self._happening) > 1:
            return
        while self._happening:
            self.state, actions = core.step(self.state, self._happening[0], time.monotonic())
            if self.state.lease_until > self._owned_until:
                self._own_for_longer()
            for action in actions:
                self._act(action)
            del self._happening[0]

    def _act(self, action: core.Action) -> None:
        if isinstance(action, core.Tell):
            self._tell(action.message)
        elif isinstance(action, core.Spawn):
            self._spawn(action.task, action.attempt)
        elif isinstance(action, core.Kill):
            if self.processes.withdraw(action.task):
                self.happen(core.Exited(action.task, Exit(signal=action.signal), charged=False))
            else:
                self.processes.signal_group(action.task, action.signal)
        elif isinstance(action, core.Dump):
            self.processes.signal_leader(action.task, signal.SIGUSR1)
        elif isinstance(action, core.Leave):
            self._is_leaving = True

    def _tell(self, message: dict[str, Any]) -> None:
        message = {"seq": len(self.events) + 1, "time": round(time.time(), 3), **message}
        pid = message.get("pid")
        if pid is not None:
            message["started"] = self.processes.started(pid)
        self.events.append(message)
        with contextlib.suppress(OSError):  # a full disk ends no training
            os.write(self._events_fd, dump(message).encode() + b"\n")
        self.followers.tell(message)

    def _own_for_longer(self) -> None:
        """Note in the checkpoint directory that the lease was renewed; ahead, so that not each renewal writes."""
        now = time.monotonic()
        self._owned_until = now + 1.5 * (self.state.lease_until - now)
        self._note_in_checkpoint_dir(until=time.time() + self._owned_until - now)

    def _note_in_checkpoint_dir(self, **values: Any) -> None:
        """Write something into the owner file, if this host's TF tasks save at all."""
        directory = self.reservation.checkpoint_dir
        if directory is None:
            return
        try:
            change_owner(directory, str(self.training), **values)
        except OSError as error:
            sys.stderr.write(f"{directory}: {error}\n")

    # --- TF tasks

    def _spawn(self, name: str, attempt: int) -> None:
        assert self.start_request is not None
        task, view = Task.parse(name), self.state.tasks[name]
        given = assign(
            self.request, self.start_request, self.reservation, self.paths, view.spec, attempt=attempt
        )
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._result_path(task))
            if given.context is not None:
                write_whole(self.paths.context(task), given.context.dumps() + "\n")
            pid = self.processes.launch(given.launch, warm=given.warm, argv=given.argv)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            with contextlib.suppress(OSError), open(given.launch.log, "a", encoding="utf-8") as log:
                log.write(f"cannot start: {error}\n")
            self.happen(core.Exited(name, Exit(code=127), f"cannot start: {error}"))
            return
        if pid is not None:
            self.happen(core.Spawned(name, pid))

    def _result_path(self, task: Task) -> str:
        """A script leaves its result in its working directory."""
        assert self.start_request is not None
        spec = self.state.tasks[str(task)].spec
        directory = working_directory(self.start_request, self.reservation, self.paths, spec)
        return os.path.join(directory, os.path.basename(self.paths.result(task)))

    def _ended(self, name: str, exit_: Exit, reason: str, *, charged: bool) -> None:
        self._read_progress(ended=name)
        # A follower may leave when it hears of the end: what the task said last comes first.
        self.followers.push_logs(lambda task: task == name, all_of=name)
        view = self.state.tasks[name]
        if exit_.code == 0 and view.spec.is_chief and view.state is not TaskState.STOPPING:
            self._finish(name)
        self.happen(core.Exited(name, exit_, reason, charged))

    def _finish(self, chief: str) -> None:
        """The chief ended well: tell its result, and mark the checkpoint directory as finished."""
        result = self._result(chief)
        if result is not None:
            self.happen(core.Finished(chief, result))
        self._note_in_checkpoint_dir(finished=True)

    def _result(self, chief: str) -> Optional[Result]:
        try:
            with open(self._result_path(Task.parse(chief)), encoding="utf-8") as file:
                return Result.loads(file.read(1024 * 1024))
        except FileNotFoundError:
            return result_of(self.progress[chief].newest, self.reservation.checkpoint_dir)
        except (ProtocolError, OSError, UnicodeDecodeError) as error:
            sys.stderr.write(f"result of {chief}: {error}\n")
            return None

    def _find_listening(self) -> None:
        for name, view in self.state.tasks.items():
            if view.state is TaskState.STARTING and view.pid is not None:
                port = self.reservation.ports.get(name)
                if port is None or is_listening("127.0.0.1", port, 0.05):
                    self.happen(core.Listening(name))

    def _read_progress(self, ended: Optional[str] = None) -> None:
        for name, view in self.state.tasks.items():
            if not view.state.is_alive or view.spec.name.role == "ps":
                continue
            if name in self._scanners:
                self._scanners[name].scan(is_complete=name == ended)
            records = self.progress[name].read()
            if records:
                self.happen(core.Advanced(name))
                newest = records[-1].to_json()
                newest = {k: v for k, v in newest.items() if v is not None}
                self.followers.tell({"type": Kind.PROGRESS, "task": name, "progress": newest})

    # --- clients

    def _accept(self) -> None:
        for closed in self.followers.forget_closed():  # the new one may get the descriptor of a closed one
            self._forget(closed)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self.listener.accept()
                connection = self.followers.add(sock)
                self.selector.register(sock, selectors.EVENT_READ, connection)

    def _receive(self, connection: Connection) -> None:
        for message in connection.receive():
            try:
                self._answer(connection, message)
            except RefusedError as error:
                connection.say(error.to_json())
            except ProtocolError as error:
                connection.say(RefusedError("bad_request", str(error)).to_json())

    def _answer(self, connection: Connection, message: Any) -> None:
        if not isinstance(message, dict):
            raise ProtocolError("an object is needed")
        command = message.get("command")
        if command == "reserve":
            self.happen(core.Renew(seconds(message.get("lease_secs"), 120.0)))
            connection.say({**self.reservation.to_json(), "state": self.state.training.value})
        elif command == "start":
            lease_secs = seconds(message.get("lease_secs"), 120.0)
            self._start(StartRequest.from_json(message.get("request")), lease_secs)
            connection.say(self.status())
        elif command == "launch":
            self._launch(str(message.get("task")))
            connection.say(self.status())
        elif command == "renew":
            self.happen(core.Renew(seconds(message.get("lease_secs"))))
            connection.say(self.status())
        elif command == "status":
            connection.say(self.status())
        elif command == "dump":
            self._dump()
            connection.say(self.status())
        elif command == "stop":
            grace = message.get("grace_secs")
            stop = core.Stop(str(message.get("reason", "stopped")), None if grace is None else seconds(grace))
            self.followers.follow(connection, [], {}, self._is_over)
            self.happen(stop)
        elif command == "follow":
            self._follow(connection, message)
        elif "renew" in message:
            self.happen(core.Renew(seconds(message["renew"])))
        elif "dump" in message:
            self._dump()
        elif "ack" in message:
            self._acknowledge(message["ack"])
        else:
            raise ProtocolError(f"unknown command {str(command)[:40]!r}")

    def _dump(self) -> None:
        for name in self.state.tasks:
            self._act(core.Dump(name))

    def _start(self, request: StartRequest, lease_secs: float) -> None:
        if request.training != str(self.training):
            raise RefusedError("bad_request", f"this agent is of training {self.training}")
        if self.start_request is not None:
            self.happen(core.Renew(lease_secs))
            return
        program = request.program
        if program.progress is not None:
            try:
                pattern = re.compile(program.progress)
            except re.error as error:
                raise RefusedError("bad_request", f"progress: {error}") from None
            self._scanners = {n: LogScanner(pattern, log, self.progress[n]) for n, log in self.logs.items()}
        self.start_request = request
        paths = (program.module, program.script, *request.inputs.values())
        with contextlib.suppress(OSError):  # on a full disk they are merely swept when they are old
            self._write_spec(*(path for path in paths if path))
        self.happen(
            core.Start(
                exits_are_retryable=program.module is None,
                has_progress=program.module is not None or program.progress is not None,
                lease_secs=lease_secs,
            )
        )

    def _launch(self, name: str) -> None:
        if self.start_request is None:
            raise RefusedError("bad_request", "the cluster has not been started")
        if name not in self.state.tasks:
            raise RefusedError("not_found", f"{name} is not a TF task of this host")
        self.happen(core.Launch(name))

    def _acknowledge(self, ack: Any) -> None:
        if not isinstance(ack, dict):
            raise ProtocolError("ack: an object is needed")
        name = str(ack.get("task"))
        if name in self.logs:
            offset = min(integer(ack.get("offset")), self.logs[name].size())
            with contextlib.suppress(OSError):  # on a full disk some lines are told twice
                self.acknowledged.put(name, offset)

    def _follow(self, connection: Connection, message: dict[str, Any]) -> None:
        since = integer(message.get("from_seq"), 0)
        wanted, told = message.get("logs") or [], message.get("told") or {}
        if not isinstance(wanted, list) or not isinstance(told, dict):
            raise ProtocolError("logs: a list is needed, and for told an object")
        logs = {
            name: max(self.acknowledged.get(name), integer(told.get(name), 0))
            for name in map(str, wanted)
            if name in self.logs
        }
        if message.get("renew") is not None:
            self.happen(core.Renew(seconds(message["renew"])))
        history = [e for e in self.events if e["seq"] > since]
        for name, file in self.progress.items():
            if file.newest is not None:
                newest = {k: v for k, v in file.newest.to_json().items() if v is not None}
                history.append({"type": Kind.PROGRESS, "task": name, "progress": newest})
        self.followers.follow(connection, history, logs, self._is_over)

    def status(self) -> dict[str, Any]:
        tasks = []
        for name, view in self.state.tasks.items():
            row: dict[str, Any] = {"task": name, "state": view.state.value, "attempt": view.attempt}
            if view.pid is not None:
                row.update(pid=view.pid, started=self.processes.started(view.pid))
            if view.exit is not None:
                row["exit"] = view.exit.to_json()
            newest = self.progress[name].newest
            if newest is not None:
                row["progress"] = {k: v for k, v in newest.to_json().items() if v is not None}
            tasks.append(row)
        return {
            "type": "status",
            "training": str(self.training),
            "host": self.request.host,
            "state": self.state.training.value,
            "is_alive": True,
            "seq": len(self.events),
            "tasks": tasks,
            "reservation": self.reservation.to_json(),
            "lease_secs": round(self.state.lease_until - time.monotonic(), 1),
            "nursery_secs": self.processes.ready_secs,
        }


def check_names(request: ReserveRequest) -> None:
    """Raises ProtocolError for names of TF tasks, modules and variables that would fail only once something is held."""
    names = [task.name for task in request.tasks]
    if len(set(names)) < len(names):
        raise ProtocolError("the same TF task twice")
    for env in (request.env, *(task.env for task in request.tasks)):
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value or not is_text(name + value):
                raise ProtocolError(f"cannot be a variable of an environment: {name[:40]!r}")
    for module in request.preload:
        if not all(part.isidentifier() for part in module.split(".")) or not is_text(module):
            raise ProtocolError(f"not the name of a module: {module[:40]!r}")
    directory = request.checkpoint_dir
    if directory is not None and ("\0" in directory or not is_text(directory)):
        raise ProtocolError(f"not a path: {directory[:80]!r}")


def is_listening(host: str, port: int, timeout: float) -> bool:
    """Whether a TCP connection to the address is accepted within `timeout` seconds."""
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError:
        return False
    return True


def main() -> int:
    """`python … agent`: the reservation's request on standard input, its answer on standard output; then serve."""
    try:
        try:
            agent = Agent(ReserveRequest.from_json(load(sys.stdin.readline())))
        except OSError as error:
            raise refusal(error, f"{error.strerror}: {error.filename}") from error
        except ProtocolError as error:
            raise RefusedError("bad_request", str(error)) from error
    except RefusedError as error:
        print(dump(error.to_json()), flush=True)
        return 1
    print(dump(agent.reservation.to_json()), flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (agent.output, 1), (agent.output, 2)):
        os.dup2(source, target)
    os.chdir(agent.paths.directory)
    try:
        agent.run()
    except BaseException:  # noqa: BLE001  the process's outermost frame: its log must say why
        traceback.print_exc()
        return 1
    return 0 if agent.state.training is not TrainingState.FAILED else 1
