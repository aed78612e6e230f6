"""Synchronous training: average the replicas' gradients, update once, let everybody go on.

Every replica pushes its gradients into one accumulator per variable, which drops gradients older than its own step
(as `tf.train.SyncReplicasOptimizer` does), and then says that it has arrived. The chief repeats one op in a thread of
its own: wait for `replicas_to_aggregate` arrivals, take the mean of the gradients that are there, apply it, give every
replica a token that carries the new global step. A replica waits for a token newer than its own step.

Unlike the stock optimizer there is one token queue *per replica*, and none is ever closed: the stock chief closes the
shared queue when it ends or restarts, which ends or breaks its peers, and hangs for two minutes in a queue runner.
A missing replica takes nobody's tokens, so with `replicas_to_aggregate` = number of replicas training waits for it.
A wake-up token releases every waiting replica: it computes afresh and pushes again. A few gradients then count twice
in one update, which is what a restart costs; nothing is lost and nobody waits for a token that went with a process.

A replica whose input has ended goes on arriving, without gradients: the mean is that of the others, whose examples all
count. What arrives is only counted, so it costs next to nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from tfps_runtime.training.session import call, state_variable
from tfps_runtime.training.stopping import StopRequest

_log = logging.getLogger("tfps")

WAKE_UP = 2**62
"""A token newer than every step."""

# What an op that spans the ps reports when one of them dies is a matter of who notices first. A new session is made
# after Aborted and Unavailable.
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
        ended: an integer tensor, read anew in each step: how many replicas have no input any more.
    """

    def __init__(
        self, optimizer: Any, *, replicas: int, aggregate: int, index: int, global_step: Any, ended: Any
    ) -> None:
        self._optimizer = optimizer
        self._replicas = replicas
        self._aggregate = aggregate
        self._index = index
        self._global_step = global_step
        self._type = global_step.dtype.base_dtype
        with tf.device(global_step.device):
            self._steps = state_variable("local_steps", [replicas], global_step.device, self._type)
            self._step = self._steps[index]
            self._arrivals = tf.ConditionalAccumulator(tf.float32, (), shared_name="tfps/arrivals")
            # Those without input arrive at once. With backups they must not stand for those who have some.
            self._wanted = tf.minimum(replicas, aggregate + ended)
            self._queues = [
                tf.FIFOQueue(-1, self._type, shapes=(), shared_name=f"tfps/tokens_{i}")
                for i in range(replicas)
            ]
            self.wake_up = self._give(tf.constant(WAKE_UP, self._type))
        self._tokens = self._queues[index]

    def build(
        self, gradients: Sequence[tuple[Any, Any]], averages: Any | None, averaged: Sequence[Any]
    ) -> None:
        """Build the steps, pairs (local step after it, seconds waited): `step` with gradients, `idle_step` without.

        Also `join`, to run before the first; for the chief `update`, with `set_steps` before the first: a new
        accumulator would take gradients of any age.

        Args:
            gradients: this replica's (gradient, variable) pairs; none is None.
            averages: a `tf.train.ExponentialMovingAverage` to update with every global step, or None.
            averaged: the variables that it averages.
        """
        pushes: list[Any] = []
        means: list[tuple[Any, Any]] = []
        set_steps = [self._arrivals.set_global_step(self._global_step)]
        with tf.device(self._global_step.device):
            everybody = self._arrivals.take_grad(self._wanted)
        for gradient, variable in gradients:
            with tf.device(variable.device):
                name = f"{variable.op.name}/tfps_gradients"
                if isinstance(gradient, tf.IndexedSlices):
                    sparse = tf.SparseConditionalAccumulator(gradient.dtype, shape=(), shared_name=name)
                    pushes.append(sparse.apply_indexed_slices_grad(gradient, local_step=self._step))
                    with tf.control_dependencies([everybody]):
                        mean = sparse.take_indexed_slices_grad(1)
                    set_steps.append(sparse.set_global_step(self._global_step))
                else:
                    dense = tf.ConditionalAccumulator(gradient.dtype, variable.get_shape(), shared_name=name)
                    pushes.append(dense.apply_grad(gradient, local_step=self._step))
                    with tf.control_dependencies([everybody]):
                        mean = dense.take_grad(1)
                    set_steps.append(dense.set_global_step(self._global_step))
                means.append((mean, variable))
        self.update = self._build_update(means, averages, averaged)
        self.step = self._build_step(1.0, pushes)
        self.idle_step = self._build_step(0.0, [])
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

    def _build_step(self, weight: float, pushes: Sequence[Any]) -> tuple[Any, Any]:
        """Push, arrive, wait for a token newer than the local step, drain to the newest."""
        with tf.device(self._global_step.device):
            with tf.control_dependencies(pushes):
                arrival = self._arrivals.apply_grad(tf.constant(weight), local_step=self._step)
            with tf.control_dependencies([arrival]):
                seen, since = tf.identity(self._step), tf.timestamp()
            with tf.control_dependencies([seen, since]):
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
                return self._set_local_step(), tf.timestamp() - since

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
                return self._set_local_step()

    def _set_local_step(self) -> Any:
        step = tf.identity(self._global_step.read_value())
        with tf.control_dependencies([tf.scatter_update(self._steps, self._index, step)]):
            return tf.identity(step)


class SyncMember:
    """Joins a replica that is not the chief to the others, in each new session."""

    def __init__(self, synchroniser: Synchroniser) -> None:
        self._synchroniser = synchroniser

    def begin(self, session: Any, coord: Any) -> None:
        del coord
        session.run(self._synchroniser.join)

    def end(self, session: Any) -> None:
        """Nothing: the chief ends it for all."""


class SyncChief(SyncMember):
    """Runs the chief's updates in a thread, up to global step `steps` exactly, in each new session."""

    def __init__(
        self, synchroniser: Synchroniser, global_step: Any, steps: int | None, stop: StopRequest
    ) -> None:
        super().__init__(synchroniser)
        self._global_step = global_step
        self._steps = steps
        self._stop = stop

    def begin(self, session: Any, coord: Any) -> None:
        session.run(self._synchroniser.set_steps)
        # Replicas may wait for an update that went with an earlier chief, or with a ps.
        session.run(self._synchroniser.wake_up)
        session.run(self._synchroniser.join)
        # And SIGTERM may find this process waiting for the others.
        self._stop.on_request = lambda: self._wake_up(session)
        step = int(session.run(self._global_step))
        update = call(session, [self._synchroniser.update])
        threading.Thread(
            target=self._update, args=(session, coord, update, step), name="tfps-sync", daemon=True
        ).start()

    def end(self, session: Any) -> None:
        self._wake_up(session)

    def _update(self, session: Any, coord: Any, update: Any, step: int) -> None:
        while not coord.should_stop() and (self._steps is None or step < self._steps):
            try:
                step = int(update()[0])
            except (tf.errors.OpError, RuntimeError) as error:
                # RuntimeError: the session was closed meanwhile.
                if not coord.should_stop():
                    self._wake_up(session)  # the peers may wait on a ps that still lives
                    # A tuple: of a bare exception it would record the one that is being handled.
                    cause = _as_recoverable(error)
                    coord.request_stop((type(cause), cause, error.__traceback__))
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
