"""Input of every kind, on real clusters: queues with a coordinator, readers of files and arrays; never on a ps."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from clusters import CHIEF, PS, WORKER

pytestmark = pytest.mark.tensorflow

both_modes = pytest.mark.parametrize("mode", ["async", "sync"])

SUM = """
    import time
    import numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Model, queued, readers

    def model_fn(features, labels, mode, params):
        # Every example adds its value to the weight, so that the weight says which examples were used, and how often.
        w = tf.get_variable("w", [], tf.float64, initializer=tf.zeros_initializer())
        return Model(
            loss=-w * tf.reduce_sum(tf.cast(features, tf.float64)),
            optimizer=tf.train.GradientDescentOptimizer(1.0),
            metrics={"w": w},
        )
"""

QUEUE_RUNNERS = """
    def input_fn(mode, params, shard):
        if mode == "eval":
            return tf.data.Dataset.from_tensors(tf.ones([1]))
        # As TensorFlow 1 did it: an op that makes a batch, a queue, threads that run it beside the step.
        batch = tf.train.limit_epochs(tf.fill([3], 1.0 + shard.index), 40)
        queue = tf.FIFOQueue(4, [tf.float32], [[3]])
        tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(batch)] * 2))
        return queue.dequeue(), None
"""

QUEUED = """
    def input_fn(mode, params, shard):
        if mode == "eval":
            return tf.data.Dataset.from_tensors(tf.ones([1]))
        return queued(batches(1.0 + shard.index, params.get("count", 40), params.get("pause", 0)))

    def batches(value, count, pause):
        for i in range(count):
            time.sleep(pause)
            yield np.full([3], value, np.float32), None
"""


def program(input_fn: str) -> str:
    return textwrap.dedent(SUM) + textwrap.dedent(input_fn)


@both_modes
@pytest.mark.parametrize("input_fn", [QUEUE_RUNNERS, QUEUED], ids=["runners", "queued"])
def test_s01_queue_runners_and_a_coordinator_feed_the_steps(train, mode, input_fn):
    """Threads fill a queue beside the steps; every batch is used once, and training ends when the queues are empty."""
    training = train(program(input_fn), mode=mode)
    training.start_all()
    assert training.wait(CHIEF, WORKER) == [0, 0], training.logs
    total = 3 * 40 * (1 + 2) if mode == "async" else 3 * 40 * (1 + 2) / 2
    assert training.result.metrics["w"] == pytest.approx(total)
    assert training.result.global_step == (80 if mode == "async" else 40)


def test_a_queue_goes_on_in_the_session_after_a_lost_ps(train):
    """A session that is lost with a ps neither ends the input early nor loses what is in the queue."""
    training = train(
        program(QUEUED), workers=1, hparams={"count": 150, "pause": 0.01}, save_checkpoint_secs=0.2
    )
    training.start_all()
    training.await_step(CHIEF, 60)
    training.kill(PS)
    training.start(PS)
    assert training.tasks[CHIEF].wait() == 0, training.logs
    assert "restored" in training.tasks[CHIEF].log
    # The batch of each step that was under way when a session was lost, but not what waited in the queue; of the global
    # steps those since the last checkpoint.
    assert training.progress(CHIEF)[-1].local_step >= 146
    assert 110 <= training.result.global_step <= 150


def test_a_fault_in_an_input_thread_is_the_trainings_fault(train):
    """An error in the thread that fills the queue ends the training with that error, instead of a hang."""
    training = train(
        program(QUEUED.replace("time.sleep(pause)", "value = value / (10 - i) if i < 11 else value")),
        workers=1,
    )
    training.start_all()
    assert training.tasks[CHIEF].wait() == 1
    assert "ZeroDivisionError" in training.tasks[CHIEF].log


READERS = {
    "tfrecords": """
        def input_fn(mode, params, shard):
            spec = {"x": tf.io.FixedLenFeature([], tf.float32)}
            return readers.tfrecords(
                params.inputs["data"], lambda records: tf.io.parse_example(records, spec)["x"], mode, shard,
                batch_size=7, epochs=2,
            )
    """,
    "csv": """
        def input_fn(mode, params, shard):
            columns = {"name": None, "x": tf.float32, "y": 0.0}
            return readers.csv(
                params.inputs["data"], columns, mode, shard, batch_size=7, epochs=2, label="y"
            ).map(lambda features, label: features["x"] + 0 * label)
    """,
    "arrays": """
        def input_fn(mode, params, shard):
            x = readers.load_npz(params.inputs["data"])["x"]
            return readers.arrays(x, mode, shard, batch_size=7, epochs=2)
    """,
}


@pytest.fixture(scope="session")
def data(forks, tmp_path_factory) -> dict[str, str]:
    """The numbers 0 to 99 in files of each kind: one .npz, two CSV, three TFRecord files."""
    import numpy as np

    folder = tmp_path_factory.mktemp("data")
    for name in READERS:
        (folder / name).mkdir()
    np.savez(folder / "arrays" / "x.npz", x=np.arange(100, dtype=np.float32))
    for i in range(2):
        rows = [f'"a, b",{x},' for x in range(50 * i, 50 * i + 50)]  # a quoted comma, an empty field
        (folder / "csv" / f"part-{i}.csv").write_text("\n".join(["name,x,y", *rows]) + "\n")
    forks.call(write_records, str(folder / "tfrecords"), directory=folder)
    return {name: str(folder / name) for name in READERS}


def write_records(directory: str) -> None:
    import tensorflow.compat.v1 as tf

    for i in range(3):
        with tf.io.TFRecordWriter(f"{directory}/part-{i}.tfrecord") as writer:
            for x in range(i, 100, 3):
                feature = tf.train.Feature(float_list=tf.train.FloatList(value=[x]))
                features = tf.train.Features(feature={"x": feature})
                writer.write(tf.train.Example(features=features).SerializeToString())


@pytest.mark.parametrize("reader", READERS)
def test_readers_give_every_replica_its_shard(train, data, reader):
    """Two workers read each example as often as there are epochs, and evaluation reads all."""
    training = train(program(READERS[reader]), inputs={"data": data[reader]})
    training.start_all()
    assert training.wait(CHIEF, WORKER) == [0, 0], training.logs
    assert training.result.metrics["w"] == pytest.approx(2 * sum(range(100)))


def test_readers_shuffle_by_seed_and_read_evaluation_in_order(forks, data, tmp_path):
    """Two seeds give two orders of the same examples, the same seed the same one; mode eval has the files' order."""
    found = forks.call(read_orders, data, directory=tmp_path)
    for name, orders in found.items():
        first, again, other, evaluated, third = orders
        assert first == again != other, name
        assert sorted(first) == sorted(other) == sorted(evaluated) == list(range(100)), name
        assert first != evaluated, name
        assert name == "tfrecords" or evaluated == list(range(100)), name
        assert set(third) < set(range(100)), name
        assert 30 <= len(third) <= 50, name


def read_orders(data: dict[str, str]) -> dict[str, list[list[int]]]:
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Shard, readers

    tf.disable_v2_behavior()
    spec = {"x": tf.io.FixedLenFeature([], tf.float32)}

    def make(name: str, mode: str, shard: Any) -> Any:
        options = {"batch_size": 8, "epochs": 1}
        if name == "arrays":
            return readers.arrays({"x": readers.load_npz(data[name])["x"]}, mode, shard, **options)
        if name == "csv":
            return readers.csv(data[name], {"name": "", "x": 0.0, "y": 0.0}, mode, shard, **options)
        return readers.tfrecords(data[name], lambda r: tf.io.parse_example(r, spec), mode, shard, **options)

    cases = [
        ("train", Shard(0, 1, 5)),
        ("train", Shard(0, 1, 5)),
        ("train", Shard(0, 1, 6)),
        ("eval", Shard(1, 3, 5)),
    ]
    found: dict[str, list[list[int]]] = {}
    for name in data:
        for mode, shard in [*cases, ("train", Shard(1, 3, 5))]:
            with tf.Graph().as_default(), tf.Session() as session:
                batch = tf.data.make_one_shot_iterator(make(name, mode, shard)).get_next()["x"]
                values: list[int] = []
                try:
                    while True:
                        values += [int(x) for x in session.run(batch)]
                except tf.errors.OutOfRangeError:
                    found.setdefault(name, []).append(values)
    return found


def test_arrays_come_in_the_order_of_their_seed(forks, tmp_path):
    """Pass after pass in the orders that NumPy draws, features with their labels; again for whoever begins anew."""
    found = forks.call(read_arrays, directory=tmp_path)
    assert found["train"] == found["expected"]
    assert found["anew"] == found["train"][:3]
    assert found["beside"] == [found["train"][0], found["train"][0], found["train"][1], found["train"][1]]
    assert found["shapes"] == [[None, 2], [None]]
    assert found["eval"] == [[[2 * i, 2 * i + 1], f"n{i}"] for i in range(23)]


def read_arrays() -> dict[str, Any]:
    import numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.training import Shard, readers

    tf.disable_v2_behavior()
    data = {"x": np.arange(46).reshape(23, 2)}, np.array([f"n{i}" for i in range(23)])
    make = lambda mode, **more: readers.arrays(data, mode, Shard(1, 2, 5), batch_size=4, **more)  # noqa: E731

    def batches(session: Any, element: Any, count: int) -> list[Any]:
        found = [session.run(element) for _ in range(count)]
        return [
            [[x.tolist(), y.decode()] for x, y in zip(f["x"], labels, strict=True)] for f, labels in found
        ]

    random, expected = np.random.default_rng(5), []
    for _ in range(2):
        order = random.permutation(np.arange(1, 23, 2))
        chosen = [sorted(order[i : i + 4].tolist()) for i in range(0, 11, 4)]
        expected += [[[[2 * row, 2 * row + 1], f"n{row}"] for row in rows] for rows in chosen]
    with tf.Graph().as_default(), tf.Session() as session:
        dataset, evaluated = make("train", epochs=2), make("eval")
        once, other = (tf.data.make_initializable_iterator(dataset) for _ in range(2))
        evaluated_once = tf.data.make_one_shot_iterator(evaluated).get_next()
        element, beside = once.get_next(), other.get_next()
        session.run([once.initializer, other.initializer])
        found: dict[str, Any] = {"expected": expected, "train": batches(session, element, 6)}
        try:
            session.run(element)
        except tf.errors.OutOfRangeError:
            session.run(once.initializer)
            found["anew"] = batches(session, element, 3)
        session.run(once.initializer)
        found["beside"] = [b for _ in range(2) for e in (element, beside) for b in batches(session, e, 1)]
        found["eval"] = [row for batch in batches(session, evaluated_once, 6) for row in batch]
        spec = tf.data.get_output_shapes(dataset)
        found["shapes"] = [spec[0]["x"].as_list(), spec[1].as_list()]
    return found


def test_readers_say_which_file_is_missing(forks, tmp_path):
    """A path that stands for no file is a ProgramError with the pattern in it."""
    assert forks.call(read_nothing, directory=tmp_path) == "there is no file /nowhere/*.csv"


def read_nothing() -> str:
    from tfps_runtime.training import ProgramError, Shard, readers

    try:
        readers.csv("/nowhere/*.csv", {"x": 0.0}, "train", Shard(), batch_size=1)
    except ProgramError as error:
        return str(error)
    return ""


@both_modes
def test_input_is_never_on_a_ps(forks, tmp_path, mode):
    """Datasets, queues, readers and their threads' ops are on the replica's CPU, whatever the device setter thinks."""
    found = forks.call(input_devices, mode, directory=tmp_path)
    assert found["kinds"] == ["FIFOQueueV2", "IteratorGetNext", "IteratorV2", "PyFunc", "RandomUniform"]
    assert found["devices"] == ["/job:worker/task:1/device:CPU:0"]


INPUT = {"FIFOQueueV2", "IteratorV2", "IteratorGetNext", "RandomUniform", "PyFunc"}


def input_devices(mode: str) -> dict[str, Any]:
    import numpy as np
    import tensorflow.compat.v1 as tf
    from tfps_runtime.protocol import Task
    from tfps_runtime.training import Model, Params, Shard, queued, readers
    from tfps_runtime.training.cluster import Cluster
    from tfps_runtime.training.program import Program
    from tfps_runtime.training.replica import build_replica

    tf.disable_v2_behavior()

    def input_fn(mode: str, params: Params, shard: Shard) -> Any:
        dataset = readers.arrays(np.ones([9, 2], np.float32), mode, shard, batch_size=3)
        rows = tf.data.make_initializable_iterator(dataset).get_next()
        made = tf.py_func(lambda x: x, [rows], tf.float32)
        made.set_shape([None, 2])
        return queued((made + tf.random_uniform([2]), None), threads=2)

    def model_fn(features: Any, labels: Any, mode: str, params: Params) -> Model:
        w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
        return Model(loss=tf.reduce_mean(w * features), optimizer=tf.train.AdamOptimizer())

    hosts = {"ps": ["a:1", "b:1"], "worker": ["a:2", "b:2"]}
    cluster = Cluster(Task("worker", 1), Task("worker", 0), hosts)
    aggregate = 2 if mode == "sync" else None
    replica = build_replica(
        Program("p.py", input_fn, model_fn), Params(), cluster, 1, replicas_to_aggregate=aggregate
    )
    # The synchroniser's token queues are on a ps, where they belong.
    operations = [op for op in replica.graph.get_operations() if op.type in INPUT and not _is_token_queue(op)]
    return {
        "kinds": sorted({op.type for op in operations}),
        "devices": sorted({op.device for op in operations}),
    }


def _is_token_queue(op: Any) -> bool:
    return op.type == "FIFOQueueV2" and op.get_attr("shared_name").startswith(b"tfps/")
