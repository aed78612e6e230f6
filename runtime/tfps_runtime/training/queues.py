"""Input through a queue: threads fill it while the step runs, a coordinator ends them.

    def input_fn(mode, params, shard):
        return queued(batches(shard.seed), capacity=4)

TensorFlow 1's own way (`tf.train.QueueRunner`, `tf.train.shuffle_batch`) works in an `input_fn` too; for new programs
`tf.data` (see `readers`) does the same with less. A queue belongs to this replica, on its own CPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps_runtime.training.inputs import Feed, build_batches, is_iterator
from tfps_runtime.training.model import ProgramError


def queued(source: Any, *, capacity: int = 4, threads: int = 1) -> tuple[Any, Any]:
    """(features, labels) from a queue that is filled in the background. Call it in `input_fn` and return the result.

    The harness starts the threads with each session. When the source ends the queue is closed, what is in it is used
    up, and the input has ended. What is in the queue survives a lost session.

    Args:
        source: an iterator of (features, labels) arrays, or of features; or such a pair of tensors, that is ops which
            make another batch each time they run.
        capacity: batches in the queue.
        threads: how many run the ops at a time; an iterator is read by one.

    Raises:
        ProgramError: an iterator ends before its first batch.
    """
    if is_iterator(source):
        if threads != 1:
            raise ProgramError("queued: an iterator is read by one thread; give tensors for more")
        batches = build_batches(source)
        structure = batches.features if batches.labels is None else (batches.features, batches.labels)
    else:
        batches, structure = None, source if source[1] is not None else source[0]
    tensors = tf.nest.flatten(structure)
    queue = tf.FIFOQueue(capacity, [tensor.dtype.base_dtype for tensor in tensors])
    enqueue = queue.enqueue(tensors)
    if batches is not None:
        runner: Any = _Feeder(queue, enqueue, batches.placeholders, batches.feeds())
    else:
        runner = tf.train.QueueRunner(queue, [enqueue] * threads)
    tf.train.add_queue_runner(runner)
    found = queue.dequeue()
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    for tensor, like in zip(found, tensors):
        tensor.set_shape(like.shape)
    result = tf.nest.pack_sequence_as(structure, found)
    return result if isinstance(structure, tuple) and len(structure) == 2 else (result, None)


class _Feeder(tf.train.QueueRunner):  # type: ignore[misc]  # TensorFlow is untyped
    """A queue runner whose batches come from Python."""

    def __init__(self, queue: Any, enqueue: Any, placeholders: list[Any], feeds: Iterator[Feed]) -> None:
        # Nothing cancels: a session that is lost with a ps must not close the queue. Closing a session ends what runs.
        super().__init__(queue, [enqueue], close_op=queue.close(), cancel_op=tf.no_op())
        self._enqueue = enqueue
        self._placeholders = placeholders
        self._feeds = feeds
        self._pending: list[Feed] = []
        """Read, but not in the queue yet."""
        self._turn = threading.Lock()

    def create_threads(
        self, sess: Any, coord: Any = None, daemon: bool = False, start: bool = False
    ) -> list[Any]:
        thread = threading.Thread(target=self._run_feed, args=(sess, coord), name="tfps-queue", daemon=daemon)
        if coord is not None:
            coord.register_thread(thread)
        if start:
            thread.start()
        return [thread]

    def _run_feed(self, session: Any, coord: Any) -> None:
        with (
            coord.stop_on_exception(),
            self._turn,
        ):  # the thread of a lost session may still be at its last batch
            while not coord.should_stop():
                if not self._pending:
                    self._pending.extend(_next(self._feeds))
                if not self._pending:
                    with contextlib.suppress(tf.errors.CancelledError):  # it is closed already
                        session.run(self.close_op)
                    return
                values = [np.asarray(value) for value in self._pending[0].values]
                session.run(self._enqueue, dict(zip(self._placeholders, values)))
                self._pending.clear()


def _next(feeds: Iterator[Feed]) -> list[Feed]:
    feed = next(feeds, None)
    return [] if feed is None else [feed]
