"""Sessions of a cluster: the chief initialises, the others wait, and a lost ps means another session.

TensorFlow's own (`MonitoredSession`, `Supervisor`) let the others look for the chief's work every 30 s, and let a
restarted chief rewind a living cluster to its last checkpoint. Here the others look several times a second, and a chief
that finds the variables alive goes on with them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import config_pb2

from tfps_runtime.training.cluster import Cluster
from tfps_runtime.training.stopping import StopRequest, StopRequestedError, deadline

_log = logging.getLogger("tfps")

STATE = "tfps_state"
"""Collection of the cluster's variables that belong to one life of the ps: shared, never saved."""

RECOVERY_WAIT_SECS = 0.2
"""Between two looks for the chief's initialisation, and before a lost session is replaced."""

CONNECT_SECS = 300.0
"""For the ps to answer; then the process ends, and its agent may try again."""

MAX_LOST_SESSIONS = 10
"""In a row, without a step between them."""


class RecoveryError(Exception):
    """Sessions are lost again and again; the process should end, and may be tried again."""


class Sessions:
    """Makes the sessions of one replica. Build it in the replica's graph, when all variables are there.

    Whether the cluster's variables may be used is itself a variable, `tfps/ready`, which the chief sets when it is done
    with a new session (`publish`): nobody steps while values are half restored.

    Args:
        cluster: which task this is.
        target: the server's, or empty for one process.
        config: a ConfigProto.
        restore: called by the chief with a session whose variables were just initialised; loads a checkpoint, if any.
        stop: ends the waiting for others.
    """

    def __init__(
        self,
        cluster: Cluster,
        target: str,
        config: Any,
        *,
        restore: Callable[[Any], None],
        stop: StopRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._target = target
        self._config = config
        self._restore = restore
        self._stop = stop
        self._clock = clock
        self._lost = -1
        self.waited_secs = 0.0
        """Spent on making sessions, altogether."""
        with cluster.placement():
            self._ready = tf.get_variable(
                "tfps/ready", (), tf.bool, tf.zeros_initializer(), trainable=False, collections=[STATE]
            )
            self._unready = self._ready.initializer
            self._publish = tf.assign(self._ready, True)
            variables = tf.global_variables() + tf.get_collection(STATE)
            self._uninitialised = tf.report_uninitialized_variables(variables)
            self._initialise_all = tf.variables_initializer([v for v in variables if v is not self._ready])
            self._initialise_local = tf.group(tf.local_variables_initializer(), tf.tables_initializer())

    def open(self) -> Any:
        """A session whose variables have values. Blocks until there is one; close it.

        Raises:
            StopRequestedError: SIGTERM came while waiting for the chief.
            RecoveryError: the sessions before this one did not bring a single step.
            tf.errors.AbortedError, tf.errors.UnavailableError: a ps went away meanwhile; call again.
        """
        started = self._clock()
        tf.get_default_graph().finalize()  # an op made in the loop would be a leak, and rebuild the session's graph
        self._lost += 1
        if self._lost > 0:
            if self._lost > MAX_LOST_SESSIONS:
                raise RecoveryError(f"{self._lost} sessions in a row were lost before a step was done")
            _log.info("session lost; making another")
            self._pause()
        session = tf.Session(self._target, config=self._config)
        try:
            with deadline(CONNECT_SECS, self._why_no_connection):
                uninitialised = session.run(self._uninitialised)
            if self._cluster.is_chief:
                self._initialise(session, uninitialised)
            else:
                self._await_chief(session)
            session.run(self._initialise_local)
        except BaseException:
            session.close()
            raise
        self.waited_secs += self._clock() - started
        return session

    def note_step(self) -> None:
        """Call after each step: the session works."""
        self._lost = 0

    def publish(self, session: Any) -> None:
        """Let the others use the variables."""
        session.run(self._publish)

    def _initialise(self, session: Any, uninitialised: Any) -> None:
        if not len(uninitialised) and session.run(self._ready):
            step = session.run(tf.train.get_global_step(session.graph))
            _log.info("variables are alive at global step %d; going on with them", step)
            return
        session.run(self._unready)
        session.run(self._initialise_all)
        self._restore(session)

    def _await_chief(self, session: Any) -> None:
        is_told = False
        while len(session.run(self._uninitialised)) or not session.run(self._ready):
            if not is_told:
                _log.info("waiting for the variables of %s", self._cluster.chief)
                is_told = True
            self._pause()

    def _pause(self) -> None:
        if self._stop.wait(RECOVERY_WAIT_SECS):
            raise StopRequestedError("asked to stop")

    def _why_no_connection(self) -> str:
        missing = self._cluster.unreachable()
        if missing:
            return f"no session within {CONNECT_SECS:g} s: {', '.join(missing)} cannot be reached from here"
        return f"no session within {CONNECT_SECS:g} s, though every TF task takes connections"


def call(session: Any, fetches: Sequence[Any], feeds: Sequence[Any] = ()) -> Callable[..., list[Any]]:
    """A function of the feeds' values, arrays of their very types, that runs the fetches and gives their values.

    What `session.run` prepares in each call is prepared once, which saves 0.2 ms of every step: a tenth of a small one.
    """
    options = config_pb2.CallableOptions(
        feed=[tensor.name for tensor in feeds], fetch=[tensor.name for tensor in fetches]
    )
    function: Callable[..., list[Any]] = session._make_callable_from_options(options)  # noqa: SLF001  (Keras 1 ran on it)
    return function


def global_step_variable() -> Any:
    """The global step of the current graph, made if need be; no increment of it is ever lost.

    A resource variable adds under a lock. To the stock variable, optimizers add without one, and of two workers' steps
    that meet there one does not count.
    """
    with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
        return tf.train.get_or_create_global_step()


def state_variable(name: str, shape: list[int], device: str, dtype: Any = tf.int32) -> Any:
    """An integer variable, 0 at first, shared by all replicas and lost with its ps."""
    with tf.device(device):
        return tf.get_variable(
            f"tfps/{name}", shape, dtype, tf.zeros_initializer(), trainable=False, collections=[STATE]
        )
