"""What becomes of a process that is to be a TF task: forked from the nursery, or started anew.

Standard library only; TensorFlow enters with the program. `become` runs in the child, before any of the program's code:
parent-death signal, own session, log on fd 1 and 2, environment, seeds; then the program as `__main__`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import hashlib
import importlib
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Optional

from tfps_runtime.failure import report
from tfps_runtime.protocol import Message, Program

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

PROXY_VARIABLES = frozenset(
    name
    for lower in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    for name in (lower, lower.upper())
)
"""gRPC would send the cluster's own traffic into these."""


@dataclass(frozen=True)
class Launch(Message):
    """One process to be: everything `become` needs. Crosses a socket as JSON; secrets are in `env`."""

    task: str
    log: str
    directory: str
    program: Program
    argv: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    seed: Optional[str] = None
    compat: Optional[str] = None


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends; leave at once if it has ended already."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def clean_environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment without proxies, with `extra`, and with what TensorFlow's server needs."""
    env = {k: v for k, v in os.environ.items() if k not in PROXY_VARIABLES}
    env.update(
        {
            "PYTHONUNBUFFERED": "1",
            "TF_GRPC_REUSE_PORT": "true",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
    )
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    env.update(extra)
    return env


LAUNCH_VARIABLE = "TFPS_LAUNCH"


def without_environment(launch: Launch) -> str:
    """The launch as a spawned task reads it from LAUNCH_VARIABLE; its `env` is the process's own already."""
    return replace(launch, env={}).dumps()


def enter(launch: Launch, parent: int, inherited: Sequence[int] = ()) -> None:
    """The part of becoming a TF task that holds for every kind of program; closes the `inherited` descriptors."""
    die_with_parent(parent)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # Whoever shows its stacks on it says so later; until then, and in a command, it must not be deadly.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(launch.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for fd in (null, log, *inherited):
        if fd > 2:
            os.close(fd)
    os.makedirs(launch.directory, 0o700, exist_ok=True)  # somebody may have taken a checkpoint directory away
    os.chdir(launch.directory)


def become(launch: Launch, parent: int, inherited: Sequence[int]) -> None:
    """Turn this freshly forked process into the TF task; never returns."""
    code = 1
    try:
        enter(launch, parent, inherited)
        os.environ.update(launch.env)
        buffer_lines()
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        reseed(launch.seed)
        code = run_program(launch)
    except BaseException:  # noqa: BLE001  the process's outermost frame
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def buffer_lines() -> None:
    """Let the C library write whole lines, too: TensorFlow prints device placements with `printf`.

    Into a file it would keep 4 KiB to itself, and a killed task, or one that leaves by `os._exit`, would lose them.
    """
    libc = ctypes.CDLL(None)
    stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    libc.setvbuf(stdout, None, 1, ctypes.c_size_t(0))  # 1: _IOLBF


def reseed(seed: Optional[str]) -> None:
    """Give this process random numbers of its own: forks share the generators' state of their nursery.

    With a seed they are the same in every run for the same task and attempt, else taken from the system; then NumPy,
    if it is not here yet, seeds itself when it comes.
    """
    data = os.urandom(32) if seed is None else hashlib.sha256(seed.encode()).digest()
    random.seed(data)
    if seed is not None:
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy.random")
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(data[:4], "little"))


def run_program(launch: Launch) -> int:
    """Run the program as `__main__` and end as an interpreter would; returns the exit code."""
    program = launch.program
    try:
        if program.module is not None:
            from tfps_runtime import training

            sys.argv = [program.module]
            return int(training.main())
        assert program.script is not None
        if launch.compat == "tf1":
            from tfps_runtime.training import compat

            compat.install()
        sys.argv = [program.script, *launch.argv]
        sys.path.insert(0, os.path.dirname(program.script))
        runpy.run_path(program.script, run_name="__main__")
    except SystemExit as stop:
        return _exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001  reported as the interpreter does
        report(error)
        return 1
    finally:
        _wind_up()
    return 0


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _wind_up() -> None:
    """What an interpreter does at its end and `os._exit` does not: join threads, run exit functions.

    Joining alone would wait for ever for the threads of an executor that nobody has shut down.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  as multiprocessing does
    atexit._run_exitfuncs()  # noqa: SLF001  the interpreter's own way; the fork leaves by os._exit


def main() -> NoReturn:
    """A spawned task (`python … task`); `enter` has run between fork and exec."""
    launch = Launch.loads(os.environ.pop(LAUNCH_VARIABLE))
    buffer_lines()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    reseed(launch.seed)
    code = run_program(launch)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # as the forked ones: a TensorFlow server has no clean end
