"""What the demo shows: live in a terminal, plain lines elsewhere.

view = View()
with view.phase("Starting Airflow"): ...
view.progress(board)            # the training's XCom, again and again
view.result(result, login)
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LINE_SECS = 3.0
"""Between two lines of progress where nothing can be drawn."""
LINE_WIDTH = 100


class View:
    """Writes to standard output. Nothing it is shown makes it fail."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, width=LINE_WIDTH, no_color=True)
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said_at = 0.0
        self._said_step: int | None = None

    @property
    def is_live(self) -> bool:
        """Whether a person watches."""
        return self._console.is_terminal

    def line(self, text: str, style: str = "") -> None:
        """One line with the time since the start."""
        at = f"{time.monotonic() - self._began:6.1f} s  "
        self._console.print(f"[dim]{at}[/]", end="")
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        self.line(text, style="red")

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Say what is going on, and how long it took when it went well."""
        began = time.monotonic()
        if self.is_live:
            with self._console.status(f"{text} …"):
                yield
        else:
            self.line(f"{text} ...")
            yield
        self.line(f"{text}: {time.monotonic() - began:.1f} s")

    def progress(self, board: Mapping[str, Any]) -> None:
        """The training's `progress`: a bar with step, loss and steps/s, or now and then a line."""
        step, steps = board.get("global_step"), board.get("steps")
        if not isinstance(step, int) or not isinstance(steps, int):
            return
        facts = _facts(board)
        if self.is_live:
            if self._bar is None:
                self._bar = Progress(
                    TextColumn("{task.description}"),
                    BarColumn(40),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[facts]}"),
                    console=self._console,
                )
                self._task = self._bar.add_task("training", total=steps, facts="")
                self._bar.start()
            assert self._task is not None
            self._bar.update(self._task, completed=min(step, steps), facts=facts)
        elif step != self._said_step and (time.monotonic() - self._said_at >= LINE_SECS or step >= steps):
            self._said_at, self._said_step = time.monotonic(), step
            self.line(f"training  step {step}/{steps}  {facts}")

    def end_progress(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def result(self, found: Mapping[str, Any]) -> None:
        """The summary of `result.json`: the model, the TF tasks, where the time went."""
        say = self._console.print
        say()
        say(f"accuracy     {found['accuracy']:.4f} on digits that it has not seen", style="bold green")
        say(f"global step  {found['global_step']}")
        say(f"checkpoint   {found['host']}:{found['checkpoint']}", soft_wrap=True)
        say()
        say(_table(("TF task", "host", "state", "restarts"), found["tasks"]))
        rows = [{"phase": name, "seconds": f"{secs:.1f}"} for name, secs in found["timings"].items()]
        say(_table(("phase", "seconds"), rows, right=("seconds",)))


def _facts(board: Mapping[str, Any]) -> str:
    loss, rate = board.get("loss"), board.get("steps_per_sec")
    parts = [f"loss {loss:.4f}"] if isinstance(loss, float) else []
    parts += [f"{rate:.0f} steps/s"] if isinstance(rate, (int, float)) else []
    return "  ".join(parts)


def _table(columns: tuple[str, ...], rows: list[dict[str, Any]], right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    return table
