"""Processes that outlived their agent, and how it is known that they are ours.

Standard library only. When an agent is killed, the kernel ends its TF tasks with it, but not what those have started.
Whatever an agent starts carries a mark in its environment, which names the agent for good: its PID namespace, pid and
start time. A process of this user with the mark of an agent that is no more is left over.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import Optional

AGENT_VARIABLE = "TFPS_AGENT"
"""In the environment of everything an agent starts: `<PID namespace>:<pid>:<start time>` of the agent."""

TRAINING_VARIABLE = "TFPS_TRAINING"
"""Beside it: the id of the training that the agent is for."""

_MARK = re.compile(rb"\0" + AGENT_VARIABLE.encode() + rb"=([0-9]{1,20}):([0-9]{1,10}):([0-9]{1,20})\0")
_DEAD = (b"Z", b"X")


def start_time(pid: int) -> Optional[int]:
    """When the process started (clock ticks since boot); with its pid it names a process for good."""
    found = _stat(pid)
    return None if found is None else found[1]


def _stat(pid: int) -> Optional[tuple[bytes, int]]:
    """State and start time of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
            return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def agent_mark(pid: int) -> str:
    """The mark of the agent with this pid, in this PID namespace."""
    return f"{_namespace()}:{pid}:{start_time(pid)}"


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _environment(pid: int) -> bytes:
    """What a process was started with, each variable between zero bytes; empty when it is not ours to read."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return b""
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + file.read() + b"\0"
    except OSError:
        return b""


def _is_orphan(pid: int, namespace: int, training: Optional[str]) -> bool:
    environment = _environment(pid)
    mark = _MARK.search(environment)
    if mark is None or int(mark[1]) != namespace:  # of another container the agent cannot be seen from here
        return False
    if (
        training is not None
        and b"\0%s=%s\0"
        % (
            TRAINING_VARIABLE.encode(),
            os.fsencode(training),
        )
        not in environment
    ):
        return False
    agent = _stat(int(mark[2]))
    return agent is None or agent[1] != int(mark[3]) or agent[0] in _DEAD


def orphans(training: Optional[str] = None) -> list[int]:
    """Living processes of this user whose agent is dead, of one training or of all; looks at all of /proc."""
    me, namespace = os.getpid(), _namespace()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != me and _is_orphan(int(name), namespace, training):
            state = _stat(int(name))
            if state is not None and state[0] not in _DEAD:
                found.append(int(name))
    return sorted(found)


def describe(pid: int) -> str:
    """A process in words: its pid and the beginning of its command line."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read(400).replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return f"{pid} ({words[:100]})"
    return str(pid)


def end_orphan(pid: int) -> bool:
    """SIGKILL to a process if it is an orphan still; whether it was sent. Safe against pids that are given anew."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):  # gone; or a kernel before 5.3, a C library that does not know the call
        handle = -1
    try:
        if not _is_orphan(pid, _namespace(), None):
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True
