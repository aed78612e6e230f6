"""The demo's home: one demo at a time, and nothing of it remains.

    with alone(home):
        tidy(home)                          # of a demo that was killed
        ...
        assert not tidy(home)               # of this one

Everything that a demo starts has a path of its home in its environment, and is found by that in /proc; its trainings
are found by their locks. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfps_runtime.protocol import LockRecord, ProtocolError, run_dir

from airflow_tfps.demo.api import wait
from airflow_tfps.demo.processes import describe, open_ports, processes
from airflow_tfps.errors import TfpsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

HOME_VARIABLE = "TFPS_DEMO_HOME"
"""In the environment of the process that serves the SSH hosts."""
GRACE_SECS = 5.0
COMMAND_SECS = 60.0
LOCK = "lock"


class DemoError(TfpsError):
    """The demo cannot go on; the message says why and what to do."""


@contextlib.contextmanager
def alone(home: Path) -> Iterator[None]:
    """Hold the home, made if need be. Raises DemoError when another demo does."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            pid = lock.read().strip()
            raise DemoError(
                f"another demo runs in {home}: end it first, with Ctrl-C or `kill {pid}`, or say --home"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def empty(home: Path) -> None:
    """Remove everything in it but its lock."""
    for entry in home.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def tidy(home: Path, *, ports: Collection[int] = (), strangers: Collection[int] = ()) -> list[str]:
    """End servers and trainings of this home, whoever started them; returns what remains, for people. Blocks.

    Args:
        home: As an absolute path.
        ports: That were open and must not be.
        strangers: Processes that only happen to have the path in their environment, as a shell has in OLDPWD.
    """
    for mark in (f"{HOME_VARIABLE}={home}\0", f"AIRFLOW_HOME={home}/"):
        _kill(mark)
    for record in _trainings(home):
        request = {"training": record.training, "host": record.host, "workdir": record.workdir}
        runtime("stop", {**request, "reason": "the demo ends", "grace_secs": GRACE_SECS})
    users = f"HOME={home}/"  # what the hosts run for us lives in their home directories
    with contextlib.suppress(TimeoutError):
        wait(lambda: not processes(users), GRACE_SECS, "the hosts' commands")
    _kill(users)
    if _trainings(home):
        runtime("sweep", {})
    left = [describe(pid) for pid in processes(str(home)) if pid not in strangers]
    left += [f"port {port} is still open" for port in sorted(set(ports) & open_ports())]
    left += [f"the lock of {record.training} on {record.host}" for record in _trainings(home)]
    return left


def runtime(command: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Call the on-host runtime here, on the machine of all demo hosts; its last answer, empty if it gave none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tfps_runtime", command],
            input=json.dumps(request).encode() + b"\n",
            capture_output=True,
            check=False,
            timeout=COMMAND_SECS,
        )
    except subprocess.TimeoutExpired:
        return {}
    lines = done.stdout.splitlines()
    return dict(json.loads(lines[-1])) if lines else {}


def _kill(mark: str) -> None:
    """SIGKILL to every process that has `mark` in its environment, and wait for their ends."""
    for pid in processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        wait(lambda: not processes(mark), GRACE_SECS, "processes to end")


def _trainings(home: Path) -> list[LockRecord]:
    """The locks of trainings whose hosts live below `home`."""
    found = []
    for path in Path(run_dir()).glob("*.lock"):
        with contextlib.suppress(OSError, ProtocolError):
            record = LockRecord.loads(path.read_text("utf-8"))
            if Path(record.workdir).is_relative_to(home):
                found.append(record)
    return found
