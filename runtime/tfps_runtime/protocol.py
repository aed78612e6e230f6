"""Words that both sides share: states, names, paths, requests and messages.

Imports the standard library only; `airflow_tfps` imports it too. Nothing here does I/O. Names, paths on a host and the
wire format are written here and nowhere else; the states stand in `states`, JSON's form in `message`.

    training = TrainingId(key=training_key("nightly", "manual__1", "training"), incarnation="0a1b2c3d")
    paths = Paths(workdir="/home/u/.tfps", training=training, host="gpu-a", uid=1000)
    paths.log(Task("ps", 0))        # /home/u/.tfps/trainings/<slug>-<digest>/gpu-a/tasks/ps-0/log
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from tfps_runtime.message import (
    MAX_DEPTH as MAX_DEPTH,
    MAX_LINE as MAX_LINE,
    Message as Message,
    ProtocolError as ProtocolError,
    check as check,
    dump as dump,
    load as load,
)
from tfps_runtime.states import (
    TASK_TRANSITIONS as TASK_TRANSITIONS,
    TRAINING_TRANSITIONS as TRAINING_TRANSITIONS,
    TaskState as TaskState,
    TrainingState as TrainingState,
)

VERSION = 1
"""Of the wire format, the handle and every file below a training's directory. One version back is read."""

EXIT_TRY_AGAIN = 75
"""A harness program's "try again" (EX_TEMPFAIL of sysexits.h)."""

LOCAL = "local"
"""The name of the connection to this very machine, without SSH."""


# --- names ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Task:
    """A TF task: role (TensorFlow's job name) and index; written `ps:0`, on a host `ps:0@gpu-a`."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}:{self.index}"

    @property
    def is_needed(self) -> bool:
        """Whether no training can do without it, whatever the mode; beside the chief.

        A ps; and a role with a name of its own, since nobody but the program knows what the others want of it.
        """
        return self.role not in ("chief", "worker", "evaluator")

    def at(self, host: str) -> str:
        return f"{self}@{host}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read `ps:0`. Raises ProtocolError."""
        match = _TASK.match(text) if isinstance(text, str) else None
        if match is None:
            raise ProtocolError(f"not a TF task: {str(text)[:80]!r} (written role:index, like ps:0)")
        return cls(match[1], int(match[2]))


ROLE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TASK = re.compile(r"([a-z][a-z0-9_]{0,31}):(0|[1-9][0-9]{0,5})\Z")
_INCARNATION = re.compile(r"[0-9a-f]{8}\Z")
_NOT_IN_KEY = re.compile("[#\n\0\ud800-\udfff]")
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


def training_key(dag_id: str, run_id: str, group_id: str, map_index: int = -1) -> str:
    """The key of a training: what it is for, the same over retries and clears."""
    parts = [dag_id, run_id, group_id or "-"]
    if map_index >= 0:
        parts.append(str(map_index))
    return "/".join(parts)


def parse_key(key: str) -> Optional[tuple[str, str, str, int]]:
    """DAG, run, group (`-`: none) and map index (-1: none) of a training's key; None if that cannot be told."""
    parts = key.split("/")
    if len(parts) == 3:
        return parts[0], parts[1], parts[2], -1
    if len(parts) == 4 and parts[3].isdecimal():
        return parts[0], parts[1], parts[2], int(parts[3])
    return None


def slug(text: str) -> str:
    """At most 40 letters, digits, `.`, `_`, `-` of `text`, for people who look at a directory."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:40].rstrip("-.") or "training"


def digest(*parts: str) -> str:
    """12 hex digits that tell `parts` apart from any others."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:12]


def key_directory(key: str) -> str:
    """Name of the directory that belongs to a key: readable and unique."""
    return f"{slug(key)}-{digest(key)}"


@dataclass(frozen=True)
class TrainingId:
    """A training: its key, and an incarnation (8 hex digits) for each start from nothing."""

    key: str
    incarnation: str

    def __post_init__(self) -> None:
        if not self.key or len(self.key) > 1000 or _NOT_IN_KEY.search(self.key):
            raise ProtocolError(
                f"not a training key: {self.key[:80]!r} (at most 1000 characters, no line breaks, no #)"
            )
        if not _INCARNATION.match(self.incarnation):
            raise ProtocolError(f"not an incarnation (8 hex digits): {self.incarnation[:80]!r}")

    def __str__(self) -> str:
        return f"{self.key}#{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> TrainingId:
        """Read `key#incarnation`. Raises ProtocolError."""
        if not isinstance(text, str):
            raise ProtocolError(f"not a training: {str(text)[:80]!r} (written key#incarnation)")
        key, _, incarnation = text.rpartition("#")
        return cls(key, incarnation)


def check_place(host: str, workdir: str) -> str:
    """The workdir with `~` replaced, of a request for `host`: both become parts of paths. Raises ProtocolError."""
    if not _HOST_NAME.match(host):
        raise ProtocolError(f"not the name of a host: {host[:80]!r}")
    path = os.path.expanduser(workdir)
    if not os.path.isabs(path) or "\0" in path or not is_text(path):
        raise ProtocolError(f"not an absolute path: {workdir[:80]!r}")
    return path


def is_text(value: str) -> bool:
    """Whether a string out of JSON can be written down: it may hold halves of characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- places on a host ---------------------------------------------------------------------------------------------


def run_dir(uid: Optional[int] = None) -> str:
    """Host-local directory for locks and sockets: never on a network file system, survives no reinstall."""
    return f"/var/tmp/tfps-{os.getuid() if uid is None else uid}"  # noqa: S108 (mode 0700, owner checked by its user)


def machine_path(uid: Optional[int] = None) -> str:
    """Holds the name by which owner files call this machine."""
    return os.path.join(run_dir(uid), "machine")


@dataclass(frozen=True)
class Paths:
    """Every path of one training on one host.

    `workdir` is durable and may be shared by several hosts; locks and sockets are host-local. Several named hosts
    may live on one machine (tests, the demo), so the host's name is part of the lock's name.
    """

    workdir: str
    training: TrainingId
    host: str
    uid: Optional[int] = None

    @property
    def directory(self) -> str:
        name = f"{slug(self.training.key)}-{digest(str(self.training))}"
        return os.path.join(self.workdir, "trainings", name, self.host)

    @property
    def spec(self) -> str:
        """The reservation as it was asked for and granted; no secrets."""
        return os.path.join(self.directory, "spec.json")

    @property
    def events(self) -> str:
        return os.path.join(self.directory, "events.jsonl")

    @property
    def acknowledged(self) -> str:
        """Log offsets that a follower acknowledged."""
        return os.path.join(self.directory, "acknowledged.json")

    @property
    def agent_log(self) -> str:
        return os.path.join(self.directory, "agent.log")

    def task_dir(self, task: Task) -> str:
        return os.path.join(self.directory, "tasks", f"{task.role}-{task.index}")

    def log(self, task: Task) -> str:
        """What the TF task wrote to its standard output and error."""
        return os.path.join(self.task_dir(task), "log")

    def progress(self, task: Task) -> str:
        """JSON lines, see `Progress`."""
        return os.path.join(self.task_dir(task), "progress.jsonl")

    def result(self, task: Task) -> str:
        """One JSON object, see `Result`; written by the chief when training has ended."""
        return os.path.join(self.task_dir(task), "result.json")

    def context(self, task: Task) -> str:
        """What a harness program is told, see `TaskContext`."""
        return os.path.join(self.task_dir(task), "context.json")

    @property
    def _local(self) -> str:
        return os.path.join(run_dir(self.uid), digest(str(self.training), self.host))

    @property
    def socket(self) -> str:
        return self._local + ".sock"

    @property
    def lock(self) -> str:
        """Held (flock) by the agent for as long as it lives; holds a `LockRecord`."""
        return self._local + ".lock"


def blob_path(workdir: str, content_hash: str, name: str) -> str:
    """Where a program or an input lies on a host: its content's hash, then a name of its own."""
    return os.path.join(workdir, "blobs", content_hash, name)


def runtime_path(workdir: str, content_hash: str) -> str:
    return os.path.join(workdir, "bin", f"tfps-{content_hash}.pyz")


OWNER_FILE = ".tfps-owner"
"""In a checkpoint directory: which training writes it (`Owner`)."""


# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exit(Message):
    """How a process ended: exactly one of the two is set."""

    code: Optional[int] = None
    signal: Optional[int] = None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        return f"exit code {self.code}"


@dataclass(frozen=True)
class TaskSpec(Message):
    """A TF task as the plan wants it on this host."""

    task: str
    gpus: int = 0
    restarts: int = 0
    has_port: bool = True
    is_chief: bool = False
    warm: bool = True
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> Task:
        return Task.parse(self.task)


@dataclass(frozen=True)
class ReserveRequest(Message):
    """Hold ports and GPUs on this host for a training, and start importing `preload`."""

    training: str
    host: str
    workdir: str
    tasks: tuple[TaskSpec, ...]
    ports: tuple[int, ...] = (20000, 29999)
    preload: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    compat: Optional[str] = None
    checkpoint_dir: Optional[str] = None
    """Where the chief of this host will write; its owner is checked. None on other hosts."""
    checkpoint_dir_is_fixed: bool = False
    lease_secs: float = 120.0
    grace_secs: float = 30.0
    stall_secs: float = 600.0
    seed: Optional[int] = None


@dataclass(frozen=True)
class Reservation(Message):
    """What a host holds for a training."""

    training: str
    host: str
    ports: dict[str, int] = field(default_factory=dict)
    gpus: dict[str, list[int]] = field(default_factory=dict)
    workdir: str = ""
    checkpoint_dir: Optional[str] = None
    state: TrainingState = TrainingState.RESERVED
    version: int = VERSION


@dataclass(frozen=True)
class CheckpointOptions(Message):
    """How the harness saves. `directory` is on the chief's host."""

    directory: str
    save_checkpoint_secs: float = 60.0
    save_summaries_secs: float = 60.0
    max_to_keep: int = 5
    sharded: bool = False


@dataclass(frozen=True)
class TaskContext(Message):
    """What a harness program is told about itself (a file; its path is in the environment as TFPS_CONTEXT)."""

    task: str
    host: str
    cluster: dict[str, list[str]]
    chief: str
    program: str
    checkpoint: CheckpointOptions
    progress_path: str
    result_path: str
    mode: str = "async"
    replication: str = "between_graph"
    replicas_to_aggregate: Optional[int] = None
    steps: Optional[int] = None
    hparams: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    start_from: Optional[str] = None
    seed: Optional[int] = None
    grace_secs: float = 30.0
    attempt: int = 0

    @property
    def name(self) -> Task:
        return Task.parse(self.task)

    @property
    def is_chief(self) -> bool:
        return self.task == self.chief


CONTEXT_VARIABLE = "TFPS_CONTEXT"


@dataclass(frozen=True)
class Program(Message):
    """What the TF tasks of a host run: exactly one of `module` (harness), `script` (as __main__), `command`."""

    module: Optional[str] = None
    script: Optional[str] = None
    command: Optional[tuple[str, ...]] = None
    args: tuple[str, ...] = ()
    progress: Optional[str] = None
    """Regular expression with groups `step` and, if it likes, `loss`, matched against each log line of a script."""


@dataclass(frozen=True)
class StartRequest(Message):
    """The cluster's addresses are known: start this host's TF tasks, all but the chief."""

    training: str
    cluster: dict[str, list[str]]
    chief: str
    program: Program
    checkpoint: CheckpointOptions
    mode: str = "async"
    replication: str = "between_graph"
    replicas_to_aggregate: Optional[int] = None
    steps: Optional[int] = None
    hparams: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    start_from: Optional[str] = None
    secrets: dict[str, str] = field(default_factory=dict)
    """Reach the TF tasks' environment and nothing else: never a file, an event or a log."""


TRAINING_DAYS = 14.0
"""How long the events and logs of a training that is over are kept, after the last of them was written."""
UNUSED_DAYS = 14.0
"""How long a program, an input or a runtime is kept after it was last asked for."""
UPLOAD_HOURS = 6.0
"""An upload that has not grown for so long has broken off."""
SWEEP_SECS = 30.0
"""How long a sweep takes at most, about; what it did not get to is the next one's."""


@dataclass(frozen=True)
class SweepRequest(Message):
    """Remove what dead trainings left. Without `workdir` and `host`, only what is not below a workdir."""

    workdir: Optional[str] = None
    host: Optional[str] = None
    training_days: float = TRAINING_DAYS
    unused_days: float = UNUSED_DAYS
    upload_hours: float = UPLOAD_HOURS
    max_secs: float = SWEEP_SECS
    dry_run: bool = False
    """Only say what would be removed."""


@dataclass(frozen=True)
class LockRecord(Message):
    """What stands in an agent's lock file."""

    training: str
    host: str
    workdir: str
    pid: int
    version: int = VERSION


@dataclass(frozen=True)
class Owner(Message):
    """What stands in a checkpoint directory's owner file."""

    training: str
    host: str
    lock: str
    finished: bool = False
    """The training has ended well: the next one does not continue in this directory."""
    machine: str = ""
    """Whose lock that is: other machines, on a shared file system, cannot ask it."""
    until: float = 0.0
    """Seconds since the epoch: by then its lease has run out, unless this file says otherwise."""
    ended: bool = False
    """Its agent has ended in order: nobody writes there."""
    version: int = VERSION


@dataclass(frozen=True)
class Progress(Message):
    """One line of a progress file. Times are seconds since the epoch; rates are per second of wall time."""

    time: float
    global_step: int
    loss: Optional[float] = None
    local_step: Optional[int] = None
    steps_per_sec: Optional[float] = None
    """Global steps."""
    examples_per_sec: Optional[float] = None
    """Of this worker."""
    waiting_secs: Optional[float] = None
    """Since the previous record, spent waiting for tokens, input or a session."""


@dataclass(frozen=True)
class Result(Message):
    """What the chief leaves when training has ended."""

    global_step: int
    checkpoint: Optional[str] = None
    """Prefix of the last complete checkpoint, e.g. /data/ckpt/x/model.ckpt-10000."""
    metrics: dict[str, float] = field(default_factory=dict)


# --- what an agent tells ----------------------------------------------------------------------------------------------
#
# Lines of JSON, `{"type": ...}`. Those with a `seq` are in events.jsonl and come once, in order, from any seq on:
#   task      task, state, attempt; pid and started when alive; exit and reason when it ended
#   training  state, reason; last: true on the last line that an agent writes
#   result    task, result (see Result)
# Those without are for the moment:
#   progress  task, progress (see Progress): the newest only
#   log       task, offset (bytes, after the last line), lines
#   caught_up the history has been sent
#   beat      every few seconds, so that silence means a lost link
#   gone      the agent is dead and had not ended the training: every task that was not final is LOST
#   error     code, message, transient: the answer to a request that was refused


class Kind:
    """Values of a message's `type`."""

    TASK = "task"
    TRAINING = "training"
    RESULT = "result"
    PROGRESS = "progress"
    LOG = "log"
    CAUGHT_UP = "caught_up"
    BEAT = "beat"
    GONE = "gone"
    ERROR = "error"


BEAT_SECS = 5.0
"""An agent says something to each follower at least this often."""


def error_message(code: str, message: str, *, transient: bool = False) -> dict[str, Any]:
    return {"type": Kind.ERROR, "code": code, "message": message, "transient": transient}


class RefusedError(Exception):
    """A command on a host cannot do what was asked; becomes an `error` message.

    Codes: busy, unresponsive, workdir, not_found, bad_request, gone, alive, gpu, checkpoint_owned, internal.
    """

    def __init__(self, code: str, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.transient = transient

    def to_json(self) -> dict[str, Any]:
        return error_message(self.code, str(self), transient=self.transient)


def parse_tasks(names: Sequence[str]) -> list[Task]:
    return [Task.parse(name) for name in names]
