"""Saves checkpoints of every kind with TensorFlow, and says what TensorFlow's own reader finds in them, as JSON.

python saves.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


def graph(directory: Path, *, sharded: bool) -> str:
    """Variables in parts along each axis, many dtypes, strings, nothing at all, a path that is not ASCII."""
    with tf.Graph().as_default(), v1.Session() as session:
        step = v1.train.get_or_create_global_step()
        for parts, name, axis in ((3, "rows", 0), (2, "columns", 1)):
            v1.get_variable(
                name, shape=(300, 70), initializer=v1.random_normal_initializer(seed=1),
                partitioner=v1.fixed_size_partitioner(parts, axis=axis),
            )  # fmt: skip
        for dtype in ("float64", "int32", "uint8", "bool", "complex64", "bfloat16", "float16", "int64"):
            v1.get_variable(f"of/{dtype}", initializer=tf.zeros((3, 1, 2), dtype))
        v1.get_variable("none", initializer=np.zeros((0, 4), np.float32))
        v1.get_variable("words", initializer=tf.constant([["a", "bc"], ["", "d" * 1000]]))
        v1.get_variable("wide", shape=(70000,), initializer=v1.ones_initializer())
        session.run(v1.global_variables_initializer())
        session.run(step.assign(1234))
        saver = v1.train.Saver(sharded=sharded, save_relative_paths=True)
        directory.mkdir(parents=True)
        return saver.save(session, str(directory / "mödel.ckpt"), global_step=1234)


def objects(directory: Path) -> str:
    """A `tf.train.Checkpoint` of TensorFlow 2."""
    tree = tf.train.Checkpoint(
        step=tf.Variable(7, dtype=tf.int64), weights=[tf.Variable(tf.ones((5, 2))), tf.Variable(3.0)]
    )
    manager = tf.train.CheckpointManager(tree, str(directory), max_to_keep=2)
    return manager.save(checkpoint_number=7)


def placed(directory: Path) -> str:
    """In three shards: one for each device."""
    with tf.Graph().as_default():
        config = v1.ConfigProto(device_count={"CPU": 3})
        for i in range(3):
            with tf.device(f"/cpu:{i}"):
                v1.get_variable(f"on{i}", initializer=np.arange(10 * (i + 1), dtype=np.int32))
        with tf.device("/cpu:0"):
            v1.get_variable("parts", shape=(100,), partitioner=v1.fixed_size_partitioner(4))
            step = v1.train.get_or_create_global_step()
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            session.run(step.assign(5))
            directory.mkdir(parents=True)
            return v1.train.Saver(sharded=True).save(session, str(directory / "m"), global_step=5)


def said(prefix: str) -> dict:
    """What TensorFlow's reader says."""
    reader = tf.train.load_checkpoint(prefix)
    dtypes = reader.get_variable_to_dtype_map()
    return {
        "prefix": prefix,
        "files": sorted(os.listdir(Path(prefix).parent)),
        "newest": tf.train.latest_checkpoint(Path(prefix).parent),
        "tensors": {
            name: [dtypes[name].name, shape] for name, shape in reader.get_variable_to_shape_map().items()
        },
    }


if __name__ == "__main__":
    base = Path(sys.argv[1])
    found = {
        "one": said(graph(base / "one", sharded=False)),
        "sharded": said(graph(base / "sharded", sharded=True)),
        "placed": said(placed(base / "placed")),
        "objects": said(objects(base / "objects")),
    }
    print(json.dumps(found))
