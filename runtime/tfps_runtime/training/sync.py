"""Synchronous training: average the replicas' gradients, update once, let everybody go on.

Every replica pushes its gradients into one accumulator per variable, which drops gradients older than its own step
(as `tf.train.SyncReplicasOptimizer` does). The chief repeats one op in a thread of its own: take the mean of
`replicas_to_aggregate` gradients, apply it, give every replica a token that carries the new global step. A replica
waits for a token newer than its own step.

Unlike the stock optimizer there is one token queue *per replica*, and none is ever closed: the stock chief closes the
shared queue when it ends or restarts, which ends or breaks its peers, and hangs for two minutes in a queue runner.
A missing replica takes nobody's tokens, so with `replicas_to_aggregate` = number of replicas training waits for it.
A wake-up token releases every waiting replica: it computes afresh and pushes again. A few gradients then count twice
in one update, which is what a restart costs; nothing is lost and nobody waits for a token that went with a process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps_runtime.training.stopping import StopRequest

_log = logging.getLogger("tfps")

WAKE_UP = 2**62
"""A token newer than every step."""

# What an op that spans the ps reports when one of them dies is a matter of who notices first. MonitoredSession
# recovers from Aborted and Unavailable.
_LOST = (
    tf.errors.AbortedError,
    tf.errors.UnavailableError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
)


class Synchroniser:
    """The ops of synchronous training, for one replica. Build it inside the cluster's placement.

    Args:
        optimizer: applies the averaged gradients.
        replicas: how many there are.
        aggregate: how many gradients make an update; fewer than `replicas` leaves backup workers.
        index: this replica's.
        global_step: the variable.
    """

    def __init__(
        self, optimizer: Any, *, replicas: int, aggregate: int, index: int, global_step: Any
    ) -> None:
        self._optimizer = optimizer
        self._aggregate = aggregate
        self._global_step = global_step
        self._type = global_step.dtype.base_dtype
        self._local_step = tf.get_variable(
            "tfps/local_step",
            (),
            self._type,
            tf.zeros_initializer(),
            trainable=False,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
        )
        with tf.device(global_step.device):
            self._queues = [
                tf.FIFOQueue(-1, self._type, shapes=(), shared_name=f"tfps/tokens_{i}")
                for i in range(replicas)
            ]
            self.wake_up = self._give(tf.constant(WAKE_UP, self._type))
        self._tokens = self._queues[index]

    def build(
        self, gradients: Sequence[tuple[Any, Any]], averages: Any | None, averaged: Sequence[Any]
    ) -> None:
        """Build `push_and_wait`, each replica's step, with `join` before the first; for the chief `update`, with
        `set_steps` before the first: a new accumulator would take gradients of any age.

        Args:
            gradients: this replica's (gradient, variable) pairs; none is None.
            averages: a `tf.train.ExponentialMovingAverage` to update with every global step, or None.
            averaged: the variables that it averages.
        """
        pushes: list[Any] = []
        means: list[tuple[Any, Any]] = []
        set_steps: list[Any] = []
        for gradient, variable in gradients:
            with tf.device(variable.device):
                name = f"{variable.op.name}/tfps_gradients"
                if isinstance(gradient, tf.IndexedSlices):
                    sparse = tf.SparseConditionalAccumulator(gradient.dtype, shape=(), shared_name=name)
                    pushes.append(sparse.apply_indexed_slices_grad(gradient, local_step=self._local_step))
                    mean = sparse.take_indexed_slices_grad(self._aggregate)
                    set_steps.append(sparse.set_global_step(self._global_step))
                else:
                    dense = tf.ConditionalAccumulator(gradient.dtype, variable.get_shape(), shared_name=name)
                    pushes.append(dense.apply_grad(gradient, local_step=self._local_step))
                    mean = dense.take_grad(self._aggregate)
                    set_steps.append(dense.set_global_step(self._global_step))
                means.append((mean, variable))
        self.update = self._build_update(means, averages, averaged)
        self.push_and_wait = self._build_wait(pushes)
        self.join = self._build_join()
        self.set_steps = tf.group(*set_steps)

    def _give(self, token: Any) -> Any:
        return tf.group(*[queue.enqueue(token) for queue in self._queues])

    def _build_update(self, means: Sequence[tuple[Any, Any]], averages: Any, averaged: Sequence[Any]) -> Any:
        """One global step; gives the new global step, after the tokens are out."""
        with tf.device(self._global_step.device):
            done = self._optimizer.apply_gradients(means, self._global_step)
            if averages is not None:
                # Before the tokens: who sees the last step may save at once, and the averages belong to it.
                with tf.control_dependencies([done]):
                    done = averages.apply(averaged)
            with tf.control_dependencies([done]):
                step = tf.identity(self._global_step.read_value())
            with tf.control_dependencies([self._give(step)]):
                return tf.identity(step)

    def _build_wait(self, pushes: Sequence[Any]) -> Any:
        """Push, wait for a token newer than the local step, drain to the newest; gives the new local step."""
        with tf.device(self._global_step.device):
            with tf.control_dependencies(pushes):
                seen = tf.identity(self._local_step)
            with tf.control_dependencies([seen]):
                first = self._tokens.dequeue()
            newest = tf.while_loop(
                lambda token: tf.logical_or(token <= seen, self._tokens.size() > 0),
                lambda _: [self._tokens.dequeue()],
                [first],
                parallel_iterations=1,
                back_prop=False,
            )
            with tf.control_dependencies([newest]):
                # Not the token's value: a wake-up carries none, and the variables are at least this new.
                step = tf.identity(self._global_step.read_value())
        return tf.assign(self._local_step, step)

    def _build_join(self) -> Any:
        """Take up the current global step; drop the tokens of an earlier life of this replica.

        The wake-up given first goes to a step of that earlier life which may still wait on the ps (its host died
        without a word): left there, it would swallow the first token meant for us.
        """
        with tf.device(self._global_step.device):
            with tf.control_dependencies([self._tokens.enqueue(tf.constant(WAKE_UP, self._type))]):
                start = tf.constant(0, self._type)
            drained = tf.while_loop(
                lambda _: self._tokens.size() > 0,
                lambda _: [self._tokens.dequeue()],
                [start],
                parallel_iterations=1,
                back_prop=False,
            )
            with tf.control_dependencies([drained]):
                step = tf.identity(self._global_step.read_value())
        return tf.assign(self._local_step, step)


class SyncWorkerHook(tf.train.SessionRunHook):  # type: ignore[misc]  # TensorFlow is untyped
    """Joins a replica that is not the chief to the others, in each new session."""

    def __init__(self, synchroniser: Synchroniser) -> None:
        self._synchroniser = synchroniser

    def after_create_session(self, session: Any, coord: Any) -> None:
        del coord
        session.run(self._synchroniser.join)


class SyncChiefHook(tf.train.SessionRunHook):  # type: ignore[misc]  # TensorFlow is untyped
    """Runs the chief's updates in a thread, up to global step `steps` exactly, in each new session."""

    def __init__(
        self, synchroniser: Synchroniser, global_step: Any, steps: int | None, stop: StopRequest
    ) -> None:
        self._synchroniser = synchroniser
        self._global_step = global_step
        self._steps = steps
        self._stop = stop

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._synchroniser.set_steps)
        # Replicas may wait for an update that went with an earlier chief, or with a ps.
        session.run(self._synchroniser.wake_up)
        session.run(self._synchroniser.join)
        # And SIGTERM may find this process waiting for the others.
        self._stop.on_request = lambda: self._wake_up(session)
        step = int(session.run(self._global_step))
        update = session.make_callable(self._synchroniser.update)
        threading.Thread(
            target=self._update, args=(session, coord, update, step), name="tfps-sync", daemon=True
        ).start()

    def end(self, session: Any) -> None:
        self._wake_up(session)

    def _update(self, session: Any, coord: Any, update: Any, step: int) -> None:
        while not coord.should_stop() and (self._steps is None or step < self._steps):
            try:
                step = int(update())
            except (tf.errors.OpError, RuntimeError) as error:
                # RuntimeError: the session was closed meanwhile.
                if not coord.should_stop():
                    coord.request_stop(_as_recoverable(error))
                    self._wake_up(session)  # this process and its peers may wait on a ps that still lives
                return

    def _wake_up(self, session: Any) -> None:
        try:
            session.run(self._synchroniser.wake_up)
        except (tf.errors.OpError, RuntimeError) as error:
            _log.debug("no wake-up: %s", error)


def _as_recoverable(error: Exception) -> Exception:
    if isinstance(error, _LOST):
        return tf.errors.AbortedError(None, None, f"the update was lost: {error}")  # type: ignore[no-any-return]
    return error
