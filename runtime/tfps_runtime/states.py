"""The states of a TF task and of a training on one host, and which may follow which.

Imports nothing of the project. The graphs in `docs/states.md` are checked against these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class TaskState(str, Enum):
    """State of one TF task, as its agent sees it.

    PENDING   -> STARTING   launched
    STARTING  -> RUNNING    its port listens (a task without a port: its process lives)
    STARTING, RUNNING -> SUCCEEDED  exit 0
    STARTING, RUNNING -> BACKOFF    ended otherwise, restarts left
    STARTING, RUNNING -> FAILED     ended otherwise, no restarts left or the exit is final
    BACKOFF   -> STARTING   the back-off is over
    STARTING, RUNNING -> STOPPING   asked to end: SIGTERM sent, SIGKILL after the grace time
    PENDING, BACKOFF, STOPPING -> STOPPED
    any but final -> LOST   its agent is gone (said by an observer)
    """

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    BACKOFF = "BACKOFF"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    LOST = "LOST"

    @property
    def is_final(self) -> bool:
        return self in _FINAL_TASK

    @property
    def is_alive(self) -> bool:
        """Whether a process belongs to the task."""
        return self in (TaskState.STARTING, TaskState.RUNNING, TaskState.STOPPING)


_FINAL_TASK = frozenset({TaskState.SUCCEEDED, TaskState.FAILED, TaskState.STOPPED, TaskState.LOST})


class TrainingState(str, Enum):
    """State of a training on one host, as its agent sees it.

    RESERVED -> STARTING   the cluster's addresses are known; ps and workers are being started
    STARTING -> READY      every started TF task of this host listens
    READY    -> RUNNING    a TF task of this host reported progress, or the chief runs here
    RUNNING  -> SUCCEEDED  the chief, running here, succeeded (its host only)
    RESERVED, STARTING, READY, RUNNING -> FAILED   a TF task of this host failed for good
    any but STOPPED, EXPIRED -> STOPPING -> the state that the end was decided with:
        SUCCEEDED, FAILED  as before the stop
        STOPPED            asked to stop before it had ended by itself
        EXPIRED            nobody renewed the lease
    """

    RESERVED = "RESERVED"
    STARTING = "STARTING"
    READY = "READY"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    EXPIRED = "EXPIRED"

    @property
    def is_final(self) -> bool:
        return self in _FINAL_TRAINING


_FINAL_TRAINING = frozenset(
    {TrainingState.SUCCEEDED, TrainingState.FAILED, TrainingState.STOPPED, TrainingState.EXPIRED}
)

_T = TaskState
TASK_TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = {
    _T.PENDING: frozenset({_T.STARTING, _T.STOPPED, _T.LOST}),
    _T.STARTING: frozenset(
        {_T.RUNNING, _T.STOPPING, _T.BACKOFF, _T.SUCCEEDED, _T.FAILED, _T.STOPPED, _T.LOST}
    ),
    _T.RUNNING: frozenset({_T.STOPPING, _T.BACKOFF, _T.SUCCEEDED, _T.FAILED, _T.STOPPED, _T.LOST}),
    _T.STOPPING: frozenset({_T.STOPPED, _T.LOST}),
    _T.BACKOFF: frozenset({_T.STARTING, _T.STOPPED, _T.LOST}),
    _T.SUCCEEDED: frozenset(),
    _T.FAILED: frozenset(),
    _T.STOPPED: frozenset(),
    _T.LOST: frozenset(),
}

_R = TrainingState
TRAINING_TRANSITIONS: Mapping[TrainingState, frozenset[TrainingState]] = {
    _R.RESERVED: frozenset({_R.STARTING, _R.FAILED, _R.STOPPING}),
    _R.STARTING: frozenset({_R.READY, _R.RUNNING, _R.SUCCEEDED, _R.FAILED, _R.STOPPING}),
    _R.READY: frozenset({_R.RUNNING, _R.SUCCEEDED, _R.FAILED, _R.STOPPING}),
    _R.RUNNING: frozenset({_R.SUCCEEDED, _R.FAILED, _R.STOPPING}),
    _R.STOPPING: frozenset({_R.SUCCEEDED, _R.FAILED, _R.STOPPED, _R.EXPIRED}),
    _R.SUCCEEDED: frozenset({_R.STOPPING}),
    _R.FAILED: frozenset({_R.STOPPING}),
    _R.STOPPED: frozenset(),
    _R.EXPIRED: frozenset(),
}
