"""Commands that run on a host, one process each: they speak with the agent or look at what it left.

Standard library only. JSON on standard input, lines of JSON on standard output. Each names the training it is about
and acts on no other. All are idempotent.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Optional

from tfps_runtime.agent import is_listening
from tfps_runtime.answers import say
from tfps_runtime.followers import integer
from tfps_runtime.models import COMMANDS as MODEL_COMMANDS
from tfps_runtime.orphans import end_orphan, orphans
from tfps_runtime.preflight import preflight
from tfps_runtime.processes import runtime_argv, runtime_location
from tfps_runtime.protocol import (
    MAX_LINE,
    Kind,
    Paths,
    ProtocolError,
    RefusedError,
    Reservation,
    ReserveRequest,
    Task,
    TaskState,
    TrainingId,
    TrainingState,
    check_place,
    dump,
    load,
)
from tfps_runtime.recall import asked_for, history, known, recall
from tfps_runtime.reserve import check_run_dir, clear_lock, is_held, living, locks, read_lock, refusal
from tfps_runtime.sweep import sweep
from tfps_runtime.tails import Acknowledged, LogFile
from tfps_runtime.uploads import note_use, put
from tfps_runtime.watching import checkpoints, pin

ANSWER_SECS = 30.0
ACKNOWLEDGE_SECS = 2.0
PROBES_AT_ONCE = 32
MAX_TRAININGS = 100
"""How many one answer of `trainings` lists."""
RESERVE_SECS = 5.0
"""How long a `reserve` looks for the agent that another one is starting."""


def paths_of(request: dict[str, Any]) -> Paths:
    """The paths of the training that a request names. Raises ProtocolError."""
    try:
        training, host = TrainingId.parse(request["training"]), str(request["host"])
        return Paths(check_place(host, str(request["workdir"])), training, host)
    except (KeyError, AttributeError) as error:
        raise ProtocolError(f"the request lacks {error}") from None


# --- speaking with an agent -----------------------------------------------------------------------------------------


def reach(paths: Paths) -> Optional[socket.socket]:
    """A connection to the training's agent, or None when it is dead. Raises RefusedError(`busy`)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(ANSWER_SECS)
    until = time.monotonic() + ANSWER_SECS
    while True:
        try:
            sock.connect(paths.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        except BlockingIOError:  # more clients at once than the agent's backlog holds
            if time.monotonic() > until:
                sock.close()
                raise RefusedError(
                    "busy", f"the agent of {paths.training} does not answer", transient=True
                ) from None
            time.sleep(0.02)
        else:
            return sock


def lines_of(sock: socket.socket) -> Iterator[dict[str, Any]]:
    with sock.makefile("r", encoding="utf-8") as file:
        for line in file:
            message = load(line)
            if isinstance(message, dict):
                yield message


def ask(paths: Paths, request: dict[str, Any]) -> dict[str, Any]:
    """One request, one answer. Raises RefusedError, code `gone` when there is no agent."""
    sock = reach(paths)
    if sock is None:
        raise RefusedError("gone", f"no agent of {paths.training} lives on {paths.host}", transient=True)
    with sock:
        sock.sendall(dump(request).encode() + b"\n")
        try:
            answer = next(lines_of(sock))
        except StopIteration:
            raise RefusedError(
                "gone", f"the agent of {paths.training} ended while it was asked", transient=True
            ) from None
        except socket.timeout:
            raise RefusedError(
                "unresponsive", f"the agent of {paths.training} does not answer", transient=True
            ) from None
    if answer.get("type") == Kind.ERROR:
        raise RefusedError(answer["code"], answer["message"], transient=bool(answer.get("transient")))
    return answer


# --- the commands ---------------------------------------------------------------------------------------------------


def reserve(request: dict[str, Any]) -> None:
    """Start the training's agent, or find it alive; answers with its `Reservation`."""
    wanted = ReserveRequest.from_json(request)
    training = TrainingId.parse(wanted.training)
    paths = Paths(check_place(wanted.host, wanted.workdir), training, wanted.host)
    until = time.monotonic() + RESERVE_SECS
    while True:
        try:
            say(ask(paths, {"command": "reserve", "lease_secs": wanted.lease_secs}))
        except RefusedError:
            if (
                is_held(paths.lock) and time.monotonic() < until
            ):  # another `reserve` of the same training was faster
                time.sleep(0.05)
                continue
        else:
            return
        try:
            say(_start_agent(wanted).to_json())
        except RefusedError as error:
            if error.code != "alive" or time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def _start_agent(wanted: ReserveRequest) -> Reservation:
    """Start an agent; what it holds. Raises RefusedError with what it said instead."""
    env = dict(os.environ)
    location = runtime_location()
    note_use(location)
    if os.path.isdir(location):
        env["PYTHONPATH"] = os.pathsep.join(p for p in (location, env.get("PYTHONPATH")) if p)
    process = subprocess.Popen(
        runtime_argv("agent"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(wanted.dumps().encode() + b"\n")
    process.stdin.close()
    line = process.stdout.readline().decode("utf-8", "replace")
    if not line:
        message = process.stderr.read().decode("utf-8", "replace").strip()
        raise RefusedError("internal", f"the agent did not start: {message[-2000:]}")
    answer = load(line)
    if answer.get("type") == Kind.ERROR:
        raise RefusedError(answer["code"], answer["message"], transient=bool(answer.get("transient")))
    return Reservation.from_json(answer)


def start(request: dict[str, Any]) -> None:
    """Give the agent the cluster's addresses; it starts its TF tasks, all but the chief."""
    say(ask(paths_of(request), {"command": "start", **_only(request, "request", "lease_secs")}))


def launch(request: dict[str, Any]) -> None:
    """Start the chief; nothing happens when it was started already."""
    say(ask(paths_of(request), {"command": "launch", "task": request.get("task")}))


def dump_stacks(request: dict[str, Any]) -> None:
    """Ask every TF task of the training for its stacks; they appear in its log."""
    say(ask(paths_of(request), {"command": "dump"}))


def renew(request: dict[str, Any]) -> None:
    """Let the training's lease run for `lease_secs` from now."""
    say(ask(paths_of(request), {"command": "renew", **_only(request, "lease_secs")}))


def probe(request: dict[str, Any]) -> None:
    """Wait until every address accepts connections, or a TF task of this host has failed, or the time is over.

    Answers with what is `missing` (task -> why), with the TF tasks of this host that are `through`, having ended well:
    nobody waits for those; and, when something failed here, `failed`. Ends when nobody reads its answer any more.
    """
    paths = paths_of(request)
    until = time.monotonic() + float(request.get("timeout_secs", 0))
    missing = {str(task): str(address) for task, address in dict(request.get("addresses", {})).items()}
    failed: dict[str, Any] = {"failed": None}
    through: list[str] = []
    asked = 0.0
    from concurrent.futures import ThreadPoolExecutor  # of no use to other commands

    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:  # a packet that a firewall drops costs a second
        while True:
            accepts = list(pool.map(_accepts, missing.values()))
            missing = {t: a for (t, a), is_there in zip(missing.items(), accepts) if not is_there}
            now = time.monotonic()
            if missing and now - asked >= 0.25:
                asked = now
                found = look(paths)
                failed = _failure(paths, found)
                through = [t["task"] for t in found["tasks"] if t["state"] == TaskState.SUCCEEDED.value]
                missing = {t: a for t, a in missing.items() if t not in through}
            if not missing or failed["failed"] or now >= until or not _is_heard():
                break
            time.sleep(0.05)
    say(
        {
            "type": "probe",
            "missing": {t: f"{a} does not accept connections" for t, a in missing.items()},
            "through": through,
            **failed,
        }
    )


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return is_listening(host.strip("[]"), int(port), 1.0)


def _is_heard() -> bool:
    """Whether anybody still reads standard output: sshd closes it when the connection is gone, and kills nobody."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not poll.poll(0)


def _failure(paths: Paths, found: dict[str, Any]) -> dict[str, Any]:
    """Why the training, `found` to be so, cannot become ready on this host, if so.

    `failed`, with the `exit` and `time` of the TF task if it is one's.
    """
    if not found["is_alive"]:
        return {"failed": f"the agent on {paths.host} is gone"}
    ended = {t["task"]: t for t in recall(paths)["tasks"]}
    failed = [ended.get(t["task"], t) for t in found["tasks"] if t["state"] == TaskState.FAILED.value]
    for task in sorted(failed, key=lambda t: float(t.get("time") or "inf"))[:1]:
        name = Task.parse(task["task"])
        said = f"{name.at(paths.host)} failed: {task.get('reason') or 'the reason is not known'}"
        tail = LogFile(paths.log(name)).tail(15)
        text = "\n".join([f"{said}; the end of its log:", *tail]) if tail else said
        return {"failed": text, "exit": task.get("exit"), "time": task.get("time")}
    if found["state"] == TrainingState.FAILED.value:
        return {"failed": str(found.get("reason") or "the training failed")}
    return {"failed": None}


def status(request: dict[str, Any]) -> None:
    """How the training stands on this host, from its agent or from what that left behind."""
    say(look(paths_of(request)))


def look(paths: Paths) -> dict[str, Any]:
    """The answer of `status`."""
    try:
        found = ask(paths, {"command": "status"})
    except RefusedError as error:
        if error.code != "gone":
            raise
        return recall(paths)
    if TrainingState(found["state"]).is_final:
        recalled = recall(paths)
        found.update(reason=recalled["reason"], result=recalled["result"])
    return found


def trainings(request: dict[str, Any]) -> dict[str, Any]:
    """The trainings of this user that live on `host`, newest first; with `ended`, those as well that left a directory.

    With `key`, only its incarnations. Each as in `status`, with what was asked of it.
    """
    host, key = str(request["host"]), request.get("key")
    records = [(record.workdir, record.training) for _, record in living() if record.host == host]
    if request.get("ended"):
        workdir = check_place(host, str(request["workdir"]))
        records += [(workdir, training) for training in known(workdir, host)]
    found: dict[str, dict[str, Any]] = {}
    for workdir, name in records:
        with contextlib.suppress(ProtocolError):
            paths = Paths(workdir, TrainingId.parse(name), host)
            if name not in found and key in (None, paths.training.key):
                found[name] = {**_look_or_say(paths), **asked_for(paths)}
    newest = sorted(found.values(), key=lambda one: float(one["changed"] or 0.0), reverse=True)
    return {"type": "trainings", "host": host, "trainings": newest[:MAX_TRAININGS], "count": len(newest)}


def _look_or_say(paths: Paths) -> dict[str, Any]:
    """As `look`; an agent that does not answer is one with that as its reason."""
    try:
        return look(paths)
    except RefusedError as error:
        return {**recall(paths), "is_alive": True, "reason": str(error)}


def follow(request: dict[str, Any]) -> None:
    """Events after `from_seq`, progress and the logs of `logs`, as they come, until the training has ended here.

    `told` has the offsets up to which this follower heard logs before its connection broke, acknowledged or not.
    Lines on standard input go to the agent: `{"ack": {"task": …, "offset": …}}`, `{"renew": secs}`. Its end of file
    ends the command: the follower is gone.
    """
    paths = paths_of(request)
    seen = integer(request.get("from_seq"), 0)
    logs = [str(name) for name in request.get("logs", [])]
    offsets = {str(name): integer(offset) for name, offset in dict(request.get("told") or {}).items()}
    is_final = False
    sock = reach(paths)
    if sock is not None:
        sock.settimeout(None)
        with sock:
            first = {"command": "follow", **_only(request, "from_seq", "logs", "told", "renew")}
            sock.sendall(dump(first).encode() + b"\n")
            for line in _relay(sock):
                message = load(line.decode("utf-8", "replace"))
                seen = max(seen, integer(message.get("seq"), 0))
                if message["type"] == Kind.LOG:
                    offsets[message["task"]] = message["offset"]
                is_final = is_final or _is_end(message)
                sys.stdout.write(line.decode("utf-8", "replace") + "\n")
                sys.stdout.flush()
        if is_final:
            return
        for _ in range(200):  # the agent's end and its lock's are not one moment
            if not is_held(paths.lock):
                break
            time.sleep(0.01)
    _tell_logs(paths, logs, offsets)  # first: a follower leaves at the last event
    for event in history(paths, seen):
        is_final = is_final or _is_end(event)
        say(event)
    say({"type": Kind.CAUGHT_UP})
    if not is_final:
        say({"type": Kind.GONE, "state": recall(paths)["state"]})


def _tell_logs(paths: Paths, names: list[str], offsets: dict[str, int]) -> None:
    """In a dead agent's place: what nobody has acknowledged of its logs, and, for ACKNOWLEDGE_SECS, who does."""
    acknowledged = Acknowledged(paths.acknowledged)
    told: dict[str, int] = {}
    for name in names:
        log, offset = LogFile(paths.log(Task.parse(name))), max(acknowledged.get(name), offsets.get(name, 0))
        while offset < log.size():
            after, lines = log.read_lines(offset, is_complete=True)
            if after <= offset:
                break
            told[name] = offset = after
            say({"type": Kind.LOG, "task": name, "offset": offset, "lines": lines})
    until = time.monotonic() + ACKNOWLEDGE_SECS
    pending = b""
    while any(acknowledged.get(name) < offset for name, offset in told.items()):
        left = until - time.monotonic()
        if left <= 0 or not select.select([sys.stdin], [], [], left)[0]:
            return
        data = os.read(sys.stdin.fileno(), 65536)
        if not data:
            sys.exit(0)
        *arrived, pending = (pending + data).split(b"\n")
        for line in arrived:
            with contextlib.suppress(ProtocolError):
                message = load(line.decode("utf-8", "replace"))
                ack = message.get("ack") if isinstance(message, dict) else None
                name = str(ack.get("task")) if isinstance(ack, dict) else ""
                if isinstance(ack, dict) and name in told:
                    acknowledged.put(name, min(integer(ack.get("offset")), told[name]))


def _is_end(message: dict[str, Any]) -> bool:
    """Whether a message says that the training has been stopped on this host: nothing comes after it."""
    return message.get("last") is True


def _relay(sock: socket.socket) -> Iterator[bytes]:
    """Lines from the agent, while lines from standard input go to it; ends when either side does."""
    pending = b""
    stdin = sys.stdin.fileno()
    while True:
        readable, _, _ = select.select([sock, stdin], [], [])
        if stdin in readable:
            data = os.read(stdin, 65536)
            if not data:
                sys.exit(0)
            sock.sendall(data)
        if sock in readable:
            try:
                data = sock.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            yield from lines


def logs(request: dict[str, Any]) -> None:
    """The last `lines` lines of a TF task's log."""
    paths = paths_of(request)
    task = Task.parse(str(request.get("task")))
    log = LogFile(paths.log(task))
    say(
        {
            "type": Kind.LOG,
            "task": str(task),
            "offset": log.size(),
            "lines": log.tail(integer(request.get("lines"), 100)),
        }
    )


def stop(request: dict[str, Any]) -> None:
    """End the training here: SIGTERM, after the grace time SIGKILL; waits until nothing is left of it.

    With `training`, that one; with `key`, every incarnation of it on this machine that belongs to `host`. Answers with
    the `stopped` trainings (id -> state). Stopping what is not there is no error.
    """
    stopped: dict[str, str] = {}
    if "training" in request:
        found = [paths_of(request)]
    else:
        found = [
            Paths(record.workdir, TrainingId.parse(record.training), record.host)
            for _, record in locks()
            if TrainingId.parse(record.training).key == request.get("key")
            and record.host == request.get("host")
        ]
    for paths in found:
        stopped[str(paths.training)] = _stop(paths, request)
    say({"type": "stopped", "stopped": stopped})


def _stop(paths: Paths, request: dict[str, Any]) -> str:
    sock = reach(paths)
    if sock is None and not is_held(paths.lock):
        if os.path.exists(paths.lock):
            clear_lock(paths.lock)
        for pid in orphans(str(paths.training)):
            end_orphan(pid)
        return str(recall(paths)["state"])
    if sock is not None:
        with sock:
            sock.settimeout(float(request.get("timeout_secs", 120.0)))
            first = {"command": "stop", **_only(request, "reason", "grace_secs")}
            with contextlib.suppress(OSError):
                sock.sendall(dump(first).encode() + b"\n")
                for _ in lines_of(sock):
                    pass
    for _ in range(500):
        if not is_held(paths.lock):
            return str(recall(paths)["state"])
        time.sleep(0.01)
    record = read_lock(paths.lock)
    raise RefusedError(
        "unresponsive",
        f"the agent of {paths.training} (pid {record and record.pid}) does not end",
        transient=True,
    )


def _only(request: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: request[name] for name in names if request.get(name) is not None}


COMMANDS: dict[str, Callable[[dict[str, Any]], Optional[dict[str, Any]]]] = {
    "preflight": preflight,
    "reserve": reserve,
    "start": start,
    "launch": launch,
    "renew": renew,
    "probe": probe,
    "status": status,
    "trainings": trainings,
    "follow": follow,
    "logs": logs,
    "dump": dump_stacks,
    "stop": stop,
    "release": stop,
    "checkpoints": checkpoints,
    "pin": pin,
    "sweep": sweep,
    **MODEL_COMMANDS,
}


def main(name: str) -> int:
    """Run one command; what it refuses is an `error` line and exit code 1."""
    if name != "reserve":  # whose agent gives its TF tasks the login's own
        os.umask(0o077)
    try:
        request = load(_first_line() or "{}")
        if not isinstance(request, dict):
            raise ProtocolError("an object is needed on standard input")
        if name != "preflight":  # which has it among its faults
            check_run_dir()
        if name == "put":
            say(put(request, sys.stdin.buffer))
        else:
            answer = COMMANDS[name](request)
            if answer is not None:
                say(answer)
    except RefusedError as error:
        say(error.to_json())
        return 1
    except (ProtocolError, KeyError, TypeError, ValueError) as error:
        say(RefusedError("bad_request", f"{name}: {type(error).__name__}: {error}").to_json())
        return 1
    except BrokenPipeError:  # nobody listens any more
        return 1
    except OSError as error:
        say(refusal(error, f"{name}: {error}").to_json())
        return 1
    return 0


def _first_line() -> str:
    """One line of standard input and not a byte more: what follows is read by descriptor."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= MAX_LINE:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line.decode("utf-8", "replace")
