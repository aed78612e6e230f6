"""TensorFlow itself between hosts: synchronous training, whose workers wait for each other."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from bed_runs import CHIEF, PS, WORKER

if TYPE_CHECKING:
    from bed_runs import BedLive

pytestmark = [pytest.mark.faults, pytest.mark.tensorflow]

SECS = 240.0


def test_synchronous_training(live: BedLive) -> None:
    """Behind the hosts' proxy variables, it survives a lost ps, chief and worker, and a worker that stands still."""
    run = live.start("faults_tensorflow")
    training = run.until_training(secs=SECS)
    run.until_saved()
    with run.row(
        "TensorFlow, sync: proxy variables on every host", "the hosts' servers find each other"
    ) as row:
        run.goes_on(training)
        row.seen = "it trains"
    for name, task in (("ps", PS), ("the chief", CHIEF), ("a worker", WORKER)):
        with run.row(
            f"TensorFlow, sync: kill -9 of {name}", "starts again in place; training goes on"
        ) as row:
            row.saved = run.until_saved(more_than=run.checkpoints()[-1].global_step)
            count = len(run.starts(training))
            os.kill(training.tasks[task][0], signal.SIGKILL)
            training = run.restarted(training, task)
            if task == PS:
                run.until_started(training, CHIEF, more_than=count, secs=SECS)
                row.restored = run.restored(training)
            run.goes_on(training, secs=SECS)
            row.seen = "restarted in place, training went on"
    with run.row(
        "TensorFlow, sync: stall, SIGSTOP of a worker (stall_secs 15)", "killed, started again"
    ) as row:
        os.kill(training.tasks[WORKER][0], signal.SIGSTOP)
        stopped = time.time()
        said = run.until_said("train", "no progress for 15 s", since=stopped)[1]
        training = run.until_replaced(training, WORKER, secs=SECS)
        run.goes_on(training, steps=10, secs=SECS)
        row.seen = f"{said}; training went on"
    run.mark("train", "success")
    run.until_over()
    run.until_clean()
