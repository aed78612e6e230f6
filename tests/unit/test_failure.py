"""The last line of a failed program's log: what was wrong, found in messages that go on for pages."""

from __future__ import annotations

import pytest
from tfps_runtime.failure import first_line, report

PLACEMENT = """Graph execution error:

Detected at node 'b' defined at (most recent call last):
    File "devices.py", line 4, in <module>
Node: 'b'
Cannot assign a device for operation b: {{node b}} was explicitly assigned to /device:GPU:0
\t [[b]]"""
TWO_NODES = """Graph execution error:

Detected at node 'a' defined at (most recent call last):
    File "x.py", line 1, in <module>
Detected at node 'a' defined at (most recent call last):
    File "x.py", line 1, in <module>
Node: 'a'
Node: 'a'
2 root error(s) found.
  (0) INVALID_ARGUMENT: shapes differ"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no such file", "no such file"),
        ("", "ValueError"),
        ("\n\n  indented\nand more", "indented"),
        (
            PLACEMENT,
            "Cannot assign a device for operation b: {{node b}} was explicitly assigned to /device:GPU:0",
        ),
        (TWO_NODES, "2 root error(s) found."),
        ("Graph execution error:\nno node is named", "no node is named"),
        ("Graph execution error:", "Graph execution error:"),
        ("Graph execution error:\nNode: 'b'", "Node: 'b'"),
    ],
)
def test_what_an_error_says_in_one_line(message, line):
    """The first line, and of TensorFlow's graph errors the one after the nodes."""
    assert first_line(ValueError(message)) == line


def failed(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_a_long_message_is_summed_up_at_the_end(capsys):
    """After the traceback comes one line with the gist; a short message is there only once, as the interpreter's."""
    report(failed(PLACEMENT))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("ValueError: Cannot assign a device for operation b")
    report(failed("no such file"))
    assert capsys.readouterr().err.count("no such file\n") == 1
