"""Input made while the step runs, against feeding one batch at a time.

    python tests/benchmarks/overlapped_input.py [--pairs 7] [--secs 8] [--input wait|compute]

One worker without a ps. The same generator of arrays feeds the step (`feed`) or fills a queue from a thread (`queue`); a
prefetched `tf.data` dataset takes as long for its elements (`data`); interleaved. At the beginning of each round the step is timed, and the
generator is set so that making a batch takes as long; both times are printed. Input waits, as for storage or a network;
with `--input compute` it draws random numbers instead, which needs a core of its own all the time, beside the step's.
The dataset then is `from_generator`, which is slow whatever it does: TensorFlow starts a thread for each element.

Bounds, medians over the rounds, for queue and data each: >= 1.368 x feed, and >= 0.7 of what is possible, (i + s) / max(i, s).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "integration")]

from clusters import CHIEF, Nursery, Trainings, until  # noqa: E402  (found through the line above)

STYLES = ("feed", "queue", "data")
LEAST_GAIN = 1.368
LEAST_SHARE = 0.7
EVEN = 0.2
"""How far apart input time and step time may be."""

PROGRAM = """
    import sys
    sys.path.insert(0, {directory!r})
    import tensorflow.compat.v1 as tf
    from tensorflow.python.data.experimental.ops.testing import sleep
    from overlapped_input import ROWS, COLUMNS, batches
    from tfps_runtime.training import Model, queued

    def input_fn(mode, params, shard):
        if mode == "eval":
            return None
        source = batches(params["input"], params["work"])
        if params["style"] == "queue":
            return queued(((x, None) for x in source), capacity=4)
        if params["style"] == "data" and params["input"] == "wait":  # the same wait as one of tf.data's own ops
            dataset = tf.data.Dataset.from_tensors(next(batches("wait", 0))).repeat()
            return dataset.apply(sleep(int(1e6 * params["work"]))).prefetch(4)
        if params["style"] == "data":
            dataset = tf.data.Dataset.from_generator(lambda: source, tf.float32, [ROWS, COLUMNS])
            return dataset.prefetch(4)
        return ((x, None) for x in source)

    def model_fn(features, labels, mode, params):
        w = tf.get_variable("w", [COLUMNS, COLUMNS], initializer=tf.orthogonal_initializer())
        x = features
        for _ in range(params["layers"]):
            x = tf.tanh(tf.matmul(x, w))
        return Model(loss=tf.reduce_mean(x ** 2), optimizer=tf.train.GradientDescentOptimizer(0.001))
"""
ROWS, COLUMNS, LAYERS = 128, 256, 12


def batches(kind: str, work: float) -> Any:
    """Endless batches; each costs `work`: seconds to `wait`, or how often to `compute` a batch of normal numbers."""
    import numpy as np

    random = np.random.default_rng(0)
    ready = random.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    # Into the same place each time: the memory of a new array would be asked of the kernel, page by page, in a thread.
    scratch = np.empty_like(ready)
    while True:
        if kind == "wait":
            time.sleep(work)
        else:
            whole, part = divmod(work, 1)
            for _ in range(int(whole)):
                random.standard_normal(dtype=np.float32, out=scratch)
            random.standard_normal(dtype=np.float32, out=scratch[: int(ROWS * part)])
        yield ready.copy()


def input_secs(kind: str, work: float, secs: float = 1.0) -> float:
    """Seconds to make a batch, with nothing beside it."""
    source = batches(kind, work)
    next(source)
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + secs:
        next(source)
        count += 1
    return (time.perf_counter() - started) / count


def step_secs(forks: Nursery, directory: Path, style: str, kind: str, work: float, secs: float) -> float:
    """Seconds from step to step in a training."""
    directory.mkdir()
    trainings = Trainings(forks, directory)
    training = trainings(
        PROGRAM.format(directory=str(Path(__file__).parent)),
        ps=0,
        workers=1,
        steps=10**9,
        hparams={"style": style, "input": kind, "work": work, "layers": LAYERS},
        session={"intraOpParallelismThreads": 1},
    )
    try:
        training.start_all()
        until(lambda: len(training.progress(CHIEF)) > 1, 60, "no steps")
        first = training.progress(CHIEF)[-1]
        time.sleep(secs)
        last = training.progress(CHIEF)[-1]
        return (last.time - first.time) / (last.global_step - first.global_step)
    finally:
        trainings.close()


def main() -> int:
    """Print each round, the medians and their ratios; exit code 1 beyond a bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--secs", type=float, default=8.0)
    parser.add_argument("--input", choices=("wait", "compute"), default="wait")
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in ("input", "step", *STYLES)}
    with tempfile.TemporaryDirectory(prefix="tfps-bench-") as place:
        forks = Nursery(Path(place) / "log")
        for pair in range(options.pairs):
            kind = options.input
            step = step_secs(forks, Path(place) / f"step-{pair}", "feed", "wait", 0, options.secs / 2)
            work = step if kind == "wait" else step / input_secs(kind, 1)
            found["step"].append(step)
            found["input"].append(input_secs(kind, work))
            for style in STYLES:
                found[style].append(
                    step_secs(forks, Path(place) / f"{style}-{pair}", style, kind, work, options.secs)
                )
            line = ", ".join(f"{name} {1e3 * times[-1]:.2f} ms" for name, times in found.items())
            print(f"pair {pair + 1}: {line}", flush=True)
        forks.close()
    rounds = [dict(zip(found, times, strict=True)) for times in zip(*found.values(), strict=True)]
    uneven = [r for r in rounds if abs(r["input"] - r["step"]) > EVEN * max(r["input"], r["step"])]
    if uneven:
        print(f"{len(uneven)} rounds are left out: input and step are more than {EVEN:.0%} apart")
    rounds = [r for r in rounds if r not in uneven]
    if not rounds:
        return 1
    possible = statistics.median((r["input"] + r["step"]) / max(r["input"], r["step"]) for r in rounds)
    print(f"possible: {possible:.2f} x feed")
    is_good = len(rounds) > options.pairs // 2
    for style in STYLES[1:]:
        gain = statistics.median(r["feed"] / r[style] for r in rounds)
        is_good = is_good and gain >= LEAST_GAIN and gain >= LEAST_SHARE * possible
        print(
            f"{style}: {gain:.3f} x feed (bound {LEAST_GAIN}), {gain / possible:.2f} of what is possible "
            f"(bound {LEAST_SHARE})"
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
