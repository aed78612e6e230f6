"""A host of a test's own for the agent's tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agents import Host, Training, wait_until


@pytest.fixture
def host(tmp_path) -> Iterator[Host]:
    """A host of its own; afterwards no process, socket, lock or port of it may be left."""
    one = Host(tmp_path)
    yield one
    for training in one.trainings:
        training.stop(grace_secs=0)
    try:
        wait_until(lambda: not one.marked(), "every process is gone", 5.0)
    except AssertionError:
        left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in one.marked()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"left behind: {left}") from None
    assert [left for training in one.trainings for left in training.left()] == []


@pytest.fixture
def training(host) -> Training:
    return host.training()
