"""A first DAG with its job and its program, for `airflow tfps init`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from airflow_tfps.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = '''\
"""A line through noisy points, the smallest program: weight 2 and bias 10 are to be found.

Try it in one process, without a cluster: python -m tfps_runtime run first_training.py --local --steps 300
"""

import numpy as np
import tensorflow.compat.v1 as tf
from tfps_runtime.training import EVAL, Model


def input_fn(mode, params, shard):
    """Batches of (features, labels). `shard` says which worker this is: each draws points of its own."""
    random = np.random.default_rng(shard.seed)
    for _ in range(10 if mode == EVAL else 10**9):
        x = random.normal(size=params["batch_size"]).astype(np.float32)
        yield x, 2 * x + 10 + random.normal(scale=0.1, size=x.shape).astype(np.float32)


def model_fn(features, labels, mode, params):
    """The graph. Variables go to the ps, everything else to the worker, without a line about it here."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    bias = tf.get_variable("bias", [], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(tf.square(weight * features + bias - labels))
    optimizer = tf.train.GradientDescentOptimizer(params["learning_rate"])
    return Model(loss=loss, optimizer=optimizer, metrics={"loss": loss, "weight": weight, "bias": bias})
'''

JOB = """\
# What runs, and how. All keys: docs/keys.md.
name: first_training
program: first_training.py
mode: async               # sync: a step waits for the gradients of all workers
steps: 1000               # global steps; the DAG's parameter goes first
roles:
  ps: 1
  worker: 2               # gpus: 1 for each is written {count: 2, gpus: 1}
hparams:                  # reach model_fn as params
  learning_rate: 0.05
  batch_size: 32
checkpoint:
  save_checkpoint_secs: 30
"""

DAG = '''\
"""A first training, every night: provision the hosts, train, report."""

from airflow.sdk import Param, dag, task

from airflow_tfps.group import TrainingTaskGroup


@task
def report(training):
    print(f"step {training['global_step']}: {training['metrics']}, saved in {training['checkpoint']}")


@dag(
    schedule="0 2 * * *",
    catchup=False,
    max_active_runs=1,
    params={"steps": Param(1000, type="integer", minimum=1, title="Global steps")},
    tags=["tfps"],
)
def first_training():
    training = TrainingTaskGroup(
        "training",
        job="jobs/first_training.yaml",
        hosts=HOSTS,
        steps="{{ params.steps }}",
    )
    report(training.output)


first_training()
'''


def files(hosts: str | list[str]) -> dict[str, str]:
    """Path below the folder -> text."""
    return {
        "first_training.py": DAG.replace("HOSTS", json.dumps(hosts, ensure_ascii=False)),
        "jobs/first_training.yaml": JOB,
        "jobs/first_training.py": PROGRAM,
    }


def write(folder: Path, hosts: str | list[str]) -> list[Path]:
    """Write the files; their paths. Raises SpecError when one is there or cannot be written; then none is new."""
    texts = {folder / name: text for name, text in files(hosts).items()}
    there = [str(path) for path in texts if path.exists() or path.is_symlink()]
    if there:
        raise SpecError("init", [f"{path} is there already; nothing was written" for path in there])
    written: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise SpecError("init", [f"{error.filename}: {error.strerror}"]) from None
    return written
