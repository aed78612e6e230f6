"""What a model may ask of the harness, and what it reports: schedules, clipping, partitions, early stopping, weights
from elsewhere, prediction, export, summaries, progress. On clusters where that matters.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from clusters import CHIEF, WORKER

pytestmark = pytest.mark.tensorflow

both_modes = pytest.mark.parametrize("mode", ["async", "sync"])


# --- the end of the input -------------------------------------------------------------------------------------------

SHARDS = """
    import time
    import numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model

    def batches(shard, params):
        for _ in range(params["batches"][shard.index]):
            time.sleep(params.get("pause", 0))
            yield np.full([4], 1.0 + 2 * shard.index, np.float32), None

    def input_fn(mode, params, shard):
        if mode == "eval":
            return tf.data.Dataset.from_tensors(tf.ones([1]))
        if params.get("dataset"):
            value = tf.fill([4], 1.0 + 2 * shard.index)
            return tf.data.Dataset.from_tensors(value).repeat(params["batches"][shard.index])
        return batches(shard, params)

    def model_fn(features, labels, mode, params):
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        return Model(
            loss=-tf.reduce_mean(w * features),     # the gradient is minus the shard's value: 1, 3 or 5
            optimizer=tf.train.GradientDescentOptimizer(1.0),
            metrics={"w": w},
        )
"""


@both_modes
@pytest.mark.parametrize("is_dataset", [False, True])
def test_uneven_shards_end_together_and_every_example_counts(train, mode, is_dataset):
    """A replica whose input ended contributes nothing: the weight is the exact sum of what all batches bring."""
    training = train(SHARDS, workers=3, mode=mode, hparams={"batches": [10, 25, 15], "dataset": is_dataset})
    training.start_all()
    assert training.wait(CHIEF, WORKER, "worker:2") == [0, 0, 0], training.logs
    if mode == "async":
        assert training.result.global_step == 50
        assert training.result.metrics["w"] == pytest.approx(10 * 1 + 25 * 3 + 15 * 5)
    else:
        assert training.result.global_step == 25
        # 10 steps of all three, 5 of the last two, 10 of the second alone: means of 3, 4 and 3
        assert training.result.metrics["w"] == pytest.approx(10 * 3 + 5 * 4 + 10 * 3)


def test_uneven_shards_end_with_backup_workers_too(train):
    """With two of three gradients per update nobody hangs when one shard after the other ends."""
    training = train(
        SHARDS,
        workers=3,
        mode="sync",
        replicas_to_aggregate=2,
        hparams={"batches": [10, 60, 30], "pause": 0.002},
    )
    training.start_all()
    assert training.wait(CHIEF, WORKER, "worker:2") == [0, 0, 0], training.logs
    assert training.result.global_step >= 60


def test_a_replica_without_input_is_replaced_like_any_other(train):
    """A synchronous chief that is killed when its own input has ended goes on without gradients after its restart."""
    training = train(SHARDS, mode="sync", hparams={"batches": [5, 300], "pause": 0.003})
    training.start_all()
    training.await_step(WORKER, 40)
    assert f"the input of {CHIEF} has ended" in training.tasks[CHIEF].log
    training.kill(CHIEF)
    training.start(CHIEF)
    assert training.wait(CHIEF, WORKER) == [0, 0], training.logs
    assert 295 <= training.result.global_step <= 300  # a step is lost when a session is
    assert training.progress(WORKER)[-1].local_step <= 300


# --- learning rates and gradients -----------------------------------------------------------------------------------


@both_modes
def test_schedules_follow_the_global_step_and_gradients_are_clipped(train, mode):
    """A piecewise constant rate changes at its boundary for all replicas; each gradient is clipped to the norm."""
    program = """
        import tensorflow.compat.v1 as tf
        from tfps_runtime.training import Model

        def input_fn(mode, params, shard):
            return tf.data.Dataset.from_tensors(tf.ones([1])).repeat(1 if mode == "eval" else None)

        def model_fn(features, labels, mode, params):
            w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
            rate = tf.train.piecewise_constant(tf.train.get_global_step(), [10, 20], [1.0, 0.1, 0.0])
            return Model(
                loss=tf.reduce_sum(w * [30.0, 40.0]) * features[0],
                optimizer=tf.train.GradientDescentOptimizer(rate),
                clip_norm=5.0,
                metrics={"w_0": w[0], "w_1": w[1]},
            )
    """
    training = train(program, mode=mode, workers=1 if mode == "async" else 2, steps=40)
    training.start_all()
    assert training.tasks[CHIEF].wait() == 0, training.logs
    # Steps 0 to 10 at rate 1, 11 to 20 at 0.1 (a boundary belongs to the value before it): 12 in all.
    moved = 11 * 1.0 + 10 * 0.1
    assert training.result.metrics["w_0"] == pytest.approx(-3 * moved, rel=1e-4)
    assert training.result.metrics["w_1"] == pytest.approx(-4 * moved, rel=1e-4)


def test_partitioned_variables_average_save_and_evaluate(train):
    """Tables over two ps, with an optimizer's slots and moving averages, train, are saved whole, and evaluate."""
    program = """
        import tensorflow.compat.v1 as tf
        from tfps_runtime.training import Model, partitioner

        def input_fn(mode, params, shard):
            return tf.data.Dataset.from_tensors({"id": [0, 999]}).repeat(1 if mode == "eval" else None)

        def model_fn(features, labels, mode, params):
            parts = partitioner(params, min_slice_bytes=1)
            table = tf.get_variable("table", [1000, 4], initializer=tf.zeros_initializer(), partitioner=parts)
            rows = tf.nn.embedding_lookup(table, features["id"], partition_strategy="div")
            bias = tf.get_variable("bias", [4], initializer=tf.zeros_initializer())
            return Model(
                loss=tf.reduce_sum((rows + bias - 1.0) ** 2),
                optimizer=tf.train.AdamOptimizer(0.1),
                metrics={"row": tf.reduce_mean(rows)},
                moving_average_decay=0.9,
            )
    """
    training = train(program, ps=2, steps=60)
    training.start_all()
    assert training.tasks[CHIEF].wait() == 0, training.logs
    assert 0.2 < training.result.metrics["row"] < 0.8
    (report,) = [line for line in training.tasks[CHIEF].log.splitlines() if "bytes of variables" in line]
    assert "(50 %)" in report, report


# --- early stopping --------------------------------------------------------------------------------------------------

STOPPING = """
    import time
    import numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import EarlyStopping, Model

    def input_fn(mode, params, shard):
        return iter([(np.ones([1], np.float32), None)]) if mode == "eval" else batches()

    def batches():
        while True:
            time.sleep(0.005)
            yield np.ones([1], np.float32), None

    def model_fn(features, labels, mode, params):
        # Finds 1 within some steps, and then nothing is gained any more.
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        return Model(
            loss=tf.reduce_mean((w - features) ** 2),
            optimizer=tf.train.GradientDescentOptimizer(0.2),
            metrics={"error": tf.abs(w - 1)},
            early_stopping=EarlyStopping(metric=params.get("metric", "error"), patience=2, min_gain=1e-6),
        )
"""


@both_modes
def test_early_stopping_ends_the_training_for_all(train, mode):
    """When evaluations bring no gain, all replicas end with exit code 0, long before the last step."""
    training = train(STOPPING, mode=mode, steps=1_000_000, save_checkpoint_secs=0.3)
    training.start_all()
    assert training.wait(CHIEF, WORKER) == [0, 0], training.logs
    assert training.result.global_step < 100_000
    assert training.result.metrics["error"] < 1e-3
    assert "early stopping: error was best at" in training.tasks[CHIEF].log


def test_early_stopping_names_a_metric_that_does_not_exist(train):
    """A misspelt metric fails the training at the first evaluation and lists the ones there are."""
    training = train(
        STOPPING, ps=0, workers=1, steps=1_000_000, save_checkpoint_secs=0.2, hparams={"metric": "erorr"}
    )
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 1
    assert "no finite metric 'erorr' (there is: error, loss)" in training.tasks[CHIEF].log.splitlines()[-1]


# --- weights from elsewhere ------------------------------------------------------------------------------------------

RENAMED = """
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model

    def input_fn(mode, params, shard):
        return tf.data.Dataset.from_tensors(tf.ones([1])).repeat(1 if mode == "eval" else None)

    def model_fn(features, labels, mode, params):
        with tf.variable_scope("line"):
            slope = tf.get_variable("slope", [], initializer=tf.zeros_initializer())
            bias = tf.get_variable("bias", [], initializer=tf.zeros_initializer())
        extra = tf.get_variable("extra", [3], initializer=tf.ones_initializer())
        return Model(
            loss=tf.reduce_mean(features * (slope + bias + extra[0])),
            optimizer=tf.train.GradientDescentOptimizer(0.0),
            metrics={"slope": slope, "bias": bias, "extra": extra[0]},
            start_from_names=params["names"],
        )
"""


def test_start_from_renames_and_leaves_out(train):
    """Weights come under other names, by prefix or one by one; what is named None begins afresh."""
    first = train(ps=0, workers=1, steps=200)
    first.start(CHIEF)
    assert first.tasks[CHIEF].wait() == 0, first.logs
    names = {"line/slope": "weight", "line/": "", "extra": None}
    second = train(
        RENAMED, ps=0, workers=1, steps=3, start_from=str(first.checkpoints), hparams={"names": names}
    )
    second.start(CHIEF)
    assert second.tasks[CHIEF].wait() == 0, second.logs
    found, wanted = second.result.metrics, first.result.metrics
    assert found["slope"] == pytest.approx(wanted["weight"])
    assert found["bias"] == pytest.approx(wanted["bias"])
    assert found["extra"] == 1

    third = train(RENAMED, ps=0, workers=1, steps=3, start_from=str(first.checkpoints), hparams={"names": {}})
    third.start(CHIEF)
    assert third.tasks[CHIEF].wait() == 1
    assert "line/slope [] is absent" in third.tasks[CHIEF].log.splitlines()[-1]


# --- prediction and export -------------------------------------------------------------------------------------------

SERVED = """
    import numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model

    def input_fn(mode, params, shard):
        features = [{"x": np.full([3, 2], 0.0, np.float32)}, {"x": np.full([2, 2], 1.0, np.float32)}]
        if mode == "predict":
            return iter(features)
        return iter([(each, np.ones(len(each["x"]), np.float32)) for each in features] * (1 if mode == "eval" else 100))

    def model_fn(features, labels, mode, params):
        w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
        words = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1], tf.int64), tf.constant(["none", "one"])), "many"
        )
        y = tf.reduce_sum(w * features["x"], axis=1)
        predictions = {"y": y, "word": words.lookup(tf.cast(features["x"][:, 0], tf.int64))}
        if labels is None:
            return Model(predictions=predictions)
        loss = tf.reduce_mean((y - labels) ** 2)
        return Model(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.1), moving_average_decay=0.5)
"""


def test_a_checkpoint_predicts_and_is_exported_for_tensorflow_2(train, forks, tmp_path):
    """Predictions come batch by batch; `tf.saved_model.load` and a call of its signature give the same numbers."""
    training = train(SERVED, ps=0, workers=1, steps=50)
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 0, training.logs
    program, checkpoint = training.fields["program"], training.result.checkpoint
    model = str(tmp_path / "model" / "1")
    predicted = forks.call(predict_and_export, program, checkpoint, model, directory=tmp_path)
    assert [batch["word"] for batch in predicted["batches"]] == [["none"] * 3, ["one"] * 2]
    assert predicted["batches"][0]["y"] == [0, 0, 0]
    assert predicted["again"].startswith(f"{model} exists already; a SavedModel is written to")
    assert sorted(path.name for path in Path(model).parent.iterdir()) == ["1"]
    served = forks.call(load_and_call, model, directory=tmp_path)
    assert served["inputs"] == {"x": [None, 2]}
    assert served["y"] == pytest.approx(predicted["batches"][1]["y"][:1] * 2)
    assert served["word"] == ["one", "one"]


def predict_and_export(program: str, checkpoint: str, directory: str) -> dict[str, Any]:
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import ProgramError, export, predict

    batches = [
        {"y": batch["y"].tolist(), "word": [word.decode() for word in batch["word"]]}
        for batch in predict(program, checkpoint)
    ]
    assert not tf.get_default_graph().get_operations()  # nothing is left in the caller's graph
    export(program, checkpoint, directory)
    try:
        export(program, checkpoint, directory)
    except ProgramError as error:
        return {"batches": batches, "again": str(error)}
    return {}


def load_and_call(directory: str) -> dict[str, Any]:
    import tensorflow as tf

    signature = tf.saved_model.load(directory).signatures["serving_default"]
    answer = signature(x=tf.ones([2, 2]))
    return {
        "inputs": {
            name: spec.shape.as_list() for name, spec in signature.structured_input_signature[1].items()
        },
        "y": answer["y"].numpy().tolist(),
        "word": [word.decode() for word in answer["word"].numpy()],
    }


def test_a_program_may_parse_what_it_is_served(train, forks, tmp_path):
    """With `serving_fn` the signature takes serialised examples."""
    training = train(
        """
        import tensorflow.compat.v1 as tf
        from tfps_runtime.training import Model

        def input_fn(mode, params, shard):
            return tf.data.Dataset.from_tensors({"x": tf.ones([2])}).repeat(1 if mode == "eval" else None)

        def serving_fn(params):
            examples = tf.placeholder(tf.string, [None])
            parsed = tf.io.parse_example(examples, {"x": tf.io.FixedLenFeature([], tf.float32)})
            return {"examples": examples}, parsed

        def model_fn(features, labels, mode, params):
            w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
            y = w * features["x"]
            return Model(
                loss=tf.reduce_mean((y - 1) ** 2), optimizer=tf.train.GradientDescentOptimizer(0.5), predictions=y
            )
        """,
        ps=0,
        workers=1,
        steps=20,
    )
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 0, training.logs
    program, checkpoint = training.fields["program"], training.result.checkpoint
    served = forks.call(export_and_parse, program, checkpoint, str(tmp_path / "model"), directory=tmp_path)
    assert served == pytest.approx([3.0], rel=1e-3)


def export_and_parse(program: str, checkpoint: str, directory: str) -> list[float]:
    import tensorflow as tf
    from tfps_runtime.training import export

    export(program, checkpoint, directory)
    tf.compat.v1.enable_v2_behavior()
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=[3.0]))
    example = tf.train.Example(features=tf.train.Features(feature={"x": feature}))
    signature = tf.saved_model.load(directory).signatures["serving_default"]
    return signature(examples=tf.constant([example.SerializeToString()]))["predictions"].numpy().tolist()


# --- what is reported ------------------------------------------------------------------------------------------------


def test_progress_and_summaries_tell_loss_rates_and_waiting(train, forks):
    """Records hold loss, steps/s, examples/s and time spent waiting; summaries hold the program's and our own."""
    training = train(mode="sync", steps=300, hparams={"step_secs": 0.005, "batch_size": 16})
    training.start_all()
    assert training.tasks[CHIEF].wait() == 0, training.logs
    for record in training.progress(CHIEF)[1:]:
        assert record.loss is not None
        assert record.steps_per_sec > 0
        # Of this replica: 16 examples a step.
        assert record.examples_per_sec == pytest.approx(16 * record.steps_per_sec, rel=0.2)
    pairs = list(zip(training.progress(CHIEF), training.progress(CHIEF)[1:], strict=False))
    waits = [after.waiting_secs / (after.time - before.time) for before, after in pairs]
    assert max(waits) > 0.3  # at least 5 ms of each step are spent waiting for the generator
    assert all(0 <= share <= 1.05 for share in waits)
    tags = forks.call(read_tags, str(training.checkpoints), directory=training.directory)
    assert {"line/weight", "line/bias", "loss", "global_step/sec"} <= set(tags)


def read_tags(directory: str) -> list[str]:
    import tensorflow.compat.v1 as tf

    files = [str(path) for path in Path(directory).glob("events.out.tfevents.*")]
    events = [event for file in files for event in tf.train.summary_iterator(file)]
    return sorted({value.tag for event in events for value in event.summary.value})


def test_a_programs_hooks_run_on_every_replica(train):
    """A SessionRunHook sees session, fetches and results of each step, may stop the training, and ends with it."""
    program = """
        import tensorflow.compat.v1 as tf
        from tfps_runtime.training import Model

        class Hook(tf.train.SessionRunHook):
            def begin(self):
                self.double = 2 * tf.cast(tf.train.get_global_step(), tf.float32)
                self.seen = 0
            def after_create_session(self, session, coord):
                print("session at", session.run(self.double), flush=True)
            def before_run(self, run_context):
                return tf.train.SessionRunArgs({"double": self.double})
            def after_run(self, run_context, run_values):
                assert run_values.results["double"] >= 0
                self.seen += 1
                if self.seen == 30:
                    run_context.request_stop()
            def end(self, session):
                print("hook saw", self.seen, flush=True)

        def input_fn(mode, params, shard):
            return None if mode == "eval" else (tf.zeros([2]), None)

        def model_fn(features, labels, mode, params):
            w = tf.get_variable("w", [])
            optimizer = tf.train.GradientDescentOptimizer(0.1)
            return Model(loss=tf.reduce_mean(w + features), optimizer=optimizer, hooks=[Hook()])
    """
    training = train(program, steps=1_000_000)
    training.start_all()
    assert training.wait(CHIEF, WORKER) == [0, 0], training.logs
    for task in (CHIEF, WORKER):
        assert "session at" in training.tasks[task].log
        assert "hook saw 30" in training.tasks[task].log
    assert 30 <= training.result.global_step <= 60  # at the chief's 30th step


def test_sigterm_is_heard_in_graph_too(train):
    """SIGTERM makes an in-graph chief save its last step and leave with "try again"; a worker just goes."""
    training = train(replication="in_graph", steps=100_000, hparams={"step_secs": 0.005})
    training.start_all()
    training.await_step(CHIEF, 50)
    training.tasks[CHIEF].signal(signal.SIGTERM)
    assert training.tasks[CHIEF].wait(5) == 75
    saved = [int(path.stem.rpartition("-")[2]) for path in training.checkpoints.glob("*.index")]
    assert len(saved) == 1
    assert saved[0] >= training.step(CHIEF)
    training.tasks[WORKER].signal(signal.SIGTERM)
    assert training.tasks[WORKER].wait(5) == -signal.SIGTERM


def test_the_command_line_evaluates_predicts_and_exports(train, forks, tmp_path):
    """`python -m tfps_runtime evaluate | predict | export` do what the functions do, and print JSON."""
    training = train(SERVED, ps=0, workers=1, steps=50)
    training.start(CHIEF)
    assert training.tasks[CHIEF].wait() == 0, training.logs
    what = [training.fields["program"], training.result.checkpoint]
    model = tmp_path / "model"
    printed = forks.call(command_lines, what, str(model), directory=tmp_path)
    assert json.loads(printed["evaluate"]) == pytest.approx(training.result.metrics)
    lines = [json.loads(line) for line in printed["predict"].splitlines()]
    assert [line["word"] for line in lines] == [["none"] * 3, ["one"] * 2]
    assert (model / "saved_model.pb").is_file()


def command_lines(what: list[str], model: str) -> dict[str, str]:
    import contextlib
    import io

    from tfps_runtime import local

    printed = {}
    for command, more in (("evaluate", []), ("predict", []), ("export", [model])):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert local.main(command, [*what, *more]) == 0
        printed[command] = output.getvalue()
    return printed
