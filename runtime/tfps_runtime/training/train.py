"""Train: what a TF task does around the loop.

code = run(context)         # in a process forked for one TF task
result = run_local("dags/programs/linear_regression.py", steps=500)
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps_runtime.failure import first_line
from tfps_runtime.protocol import EXIT_TRY_AGAIN, CheckpointOptions, Result, TaskContext
from tfps_runtime.training.checkpoints import Checkpoints, Saving
from tfps_runtime.training.cluster import Cluster
from tfps_runtime.training.early import EarlyStop
from tfps_runtime.training.evaluation import evaluate
from tfps_runtime.training.hooked import Hooked
from tfps_runtime.training.loop import Loop
from tfps_runtime.training.model import Params, random_seed
from tfps_runtime.training.program import Program, load_program
from tfps_runtime.training.progress import ProgressWriter
from tfps_runtime.training.replica import Replica, build_replica
from tfps_runtime.training.session import RecoveryError, Sessions
from tfps_runtime.training.stopping import StopRequest, StopRequestedError
from tfps_runtime.training.summaries import Summaries
from tfps_runtime.training.sync import SyncChief, SyncMember
from tfps_runtime.training.towers import build_towers
from tfps_runtime.whole import write_whole

_log = logging.getLogger("tfps")

TRY_AGAIN = (
    tf.errors.AbortedError,
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    RecoveryError,
    StopRequestedError,
)
"""What another try may mend; any other error is the program's, and final."""


def run(context: TaskContext) -> int:
    """Be the TF task that `context` describes, until training ends; gives the exit code. Call once per process.

    A ps serves until it is killed; so does every in-graph replica but the chief. A replica trains; the chief also
    initialises, saves, and in the end evaluates and leaves the result at `context.result_path`. SIGTERM: the step
    under way is finished, the chief saves.

    Returns:
        0 if training has ended; EXIT_TRY_AGAIN after SIGTERM, or if the cluster was lost beyond recovery.

    Raises:
        ProgramError: this program cannot work in this cluster; so do all errors of the program itself.
    """
    tf.disable_v2_behavior()
    cluster = Cluster.from_context(context)
    if cluster.is_server_only:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it has nothing to save
        cluster.start_server(cluster.config(context.session)).join()
        return EXIT_TRY_AGAIN
    stop = StopRequest()
    # The agent kills after grace_secs. Only the chief has something to save.
    stop.install(0.8 * context.grace_secs if cluster.is_chief else min(2.0, 0.5 * context.grace_secs))
    try:
        server = cluster.start_server(cluster.config(context.session))
        result = _train(context, cluster, server.target, stop)
    except TRY_AGAIN as error:
        _log.info("%s leaves, to be tried again: %s", cluster.task, first_line(error))
        return EXIT_TRY_AGAIN
    if stop.is_requested and result is None:
        _log.info("%s stopped as asked", cluster.task)
        return EXIT_TRY_AGAIN
    if result is not None:
        write_whole(context.result_path, result.dumps() + "\n")
    return 0


def run_local(
    program: str,
    *,
    steps: int | None = None,
    hparams: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    checkpoint_dir: str | None = None,
    save_checkpoint_secs: float = 60.0,
    session: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> Result:
    """Train and evaluate a program in this process, without a cluster; blocks until the end.

    Continues from the newest checkpoint in `checkpoint_dir`. Without a directory nothing is kept, and the result
    names no checkpoint. Call it in a process that has not used TensorFlow otherwise: TensorFlow 2 behaviour is off
    afterwards.

    Args:
        program: path of the Python file.
        steps: global step to end at; None ends with the input.
        hparams: for the program.
        inputs: name -> local path.
        checkpoint_dir: made if absent.
        save_checkpoint_secs: between two checkpoints.
        session: ConfigProto's fields, as in the job.
        seed: of all random numbers; None draws one.

    Raises:
        ProgramError: the program cannot work; so do all errors of the program itself.
    """
    configure_logging()
    tf.disable_v2_behavior()
    with tempfile.TemporaryDirectory(prefix="tfps-") as scratch:
        context = TaskContext(
            task="worker:0",
            host="local",
            cluster={},
            chief="worker:0",
            program=program,
            checkpoint=CheckpointOptions(
                directory=checkpoint_dir or scratch, save_checkpoint_secs=save_checkpoint_secs
            ),
            progress_path="",
            result_path="",
            steps=steps,
            hparams=dict(hparams or {}),
            inputs=dict(inputs or {}),
            session=dict(session or {}),
            seed=seed,
        )
        result = _train(context, Cluster.from_context(context), "", StopRequest())
    assert result is not None  # this process is the chief, and nobody asks it to stop
    return result if checkpoint_dir is not None else Result(result.global_step, None, result.metrics)


def configure_logging() -> None:
    """Send the harness's log lines to stdout, bare; idempotent. The root logger is the program's."""
    if not _log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
        _log.propagate = False
    tf.logging.set_verbosity(tf.logging.ERROR)  # every TensorFlow 1 name is announced as deprecated otherwise


def _train(context: TaskContext, cluster: Cluster, target: str, stop: StopRequest) -> Result | None:
    """Train this replica; gives the result if this is the chief and training has ended."""
    seed = random_seed(context.seed, context.task, context.attempt)
    random.seed(seed)  # forked processes start with equal generators
    np.random.seed(seed)  # noqa: NPY002  (the generator that programs of this kind use)
    program = load_program(context.program)
    params = Params(context.hparams, context.inputs, ps_count=cluster.ps_count)
    replica = _build(context, program, params, cluster, seed)
    config = cluster.config(context.session)
    progress = ProgressWriter(context.progress_path or None)
    with replica.graph.as_default():
        checkpoints = None
        with cluster.placement():
            hooked = Hooked(replica.model.hooks)  # first: hooks may add variables
            if cluster.is_chief:
                names = replica.model.start_from_names
                checkpoints = Checkpoints(context.checkpoint, context.start_from, names)
        restore = _nothing if checkpoints is None else checkpoints.restore
        sessions = Sessions(cluster, target, config, restore=restore, stop=stop)
        _log.info(
            "%s is replica %d of %d, with %d ps, %s, to global step %s",
            cluster.task,
            cluster.replica_index,
            len(cluster.replicas),
            cluster.ps_count,
            "in-graph" if cluster.is_in_graph else context.mode,
            context.steps if context.steps is not None else "at the input's end",
        )
        members = [*_sync_member(replica, context.steps, stop), hooked]
        with contextlib.closing(progress), _beside(context, program, replica, checkpoints) as beside:
            Loop(
                replica,
                sessions,
                progress,
                steps=context.steps,
                stop=stop,
                hooked=hooked,
                companions=[*members, *beside.companions],
                watchers=beside.watchers,
                summaries=beside.summaries,
            ).run()
    if checkpoints is None or stop.is_requested:
        return None
    return _result(context, program, checkpoints)


def _build(context: TaskContext, program: Program, params: Params, cluster: Cluster, seed: int) -> Replica:
    if cluster.is_in_graph:
        return build_towers(program, params, cluster, seed)
    aggregate = _replicas_to_aggregate(context, cluster)
    return build_replica(program, params, cluster, seed, replicas_to_aggregate=aggregate)


def _sync_member(replica: Replica, steps: int | None, stop: StopRequest) -> list[Any]:
    if replica.synchroniser is None:
        return []
    if replica.cluster.is_chief:
        return [SyncChief(replica.synchroniser, replica.global_step, steps, stop)]
    return [SyncMember(replica.synchroniser)]


@dataclass(frozen=True)
class _Beside:
    """What the chief does beside the steps."""

    companions: Sequence[Any] = ()
    watchers: Sequence[Any] = ()
    summaries: Summaries | None = None


@contextlib.contextmanager
def _beside(
    context: TaskContext, program: Program, replica: Replica, checkpoints: Checkpoints | None
) -> Iterator[_Beside]:
    if checkpoints is None:
        yield _Beside()
        return
    options = context.checkpoint
    saving = Saving(checkpoints, replica.global_step, options.save_checkpoint_secs)
    with contextlib.closing(
        Summaries(options.directory, options.save_summaries_secs, replica.graph)
    ) as summaries:
        watchers: list[Any] = [saving]
        if replica.model.early_stopping is not None:
            judge = functools.partial(_evaluate, context, program)
            watchers.append(EarlyStop(replica.model.early_stopping, saving, judge, summaries))
        yield _Beside([saving], watchers, summaries)


def _replicas_to_aggregate(context: TaskContext, cluster: Cluster) -> int | None:
    """None for async mode. One process has nobody to wait for."""
    if context.mode != "sync" or cluster.is_local:
        return None
    if context.replicas_to_aggregate is None:
        return len(cluster.replicas)
    return context.replicas_to_aggregate


def _result(context: TaskContext, program: Program, checkpoints: Checkpoints) -> Result:
    checkpoint = checkpoints.newest()
    assert checkpoint is not None  # the training's end has just saved one
    metrics = _evaluate(context, program, checkpoint)
    _log.info(
        "evaluated %s: %s", checkpoint, ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
    )
    return Result(int(checkpoint.rpartition("-")[2]), checkpoint, metrics)


def _evaluate(context: TaskContext, program: Program, checkpoint: str) -> dict[str, float]:
    seed = context.seed or 0
    return evaluate(program, checkpoint, context.hparams, context.inputs, session=context.session, seed=seed)


def _nothing(session: Any) -> None:
    """Restore nothing: this is not the chief."""
