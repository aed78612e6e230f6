"""The training harness on real clusters: tasks forked from one process that has imported TensorFlow, on loopback."""

from __future__ import annotations

import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from clusters import CHIEF, DIGITS, LINEAR_REGRESSION, PS, WORKER, free_ports, until

pytestmark = pytest.mark.tensorflow

both_modes = pytest.mark.parametrize("mode", ["async", "sync"])


# --- tests -----------------------------------------------------------------------------------------------------------


def test_importing_the_harness_leaves_a_process_that_may_fork(forks):
    """Importing the package starts no thread and does not wake TensorFlow's runtime."""
    assert forks.greeting == {
        "ready": True,
        "new_threads": 0,
        "python_threads": 1,
        "is_runtime_initialised": False,
        "imported": "tfps_runtime.training",
    }


@both_modes
def test_a_cluster_finds_the_line_and_everybody_takes_part(train, mode):
    """One ps and two workers reach weight 2 and bias 10, both workers from the start to the end."""
    training = train(mode=mode, steps=300, hparams={"step_secs": 0.003}, ps=2)
    training.start_all()
    codes = [training.tasks[task].wait() for task in (CHIEF, WORKER)]
    assert codes == [0, 0], training.tasks[CHIEF].log + training.tasks[WORKER].log
    metrics = training.result.metrics
    assert abs(metrics["weight"] - 2) < 0.1
    assert abs(metrics["bias"] - 10) < 0.2
    assert metrics["loss"] < 0.2
    chief, worker = training.progress(CHIEF), training.progress(WORKER)
    assert abs(chief[0].time - worker[0].time) < 1.5
    if mode == "sync":
        assert training.result.global_step == 300
        assert chief[-1].local_step == worker[-1].local_step == 300
    else:
        last = max(
            chief[-1].global_step, worker[-1].global_step
        )  # maybe of a step after the chief's last save
        assert chief[-1].local_step + worker[-1].local_step == last
        assert 300 <= training.result.global_step <= last <= 301
        assert min(chief[-1].local_step, worker[-1].local_step) > 75
    assert chief[-1].global_step >= 299
    assert [record.global_step for record in chief] == sorted(record.global_step for record in chief)
    assert chief[-1].steps_per_sec > 0
    assert chief[-1].examples_per_sec > 0
    assert training.result.checkpoint == str(
        training.checkpoints / f"model.ckpt-{training.result.global_step}"
    )
    assert Path(training.result.checkpoint + ".index").exists()
    assert "/" not in (training.checkpoints / "checkpoint").read_text()
    assert list(training.checkpoints.glob("events.out.tfevents.*"))
    assert training.tasks["ps:0"].code is training.tasks["ps:1"].code is None


@both_modes
def test_a_killed_chief_takes_the_living_variables_up(train, mode):
    """A chief that comes back goes on where the cluster stands; the other worker and the ps never restart."""
    training = train(mode=mode, steps=100_000, hparams={"step_secs": 0.005}, save_checkpoint_secs=0.2)
    training.start_all()
    training.await_step(WORKER, 60)
    training.kill(CHIEF)
    before = training.step(CHIEF)
    killed = time.time()
    training.start(CHIEF)
    training.await_step(CHIEF, before + 100)
    back = next(record for record in training.progress(CHIEF) if record.time > killed)
    assert back.global_step > before
    assert back.time - killed < 3
    assert "variables are alive at global step" in training.tasks[CHIEF].log
    training.await_step(WORKER, training.step(CHIEF))
    assert training.tasks[WORKER].code is None
    assert training.attempts == {PS: 0, CHIEF: 1, WORKER: 0}


@both_modes
def test_a_killed_ps_costs_no_more_than_the_steps_since_the_last_checkpoint(train, mode):
    """When the ps is back the same workers go on from the last checkpoint, within seconds."""
    training = train(mode=mode, steps=100_000, hparams={"step_secs": 0.005}, save_checkpoint_secs=0.3)
    training.start_all()
    until(lambda: list(training.checkpoints.glob("*.meta")), 20, "no checkpoint")
    training.await_step(WORKER, 100)
    saved = max(int(path.stem.rpartition("-")[2]) for path in training.checkpoints.glob("*.index"))
    training.kill(PS)
    killed = time.time()
    training.start(PS)
    for task in (CHIEF, WORKER):
        until(
            lambda task=task: training.progress(task)[-1].time > killed + 0.2,
            10,
            f"{task} does not step again",
        )
    for task in (CHIEF, WORKER):
        back = next(record for record in training.progress(task) if record.time > killed + 0.05)
        assert back.time - killed < 4
        assert back.global_step >= saved
    training.await_step(WORKER, training.step(CHIEF) + 50)
    assert "restored" in training.tasks[CHIEF].log
    assert training.attempts == {PS: 1, CHIEF: 0, WORKER: 0}


def test_s10_training_without_synchronisation_goes_on_without_a_worker(train):
    """An asynchronous worker that dies stops nobody."""
    training = train(steps=400, hparams={"step_secs": 0.005})
    training.start_all()
    training.await_step(WORKER, 50)
    training.kill(WORKER)
    assert training.tasks[CHIEF].wait() == 0, training.tasks[CHIEF].log
    assert training.result.global_step == 400


def test_synchronous_training_waits_for_a_lost_worker_and_goes_on_with_it(train):
    """Without backup workers a missing worker halts the others, and its restart releases them."""
    training = train(mode="sync", steps=300, hparams={"step_secs": 0.005})
    training.start_all()
    training.await_step(WORKER, 50)
    training.kill(WORKER)
    reached = training.step(WORKER)
    training.start(WORKER)
    assert [training.tasks[task].wait() for task in (CHIEF, WORKER)] == [0, 0]
    assert training.result.global_step == 300
    back = training.tasks[WORKER].log
    assert "step 300" in back, back
    assert training.progress(WORKER)[-1].local_step <= 300 - reached


def test_s09_a_backup_worker_makes_up_for_a_slow_one(train):
    """With two of three gradients per update nobody waits for the slowest worker."""
    program = """
        import time, numpy as np
        import tensorflow.compat.v1 as tf
        from tfps_runtime.training import Model

        def input_fn(mode, params, shard):
            if mode == "eval":
                return None
            def batches():
                while True:
                    time.sleep(0.5 if shard.index == 2 else 0.005)
                    yield np.ones([4], np.float32), np.ones([4], np.float32)
            return batches()

        def model_fn(features, labels, mode, params):
            w = tf.get_variable("w", [])
            return Model(loss=tf.reduce_mean((w * features - labels) ** 2), optimizer=tf.train.AdamOptimizer(0.01))
    """
    training = train(program, mode="sync", workers=3, steps=100, replicas_to_aggregate=2)
    training.start_all()
    assert [training.tasks[task].wait() for task in (CHIEF, WORKER)] == [0, 0], training.tasks[CHIEF].log
    first, last = training.progress(CHIEF)[0], training.progress(CHIEF)[-1]
    assert last.global_step == 100
    assert last.time - first.time < 10  # one update for each of the slow worker's steps would take 50 s
    assert training.result.metrics == {}


AVERAGING = """
    import numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model

    def input_fn(mode, params, shard):
        return tf.data.Dataset.from_tensors(tf.ones([4])).repeat(1 if mode == "eval" else None)

    def model_fn(features, labels, mode, params):
        # The gradient is 1 everywhere, so that after t updates the weight is -t.
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        return Model(
            loss=tf.reduce_mean(w * features),
            optimizer=tf.train.GradientDescentOptimizer(1.0),
            metrics={"w": w},
            moving_average_decay=0.5,
        )
"""


@both_modes
def test_evaluation_uses_the_moving_averages(train, forks, mode):
    """The evaluated weight is the average that the checkpoint holds, not the trained weight."""
    training = train(AVERAGING, mode=mode, steps=40)
    training.start_all()
    assert training.tasks[CHIEF].wait() == 0, training.tasks[CHIEF].log
    values = forks.call(read_checkpoint, training.result.checkpoint, directory=training.directory)
    assert training.result.metrics["w"] == pytest.approx(values["w/ExponentialMovingAverage"])
    assert values["w"] < training.result.metrics["w"] < 0
    if mode == "sync":
        assert values["w"] == -40
        # An average with decay 1/2 of ..., -39, -40 lags one behind.
        assert values["w/ExponentialMovingAverage"] == pytest.approx(-39, abs=0.01)


def read_checkpoint(prefix: str) -> dict[str, float]:
    import tensorflow.compat.v1 as tf

    reader = tf.train.load_checkpoint(prefix)
    names = reader.get_variable_to_shape_map()
    assert not any("tfps" in name for name in names), names
    return {name: float(reader.get_tensor(name)) for name in names}


def test_a_loss_that_is_not_a_number_ends_the_training_and_names_the_step(train):
    """NaN fails the task with exit code 1 and a last line that says where; no checkpoint is left of it."""
    training = train(steps=5000, hparams={"learning_rate": 1e20})
    training.start_all()
    assert training.tasks[CHIEF].wait() == 1
    last = training.tasks[CHIEF].log.strip().splitlines()[-1]
    assert "NotFiniteError: the loss is " in last
    assert "at global step " in last
    assert not list(training.checkpoints.glob("*.index"))


@both_modes
def test_a_chief_asked_to_stop_saves_and_leaves(train, mode):
    """SIGTERM makes the chief save its last step and leave with "try again"; a waiting worker just leaves."""
    training = train(mode=mode, steps=100_000, hparams={"step_secs": 0.005})
    training.start_all()
    training.await_step(WORKER, 50)
    training.tasks[CHIEF].signal(signal.SIGTERM)
    assert training.tasks[CHIEF].wait(5) == 75
    saved = [int(path.stem.rpartition("-")[2]) for path in training.checkpoints.glob("*.index")]
    assert len(saved) == 1
    assert 0 <= saved[0] - training.step(CHIEF) < 10  # the others may step meanwhile
    assert not (training.directory / "worker-0" / "result.json").exists()
    training.tasks[WORKER].signal(signal.SIGTERM)
    assert training.tasks[WORKER].wait(5) == 75


def test_a_chief_that_waits_for_others_can_be_stopped(train):
    """SIGTERM reaches a synchronous chief that blocks because a worker is missing."""
    training = train(mode="sync", steps=100_000)
    training.start_all()
    training.await_step(WORKER, 20)
    training.kill(WORKER)
    reached = training.step(WORKER)
    training.tasks[CHIEF].signal(signal.SIGTERM)
    assert training.tasks[CHIEF].wait(5) == 75
    saved = [int(path.stem.rpartition("-")[2]) for path in training.checkpoints.glob("*.index")]
    assert len(saved) == 1
    assert saved[0] >= reached


def test_a_chief_that_waits_for_its_ps_can_be_stopped(train):
    """SIGTERM ends a chief that has no ps and no session, where TensorFlow itself blocks without end."""
    training = train(steps=100, grace_secs=1.0)
    training.start(CHIEF)
    until(lambda: "is replica 0" in training.tasks[CHIEF].log, 10, "the chief did not start")
    training.tasks[CHIEF].signal(signal.SIGTERM)
    assert training.tasks[CHIEF].wait(5) == 75


FINITE = """
    import time
    import numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model

    def input_fn(mode, params, shard):
        n = 5 if mode == "eval" else params["batches"][shard.index]
        return batches(n, params.get("step_secs", [0.0, 0.0])[shard.index])

    def batches(n, step_secs):
        for _ in range(n):
            time.sleep(step_secs)
            yield np.ones([2], np.float32), None

    def model_fn(features, labels, mode, params):
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        return Model(loss=tf.reduce_mean((w - features) ** 2), optimizer=tf.train.GradientDescentOptimizer(0.1))
"""


@both_modes
@pytest.mark.parametrize("batches", [[20, 60], [60, 20]])
def test_training_without_a_step_limit_ends_with_its_input(train, mode, batches):
    """Async: a step for each batch of both shards. Sync: as many as the longer shard has. Nobody hangs."""
    training = train(FINITE, mode=mode, hparams={"batches": batches})
    training.start_all()
    assert [training.tasks[task].wait(15) for task in (CHIEF, WORKER)] == [0, 0], training.tasks[CHIEF].log
    assert training.result.global_step == (80 if mode == "async" else 60)


def test_a_chief_that_waits_for_the_input_of_others_survives_a_lost_ps(train):
    """The ps forgets whose input has ended; the chief, which has nothing left to do, says so again."""
    training = train(FINITE, hparams={"batches": [5, 150], "step_secs": [0.0, 0.02]})
    training.start_all()
    until(lambda: f"the input of {CHIEF} has ended" in training.tasks[CHIEF].log, 10, "the input did not end")
    training.await_step(WORKER, 30)
    training.kill(PS)
    training.start(PS)
    assert [training.tasks[task].wait(20) for task in (CHIEF, WORKER)] == [0, 0], training.tasks[CHIEF].log
    assert 0 < training.result.global_step < 150
    assert "ending without them" not in training.tasks[CHIEF].log


def test_replicas_draw_different_random_numbers(train):
    """Forked workers share no random numbers: Python's, NumPy's, TensorFlow's and the shard's seed all differ."""
    program = """
        import random, numpy as np
        import tensorflow.compat.v1 as tf
        from tfps_runtime.training import Model

        class Show(tf.train.SessionRunHook):
            def begin(self):
                self.noise = tf.random_uniform([])
                self.is_shown = False
            def after_create_session(self, session, coord):
                print("drawn", random.random(), np.random.rand(), session.run(self.noise), flush=True)

        def input_fn(mode, params, shard):
            print("seed", shard.seed, flush=True)
            return tf.zeros([2]), None

        def model_fn(features, labels, mode, params):
            w = tf.get_variable("w", [])
            optimizer = tf.train.GradientDescentOptimizer(0.1)
            return Model(loss=tf.reduce_mean(w + features), optimizer=optimizer, hooks=[Show()])
    """
    training = train(program, mode="sync", steps=100_000)
    training.start_all()
    training.await_step(WORKER, 1)
    lines = {}
    for task in (CHIEF, WORKER):
        log = training.tasks[task].log.splitlines()
        lines[task] = [
            next(line for line in log if line.startswith(word)).split() for word in ("seed", "drawn")
        ]
    (chief_seed, chief_drawn), (worker_seed, worker_drawn) = lines[CHIEF], lines[WORKER]
    assert chief_seed != worker_seed
    assert all(a != b for a, b in zip(chief_drawn[1:], worker_drawn[1:], strict=True)), lines


def test_a_worker_may_come_long_before_the_chief(train):
    """Workers that are started first wait for the chief's variables, and then all step together."""
    training = train(mode="sync", steps=200)
    training.start(PS, WORKER)
    until(lambda: "is replica 1 of 2" in training.tasks[WORKER].log, 10, "the worker did not start")
    training.start(CHIEF)
    assert [training.tasks[task].wait() for task in (CHIEF, WORKER)] == [0, 0]
    assert training.progress(WORKER)[-1].local_step == 200


def test_a_finished_training_started_again_only_evaluates(train):
    """A chief that finds its steps done trains nothing and gives the same result."""
    training = train(ps=0, workers=1, steps=100)
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 0, training.tasks[CHIEF].log
    first, records = training.result, len(training.progress(CHIEF))
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 0
    assert training.result == first
    assert len(training.progress(CHIEF)) == records
    assert "nothing left to train" in training.tasks[CHIEF].log


@pytest.mark.parametrize("state", ["", 'model_checkpoint_path: "model.ckpt-1"\n'], ids=["empty", "older"])
def test_the_newest_complete_checkpoint_counts_whatever_the_state_file_says(train, state):
    """After a loss of power the file may be empty, after a kill it may lag: neither begins the training anew."""
    training = train(ps=0, workers=1, steps=100)
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 0, training.tasks[CHIEF].log
    (training.checkpoints / "checkpoint").write_text(state)
    (training.checkpoints / "model.ckpt-900.index").write_bytes(b"")  # of a save that was cut off
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 0, training.tasks[CHIEF].log
    assert "model.ckpt-100\n" in training.tasks[CHIEF].log.partition("restored ")[2]
    assert "nothing left to train" in training.tasks[CHIEF].log


def test_what_killed_saves_have_left_is_cleared_away(train):
    """A chief that begins removes what may be as large as the model; a checkpoint with an index stays."""
    training = train(ps=0, workers=1, steps=100)
    training.checkpoints.mkdir(parents=True)
    left = [
        "model.ckpt-7.data-00000-of-00001.tempstate123",
        "model.ckpt-8.data-00000-of-00001",
        "checkpoint.tmp0a",
    ]
    for name in (*left, "model.ckpt-9.data-00000-of-00001", "model.ckpt-9.index"):
        (training.checkpoints / name).write_bytes(b"part")
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 0, training.tasks[CHIEF].log
    there = {path.name for path in training.checkpoints.iterdir()}
    assert not there.intersection(left)
    assert {"model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001", "model.ckpt-100.index"} <= there


def test_start_from_takes_weights_and_counts_from_zero(train):
    """`start_from` brings the weights of another training's checkpoint, not its global step."""
    first = train(ps=0, workers=1, steps=300)
    first.start(CHIEF)
    assert first.tasks[CHIEF].wait() == 0
    second = train(steps=5, hparams={"learning_rate": 0.0}, start_from=str(first.checkpoints))
    second.start_all()
    assert second.tasks[CHIEF].wait() == 0, second.tasks[CHIEF].log
    assert second.result.global_step in {5, 6}
    assert second.result.metrics == pytest.approx(first.result.metrics)


@both_modes
def test_digits_are_recognised(train, digits, mode):
    """The bundled digits program reaches 93 % on held-out images with two workers."""
    training = train(DIGITS, mode=mode, steps=200, inputs=digits)
    training.start_all()
    assert training.tasks[CHIEF].wait() == 0, training.tasks[CHIEF].log
    assert training.result.metrics["accuracy"] >= 0.93


def test_s04_the_same_program_runs_in_one_process(forks, tmp_path):
    """`run_local` trains without a cluster, keeps checkpoints where asked, and goes on from them."""
    results = forks.call(
        local_twice, str(LINEAR_REGRESSION), str(tmp_path / "checkpoints"), directory=tmp_path
    )
    assert [each["global_step"] for each in results] == [200, 400]
    assert results[1]["checkpoint"] == str(tmp_path / "checkpoints" / "model.ckpt-400")
    assert abs(results[1]["metrics"]["weight"] - 2) < 0.1
    assert abs(results[1]["metrics"]["bias"] - 10) < 0.2
    assert (tmp_path / "checkpoints" / "model.ckpt-200.index").exists()


def local_twice(program: str, directory: str) -> list[Any]:
    from tfps_runtime.training import run_local

    return [
        run_local(program, steps=steps, checkpoint_dir=directory, seed=3).to_json() for steps in (200, 400)
    ]


SPARSE = """
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model

    if {is_resource}:
        tf.enable_resource_variables()

    def input_fn(mode, params, shard):
        return tf.data.Dataset.from_tensors({{"id": [0, 3]}}).repeat(1 if mode == "eval" else None)

    def model_fn(features, labels, mode, params):
        rows = tf.get_variable(
            "rows", [4, 1], initializer=tf.zeros_initializer(), partitioner=tf.fixed_size_partitioner(2)
        )
        seen = tf.get_variable("seen", [], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(seen, 1.0))
        return Model(
            loss=tf.reduce_sum(tf.nn.embedding_lookup(rows, features["id"])),
            optimizer=tf.train.GradientDescentOptimizer(1.0),
            metrics={{"seen": seen, **{{f"row_{{i}}": tf.nn.embedding_lookup(rows, [i]) for i in range(4)}}}},
            clip_norm=2 ** 0.5 / 2,  # half the norm of the gradient, which is 1 for two rows
        )
"""


@both_modes
@pytest.mark.parametrize("is_resource", [False, True])
def test_sparse_gradients_reach_the_rows_they_are_of(train, mode, is_resource):
    """Embeddings split over two ps, clipping and update ops work in both modes, with both kinds of variables."""
    training = train(SPARSE.format(is_resource=is_resource), mode=mode, ps=2, steps=20)
    training.start_all()
    assert [training.tasks[task].wait() for task in (CHIEF, WORKER)] == [0, 0], training.tasks[CHIEF].log
    metrics, steps = training.result.metrics, training.result.global_step
    # An asynchronous worker's last step may fall into the chief's last save.
    late = 1 if mode == "async" else 0
    assert metrics["row_0"] == pytest.approx(-steps / 2, abs=late / 2 + 1e-3)
    assert metrics["row_3"] == pytest.approx(-steps / 2, abs=late / 2 + 1e-3)
    assert metrics["row_1"] == metrics["row_2"] == 0
    assert abs(metrics["seen"] - (2 * steps if mode == "sync" else steps)) <= late


def test_variables_are_spread_by_bytes_and_everything_else_stays(forks, tmp_path):
    """Large variables alternate between ps; small ones fill up; local variables and input stay on the replica."""
    devices = forks.call(placed, directory=tmp_path)
    assert devices["large_1"] == "/job:ps/task:0/device:CPU:0"
    assert devices["large_2"] == devices["small"] == "/job:ps/task:1/device:CPU:0"
    assert devices["slot"] == devices["large_1"]
    assert devices["local"] == devices["accuracy"] == "/job:worker/task:1/device:CPU:0"
    assert devices["input"] == "/job:worker/task:1/device:CPU:0"
    assert devices["filters"] == ["/job:ps", "/job:worker/task:1"]


def placed() -> dict[str, Any]:
    import tensorflow.compat.v1 as tf
    from tfps_runtime.protocol import Task
    from tfps_runtime.training.cluster import Cluster

    tf.disable_v2_behavior()
    hosts = {"ps": ["a:1", "b:1"], "worker": ["a:2", "b:2"]}
    cluster = Cluster(Task("worker", 1), Task("worker", 0), hosts)
    with cluster.input_device():
        x = tf.zeros([1])
    with cluster.placement():
        large_1 = tf.get_variable("large_1", [1000])
        large_2 = tf.get_variable("large_2", [900])
        small = tf.get_variable("small", [10])
        local = tf.get_variable("local", [1000], collections=[tf.GraphKeys.LOCAL_VARIABLES])
        tf.metrics.accuracy(tf.zeros([1]), x)
        optimizer = tf.train.AdamOptimizer()
        optimizer.minimize(tf.reduce_sum(large_1) + tf.reduce_sum(large_2))
    devices = {"large_1": large_1, "large_2": large_2, "small": small, "local": local, "input": x}
    devices["accuracy"] = next(v for v in tf.local_variables() if "accuracy" in v.name)
    devices["slot"] = optimizer.get_slot(large_1, "m")
    config = cluster.config({"allowSoftPlacement": True})
    return {"filters": list(config.device_filters), **{name: each.device for name, each in devices.items()}}


def test_workers_add_to_the_global_step_under_a_lock(forks, tmp_path):
    """Without one, two steps that meet on the ps count as one: seldom, and in a real training sooner or later."""
    assert forks.call(additions, directory=tmp_path) == ["AssignAddVariableOp"]


def additions() -> list[str]:
    """Ops of an asynchronous replica that add to its global step; TensorFlow's AssignAdd takes no lock by default."""
    import tensorflow.compat.v1 as tf
    from tfps_runtime.protocol import Task
    from tfps_runtime.training import Params
    from tfps_runtime.training.cluster import Cluster
    from tfps_runtime.training.program import load_program
    from tfps_runtime.training.replica import build_replica

    tf.disable_v2_behavior()
    cluster = Cluster(Task("worker", 1), Task("worker", 0), {"ps": ["a:1"], "worker": ["a:2", "b:2"]})
    replica = build_replica(load_program(str(LINEAR_REGRESSION)), Params(), cluster, 1)
    found = [op for op in replica.graph.get_operations() if op.type.startswith("AssignAdd")]
    return [op.type for op in found if op.inputs[0].op.name == "global_step"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"program": Path("/nowhere.py")}, "/nowhere.py: no such Python file"),
        ({"program": Path(__file__)}, "no function input_fn"),
        ({"session": {"allowSoftPlacment": True}}, "the job's session options"),
        ({"roles": {"worker": 2}}, "give the job at least one ps"),
        (
            {"mode": "sync", "replicas_to_aggregate": 3},
            "replicas_to_aggregate is 3, but there are 1 replicas",
        ),
    ],
)
def test_what_cannot_work_is_said_in_the_last_line(train, fields, message):
    """A job that cannot work ends its task with code 1; the last line of the log says why."""
    training = train(ps=0, workers=1, steps=5, **fields)
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 1
    assert message in training.tasks[CHIEF].log.strip().splitlines()[-1]


def test_what_blocks_in_tensorflow_is_ended_by_a_deadline(forks, tmp_path):
    """A session that never comes ends its process with "try again"; the last words name the ps that is missing."""
    process, answer = forks.begin(wait_for_nobody, *free_ports(2), directory=tmp_path)
    assert process.wait() == 75
    assert "giving up: without ps:0 (127.0.0.1:" in process.log
    assert not answer.exists()


def wait_for_nobody(*ports: int) -> None:
    import tensorflow.compat.v1 as tf
    from tfps_runtime.protocol import Task
    from tfps_runtime.training.cluster import Cluster
    from tfps_runtime.training.stopping import deadline

    tf.disable_v2_behavior()
    ps, worker = (f"127.0.0.1:{port}" for port in ports)
    cluster = Cluster(Task("worker", 0), Task("worker", 0), {"ps": [ps], "worker": [worker]})
    server = cluster.start_server(cluster.config({}))
    with (
        deadline(0.3, lambda: f"without {', '.join(cluster.unreachable())}"),
        tf.Session(server.target) as session,
    ):
        session.run(tf.constant(1))


def test_a_script_for_tensorflow_1_finds_its_names(forks, tmp_path):
    """After compat.install() `import tensorflow as tf` is TensorFlow 1, submodules and planted modules included."""
    assert forks.call(run_tensorflow_1_script, directory=tmp_path) == {
        "is_eager": False,
        "sum": 3.0,
        "planted": "planted",
        "same": True,
        "absent": True,
    }


def run_tensorflow_1_script() -> dict[str, Any]:
    import types

    from tfps_runtime.training import compat

    compat.install()
    compat.install()
    sys.modules["tensorflow.contrib"] = types.ModuleType("tensorflow.contrib", "planted")
    names: dict[str, Any] = {}
    script = """
        import tensorflow as tf
        import tensorflow.compat.v1 as v1
        from tensorflow.python.framework import ops
        import tensorflow.contrib as contrib
        with tf.Session() as session:
            total = float(session.run(tf.placeholder_with_default(1.0, []) + 2))
    """
    exec(textwrap.dedent(script), names)
    tf = names["tf"]
    return {
        "is_eager": tf.executing_eagerly(),
        "sum": names["total"],
        "planted": names["contrib"].__doc__,
        "same": names["v1"].Graph is tf.Graph is names["ops"].Graph,
        "absent": not hasattr(tf, "nothing_of_the_kind"),
    }
