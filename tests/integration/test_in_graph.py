"""In-graph replication on real clusters: the chief builds a tower on every worker and drives them; they only serve."""

from __future__ import annotations

import time
from typing import Any

import pytest
from clusters import CHIEF, DAGS, DIGITS, PS, WORKER, until

from airflow_tfps.spec import JobSpec

pytestmark = pytest.mark.tensorflow

ENDS_WITHIN = 5.0
"""Seconds from the last step, after which a report of progress follows, to the end of the chief."""

SHARDS = """
    import time
    import numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model

    def batches(shard, count, pause):
        for _ in range(count):
            time.sleep(pause)
            yield np.full([4], 1.0 + 2 * shard.index, np.float32), None

    def input_fn(mode, params, shard):
        if mode == "eval":
            return batches(shard, 1, 0)
        count = params["batches"][shard.index]
        if params.get("dataset"):
            return tf.data.Dataset.from_tensors(tf.fill([4], 1.0 + 2 * shard.index)).repeat(count)
        return batches(shard, count, params.get("pause", 0))

    def model_fn(features, labels, mode, params):
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        return Model(
            loss=-tf.reduce_mean(w * features),     # the gradient is minus the shard's value
            optimizer=tf.train.GradientDescentOptimizer(1.0),
            metrics={"w": w},
        )
"""


@pytest.mark.parametrize("is_dataset", [False, True])
@pytest.mark.parametrize("ps", [0, 1])
def test_s06_the_chief_drives_towers_on_workers_that_only_serve(train, ps, is_dataset):
    """Each tower gets its shard, gradients are averaged over those that have input, and no example is lost."""
    hparams = {"batches": [10, 25, 15], "dataset": is_dataset}
    training = train(SHARDS, ps=ps, workers=3, replication="in_graph", hparams=hparams)
    training.start_all()
    assert training.tasks[CHIEF].wait() == 0, training.logs
    assert training.result.global_step == 25
    # 10 steps of all three (values 1, 3, 5), 5 of the last two, 10 of the second alone
    assert training.result.metrics["w"] == pytest.approx(10 * 3 + 5 * 4 + 10 * 3)
    assert training.progress(CHIEF)[-1].local_step == 25
    for task, process in training.tasks.items():
        assert task == CHIEF or process.code is None, process.log  # they serve until they are stopped
        assert task == CHIEF or "step" not in process.log


def test_an_in_graph_chief_goes_on_when_a_worker_is_back(train):
    """A worker that dies halts the step; when it serves again, the chief goes on with the living variables."""
    hparams = {"batches": [400, 400], "pause": 0.005}
    training = train(SHARDS, replication="in_graph", hparams=hparams)
    training.start_all()
    training.await_step(CHIEF, 40)
    training.kill(WORKER)
    reached = training.step(CHIEF)
    killed = time.time()
    training.start(WORKER)
    training.await_step(CHIEF, reached + 60)
    back = next(record for record in training.progress(CHIEF) if record.time > killed + 0.1)
    assert back.global_step >= reached
    assert back.time - killed < 4
    assert training.tasks[CHIEF].wait() == 0, training.logs
    assert "variables are alive" in training.tasks[CHIEF].log
    assert training.attempts == {PS: 0, CHIEF: 0, WORKER: 1}


def test_an_in_graph_training_survives_its_ps_and_its_chief(train):
    """A ps that comes back is filled from the last checkpoint; a chief that comes back takes the variables up."""
    hparams = {"batches": [4000, 4000], "pause": 0.005}
    training = train(SHARDS, replication="in_graph", hparams=hparams, save_checkpoint_secs=0.2)
    training.start_all()
    training.await_step(CHIEF, 80)
    until(lambda: list(training.checkpoints.glob("*.meta")), 10, "no checkpoint")
    training.kill(PS)
    training.start(PS)
    until(lambda: "restored" in training.tasks[CHIEF].log, 15, training.logs)
    reached = training.step(CHIEF)
    training.await_step(CHIEF, reached + 40)
    training.kill(CHIEF)
    reached = training.step(CHIEF)
    training.start(CHIEF)
    training.await_step(CHIEF, reached + 40)
    assert "variables are alive" in training.tasks[CHIEF].log
    assert training.attempts == {PS: 1, CHIEF: 1, WORKER: 0}


def test_digits_are_recognised_in_graph_on_job_names_of_ones_own(train, digits):
    """The bundled digits program reaches 93 % on held-out images with two towers, and ends soon after its last step."""
    training = train(
        DIGITS, roles={"tower": 2}, chief="tower:0", replication="in_graph", steps=200, inputs=digits
    )
    training.start_all()
    assert training.tasks["tower:0"].wait() == 0, training.logs
    ended = time.time()
    assert ended - training.progress("tower:0")[-1].time < ENDS_WITHIN
    assert training.result.global_step == 200
    assert training.result.metrics["accuracy"] >= 0.93


def test_the_in_graph_job_of_digits(train, digits):
    """As its file says: a chief beside two workers that only serve."""
    job = JobSpec.from_file(DAGS / "jobs" / "digits_in_graph.yaml")
    job.check_runnable()
    training = train(
        job.local_path(job.program),
        roles={role: spec.count for role, spec in job.roles.items()},
        chief="chief:0",
        replication=job.replication,
        steps=150,
        hparams=dict(job.hparams),
        inputs=digits,
    )
    training.start_all()
    assert training.tasks["chief:0"].wait() == 0, training.logs
    assert training.result.metrics["accuracy"] >= 0.93


def test_variables_that_towers_cannot_share_are_refused(train):
    """A model that makes its variables with tf.Variable is refused by name, instead of training one tower alone."""
    program = """
        import tensorflow.compat.v1 as tf
        from tfps_runtime.training import Model

        def input_fn(mode, params, shard):
            return tf.zeros([2]), None

        def model_fn(features, labels, mode, params):
            w = tf.Variable(0.0, name="w")
            return Model(loss=tf.reduce_mean(w - features), optimizer=tf.train.GradientDescentOptimizer(0.1))
    """
    training = train(program, replication="in_graph", steps=5)
    training.start_all()
    assert training.tasks[CHIEF].wait() == 1
    last = training.tasks[CHIEF].log.strip().splitlines()[-1]
    assert "model_fn makes tower_1/w anew for each tower" in last


def test_towers_and_variables_are_where_they_belong(forks, tmp_path):
    """Input and its feeding stay on the chief, each tower's ops are on its worker, variables on the ps."""
    found = forks.call(placed_towers, directory=tmp_path)
    assert found["variables"] == ["/job:ps/task:0/device:CPU:0"]
    assert found["input"] == ["/job:worker/task:0/device:CPU:0"]
    assert found["towers"] == ["/job:worker/task:0", "/job:worker/task:1"]
    assert found["filters"] == []
    assert found["report"] == {"ps:0": 4 + 8}


def placed_towers() -> dict[str, Any]:
    import tensorflow.compat.v1 as tf
    from tfps_runtime.protocol import Task
    from tfps_runtime.training.cluster import Cluster
    from tfps_runtime.training.model import Model, Params
    from tfps_runtime.training.placement import bytes_by_task
    from tfps_runtime.training.program import Program
    from tfps_runtime.training.towers import build_towers

    tf.disable_v2_behavior()
    products = []

    def input_fn(mode: str, params: Params, shard: Any) -> Any:
        return tf.data.Dataset.from_tensors(tf.ones([4])).repeat()

    def model_fn(features: Any, labels: Any, mode: str, params: Params) -> Model:
        products.append(tf.get_variable("w", []) * features)
        return Model(loss=tf.reduce_mean(products[-1]), optimizer=tf.train.GradientDescentOptimizer(0.1))

    hosts = {"ps": ["a:1"], "worker": ["a:2", "b:2"]}
    cluster = Cluster(Task("worker", 0), Task("worker", 0), hosts, is_in_graph=True)
    replica = build_towers(Program("p.py", input_fn, model_fn), Params(), cluster, seed=1)
    operations = replica.graph.get_operations()
    with replica.graph.as_default():
        variables = tf.global_variables()
    return {
        "variables": sorted({variable.device for variable in variables}),
        "input": sorted({op.device for op in operations if "Iterator" in op.type}),
        "towers": [product.device for product in products],
        "filters": list(cluster.config({}).device_filters),
        "report": bytes_by_task(variables),
    }
