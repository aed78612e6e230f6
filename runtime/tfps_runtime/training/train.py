"""Train: the loop, and what a TF task does around it.

code = run(context)         # in a process forked for one TF task
result = run_local("dags/programs/linear_regression.py", steps=500)
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps_runtime.failure import first_line
from tfps_runtime.protocol import EXIT_TRY_AGAIN, CheckpointOptions, Result, TaskContext
from tfps_runtime.training.checkpoints import CheckpointHook, Checkpoints
from tfps_runtime.training.cluster import Cluster
from tfps_runtime.training.evaluation import evaluate
from tfps_runtime.training.model import Params, ProgramError, random_seed
from tfps_runtime.training.program import Program, load_program
from tfps_runtime.training.progress import ProgressWriter
from tfps_runtime.training.replica import Replica, build_replica
from tfps_runtime.training.session import (
    MAX_LOST_SESSIONS,
    RECOVERY_WAIT_SECS,
    ClusterSessionCreator,
    PublishHook,
    RecoveryError,
)
from tfps_runtime.training.stopping import StopRequest, StopRequestedError
from tfps_runtime.training.sync import SyncChiefHook, SyncWorkerHook

_log = logging.getLogger("tfps")

STOP_GRACE_SECS = 2.0
"""For a program's own queue runners when a session ends; stock TensorFlow waits 120 s for a blocked one."""

OTHERS_INPUT_SECS = 30.0
"""Async, no step limit or not reached: the chief's input has ended and the global step stands still for this long."""

_TRY_AGAIN = (
    tf.errors.AbortedError,
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    RecoveryError,
    StopRequestedError,
)


class NotFiniteError(ProgramError):
    """The loss became NaN or infinite."""


def run(context: TaskContext) -> int:
    """Be the TF task that `context` describes, until training ends; gives the exit code. Call once per process.

    A ps serves until it is killed. A replica trains; the chief also initialises, saves, and in the end evaluates and
    leaves the result at `context.result_path`. SIGTERM: the step under way is finished, the chief saves.

    Returns:
        0 if training has ended; EXIT_TRY_AGAIN after SIGTERM, or if the cluster was lost beyond recovery.

    Raises:
        ProgramError: this program cannot work in this cluster; so do all errors of the program itself.
    """
    tf.disable_v2_behavior()
    if context.replication != "between_graph":
        raise ProgramError(f"replication {context.replication!r}: model_fn programs train between_graph")
    cluster = Cluster.from_context(context)
    if cluster.is_ps:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it has nothing to save
        cluster.start_server(cluster.config(context.session)).join()
        return EXIT_TRY_AGAIN
    stop = StopRequest()
    # The agent kills after grace_secs. Only the chief has something to save.
    stop.install(0.8 * context.grace_secs if cluster.is_chief else min(2.0, 0.5 * context.grace_secs))
    try:
        server = cluster.start_server(cluster.config(context.session))
        result = _train(context, cluster, server.target, stop)
    except _TRY_AGAIN as error:
        _log.info("%s leaves, to be tried again: %s", cluster.task, first_line(error))
        return EXIT_TRY_AGAIN
    if stop.is_requested and result is None:
        _log.info("%s stopped as asked", cluster.task)
        return EXIT_TRY_AGAIN
    if result is not None:
        _write(context.result_path, result)
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
    params = Params(context.hparams, context.inputs)
    replica = build_replica(
        program, params, cluster, seed, replicas_to_aggregate=_replicas_to_aggregate(context, cluster)
    )
    config = cluster.config(context.session)
    progress = ProgressWriter(context.progress_path or None)
    with replica.graph.as_default():
        with cluster.placement():
            checkpoints = Checkpoints(context.checkpoint, context.start_from) if cluster.is_chief else None
        creator = ClusterSessionCreator(
            cluster,
            target,
            config,
            restore=checkpoints.restore if checkpoints is not None else _nothing,
            stop=stop,
        )
        hooks = _hooks(context, replica, checkpoints, creator, stop)
        _log.info(
            "%s is replica %d of %d, with %d ps, %s, to global step %s",
            cluster.task,
            cluster.replica_index,
            len(cluster.replicas),
            cluster.ps_count,
            context.mode,
            context.steps if context.steps is not None else "at the input's end",
        )
        try:
            _loop(replica, creator, hooks, progress, steps=context.steps, stop=stop)
        finally:
            progress.close()
    if checkpoints is None or stop.is_requested:
        return None
    return _result(context, program, checkpoints)


def _loop(
    replica: Replica,
    creator: ClusterSessionCreator,
    hooks: list[Any],
    progress: ProgressWriter,
    *,
    steps: int | None,
    stop: StopRequest,
) -> None:
    """Step until the global step is reached, the input has ended, or this process was asked to stop.

    Raises NotFiniteError, and whatever a step raises beyond what a new session can mend.
    """
    waited_secs = 0.0
    feeds = replica.batches.feeds()
    with tf.train.MonitoredSession(
        session_creator=creator, hooks=hooks, stop_grace_period_secs=STOP_GRACE_SECS
    ) as session:
        step, ended = _run_bare(session, [replica.global_step, replica.ended])
        if is_reached(step, steps):
            _log.info("global step %d: nothing left to train up to %d", step, steps)
        while not (
            is_reached(step, steps)
            or replica.is_input_over(ended)
            or stop.is_requested
            or session.should_stop()
        ):
            try:
                asked = time.monotonic()
                feed = next(feeds)
                waited_secs += time.monotonic() - asked
                values = session.run(replica.fetches, feed_dict=feed)
            except (StopIteration, tf.errors.OutOfRangeError):
                _log.info("the input of %s has ended", replica.cluster.task)
                _end_input(session, replica, progress, steps, stop)
                break
            creator.note_step()
            step, ended, loss = int(values["step"]), values["ended"], float(values["loss"])
            if not math.isfinite(loss):
                raise NotFiniteError(
                    f"the loss is {loss} at global step {step}, local step {progress.local_step + 1}; "
                    "a smaller learning rate or clip_norm may help"
                )
            progress.step(step, loss, values.get("examples"), waited_secs + creator.waited_secs)


def _run_bare(session: Any, fetches: Any) -> Any:
    """Run something that is no step: without hooks, whose own fetches may need a batch."""
    for _ in range(MAX_LOST_SESSIONS):
        # When a session is lost here, MonitoredSession makes another and then calls with the closed one again.
        with contextlib.suppress(RuntimeError):
            return session.run_step_fn(lambda step_context: step_context.session.run(fetches))
    raise RecoveryError(f"{MAX_LOST_SESSIONS} sessions in a row were closed under {fetches}")


def is_reached(step: int, steps: int | None) -> bool:
    return steps is not None and step >= steps


def _end_input(
    session: Any, replica: Replica, progress: ProgressWriter, steps: int | None, stop: StopRequest
) -> None:
    """Tell the others that this replica's input has ended.

    Synchronous training ends for all, for an update needs everybody. Asynchronous training goes on without this
    replica; the chief stays to save what the others do, until their input ends or nothing moves any more.
    """
    ended = _run_bare(session, replica.mark_ended)
    if replica.synchroniser is not None:
        _run_bare(session, replica.synchroniser.wake_up)
    elif replica.cluster.is_chief:
        started = since = time.monotonic()
        step = -1
        while not ended.all() and not stop.wait(RECOVERY_WAIT_SECS):
            # Marked again each time: a ps that was lost has forgotten it.
            now_step, ended = _run_bare(session, [replica.global_step, replica.mark_ended])
            progress.watch(int(now_step), time.monotonic() - started)
            if is_reached(now_step, steps):
                break
            if now_step != step:
                step, since = now_step, time.monotonic()
            elif time.monotonic() - since > OTHERS_INPUT_SECS:
                _log.info("the others have not stepped for %g s; ending without them", OTHERS_INPUT_SECS)
                break


def _hooks(
    context: TaskContext,
    replica: Replica,
    checkpoints: Checkpoints | None,
    creator: ClusterSessionCreator,
    stop: StopRequest,
) -> list[Any]:
    hooks: list[Any] = []
    if replica.synchroniser is not None:
        if replica.cluster.is_chief:
            hooks.append(SyncChiefHook(replica.synchroniser, replica.global_step, context.steps, stop))
        else:
            hooks.append(SyncWorkerHook(replica.synchroniser))
    hooks.extend(replica.model.hooks)
    if checkpoints is not None:
        options = context.checkpoint
        hooks += [
            CheckpointHook(checkpoints, replica.global_step, options.save_checkpoint_secs),
            tf.train.SummarySaverHook(
                save_secs=options.save_summaries_secs,
                output_dir=options.directory,
                summary_op=replica.summary,
            ),
            tf.train.StepCounterHook(
                every_n_steps=None, every_n_secs=options.save_summaries_secs, output_dir=options.directory
            ),
            PublishHook(creator),
        ]
    return hooks


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
    metrics = evaluate(
        program, checkpoint, context.hparams, context.inputs, session=context.session, seed=context.seed or 0
    )
    _log.info(
        "evaluated %s: %s", checkpoint, ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
    )
    return Result(int(checkpoint.rpartition("-")[2]), checkpoint, metrics)


def _write(path: str, result: Result) -> None:
    temporary = Path(f"{path}.{os.getpid()}")
    temporary.write_text(result.dumps() + "\n", encoding="utf-8")
    temporary.replace(path)


def _nothing(session: Any) -> None:
    """Restore nothing: this is not the chief."""
