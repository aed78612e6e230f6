"""SIGTERM as a question that the training loop asks between two steps, with an answer even if it never asks.

A Python signal handler runs in the main thread between two bytecodes, which is never while TensorFlow blocks: a
session that waits for a lost ps, a synchronous step that waits for others. So a thread hears of the signal too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Callable

from tfps_runtime.protocol import EXIT_TRY_AGAIN


class StopRequestedError(Exception):
    """Raised where waiting on makes no sense because this process was asked to stop."""


class StopRequest:
    """Whether this process was asked to stop.

    `on_request`, if set, is called in a thread when the request comes: to release a main thread that waits.
    """

    def __init__(self) -> None:
        self._requested = threading.Event()
        self.on_request: Callable[[], None] | None = None

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    def wait(self, timeout_secs: float) -> bool:
        """Sleep, but not beyond a request; gives `is_requested`."""
        return self._requested.wait(timeout_secs)

    def install(self, patience_secs: float) -> None:
        """Listen to SIGTERM. Call once, in the main thread.

        A process that is still there `patience_secs` after the signal writes its stacks to stderr and exits with
        EXIT_TRY_AGAIN.
        """
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self._requested.set())
        threading.Thread(
            target=self._listen, args=(reader, patience_secs), name="tfps-stop", daemon=True
        ).start()

    def _listen(self, reader: socket.socket, patience_secs: float) -> None:
        while signal.SIGTERM not in reader.recv(64):
            pass  # other signals wake this thread too
        self._requested.set()
        _exit_after(patience_secs, lambda: f"not stopped {patience_secs:g} s after SIGTERM")
        if self.on_request is not None:
            self.on_request()


@contextlib.contextmanager
def deadline(secs: float, reason: Callable[[], str]) -> Iterator[None]:
    """End the process with EXIT_TRY_AGAIN if the block takes longer than `secs`, even if it blocks in TensorFlow.

    `reason` is then called for a line on stderr; the stacks of all threads follow.
    """
    timer = _exit_after(secs, reason)
    try:
        yield
    finally:
        timer.cancel()


def _exit_after(secs: float, reason: Callable[[], str]) -> threading.Timer:
    def leave() -> None:
        sys.stderr.write(f"giving up: {reason()}\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(EXIT_TRY_AGAIN)

    timer = threading.Timer(secs, leave)
    timer.daemon = True
    timer.start()
    return timer
