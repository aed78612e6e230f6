"""Scripts that know nothing of us: TensorFlow 1 on TensorFlow 2, clusters that lose workers, TensorFlow 2 itself.

Forked from one nursery that all tests share, the product's own; under `airflowless` as Airflow runs them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import textwrap
import time
from pathlib import Path

import pytest
from stage import airflowless, numbers
from tfps_runtime.protocol import Exit

pytestmark = pytest.mark.tensorflow

SCRIPTS = Path(__file__).with_name("scripts")
PROGRAMS = Path(__file__).parents[2] / "dags" / "programs"
FLAGS = (
    "--job_name={job_name}",
    "--task_index={task_index}",
    "--ps_hosts={ps_hosts}",
    "--worker_hosts={worker_hosts}",
)
ENDS_WITHIN = 5.0
"""Seconds from the last step of any mode to the end of its processes."""


@pytest.fixture
def run(stage, tmp_path):
    """Run the text of a script to its end; gives the process."""

    def run(text: str, *args: str, compat: str | None = "tf1", code: int = 0):
        path = tmp_path / f"script-{len(list(tmp_path.glob('script-*.py')))}.py"
        path.write_text(textwrap.dedent(text))
        script = stage.start(path, *args, directory=tmp_path, compat=compat)
        assert script.wait() == Exit(code=code), script.log[-4000:]
        return script

    return run


# --- TensorFlow 1's names ---------------------------------------------------------------------------------------------


def test_tensorflow_1_scripts_find_their_layers_and_cells(run):
    """Layers, cells, initializers and regularizers train; variables have the names that old checkpoints have."""
    script = run(
        """
        import tensorflow as tf
        import tensorflow.contrib.layers as layers
        from tensorflow.contrib.framework import get_or_create_global_step
        from tensorflow.contrib.rnn import BasicLSTMCell, GRUCell, MultiRNNCell
        from tensorflow.python.framework import ops

        step = get_or_create_global_step()
        images = tf.random_normal([4, 8, 8, 1])
        net = layers.conv2d(images, 3, [3, 3], weights_regularizer=layers.l2_regularizer(0.5))
        net = layers.max_pool2d(net, 2)
        net = layers.dropout(layers.flatten(net), keep_prob=0.9)
        net = layers.fully_connected(net, 5, weights_initializer=layers.xavier_initializer(), scope="hidden")
        net = tf.layers.dense(net, 4, activation=tf.nn.relu)
        cell = MultiRNNCell([BasicLSTMCell(3), tf.nn.rnn_cell.DropoutWrapper(GRUCell(3), 0.9)])
        outputs, _ = tf.nn.dynamic_rnn(cell, tf.reshape(net, [4, 2, 2]), dtype=tf.float32)
        penalty = layers.apply_regularization(layers.l1_regularizer(0.1), tf.trainable_variables("hidden"))
        (kept,) = [l for l in tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES) if "Conv" in l.name]
        loss = tf.reduce_sum(layers.linear(outputs[:, -1], 1)) + penalty + kept
        train = tf.train.AdamOptimizer().minimize(loss, global_step=step)
        strategy = tf.contrib.training.GreedyLoadBalancingStrategy(2, tf.contrib.training.byte_size_load_fn)
        with tf.Graph().as_default(), tf.device(tf.train.replica_device_setter(ps_tasks=2, ps_strategy=strategy)):
            sizes = [tf.get_variable(n, [k]) for n, k in (("large", 9), ("small", 2), ("second", 3))]
        print("placed", [v.device for v in sizes])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            weights = session.graph.get_tensor_by_name("Conv/weights:0")
            want = 0.5 * tf.nn.l2_loss(weights)
            print("penalty", abs(session.run(kept - want)) < 1e-6, "step", session.run([train, step])[1])
        for variable in tf.trainable_variables():
            print("variable", variable.name)
        """
    )
    names = re.findall(r"^variable (\S+):0$", script.log, re.MULTILINE)
    rnn = ["gates", "candidate"]
    assert names[:14] == [
        *("Conv/weights", "Conv/biases", "hidden/weights", "hidden/biases", "dense/kernel", "dense/bias"),
        *(f"rnn/multi_rnn_cell/cell_0/basic_lstm_cell/{part}" for part in ("kernel", "bias")),
        *(f"rnn/multi_rnn_cell/cell_1/gru_cell/{gate}/{part}" for gate in rnn for part in ("kernel", "bias")),
        *("fully_connected/weights", "fully_connected/biases"),
    ]
    assert "penalty True step 1" in script.log
    assert "placed ['/job:ps/task:0', '/job:ps/task:1', '/job:ps/task:1']" in script.log
    assert "deprecated" not in script.log


def test_what_is_gone_fails_by_name_with_its_replacement(run):
    """However a script asks for what TensorFlow 2 dropped, the error names it and what to use instead."""
    script = run(
        """
        import tensorflow as tf

        for statement in (
            "tf.contrib.slim.conv2d",
            "import tensorflow.contrib.slim as slim",
            "from tensorflow.contrib import slim",
            "from tensorflow.contrib.slim.nets import vgg",
            "from tensorflow.contrib.layers import batch_norm",
            "tf.contrib.layers.batch_norm",
            "tf.contrib.crf.crf_log_likelihood",
            "from tensorflow.examples.tutorials.mnist import mnist",
            "tf.layers.batch_normalization",
            "tf.train.SummaryWriter",
            "tf.mul",
            "tf.estimator.Estimator",
        ):
            try:
                exec(statement)
            except (AttributeError, ImportError) as error:
                print(statement, "->", type(error).__name__, error)
        import tensorflow.compat.v1
        print(tf.__version__ == tensorflow.compat.v1.__version__, tf.train.Supervisor.__module__)
        tf.contrib.learn
        """,
        code=1,
    )
    found = dict(
        re.findall(
            r"^(.*) -> \w+Error (tf\.\S+ is not there in TensorFlow \S+; .*)$", script.log, re.MULTILINE
        )
    )
    uses = {
        name: re.fullmatch(r"tf\.(\S+) is not there in TensorFlow [\d.]+; (.*)", text)
        for name, text in found.items()
    }
    unknown = "no replacement is known: change the script, or plant a module of that name in sys.modules"
    assert {name: match.groups() for name, match in uses.items()} == {
        "tf.contrib.slim.conv2d": ("contrib.slim", "use the package tf_slim"),
        "import tensorflow.contrib.slim as slim": ("contrib.slim", "use the package tf_slim"),
        "from tensorflow.contrib import slim": ("contrib.slim", "use the package tf_slim"),
        "from tensorflow.contrib.slim.nets import vgg": ("contrib.slim", "use the package tf_slim"),
        "from tensorflow.contrib.layers import batch_norm": (
            "contrib.layers.batch_norm",
            "use tf.nn.batch_normalization",
        ),
        "tf.contrib.layers.batch_norm": ("contrib.layers.batch_norm", "use tf.nn.batch_normalization"),
        "tf.contrib.crf.crf_log_likelihood": ("contrib.crf", unknown),
        "from tensorflow.examples.tutorials.mnist import mnist": ("examples.tutorials.mnist.mnist", unknown),
        "tf.layers.batch_normalization": ("layers.batch_normalization", "use tf.nn.batch_normalization"),
        "tf.train.SummaryWriter": ("train.SummaryWriter", "use tf.summary.FileWriter"),
        "tf.mul": ("mul", "use tf.multiply"),
        "tf.estimator.Estimator": (
            "estimator",
            "use a program with model_fn and input_fn for the training harness (docs/jobs.md)",
        ),
    }
    assert "True tfps_runtime.training.compat" in script.log
    last = script.log.splitlines()[-1]
    assert last.startswith("AttributeError: tf.contrib.learn is not there in TensorFlow"), last


def test_a_script_may_plant_what_is_gone(run):
    """A module that the script puts in the place of what is gone is found, by import and by attribute."""
    script = run(
        """
        import sys, types
        sys.modules["tensorflow.contrib.slim"] = types.ModuleType("tensorflow.contrib.slim")
        sys.modules["tensorflow.contrib.slim"].answer = 42
        import tensorflow as tf
        from tensorflow.contrib import slim
        print(slim.answer, tf.contrib.slim.answer)
        """
    )
    assert "42 42" in script.log


def test_without_compat_the_script_has_tensorflow_as_it_is(run):
    """Only `compat: tf1` changes what `import tensorflow` means: eager TensorFlow 2 otherwise, stock Supervisor."""
    script = run(
        """
        import tensorflow as tf
        print(tf.executing_eagerly(), (tf.constant(20) + 1).numpy(), hasattr(tf, "contrib"))
        print(tf.compat.v1.train.Supervisor.__module__)
        """,
        compat=None,
    )
    assert "True 21 False\ntensorflow.python.training.supervisor" in script.log


def test_what_c_code_prints_is_in_the_log_of_a_killed_task(run, stage, tmp_path):
    """TensorFlow prints placements with `printf`: whole lines reach the log at once, not when a buffer is full."""
    path = tmp_path / "killed.py"
    path.write_text(
        "import ctypes, os, signal\n"
        "ctypes.CDLL(None).printf(b'placed here\\n')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = stage.start(path, directory=tmp_path)
    assert script.wait() == Exit(signal=9)
    assert script.log == "placed here\n"


# --- clusters -----------------------------------------------------------------------------------------------------


def test_a_session_may_be_closed_before_its_supervisor_stops(run):
    """What a queue runner was doing is cancelled then; the script has not failed."""
    script = run(
        """
        import tensorflow as tf

        queue = tf.FIFOQueue(1, tf.float32)
        size = queue.size()
        runner = tf.train.QueueRunner(queue, [queue.enqueue(1.0)])
        supervisor = tf.train.Supervisor(logdir=None, summary_op=None)
        with supervisor.prepare_or_wait_for_session("") as session:
            thread = supervisor.start_queue_runners(session, [runner])[0]
            while session.run(size) < 1:
                pass
        thread.join()
        supervisor.stop()
        print("stopped")
        """
    )
    assert "stopped" in script.log


def test_a_worker_lost_for_good_stops_nobody_with_device_filters_and_everybody_without(script_cluster):
    """One of three workers dies before the chief comes: with filters the last step is reached, without nobody starts.

    Without filters a new session waits for every TF task of the cluster, and says nothing.
    """
    clusters = {}
    for filters in (True, False):
        clusters[filters] = script_cluster(
            SCRIPTS / "replicas.py",
            *FLAGS,
            "--device_filters" if filters else "--nodevice_filters",
            ps=1,
            worker=3,
        )
    with_filters, without = clusters[True], clusters[False]
    for cluster in (with_filters, without):
        cluster.start("ps:0", "worker:1", "worker:2")
        for name in ("ps:0", "worker:1", "worker:2"):
            cluster.tasks[name].wait_for("serving")
        cluster.tasks["worker:2"].kill()
        cluster.start("worker:0")
    started = time.monotonic()
    with_filters.wait("worker:0", "worker:1")
    needed = time.monotonic() - started
    done = [
        numbers(
            with_filters.tasks[f"worker:{i}"].log.splitlines(), re.compile(r"last step: (\d+), local: (\d+)")
        )
        for i in (0, 1)
    ]
    # Each has read the global step after its last one. The stock optimizer adds to it without a lock: of two steps that
    # meet one may not count, so there can be more steps than it tells, never fewer.
    assert all(int(step) >= 200 for ((step, _),) in done)
    assert sum(int(local) for ((_, local),) in done) >= max(int(step) for ((step, _),) in done)

    chief = without.tasks["worker:0"]
    without.stage.until(lambda: time.monotonic() - started > 3 * needed + 5, "much longer has passed")
    os.kill(chief.pid, signal.SIGUSR1)  # a TF task writes its stacks
    chief.wait_for("tensorflow/python/client/session.py")
    without.stage.pump()
    for name in ("worker:0", "worker:1"):
        assert without.tasks[name].exit is None
        assert "the first step" not in without.tasks[name].log


def test_async_workers_share_the_work_evenly_and_end_with_the_last_step(script_cluster):
    """Two equal workers over 2000 steps: both from the start, each within a quarter of half, and a prompt end.

    Every local step is a global step. Who is in a step when the last one is done finishes it, maybe after the chief has
    saved: so two workers may do one more than 2000, and the checkpoint may lack that one.
    """
    fields = {"steps": 2000, "hparams": {"step_secs": 0.004}, "seed": 3}
    cluster = script_cluster(PROGRAMS / "linear_regression.py", fields=fields, ps=1, worker=2)
    cluster.start_all()
    cluster.wait("worker:0", "worker:1")
    records = [cluster.progress(f"worker:{i}") for i in (0, 1)]
    locals_ = [each[-1].local_step for each in records]
    print(f"local steps: {locals_}")
    assert sum(locals_) == max(each[-1].global_step for each in records)
    assert 2000 <= cluster.result.global_step <= sum(locals_) <= 2001
    assert all(0.75 * 1000 <= local <= 1.25 * 1000 for local in locals_)
    assert abs(records[0][0].time - records[1][0].time) < 2.0
    assert max(each[0].global_step for each in records) < 300
    ended = time.time() - (time.monotonic() - max(cluster.tasks[f"worker:{i}"].ended for i in (0, 1)))
    assert ended - max(each[-1].time for each in records) < ENDS_WITHIN


def test_sync_workers_end_with_the_last_step(script_cluster):
    """Synchronous training ends everywhere soon after its last step; a stock chief hangs two minutes."""
    fields = {"mode": "sync", "steps": 100, "hparams": {"step_secs": 0.004}}
    cluster = script_cluster(PROGRAMS / "linear_regression.py", fields=fields, ps=1, worker=2)
    cluster.start_all()
    cluster.wait("worker:0", "worker:1")
    last = max(cluster.progress(f"worker:{i}")[-1].time for i in (0, 1))
    ended = time.time() - (time.monotonic() - max(cluster.tasks[f"worker:{i}"].ended for i in (0, 1)))
    assert ended - last < ENDS_WITHIN
    assert cluster.result.global_step == 100


def test_parameter_server_strategy_through_tf_config(tmp_path, here):
    """TensorFlow 2's own coordinator, a chief that schedules steps on workers, finds its cluster in TF_CONFIG."""
    shutil.copy(SCRIPTS / "strategy.py", tmp_path)
    job = {
        "script": "strategy.py",
        "roles": {"chief": 1, "ps": 1, "worker": 2},
        "progress": r"step (?P<step>\d+) loss (?P<loss>[\d.]+)",
    }
    with airflowless(here, job, tmp_path, "own/strategy/training") as training:
        verdict = training.run()
        assert verdict.outcome == "succeeded", training.transitions
        log = training.log("chief:0")
        ((weight, bias),) = numbers(
            log.splitlines(), re.compile(r"weight: ([\d.]+), bias: ([\d.]+), on .*job:ps")
        )
        assert abs(float(weight) - 2) < 0.1
        assert abs(float(bias) - 10) < 0.1
        assert training.step("chief:0") == 400
        assert verdict.result["global_step"] == 400
