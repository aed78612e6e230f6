"""What a backup worker is worth: synchronous training with three workers, one of which is ten times as slow.

    python tests/benchmarks/backup_workers.py [--pairs 7] [--secs 6]

Three variants, interleaved, 1 ps and 3 workers on this machine. A step is a pause of 30 ms, as if a device computed, so
that the result does not depend on how many cores the machine has; the slow worker pauses 300 ms more.

- `even`: no slow worker, each update waits for all three;
- `backup`: one slow worker, each update takes the first two gradients;
- `halted`: one slow worker, each update waits for all three.

Bounds: backup / even >= 0.9, halted / even <= 0.3 (medians).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "integration")]

from clusters import CHIEF, Nursery, Trainings, until  # noqa: E402  (found through the line above)

STEP_SECS = 0.03
VARIANTS = {"even": (3, 0.0), "backup": (2, 10 * STEP_SECS), "halted": (3, 10 * STEP_SECS)}
"""Name -> gradients per update, the last worker's pause on top of its step."""

PROGRAM = """
    import time, numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model

    def batches(pause):
        x = np.ones([8], np.float32)
        while True:
            time.sleep(pause)
            yield x, 2 * x

    def input_fn(mode, params, shard):
        slow = params["slow_secs"] if shard.index == 2 else 0.0
        return None if mode == "eval" else batches(params["step_secs"] + slow)

    def model_fn(features, labels, mode, params):
        w = tf.get_variable("w", [100])
        loss = tf.reduce_mean((w[0] * features - labels) ** 2)
        return Model(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.01))
"""


def steps_per_sec(forks: Nursery, directory: Path, variant: str, secs: float) -> float:
    """Global steps per second of one training, from when all workers step."""
    aggregate, slow_secs = VARIANTS[variant]
    trainings = Trainings(forks, directory)
    training = trainings(
        PROGRAM,
        workers=3,
        mode="sync",
        replicas_to_aggregate=aggregate,
        steps=10**9,
        hparams={"step_secs": STEP_SECS, "slow_secs": slow_secs},
    )
    try:
        training.start_all()
        tasks = (CHIEF, "worker:1", "worker:2")
        until(lambda: all(training.progress(task) for task in tasks), 60, "the workers do not step")
        first = training.progress(CHIEF)[-1]
        time.sleep(secs)
        last = training.progress(CHIEF)[-1]
        return (last.global_step - first.global_step) / (last.time - first.time)
    finally:
        trainings.close()


def main() -> int:
    """Print each round, the medians and their ratios; exit code 1 beyond a bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--secs", type=float, default=6.0)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="tfps-bench-") as place:
        forks = Nursery(Path(place) / "log")
        for pair in range(options.pairs):
            for name, found in rates.items():
                directory = Path(place) / f"{name}-{pair}"
                directory.mkdir()
                found.append(steps_per_sec(forks, directory, name, options.secs))
            line = ", ".join(f"{name} {found[-1]:.2f}" for name, found in rates.items())
            print(f"pair {pair + 1}, steps/s: {line}", flush=True)
        forks.close()
    even, backup, halted = (statistics.median(rates[name]) for name in VARIANTS)
    print(f"medians, steps/s: even {even:.2f}, backup {backup:.2f}, halted {halted:.2f}")
    print(
        f"backup / even {backup / even:.3f} (bound >= 0.9), halted / even {halted / even:.3f} (bound <= 0.3)"
    )
    return 0 if backup >= 0.9 * even and halted <= 0.3 * even else 1


if __name__ == "__main__":
    sys.exit(main())
