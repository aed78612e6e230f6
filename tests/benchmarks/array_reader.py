"""What `readers.arrays` costs a step, against `tf.data.Dataset.from_generator` and against one batch again and again.

    python tests/benchmarks/array_reader.py [--rounds 15] [--steps 60]

Three processes, which take turns of some steps each: the same small model, whose batches of 128 rows come from
`readers.arrays`, from a generator that gathers the same rows, or are a constant. Processes of their own, since TensorFlow
2.21 changes a whole process with the first `from_generator`. Printed are medians over the turns. Bound: `arrays` takes
no more processor time than `from_generator` (median of the rounds' ratios).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

ROWS, COLUMNS, LAYERS = 128, 256, 12
KINDS = ("arrays", "from_generator", "constant")


def generator(data: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """What `readers.arrays` draws."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(data))
        for i in range(0, len(data), ROWS):
            yield data[np.sort(order[i : i + ROWS])]


def build(kind: str) -> Any:
    """A function that runs a step on batches of this kind."""
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Shard, readers

    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    data = np.random.default_rng(0).standard_normal((100 * ROWS, COLUMNS), dtype=np.float32)
    if kind == "arrays":
        dataset = readers.arrays(data, "train", Shard(0, 1, 1), batch_size=ROWS)
    elif kind == "from_generator":
        shape = [None, COLUMNS]
        dataset = tf.data.Dataset.from_generator(lambda: generator(data, 1), tf.float32, shape).prefetch(2)
    else:
        dataset = tf.data.Dataset.from_tensors(data[:ROWS]).repeat().prefetch(2)
    iterator = tf.data.make_initializable_iterator(dataset)
    w = tf.get_variable("w", [COLUMNS, COLUMNS], initializer=tf.orthogonal_initializer())
    x = iterator.get_next()
    for _ in range(LAYERS):
        x = tf.tanh(tf.matmul(x, w))
    step = tf.train.GradientDescentOptimizer(0.001).minimize(tf.reduce_mean(x**2))
    session = tf.Session(config=tf.ConfigProto(intra_op_parallelism_threads=1))
    session.run([iterator.initializer, tf.global_variables_initializer()])
    return session.make_callable(step)


def take_turns(kind: str) -> None:
    """For each number on stdin run so many steps; seconds and processor seconds per step on stdout."""
    step = build(kind)
    for line in sys.stdin:
        began, spent, count = time.perf_counter(), time.process_time(), int(line)
        for _ in range(count):
            step()
        found = [(time.perf_counter() - began) / count, (time.process_time() - spent) / count]
        print(json.dumps(found), flush=True)


def main() -> int:
    """Print the medians; exit code 1 beyond the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind is not None:
        take_turns(options.kind)
        return 0
    processes = {
        kind: subprocess.Popen(
            [sys.executable, __file__, "--kind", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
        )
        for kind in KINDS
    }  # fmt: skip
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for turn in range(options.rounds + 1):
        for kind, process in processes.items():
            process.stdin.write(f"{options.steps}\n")
            values = json.loads(process.stdout.readline())
            if turn:  # the first one warms up
                found[kind].append(values)
    for process in processes.values():
        process.stdin.close()
        process.wait()
    for kind, values in found.items():
        secs, cpu = (statistics.median(each) for each in zip(*values, strict=True))
        print(f"{kind:15} {1e3 * secs:6.2f} ms, {1e3 * cpu:6.2f} ms of processor time per step")
    pairs = zip(found["arrays"], found["from_generator"], strict=True)
    ratio = statistics.median(ours[1] / theirs[1] for ours, theirs in pairs)
    print(f"arrays / from_generator, processor time: {ratio:.2f} (bound 1)")
    return int(ratio > 1)


if __name__ == "__main__":
    sys.exit(main())
