"""The graph that one replica trains: between-graph replication, asynchronous or synchronous.

Every replica builds the same graph but for devices and its share of the input; variables meet on the ps by name.
`towers` builds the graph of in-graph replication from the same parts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps_runtime.training.cluster import Cluster
from tfps_runtime.training.inputs import Batches, build_batches, keep_queues_open
from tfps_runtime.training.model import TRAIN, Model, Params, ProgramError, Shard
from tfps_runtime.training.placement import bytes_by_task, describe, pack_gradients
from tfps_runtime.training.program import Program
from tfps_runtime.training.session import global_step_variable, state_variable
from tfps_runtime.training.sync import Synchroniser

_log = logging.getLogger("tfps")


class Status:
    """Where the cluster stands: one vector, so that one tensor from the ps tells it all after each step."""

    def __init__(self, vector: Any) -> None:
        self.step = int(vector[0])
        """The global step."""
        self.waited_secs = float(vector[1]) / 1e6
        """In this step, for others."""
        self.is_over = bool(vector[2])
        """Whether the chief has ended the training for all."""
        self.ended = vector[3:]
        """For each replica: 1 if its input has ended, else 0."""


class StatusOps:
    """The ops around `Status`. Build it inside the cluster's placement.

    Args:
        global_step: the variable.
        replicas: how many have input of their own.
        index: this replica's.
    """

    def __init__(self, global_step: Any, replicas: int, index: int) -> None:
        self._global_step = global_step
        self._marks = state_variable("ended", [1 + replicas], global_step.device)
        with tf.device(global_step.device):
            self.ended_count = tf.reduce_sum(self._marks.read_value()[1:])
            self.now = self.after([])
            self.mark_ended = self.after([tf.scatter_update(self._marks, 1 + index, 1)])
            """Says that this replica's input has ended; gives the status after it."""
            self.end_for_all = tf.scatter_update(self._marks, 0, 1)

    def after(self, done: Sequence[Any], step: Any = None, waited_secs: Any = 0.0) -> Any:
        """The status when `done` is done; `step` if that is known already."""
        with tf.device(self._global_step.device), tf.control_dependencies(done):
            step = self._global_step.read_value() if step is None else step
            with tf.control_dependencies([step]):
                marks = tf.cast(self._marks.read_value(), tf.int64)
            waited_us = tf.cast(1e6 * tf.cast(waited_secs, tf.float64), tf.int64)
            return tf.concat([[tf.cast(step, tf.int64), waited_us], marks], axis=0)


@dataclass(frozen=True)
class Replica:
    """What the training loop needs of the graph. Tensors belong to `graph`."""

    graph: Any
    cluster: Cluster
    model: Model
    batches: Batches
    global_step: Any
    status: StatusOps
    input_index: int
    """In `Status.ended`."""
    step: Any
    """One step: runs it and gives the status after it."""
    idle_step: Any
    """Sync: what a replica does whose input has ended; gives the status. None: there is nothing to do."""
    loss: Any
    input_secs: Any
    """Seconds from the beginning of a step to its batch; None if batches are fed."""
    synchroniser: Synchroniser | None
    summary: Any
    """All the program's summaries and the loss."""


def build_replica(
    program: Program,
    params: Params,
    cluster: Cluster,
    seed: int,
    *,
    replicas_to_aggregate: int | None = None,
) -> Replica:
    """Build the training graph of this TF task, in a graph of its own.

    Args:
        program: its input_fn and model_fn are called once each.
        params: for both.
        cluster: where things are placed.
        seed: of this replica's random ops, and of its shard.
        replicas_to_aggregate: gradients per update in sync mode; None for async mode.

    Raises:
        ProgramError: the model or the numbers cannot work.
    """
    count, index = len(cluster.replicas), cluster.replica_index
    if replicas_to_aggregate is not None and not 1 <= replicas_to_aggregate <= count:
        raise ProgramError(
            f"replicas_to_aggregate is {replicas_to_aggregate}, but there are {count} replicas"
        )
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(seed)
        with cluster.input_device():
            batches = build_batches(program.input_fn(TRAIN, params, Shard(index, count, seed)))
            keep_queues_open()
            input_secs = time_to(batches)
        with cluster.placement():
            global_step = global_step_variable()
            model = program.model_fn(batches.features, batches.labels, TRAIN, params)
            gradients = pack_gradients(gradients_of(program, model))
            averages, averaged = moving_averages(model, global_step)
            status = StatusOps(global_step, count, index)
            synchroniser = idle_step = None
            if replicas_to_aggregate is None:
                # What is made for all variables at once (the learning rate, say) is made where they are.
                with tf.device(global_step.device):
                    done = apply_gradients(
                        model, gradients, global_step, averages, averaged, is_chief=cluster.is_chief
                    )
                step = status.after([done])
            else:
                synchroniser = Synchroniser(
                    model.optimizer,
                    replicas=count,
                    aggregate=replicas_to_aggregate,
                    index=index,
                    global_step=global_step,
                    ended=status.ended_count,
                )
                synchroniser.build(gradients, averages, averaged)
                step = status.after([], *synchroniser.step)
                idle_step = status.after([], *synchroniser.idle_step)
            tf.summary.scalar("loss", model.loss)
            summary = tf.summary.merge_all()
        log_placement(cluster)
    return Replica(
        graph=graph,
        cluster=cluster,
        model=model,
        batches=batches,
        global_step=global_step,
        status=status,
        input_index=index,
        step=step,
        idle_step=idle_step,
        loss=model.loss,
        input_secs=input_secs,
        synchroniser=synchroniser,
        summary=summary,
    )


def time_to(batches: Batches) -> Any:
    """Seconds from the beginning of a step until its batch is there, as a tensor; None if batches are fed."""
    if batches.placeholders:
        return None
    since = tf.timestamp()  # depends on nothing, so it is among the first that a step runs
    tensors = [tensor for tensor in tf.nest.flatten((batches.features, batches.labels)) if tensor is not None]
    with tf.control_dependencies([getattr(tensor, "op", tensor) for tensor in tensors]):
        return tf.timestamp() - since


def gradients_of(program: Program, model: Model) -> list[tuple[Any, Any]]:
    """A replica's (gradient, variable) pairs, after clipping and the model's update ops."""
    if model.loss is None:
        raise ProgramError(f"{program.path}: model_fn gave no loss in mode 'train'")
    if not isinstance(model.optimizer, tf.train.Optimizer):
        raise ProgramError(
            f"{program.path}: the model's optimizer is {type(model.optimizer).__name__}; "
            "it must be a tf.train.Optimizer of tensorflow.compat.v1"
        )
    pairs = [pair for pair in model.optimizer.compute_gradients(model.loss) if pair[0] is not None]
    if not pairs:
        raise ProgramError(f"{program.path}: the loss depends on no trainable variable")
    gradients = [gradient for gradient, _ in pairs]
    if model.clip_norm is not None:
        gradients, _ = tf.clip_by_global_norm(gradients, model.clip_norm)
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    if updates:  # batch normalisation's averages, say: as with each replica's step
        with tf.control_dependencies(updates):
            gradients = [_identity(gradient) for gradient in gradients]
    return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs)]


def _identity(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


def moving_averages(model: Model, global_step: Any) -> tuple[Any, list[Any]]:
    """The averages that the model wants, or None; and of which variables."""
    if model.moving_average_decay is None:
        return None, []
    with tf.device(global_step.device):
        averages = tf.train.ExponentialMovingAverage(model.moving_average_decay, global_step)
    return averages, tf.trainable_variables()


def apply_gradients(
    model: Model,
    gradients: Sequence[tuple[Any, Any]],
    global_step: Any,
    averages: Any,
    averaged: list[Any],
    *,
    is_chief: bool,
) -> Any:
    """The op that updates the variables, and with them, on the chief, their averages."""
    done = model.optimizer.apply_gradients(gradients, global_step)
    if averages is not None:
        with tf.control_dependencies([done]):
            update = averages.apply(averaged)  # built by all, for equal graphs; the chief runs it
        done = update if is_chief else done
    return done


def log_placement(cluster: Cluster) -> None:
    """Say how many bytes of variables, with the optimizer's slots, each TF task holds; the chief says it for all."""
    if cluster.is_chief and not cluster.is_local:
        _log.info("bytes of variables: %s", describe(bytes_by_task(tf.global_variables())))
