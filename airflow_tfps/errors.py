"""Errors of the package, one tree.

Imports nothing. A message says what is wrong, where, and what to do next. `transient` tells whether trying again
can help: operators turn transient errors into a failed try and all others into a failed task without retries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class TfpsError(Exception):
    """Root of every error that this package raises on purpose."""

    transient = False


class SpecError(TfpsError):
    """A job, an inventory or a plan is wrong; nothing was touched.

    `faults` holds every fault found, each as `path.in.the.yaml: what is wrong and what to write instead`.
    """

    def __init__(self, what: str, faults: Sequence[str]) -> None:
        self.what = what
        self.faults = tuple(faults)
        super().__init__(f"{what} is not valid:\n" + "\n".join(f"  - {fault}" for fault in self.faults))


class HostError(TfpsError):
    """Something about one host; `host` is its name in the inventory."""

    def __init__(self, host: str, message: str) -> None:
        self.host = host
        super().__init__(f"{host}: {message}")


class HostUnreachableError(HostError):
    """No connection could be made, or an existing one was lost before the remote side had answered."""

    transient = True


class HostKeyError(HostError):
    """The host's key is unknown or has changed; nothing was sent to it."""


class AuthenticationError(HostError):
    """The host refused the connection's user, key or password."""


class HostNotReadyError(HostError):
    """The host lacks something: Python, a writable workdir, an importable module."""


class CommandError(HostError):
    """A command on a host failed and said why."""

    def __init__(self, host: str, message: str, *, code: str = "error", transient: bool = False) -> None:
        super().__init__(host, message)
        self.code = code
        self.transient = transient


class BusyError(TfpsError):
    """Ports or GPUs that the plan needs are held by others right now; nothing is held."""

    transient = True


class NotReadyError(TfpsError):
    """The cluster did not become ready; names the TF tasks that are missing, and why.

    Final when a TF task has ended in a way that says the program is wrong.
    """

    def __init__(self, message: str, *, transient: bool = True) -> None:
        super().__init__(message)
        self.transient = transient


class TrainingFailedError(TfpsError):
    """The training failed; names the first failing TF task, its exit and the tail of its log."""

    def __init__(self, message: str, *, transient: bool = True) -> None:
        super().__init__(message)
        self.transient = transient
