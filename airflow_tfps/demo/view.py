"""What the demo shows: live in a terminal, plain lines elsewhere.

view = View()
with view.phase("Starting Airflow"):
    ...
with view.following():
    view.task("training.train", "deferred")
    view.progress(board)        # the training's XCom, again and again
view.result(found)
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LINE_SECS = 3.0
"""Between two lines of progress where nothing can be drawn."""
LINE_WIDTH = 100


class View:
    """Writes to standard output."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, width=LINE_WIDTH, no_color=True)
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said_at = 0.0
        self._said_step: int | None = None

    def line(self, text: str, style: str = "") -> None:
        """One line with the time since the start."""
        at = f"{time.monotonic() - self._began:6.1f} s  "
        self._console.print(Text.assemble((at, "dim"), (text, style)), soft_wrap=True)

    def error(self, text: str) -> None:
        self.line(text, style="red")

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Say what is going on, and how long it took when it went well."""
        began = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(f"{text} …"):
                yield
        else:
            self.line(f"{text} ...")
            yield
        self.line(f"{text}: {time.monotonic() - began:.1f} s")

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """While a DAG run goes on: a bar below the lines, where one can be drawn."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(30),
            TextColumn("{task.fields[facts]}"),
        )
        with Progress(*columns, console=self._console) as self._bar:
            self._task = self._bar.add_task("", total=None, facts="")
            yield
        self._bar = None

    def task(self, name: str, state: str) -> None:
        """An Airflow task has come into another state."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=f"{name} {state}")
        if state == "deferred":
            self.line(f"{name:<20} deferred: no worker slot is held")
        elif state not in ("queued", "running", "scheduled"):
            self.line(f"{name:<20} {state}", style="" if state == "success" else "red")

    def progress(self, board: Mapping[str, Any]) -> None:
        """The training's `progress`: step, loss and steps/s on the bar, or now and then as a line."""
        step, steps = board.get("global_step"), board.get("steps")
        if not isinstance(step, int) or not isinstance(steps, int):
            return
        facts = f"step {step}/{steps}  {_facts(board)}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=steps, completed=min(step, steps), facts=facts)
        elif step != self._said_step and time.monotonic() - self._said_at >= LINE_SECS:
            self._said_at, self._said_step = time.monotonic(), step
            self.line(f"{'':<20} {facts}")

    def result(self, found: Mapping[str, Any]) -> None:
        """The summary of `result.json`: the model, the TF tasks, where the time went."""
        say = self._console.print
        say()
        say(f"accuracy     {found['accuracy']:.4f} on digits that it has not seen", style="bold green")
        say(f"global step  {found['global_step']}")
        say(f"checkpoint   {found['host']}:{found['checkpoint']}", soft_wrap=True)
        model = found["model"]
        say(f"model        {model['host']}:{model['path']}, version {model['version']}", soft_wrap=True)
        say()
        tasks = Table("TF task", "host", "state", "restarts", box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for task in found["tasks"]:
            tasks.add_row(task["task"], task["host"], task["state"], str(task["restarts"]))
        say(tasks)
        say()
        times = Table("phase", "seconds", box=None, pad_edge=False, padding=(0, 3, 0, 0))
        times.columns[1].justify = "right"
        for phase, secs in found["timings"].items():
            times.add_row(phase, f"{secs:.1f}")
        say(times)
        say()


def _facts(board: Mapping[str, Any]) -> str:
    loss, rate = board.get("loss"), board.get("steps_per_sec")
    parts = [f"loss {loss:.4f}"] if isinstance(loss, float) else []
    parts += [f"{rate:.0f} steps/s"] if isinstance(rate, (int, float)) else []
    return "  ".join(parts)
