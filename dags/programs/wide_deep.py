"""Click-through rate: a wide part that remembers pairs, a deep part that generalises, sparse features hashed.

    python -m tfps_runtime run wide_deep.py --local --steps 2000

The clicks come from a seeded generator whose click probabilities are known, so the metrics say how good the model could
be at best: `auc` is the model's on held-out clicks, `optimum_auc` that of the true probabilities.

Both tables (weights of single features and of pairs; embeddings) have a row for each hash value. They are partitioned
over all ps, and a step moves only the rows that its batch needs.

hparams: `learning_rate`, `batch_size`, `buckets` (rows of each table), `dimensions` (of an embedding), `hidden_units`,
`eval_batches`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow.compat.v1 as tf
from tfps_runtime.training import EVAL, PREDICT, Model, Params, Shard, partitioner, queued

if TYPE_CHECKING:
    from collections.abc import Iterator

    Tensors = dict[str, tf.Tensor]

SIZES = {"user": 1000, "ad": 200, "site": 50, "hour": 24}
PAIRS = (("site", "hour"), ("ad", "site"))
"""Pairs of features that the wide part remembers."""


class World:
    """The clicks' true probabilities: an effect of each value, one of each (site, hour), one of each (ad, site)."""

    def __init__(self, seed: int = 7) -> None:
        random = np.random.default_rng(seed)
        self.effects = [random.normal(scale=0.6, size=size) for size in SIZES.values()]
        self.rush = random.normal(scale=0.5, size=(SIZES["site"], SIZES["hour"]))
        topics = [random.normal(size=(SIZES[name], 2)) for name in ("ad", "site")]
        self.fit = 0.4 * topics[0] @ topics[1].T

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, clicks, probabilities) of `count` impressions; small ids are frequent, as popular ads are."""
        popularity = random.uniform(size=(count, len(SIZES))) ** 1.5
        ids = (popularity * list(SIZES.values())).astype(np.int32)
        _, ad, site, hour = ids.T
        effects = sum(effect[ids[:, i]] for i, effect in enumerate(self.effects))
        logits = effects + self.rush[site, hour] + self.fit[ad, site] - 1.0
        probabilities = 1 / (1 + np.exp(-logits))
        clicks = random.uniform(size=count) < probabilities
        return ids, clicks.astype(np.float32), probabilities.astype(np.float32)


def impressions(seed: int, size: int, count: int | None = None) -> Iterator[tuple[Any, Any]]:
    """Batches of (features, labels); `count` of them, or without end."""
    world, random = World(), np.random.default_rng(seed)
    while count is None or count > 0:
        ids, clicks, probabilities = world.draw(random, size)
        yield {"ids": ids}, {"clicked": clicks, "probability": probabilities}
        count = None if count is None else count - 1


def input_fn(mode: str, params: Params, shard: Shard) -> Any:
    """Every replica draws impressions of its own, in a thread beside the steps; evaluation sees always the same."""
    if mode in (EVAL, PREDICT):
        return impressions(seed=0, size=1000, count=params.get("eval_batches", 50))
    return queued(impressions(1 + shard.seed, params.get("batch_size", 500)))


def model_fn(features: Tensors, labels: Tensors | None, mode: str, params: Params) -> Model:  # noqa: ARG001  one for all
    buckets, dimensions = params.get("buckets", 32768), params.get("dimensions", 8)
    words = {
        name: tf.strings.join([name, tf.as_string(features["ids"][:, i])], "=")
        for i, name in enumerate(SIZES)
    }
    singles = list(words.values())
    pairs = [tf.strings.join([words[a], words[b]], "&") for a, b in PAIRS]

    def rows(table: str, keys: list[tf.Tensor], width: int, scale: float) -> tf.Tensor:
        """The table's rows of the keys' hash values: [batch, keys, width]."""
        variable = tf.get_variable(
            table,
            [buckets, width],
            initializer=tf.random_normal_initializer(stddev=scale),
            partitioner=partitioner(params),
        )
        hashed = tf.strings.to_hash_bucket_fast(tf.stack(keys, axis=1), buckets)
        return tf.nn.embedding_lookup(variable, hashed, partition_strategy="div")

    wide = tf.reduce_sum(rows("wide", singles + pairs, 1, 0.0), axis=[1, 2])
    deep = tf.reshape(rows("embeddings", singles, dimensions, 0.1), [-1, len(singles) * dimensions])
    for i, units in enumerate(params.get("hidden_units", [32, 16])):
        deep = tf.nn.relu(_layer(f"hidden_{i}", deep, units))
    logits = wide + tf.squeeze(_layer("output", deep, 1), axis=1)
    probabilities = tf.sigmoid(logits)
    if labels is None:
        return Model(predictions={"probability": probabilities})

    def auc(predicted: tf.Tensor) -> Any:
        return tf.metrics.auc(
            labels["clicked"], predicted, num_thresholds=1000, summation_method="careful_interpolation"
        )

    # Adagrad's own 0.1 would outweigh the gradients of all but the most frequent rows: a row is in few of the clicks.
    optimizer = tf.train.AdagradOptimizer(params.get("learning_rate", 0.1), initial_accumulator_value=1e-6)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels["clicked"], logits=logits)
    return Model(
        loss=tf.reduce_mean(losses),
        optimizer=optimizer,
        metrics={"auc": auc(probabilities), "optimum_auc": auc(labels["probability"])},
        predictions={"probability": probabilities},
    )


def _layer(name: str, inputs: tf.Tensor, units: int) -> tf.Tensor:
    with tf.variable_scope(name):
        size = inputs.shape[1]
        weights = tf.get_variable("weights", [size, units], initializer=tf.glorot_uniform_initializer())
        return tf.matmul(inputs, weights) + tf.get_variable(
            "biases", [units], initializer=tf.zeros_initializer()
        )
