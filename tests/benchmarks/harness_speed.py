"""Steps per second of the harness, against scripts with a loop of their own on the same model.

    python tests/benchmarks/harness_speed.py [--pairs 7] [--secs 20] [--model line|digits] [--workers 2]

Three variants, interleaved, 1 ps and asynchronous workers on this machine:

- `plain`: a `Supervisor`, a `Server` and a session without device filters, one `session.run` with a feed per step, as
  tutorials write it;
- `filters`: the same script, whose server and session know only the ps and themselves;
- `harness`: the same model as `model_fn`, fed by an iterator of arrays.

The clock starts when all workers step. Bounds: harness / plain >= 1.2, harness / filters >= 0.97 (medians).
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

from clusters import CHIEF, Nursery, Trainings, free_ports, until  # noqa: E402  (found through the line above)

BOUNDS = {"plain": 1.2, "filters": 0.97}

PROGRAM = """
    import sys
    sys.path.insert(0, {directory!r})
    import tensorflow.compat.v1 as tf
    from harness_speed import MODELS, batches
    from tfps_runtime.training import Model

    def input_fn(mode, params, shard):
        return None if mode == "eval" else batches({model!r}, shard.seed)

    def model_fn(features, labels, mode, params):
        loss, rate = MODELS[{model!r}](features, labels)
        return Model(loss=loss, optimizer=tf.train.GradientDescentOptimizer(rate))
"""


def line(x: Any, y: Any) -> tuple[Any, float]:
    """Loss and learning rate of y = wx + b: a step is nothing but overhead."""
    import tensorflow.compat.v1 as tf

    weight = tf.get_variable("weight", [1], tf.float32)
    bias = tf.get_variable("bias", [1], tf.float32)
    return tf.reduce_mean(tf.square(y - (x * weight + bias))), 0.003


def digits(x: Any, y: Any) -> tuple[Any, float]:
    """Loss and learning rate of 784-500-10 with L2 regularisation."""
    import tensorflow.compat.v1 as tf

    noise = tf.truncated_normal_initializer(stddev=0.1)
    hidden = tf.get_variable("hidden", [784, 500], tf.float32, noise)
    hidden_bias = tf.get_variable("hidden_bias", [500], tf.float32, noise)
    output = tf.get_variable("output", [500, 10], tf.float32, noise)
    output_bias = tf.get_variable("output_bias", [10], tf.float32, noise)
    logits = tf.matmul(tf.nn.relu(tf.matmul(x, hidden) + hidden_bias), output) + output_bias
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    return loss + 1e-4 * (tf.nn.l2_loss(hidden) + tf.nn.l2_loss(output)), 0.01


MODELS = {"line": line, "digits": digits}


def batches(model: str, seed: int) -> Any:
    """Endless (x, y); made beforehand, so that they cost nothing."""
    import numpy as np

    random = np.random.default_rng(seed)
    if model == "line":
        x = random.normal(size=(100, 32)).astype(np.float32)
        y = 2 * x + 10
    else:
        x = random.uniform(size=(100, 100, 784)).astype(np.float32)
        y = random.integers(10, size=(100, 100)).astype(np.int32)
    while True:
        yield from zip(x, y, strict=True)


def script(role: str, index: int, cluster: dict[str, list[str]], model: str, options: dict[str, Any]) -> None:
    """A task of `plain` or `filters`; notes "time step" lines in a file of its own, and runs until it is killed."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    spec = tf.train.ClusterSpec(cluster)
    place = Path(options["place"])
    config = tf.ConfigProto()
    if options["has_filters"] and role == "worker":
        config.device_filters[:] = ["/job:ps", f"/job:worker/task:{index}"]
    server = tf.train.Server(spec, job_name=role, task_index=index, config=config)
    if role == "ps":
        server.join()
    with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{index}", cluster=spec)):
        global_step = tf.Variable(0, name="global_step", trainable=False)
        feed = batches(model, index)
        x, y = next(feed)
        x = tf.placeholder(x.dtype, [None, *x.shape[1:]])
        y = tf.placeholder(y.dtype, [None])
        loss, rate = MODELS[model](x, y)
        train_op = tf.train.GradientDescentOptimizer(rate).minimize(loss, global_step=global_step)
        init_op = tf.global_variables_initializer()
        saver = tf.train.Saver()
    supervisor = tf.train.Supervisor(
        is_chief=index == 0,
        logdir=str(place / "logs"),
        init_op=init_op,
        summary_op=None,
        saver=saver,
        global_step=global_step,
        save_model_secs=60,
    )
    # A Supervisor that finds nothing initialised looks again after 30 s. That is not what is measured here.
    while index > 0 and not (place / "steps-0").exists():
        time.sleep(0.05)
    with (
        supervisor.prepare_or_wait_for_session(server.target, config=config) as session,
        (place / f"steps-{index}").open("w", buffering=1) as notes,
    ):
        due = 0.0
        while True:
            xs, ys = next(feed)
            _, _, step = session.run([train_op, loss, global_step], feed_dict={x: xs, y: ys})
            if time.time() >= due:
                due = time.time() + 0.5
                notes.write(f"{time.time()} {step}\n")


def run_script(
    forks: Nursery, directory: Path, model: str, workers: int, secs: float, *, has_filters: bool
) -> float:
    """Global steps per second of the script."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + workers)]
    cluster = {"ps": addresses[:1], "worker": addresses[1:]}
    options = {"has_filters": has_filters, "place": str(directory)}
    tasks = [("ps", 0), *(("worker", i) for i in range(workers))]
    processes = [
        forks.begin(script, role, i, cluster, model, options, directory=directory)[0] for role, i in tasks
    ]

    def notes(index: int) -> list[tuple[float, int]]:
        path = directory / f"steps-{index}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(float(when), int(step)) for when, step in map(str.split, lines)]

    try:
        until(lambda: all(len(notes(i)) > 1 for i in range(workers)), 90, processes[1].log)
        return rate(lambda: notes(0), secs)
    finally:
        for process in processes:
            process.signal(9)
            process.wait()


def run_harness(forks: Nursery, directory: Path, model: str, workers: int, secs: float) -> float:
    """Global steps per second of the harness."""
    trainings = Trainings(forks, directory)
    program = PROGRAM.format(directory=str(Path(__file__).parent), model=model)
    training = trainings(program, workers=workers, steps=10**9)
    try:
        training.start_all()
        tasks = [CHIEF, *(f"worker:{i}" for i in range(1, workers))]
        until(lambda: all(len(training.progress(task)) > 1 for task in tasks), 90, "no steps")
        return rate(lambda: [(each.time, each.global_step) for each in training.progress(CHIEF)], secs)
    finally:
        trainings.close()


def rate(notes: Any, secs: float) -> float:
    """Steps per second over `secs` from now on."""
    since, step = notes()[-1]
    time.sleep(secs)
    until(lambda: notes()[-1][0] >= since + secs, 10, "the steps have stopped")
    now, reached = notes()[-1]
    return (reached - step) / (now - since)


def main() -> int:
    """Print each round, the medians and their ratios; exit code 1 beyond a bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--secs", type=float, default=20.0)
    parser.add_argument("--model", choices=MODELS, default="line")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"plain": [], "filters": [], "harness": []}
    with tempfile.TemporaryDirectory(prefix="tfps-bench-") as place:
        forks = Nursery(Path(place) / "log")
        for pair in range(options.pairs):
            for name, found in rates.items():
                directory = Path(place) / f"{name}-{pair}"
                directory.mkdir()
                arguments = (forks, directory, options.model, options.workers, options.secs)
                if name == "harness":
                    found.append(run_harness(*arguments))
                else:
                    found.append(run_script(*arguments, has_filters=name == "filters"))
            print(
                f"pair {pair + 1}:",
                ", ".join(f"{name} {found[-1]:.1f}" for name, found in rates.items()),
                flush=True,
            )
        forks.close()
    is_good = True
    for name, bound in BOUNDS.items():
        ratios = [a / b for a, b in zip(rates["harness"], rates[name], strict=True)]
        ratio = statistics.median(rates["harness"]) / statistics.median(rates[name])
        is_good = is_good and ratio >= bound
        print(
            f"harness / {name}: {ratio:.3f} of medians (bound {bound}); "
            f"pairs {', '.join(f'{each:.3f}' for each in sorted(ratios))}"
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
