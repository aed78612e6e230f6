"""The training loop of one replica: sessions, steps, and what the chief does beside them.

Loop(replica, sessions, progress, steps=1000, stop=stop).run()
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Protocol

import tensorflow.compat.v1 as tf

from tfps_runtime.training.hooked import Hooked
from tfps_runtime.training.inputs import Feed
from tfps_runtime.training.model import ProgramError
from tfps_runtime.training.progress import ProgressWriter
from tfps_runtime.training.replica import Replica, Status
from tfps_runtime.training.session import RECOVERY_WAIT_SECS, Sessions, call
from tfps_runtime.training.stopping import StopRequest
from tfps_runtime.training.summaries import Summaries

_log = logging.getLogger("tfps")

LOST = (tf.errors.AbortedError, tf.errors.UnavailableError)
"""What ends a session that another one may replace: a task that was lost, or has started anew."""

STOP_GRACE_SECS = 2.0
"""For a program's own queue runners when a session ends; stock TensorFlow waits 120 s for a blocked one."""

OTHERS_INPUT_SECS = 30.0
"""Async, no step limit or not reached: the chief's input has ended and the global step stands still for this long."""


class NotFiniteError(ProgramError):
    """The loss became NaN or infinite."""


class Companion(Protocol):
    """Something that goes along with the steps."""

    def begin(self, session: Any, coord: Any) -> None:
        """There is a new session."""

    def end(self, session: Any) -> None:
        """Training has ended for this replica, without an error."""


class Watcher(Protocol):
    """Something that the chief does now and then."""

    def look(self, session: Any, status: Status) -> bool:
        """Called after each step; true ends the training for all."""


class Loop:
    """Trains one replica. Build it when the graph is complete; it is finalised with the first session.

    Args:
        replica: the graph.
        sessions: makes the sessions.
        progress: gets every step.
        steps: global step to end at; None ends with the input.
        stop: SIGTERM, asked between two steps.
        hooked: the program's hooks.
        companions: begin with each session, in this order, before the variables are published; end in this order.
        watchers: asked after each step.
        summaries: the chief's.
    """

    def __init__(
        self,
        replica: Replica,
        sessions: Sessions,
        progress: ProgressWriter,
        *,
        steps: int | None,
        stop: StopRequest,
        hooked: Hooked,
        companions: Sequence[Companion] = (),
        watchers: Sequence[Watcher] = (),
        summaries: Summaries | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica = replica
        self._sessions = sessions
        self._progress = progress
        self._steps = steps
        self._stop = stop
        self._watchers = watchers
        self._summaries = summaries
        self._clock = clock
        self._hooked = hooked
        self._companions = companions
        self._feeds = replica.batches.feeds()
        self._waited_secs = 0.0
        self._has_input_ended = False
        """Remembered by this process: a ps that was lost has forgotten it."""
        self._stands_at, self._stands_since = -1, 0.0

    def run(self) -> None:
        """Step until the global step is reached, the input has ended, or this process was asked to stop.

        Raises NotFiniteError, and whatever a step raises beyond what a new session can mend.
        """
        is_done = False
        while not is_done:
            with contextlib.suppress(*LOST):  # the next session says so
                is_done = self._run_session()

    def _run_session(self) -> bool:
        """One session's life; true when training has ended."""
        session = self._sessions.open()
        coord = _Coordinator(session)
        threads: list[Any] = []
        try:
            threads = tf.train.start_queue_runners(session, coord)
            for companion in self._companions:
                companion.begin(session, coord)
            if self._replica.cluster.is_chief:
                self._sessions.publish(session)
            self._train(session, coord)
            coord.raise_requested_exception()
            for companion in self._companions:
                companion.end(session)
        except (tf.errors.OpError, RuntimeError):  # RuntimeError: a thread that failed has closed the session
            coord.raise_requested_exception()  # what happened first is the cause
            raise
        else:
            return True
        finally:
            coord.request_stop()
            session.close()  # releases threads that wait in it
            with contextlib.suppress(tf.errors.OpError):  # raised above
                coord.join(threads, stop_grace_period_secs=STOP_GRACE_SECS, ignore_live_threads=True)

    def _train(self, session: Any, coord: Any) -> None:
        replica = self._replica
        status = Status(session.run(replica.status.now))
        if self._is_reached(status):
            _log.info("global step %d: nothing left to train up to %d", status.step, self._steps)
        if status.ended[replica.input_index]:
            self._has_input_ended = True  # in an earlier life of this process
        stepper = _Stepper(replica, session, self._hooked)
        while not (
            self._is_reached(status) or status.is_over or self._stop.is_requested or coord.should_stop()
        ):
            if not self._has_input_ended:
                try:
                    status = self._step(stepper)
                except (StopIteration, tf.errors.OutOfRangeError):
                    _log.info("the input of %s has ended", replica.cluster.task)
                    self._has_input_ended = True
                    continue
            else:
                others = self._idle(stepper)
                if others is None:
                    break
                status = others
            self._sessions.note_step()
            if self._is_ended_by_watchers(session, status):
                session.run(replica.status.end_for_all)
                stepper.wake_up_others()
                break

    def _is_ended_by_watchers(self, session: Any, status: Status) -> bool:
        verdicts = [watcher.look(session, status) for watcher in self._watchers]  # each is asked
        return any(verdicts)

    def _is_reached(self, status: Status) -> bool:
        return self._steps is not None and status.step >= self._steps

    def _step(self, stepper: _Stepper) -> Status:
        """A step on the next batch. Raises StopIteration or OutOfRangeError if there is none, and NotFiniteError."""
        asked = self._clock()
        feed = next(self._feeds)
        self._waited_secs += self._clock() - asked
        has_summary = self._summaries is not None and self._summaries.is_due()
        values = stepper.step(feed, has_summary=has_summary)
        status = values.status
        if not math.isfinite(values.loss):
            raise NotFiniteError(
                f"the loss is {values.loss} at global step {status.step}, local step {self._progress.local_step + 1}; "
                "a smaller learning rate or clip_norm may help"
            )
        self._waited_secs += values.input_secs + status.waited_secs
        waited = self._waited_secs + self._sessions.waited_secs
        self._progress.step(status.step, values.loss, values.examples, waited)
        if has_summary and self._summaries is not None:
            self._summaries.write(values.summary, status.step)
        return status

    def _idle(self, stepper: _Stepper) -> Status | None:
        """What to do instead of a step when this replica's input has ended; None if there is nothing left to do.

        Synchronous: go on without gradients until nobody has input. Asynchronous: the others go on by themselves; the
        chief stays to save what they do, until their input ends or nothing moves any more.
        """
        replica = self._replica
        is_waiting_chief = replica.cluster.is_chief and not replica.cluster.is_in_graph
        # Marked anew in each session: a ps that was lost has forgotten it.
        if not stepper.has_marked or replica.synchroniser is None:
            status = stepper.mark_ended()
            if status.ended.all():
                stepper.wake_up_others()
                return None
            if replica.synchroniser is None and not is_waiting_chief:
                return None
        started = self._clock()
        if replica.synchroniser is not None:
            status = stepper.idle_step()
            if status.ended.all():
                return None
        else:
            if status.step != self._stands_at:
                self._stands_at, self._stands_since = status.step, started
            elif started - self._stands_since > OTHERS_INPUT_SECS:
                _log.info("the others have not stepped for %g s; ending without them", OTHERS_INPUT_SECS)
                return None
            self._stop.wait(RECOVERY_WAIT_SECS)
        self._waited_secs += self._clock() - started
        self._progress.watch(status.step, self._waited_secs + self._sessions.waited_secs)
        return status


@dataclass(frozen=True)
class _Values:
    """What a step gives."""

    status: Status
    loss: float
    input_secs: float
    examples: int | None
    summary: bytes | None


class _Stepper:
    """Runs the steps of one session."""

    def __init__(self, replica: Replica, session: Any, hooked: Hooked) -> None:
        self._replica = replica
        self._session = session
        self._hooked = hooked
        self.has_marked = False
        """Whether the cluster has been told in this session that our input has ended."""
        examples = replica.batches.examples
        self._examples = examples if isinstance(examples, int) else None
        self._optional = {
            "input_secs": replica.input_secs,
            "examples": None if isinstance(examples, int) else examples,
        }
        self._functions: dict[bool, Callable[..., Sequence[Any]]] = {}
        self._idle: Callable[..., Sequence[Any]] | None = None

    def step(self, feed: Feed, *, has_summary: bool) -> _Values:
        fetches = {name: tensor for name, tensor in self._optional.items() if tensor is not None}
        if has_summary and self._replica.summary is not None:
            fetches["summary"] = self._replica.summary
        if has_summary not in self._functions:
            self._functions[has_summary] = self._make(
                [self._replica.step, self._replica.loss, *fetches.values()]
            )
        vector, loss, *others = self._functions[has_summary](*feed.values)
        found = dict(zip(fetches, others))
        examples = self._examples if feed.examples is None else feed.examples
        return _Values(
            status=Status(vector),
            loss=float(loss),
            input_secs=float(found.get("input_secs", 0.0)),
            examples=int(found["examples"]) if "examples" in found else examples,
            summary=found.get("summary"),
        )

    def idle_step(self) -> Status:
        if self._idle is None:
            self._idle = call(self._session, [self._replica.idle_step])
        return Status(self._idle()[0])

    def mark_ended(self) -> Status:
        self.has_marked = True
        return Status(self._session.run(self._replica.status.mark_ended))

    def wake_up_others(self) -> None:
        if self._replica.synchroniser is not None:
            self._session.run(self._replica.synchroniser.wake_up)

    def _make(self, fetches: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        placeholders = self._replica.batches.placeholders
        if not self._hooked.hooks:
            return call(self._session, fetches, placeholders)
        return lambda *values: self._hooked.run(self._session, fetches, dict(zip(placeholders, values)))


class _Coordinator(tf.train.Coordinator):  # type: ignore[misc]  # TensorFlow is untyped
    """Of a session's threads. When one fails, the session is closed: the main thread may be waiting in it."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self._of_session = session

    def request_stop(self, ex: Any = None) -> None:
        super().request_stop(ex)
        if ex is not None and not isinstance(ex, tf.errors.OutOfRangeError):
            self._of_session.close()
