"""What a failed program leaves in its log: the traceback, and at the very end one line that says what was wrong.

Standard library only; knows the form of TensorFlow's messages, which go on for pages.
"""

from __future__ import annotations

import sys
import traceback

_FRAME = "Graph execution error:"
"""Begins a message that first tells where each node was made, and then, after `Node: 'x'`, what was wrong with it."""


def first_line(error: BaseException) -> str:
    """What an error says, without the pages of graph and stack that TensorFlow puts around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0] == _FRAME:
        nodes = [i for i, line in enumerate(lines[:-1]) if line.startswith("Node: ")]
        return lines[nodes[-1] + 1] if nodes else lines[1] if len(lines) > 1 else lines[0]
    return lines[0]


def report(error: BaseException) -> None:
    """Print the traceback to standard error as the interpreter does; after a long message, its gist on one line.

    What people see first is the end of the log.
    """
    traceback.print_exception(type(error), error, error.__traceback__)
    if "\n" in str(error).strip():
        sys.stderr.write(f"{type(error).__name__}: {first_line(error)}\n")
