"""The graph that one replica trains: between-graph replication, asynchronous or synchronous.

Every replica builds the same graph but for devices and its share of the input; variables meet on the ps by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from tfps_runtime.training.cluster import Cluster
from tfps_runtime.training.inputs import Batches, build_batches
from tfps_runtime.training.model import TRAIN, Model, Params, ProgramError, Shard
from tfps_runtime.training.program import Program
from tfps_runtime.training.session import state_variable
from tfps_runtime.training.sync import Synchroniser


@dataclass(frozen=True)
class Replica:
    """What the training loop needs of the graph. Tensors belong to `graph`."""

    graph: Any
    cluster: Cluster
    model: Model
    batches: Batches
    global_step: Any
    fetches: dict[str, Any]
    """One step: runs it and gives `step` (global, after it), `loss`, `ended` and `examples`."""
    ended: Any
    """For each replica: 1 if its input has ended, else 0."""
    mark_ended: Any
    """Says that this replica's input has ended; gives `ended` after it."""
    synchroniser: Synchroniser | None
    summary: Any
    """All the program's summaries and the loss."""

    def is_input_over(self, ended: Any) -> bool:
        """Whether training ends for this replica, by a value of `ended`; in sync mode the first end is everybody's."""
        return bool(ended.any() if self.synchroniser is not None else ended[self.cluster.replica_index])


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
        with cluster.placement():
            global_step = tf.train.get_or_create_global_step()
            model = program.model_fn(batches.features, batches.labels, TRAIN, params)
            gradients = _gradients(program, model)
            averages, averaged = _moving_averages(model, global_step)
            ended = state_variable("input_ended", [count], global_step.device)
            mark_ended = tf.scatter_update(ended, index, 1)
            synchroniser = None
            if replicas_to_aggregate is None:
                step = _apply(
                    model.optimizer, gradients, global_step, averages, averaged, is_chief=cluster.is_chief
                )
            else:
                synchroniser = Synchroniser(
                    model.optimizer,
                    replicas=count,
                    aggregate=replicas_to_aggregate,
                    index=index,
                    global_step=global_step,
                )
                synchroniser.build(gradients, averages, averaged)
                step = synchroniser.push_and_wait
            with tf.control_dependencies([step]):
                fetches = {
                    "step": tf.identity(step),
                    "loss": model.loss,
                    "ended": tf.identity(ended.read_value()),
                }
            if batches.examples is not None:
                fetches["examples"] = tf.convert_to_tensor(batches.examples)
            tf.summary.scalar("loss", model.loss)
            summary = tf.summary.merge_all()
    return Replica(
        graph, cluster, model, batches, global_step, fetches, ended, mark_ended, synchroniser, summary
    )


def _gradients(program: Program, model: Model) -> list[tuple[Any, Any]]:
    """This replica's (gradient, variable) pairs, after clipping and the model's update ops."""
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


def _moving_averages(model: Model, global_step: Any) -> tuple[Any, list[Any]]:
    if model.moving_average_decay is None:
        return None, []
    return tf.train.ExponentialMovingAverage(
        model.moving_average_decay, global_step
    ), tf.trainable_variables()


def _apply(
    optimizer: Any,
    gradients: list[tuple[Any, Any]],
    global_step: Any,
    averages: Any,
    averaged: list[Any],
    *,
    is_chief: bool,
) -> Any:
    """An asynchronous step; gives the global step after it."""
    done = optimizer.apply_gradients(gradients, global_step)
    if averages is not None:
        with tf.control_dependencies([done]):
            update = averages.apply(averaged)  # built by all, for equal graphs; the chief runs it
        done = update if is_chief else done
    with tf.control_dependencies([done]):
        return tf.identity(global_step.read_value())
