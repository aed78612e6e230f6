"""What a command answers: lines of JSON on standard output; standard library only."""

from __future__ import annotations

import sys
from typing import Any

from tfps_runtime.message import dump


def say(message: dict[str, Any]) -> None:
    """One line to whoever runs the command."""
    sys.stdout.write(dump(message) + "\n")
    sys.stdout.flush()
