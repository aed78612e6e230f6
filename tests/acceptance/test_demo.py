"""`make demo`, as a person at a terminal and as a script see it: the result, a failure, Ctrl-C; nothing remains.

The demo runs as a process in a home of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_tfps.demo.processes import leftovers, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.live, pytest.mark.tensorflow]

RUN_SECS = 400
STOP_SECS = 90
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Running:
    """A demo that runs; what it prints is gathered, on a terminal or on a pipe."""

    def __init__(self, home: Path, *arguments: str, on_terminal: bool = False) -> None:
        self.home = home
        self.out = home / "result.json"
        self._text = b""
        argv = [
            sys.executable,
            "-m",
            "airflow_tfps.demo",
            f"--home={home}/demo",
            f"--out={self.out}",
            *arguments,
        ]
        self._reader, writer = pty.openpty() if on_terminal else os.pipe()
        self._terminal = self._reader if on_terminal else None
        self.process = subprocess.Popen(
            argv,
            stdin=writer if on_terminal else subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
            # Only from its controlling terminal does Ctrl-C reach a process; nothing here has threads yet.
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if on_terminal else None,  # noqa: PLW1509
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(writer)
        threading.Thread(target=self._gather, daemon=True).start()

    def _gather(self) -> None:
        while True:
            try:
                data = os.read(self._reader, 65536)
            except OSError:  # how a terminal says that its other side is closed
                return
            if not data:
                return
            self._text += data

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self._text.decode("utf-8", "replace"))

    def wait_for(self, words: str) -> None:
        self.wait_until(lambda: words in self.text, f"{words!r} is printed")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + RUN_SECS
        while not condition():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until, f"not in time: {what}\n{self.text}"
            time.sleep(0.1)

    def end(self, secs: float = STOP_SECS) -> int:
        return self.process.wait(secs)

    def press_ctrl_c(self) -> None:
        """As a terminal does it: the character, or the signal to the process that is in front."""
        if self._terminal is not None:
            os.write(self._terminal, b"\x03")
        else:
            self.process.send_signal(signal.SIGINT)

    def check_nothing_remains(self) -> None:
        assert "nothing is left" in self.text
        assert leftovers(self.home) == []


@pytest.fixture
def demo(tmp_path) -> Iterator:
    """Factory of demos in `tmp_path`; ends what a failed test leaves."""
    started: list[Running] = []

    def start(*arguments: str, on_terminal: bool = False) -> Running:
        started.append(Running(tmp_path, *arguments, on_terminal=on_terminal))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.end()
    for pid in processes(f"{tmp_path}/demo"):
        os.kill(pid, signal.SIGKILL)


def test_demo_at_a_terminal_stays_up_until_ctrl_c(demo):
    """The training ends well and is summed up; the UI stays until Ctrl-C; a second demo is refused meanwhile."""
    first = demo(on_terminal=True)
    first.wait_for("Ctrl-C ends it")
    assert leftovers(first.home), "it is up"

    second = demo()
    assert second.end() == 1
    assert f"another demo runs in {first.home}/demo" in second.text
    assert str(first.process.pid) in second.text

    first.press_ctrl_c()
    assert first.end() == 0
    first.check_nothing_remains()
    for words in ("user admin, password", "worker:0", "gpu-b", "loss", "steps/s", "Airflow start"):
        assert words in first.text, words

    found = json.loads(first.out.read_text("utf-8"))
    assert found["accuracy"] >= 0.93
    assert found["accuracy"] == found["metrics"]["accuracy"]
    assert found["global_step"] == 1000
    assert found["model"]["version"] == 1
    assert Path(found["model"]["path"], "saved_model.pb").is_file()
    assert Path(f"{found['checkpoint']}.index").is_file()
    assert {task["task"]: task["host"] for task in found["tasks"]} == {
        "ps:0": "gpu-a",
        "worker:0": "gpu-b",
        "worker:1": "gpu-c",
    }
    assert all(secs >= 0 for secs in found["timings"].values())


def test_failing_run_is_explained(demo):
    """A run whose model is too bad ends with 1 and the log of the task that failed, and leaves no result."""
    failing = demo("--steps=1")
    assert failing.end(RUN_SECS) == 1
    assert "nightly_digits failed in judge" in failing.text
    assert re.search(r"accuracy 0\.\d+ on unseen digits, below 0\.93", failing.text)
    assert not failing.out.exists()
    failing.check_nothing_remains()


MOMENTS: dict[str, Callable[[Running], bool]] = {
    "the hosts start": lambda demo: "Starting the SSH hosts" in demo.text,
    "the database is made": lambda demo: "Starting Airflow" in demo.text,
    "the components start": lambda demo: (demo.home / "demo/airflow/logs-components/triggerer.log").exists(),
    "it trains": lambda demo: "training.train       deferred" in demo.text,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_interrupt_leaves_nothing(demo, moment):
    """Ctrl-C, even pressed twice, ends everything at any moment, and is no success."""
    interrupted = demo("--steps=1000000")
    interrupted.wait_until(lambda: MOMENTS[moment](interrupted), moment)
    interrupted.press_ctrl_c()
    interrupted.press_ctrl_c()
    assert interrupted.end() == 130
    interrupted.check_nothing_remains()
    assert not interrupted.out.exists()
