"""The graph of in-graph replication: the chief builds a tower on every replica's device and drives them all.

One session without device filters, one client: this process. The other replicas only serve. Each step every tower
computes the gradients of a batch of its own; their mean is applied once. All input is read here, by the client, and
sent to the towers with the step, which is what limits this kind of replication.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps_runtime.protocol import Task
from tfps_runtime.training.cluster import Cluster
from tfps_runtime.training.inputs import (
    Batches,
    Feed,
    build_batches,
    is_dataset,
    is_iterator,
    keep_queues_open,
    next_element,
    pair,
)
from tfps_runtime.training.model import TRAIN, Model, Params, ProgramError, Shard, random_seed
from tfps_runtime.training.placement import pack_gradients
from tfps_runtime.training.program import Program
from tfps_runtime.training.replica import (
    Replica,
    StatusOps,
    apply_gradients,
    gradients_of,
    log_placement,
    moving_averages,
    time_to,
)
from tfps_runtime.training.session import global_step_variable

Gradients = list[tuple[Any, Any]]


def build_towers(program: Program, params: Params, cluster: Cluster, seed: int) -> Replica:
    """Build the training graph of all replicas, in a graph of its own; for the loop it is one replica.

    Args:
        program: its input_fn and model_fn are called once for each tower. Variables come from `tf.get_variable`: the
            second tower takes up those of the first.
        params: for both.
        cluster: where things are placed.
        seed: of the random ops, and of the shards.

    Raises:
        ProgramError: the model cannot work, or makes variables that towers cannot share.
    """
    count = len(cluster.replicas)
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(seed)
        with cluster.input_device():
            shards = [Shard(i, count, random_seed(seed, "tower", i)) for i in range(count)]
            inputs = _inputs([program.input_fn(TRAIN, params, shard) for shard in shards])
            keep_queues_open()
            input_secs = time_to(inputs[0])
        models: list[Model] = []
        towers: list[Gradients] = []
        summaries: list[Any] = []
        for task, batches in zip(cluster.replicas, inputs):
            with _tower(cluster, task, len(models)):
                if not models:
                    global_step = global_step_variable()
                model = program.model_fn(batches.features, batches.labels, TRAIN, params)
                _require_shared(program, models)
                towers.append(pack_gradients(gradients_of(program, model)))
                models.append(model)
            # The chief's tower speaks for all.
            summaries = summaries or list(tf.get_collection(tf.GraphKeys.SUMMARIES))
            tf.get_default_graph().clear_collection(tf.GraphKeys.UPDATE_OPS)
        with cluster.placement():
            status = StatusOps(global_step, 1, 0)
            weights = [batches.weight for batches in inputs]
            with tf.device(global_step.device):
                gradients = _mean_gradients(towers, weights)
                averages, averaged = moving_averages(models[0], global_step)
                done = apply_gradients(models[0], gradients, global_step, averages, averaged, is_chief=True)
            loss = tf.add_n([w * model.loss for w, model in zip(weights, models)]) / tf.add_n(weights)
            summary = tf.summary.merge([*summaries, tf.summary.scalar("loss", loss)])
            step = status.after([done])
        log_placement(cluster)
    return Replica(
        graph=graph,
        cluster=cluster,
        model=models[0],
        batches=inputs[0],
        global_step=global_step,
        status=status,
        input_index=0,
        step=step,
        idle_step=None,
        loss=loss,
        input_secs=input_secs,
        synchroniser=None,
        summary=summary,
    )


@contextlib.contextmanager
def _tower(cluster: Cluster, task: Task, index: int) -> Iterator[None]:
    scope = tf.name_scope(f"tower_{index}") if index else contextlib.nullcontext()
    with cluster.placement(task), tf.variable_scope(tf.get_variable_scope(), reuse=index > 0), scope:
        yield


def _require_shared(program: Program, models: Sequence[Model]) -> None:
    """Raises ProgramError if a further tower has made variables of its own."""
    variables = tf.get_collection(_FIRST)
    if not models:
        for variable in tf.global_variables():
            tf.add_to_collection(_FIRST, variable)
        return
    own = [
        variable.op.name for variable in tf.global_variables() if not any(variable is v for v in variables)
    ]
    if own:
        raise ProgramError(
            f"{program.path}: model_fn makes {', '.join(own[:5])} anew for each tower; in-graph replication shares "
            "variables by name: make them with tf.get_variable"
        )


_FIRST = "tfps_first_tower"


def _mean_gradients(towers: Sequence[Gradients], weights: Sequence[Any]) -> Gradients:
    """The weighted mean over the towers, made where each variable is."""
    total = tf.add_n(list(weights))
    means: Gradients = []
    for pairs in zip(*towers):
        variable = pairs[0][1]
        with tf.device(variable.device):
            shares = [tf.cast(weight / total, variable.dtype.base_dtype) for weight in weights]
            gradients = [gradient for gradient, _ in pairs]
            if all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
                mean: Any = tf.IndexedSlices(
                    tf.concat([share * each.values for share, each in zip(shares, gradients)], axis=0),
                    tf.concat([each.indices for each in gradients], axis=0),
                    gradients[0].dense_shape,
                )
            else:
                mean = tf.add_n(
                    [share * tf.convert_to_tensor(each) for share, each in zip(shares, gradients)]
                )
            means.append((mean, variable))
    return means


# --- input -----------------------------------------------------------------------------------------------------------


class TowerBatches(Batches):
    """One tower's batches. A tower whose input has ended sees its last or first batch again, with weight 0.

    The first tower's object stands for all: it has all placeholders, and the examples of all towers.
    """

    weight: Any = 1.0
    """Scalar tensor: 1 while the tower's input lasts, then 0."""


def _inputs(sources: Sequence[Any]) -> list[TowerBatches]:
    """The towers' input. Ends (OutOfRangeError, or the end of `feeds`) when that of all towers has ended."""
    if all(is_dataset(source) for source in sources):
        return _from_datasets(sources)
    if all(is_iterator(source) for source in sources):
        return _from_iterators(sources)
    if any(is_dataset(source) or is_iterator(source) for source in sources):
        raise ProgramError("input_fn must return the same kind of input for every tower")
    # Tensors end when the first of them ends: nobody can ask them beforehand.
    towers = [_tower_batches(*pair(source)) for source in sources]
    return _count_examples(towers)


def _tower_batches(features: Any, labels: Any, weight: Any = None) -> TowerBatches:
    batches = TowerBatches(features, labels)
    batches.weight = tf.constant(1.0) if weight is None else weight
    return batches


def _count_examples(towers: list[TowerBatches]) -> list[TowerBatches]:
    if all(batches.examples is not None for batches in towers):
        counts = [
            tf.cast(batches.examples, tf.int32) * tf.cast(batches.weight, tf.int32) for batches in towers
        ]
        towers[0].examples = tf.add_n(counts)
    else:
        towers[0].examples = None
    return towers


def _from_datasets(sources: Sequence[Any]) -> list[TowerBatches]:
    def padded(dataset: Any) -> Any:
        one, zero = tf.constant(1.0), tf.constant(0.0)
        rest = dataset.take(1).cache().repeat()
        return dataset.map(lambda *e: (_element(e), one)).concatenate(
            rest.map(lambda *e: (_element(e), zero))
        )

    def has_any(*towers: Any) -> Any:
        return tf.reduce_any([weight > 0 for _, weight in towers])

    zipped = tf.data.Dataset.zip(tuple(padded(source) for source in sources))
    elements = next_element(zipped.take_while(has_any).prefetch(1))
    return _count_examples([_tower_batches(*pair(element), weight) for element, weight in elements])


def _element(arguments: tuple[Any, ...]) -> Any:
    """A dataset's element from the arguments of a mapped function, which get tuples unpacked."""
    return arguments[0] if len(arguments) == 1 else arguments


def _from_iterators(sources: Sequence[Any]) -> list[TowerBatches]:
    fed = [build_batches(source) for source in sources]
    weights = [tf.placeholder(tf.float32, []) for _ in fed]
    towers = [_tower_batches(each.features, each.labels, weight) for each, weight in zip(fed, weights)]
    first = _FirstOfFed(fed[0].features, fed[0].labels)
    first.weight = weights[0]
    first.examples = None
    first.placeholders = [tensor for each in fed for tensor in each.placeholders] + weights
    first.fed = fed
    return [first, *towers[1:]]


class _FirstOfFed(TowerBatches):
    fed: Sequence[Batches] = ()

    def feeds(self) -> Iterator[Feed]:
        # A first batch is always there: `build_batches` has looked.
        last: dict[int, Feed] = {}
        for feeds in itertools.zip_longest(*(batches.feeds() for batches in self.fed)):
            last.update({i: feed for i, feed in enumerate(feeds) if feed is not None})
            weights = [np.float32(feed is not None) for feed in feeds]
            counts = [feed.examples for feed in feeds if feed is not None]
            values = [value for i in range(len(feeds)) for value in last[i].values]
            known = [count for count in counts if count is not None]
            yield Feed(values + weights, sum(known) if len(known) == len(counts) else None)
