"""The bundled linear regression under running Airflow components, killed on the way: TensorFlow itself, both modes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live import until
from tfps_runtime.checkpoint import latest_checkpoint
from tfps_runtime.reserve import read_lock

if TYPE_CHECKING:
    from live import Live, Run

pytestmark = [pytest.mark.live, pytest.mark.tensorflow]

SECS = 240.0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_killed_and_retried_it_continues_from_the_saved_step(live: Live, mode: str) -> None:
    """With its agent dies the training; the retry restores the newest checkpoint and finds weight 2 and bias 10."""
    run = live.start("live_linear", mode=mode)
    first = until(lambda: agent_of(run), SECS, "an agent")
    saved = until(lambda: newest(run), SECS, "a checkpoint")
    os.kill(first[1], signal.SIGKILL)
    until(lambda: (agent_of(run) or first)[0] != first[0], SECS, "another incarnation")
    run.until_over(state="success", secs=SECS)

    result = run.xcom("train")
    assert result["global_step"] >= 600
    assert abs(result["metrics"]["weight"] - 2) < 0.1
    assert abs(result["metrics"]["bias"] - 10) < 0.2
    log = "\n".join(line for attempt in (1, 2) for line in run.log("train", attempt))
    restored = [int(step) for step in re.findall(r"restored \S*model\.ckpt-(\d+)", log)]
    assert len(restored) == 1
    assert restored[0] >= saved
    run.until_nothing_is_left()


def agent_of(run: Run) -> tuple[str, int] | None:
    """Training id and pid of the run's agent, there being one host."""
    for path in run.locks():
        record = read_lock(path)
        if record is not None:
            return record.training, record.pid
    return None


def newest(run: Run) -> int | None:
    """Global step of the newest complete checkpoint."""
    found = [latest_checkpoint(str(path)) for path in Path(run.control).glob("checkpoints/*")]
    return found[0].global_step if found and found[0] is not None else None
