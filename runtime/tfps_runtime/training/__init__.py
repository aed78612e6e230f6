"""The training harness: programs of `input_fn` and `model_fn`, trained with parameter servers.

The only importer of TensorFlow, as `tensorflow.compat.v1`. Importing this package runs no op, makes no session and
starts no thread, so a nursery may import it and fork afterwards.

    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model

    def input_fn(mode, params, shard): ...      # a dataset, tensors, or an iterator of arrays: see `inputs`
    def model_fn(features, labels, mode, params):
        return Model(loss=loss, optimizer=tf.train.AdamOptimizer(params["learning_rate"]), metrics={...})
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tfps_runtime.failure import report
from tfps_runtime.protocol import CONTEXT_VARIABLE, TaskContext
from tfps_runtime.training import readers
from tfps_runtime.training.evaluation import evaluate, predict
from tfps_runtime.training.export import export
from tfps_runtime.training.model import (
    EVAL,
    PREDICT,
    TRAIN,
    EarlyStopping,
    Model,
    Params,
    ProgramError,
    Shard,
)
from tfps_runtime.training.placement import partitioner
from tfps_runtime.training.queues import queued
from tfps_runtime.training.train import configure_logging, run, run_local

__all__ = [
    "EVAL",
    "PREDICT",
    "TRAIN",
    "EarlyStopping",
    "Model",
    "Params",
    "ProgramError",
    "Shard",
    "configure_logging",
    "evaluate",
    "export",
    "main",
    "partitioner",
    "predict",
    "queued",
    "readers",
    "run",
    "run_local",
]


def main() -> int:
    """Be the TF task that the file named by TFPS_CONTEXT describes; gives the exit code.

    0: training has ended. 75: try again. Anything else: the program failed, with a traceback on stderr. The caller
    should leave with `os._exit`: a TensorFlow server has no clean end, and blocked threads may outlive the loop.
    """
    configure_logging()
    try:
        return run(TaskContext.loads(Path(os.environ[CONTEXT_VARIABLE]).read_text(encoding="utf-8")))
    except Exception as error:  # noqa: BLE001  (the process's outermost frame)
        report(error)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
