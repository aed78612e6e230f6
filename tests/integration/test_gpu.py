"""What only a machine with GPUs can show. Skipped elsewhere; needs a TensorFlow that is built with CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from stage import airflowless
from tfps_runtime.protocol import Exit

from airflow_tfps.inventory import Inventory


def smi(query: str) -> list[list[str]]:
    """Rows of an answer of nvidia-smi; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    argv = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return [row.split(", ") for row in done.stdout.splitlines()] if done.returncode == 0 else []


GPUS = smi("pci.bus_id,memory.total")

pytestmark = [pytest.mark.tensorflow, pytest.mark.skipif(not GPUS, reason="there is no GPU here")]

MULTIPLY = """
import os
import sys
import time
import tensorflow.compat.v1 as tf

if not tf.test.is_built_with_cuda():
    sys.exit(77)
tf.disable_v2_behavior()
config = tf.ConfigProto(log_device_placement=True)
config.gpu_options.allow_growth = True
with tf.device("/gpu:0"):
    product = tf.matmul(tf.random_normal([256, 256]), tf.random_normal([256, 256]), name="product")
with tf.Session(config=config) as session:
    session.run(product)
    print("GPUs", [d.name for d in session.list_devices() if d.device_type == "GPU"], flush=True)
    while os.path.exists("wait"):
        time.sleep(0.05)
"""


def device_files(pid: int) -> list[str]:
    """The GPU device files that a process has open: CUDA is initialised in it if there are any."""
    folder = Path(f"/proc/{pid}/fd")
    links = [os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).exists()]
    return [link for link in links if link.startswith("/dev/nvidia")]


def test_forks_use_the_gpu_and_their_nursery_never_does(stage, tmp_path):
    """Two processes forked after TensorFlow's import compute on the GPU; CUDA is not initialised before the fork."""
    (tmp_path / "multiply.py").write_text(MULTIPLY)
    (tmp_path / "wait").touch()
    forks = [
        stage.start(
            tmp_path / "multiply.py", directory=tmp_path, name=f"fork-{i}", env={"CUDA_VISIBLE_DEVICES": "0"}
        )
        for i in (0, 1)
    ]
    for fork in forks:
        stage.until(lambda fork=fork: "GPUs" in fork.log or fork.exit is not None, fork.name)
    if forks[0].exit == Exit(code=77):
        pytest.skip("this TensorFlow is built without CUDA")
    assert all(fork.pid is not None and device_files(fork.pid) for fork in forks)
    assert device_files(stage.pid) == []
    (tmp_path / "wait").unlink()
    for fork in forks:
        assert fork.wait() == Exit(code=0), fork.log
        assert "product: (MatMul): /job:localhost/replica:0/task:0/device:GPU:0" in fork.log


def test_each_worker_has_one_gpu_and_takes_little_of_its_memory(tmp_path):
    """As many workers as GPUs train on one each, the ps sees none, and with `allow_growth` most memory stays free."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import os
            import subprocess
            import numpy as np
            import tensorflow.compat.v1 as tf
            from tfps_runtime.training import TRAIN, Model


            class Tell(tf.train.SessionRunHook):
                def end(self, session):
                    mine = [d.name for d in session.list_devices() if d.device_type == "GPU"]
                    print("GPUs", len(mine), flush=True)
                    index = os.environ["CUDA_VISIBLE_DEVICES"]
                    query = ["nvidia-smi", "-i", index, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
                    print("MiB", subprocess.run(query, capture_output=True, text=True).stdout.strip(), flush=True)


            def input_fn(mode, params, shard):
                if mode == TRAIN:
                    return iter(lambda: (np.ones(4, np.float32), np.ones(4, np.float32)), None)


            def model_fn(features, labels, mode, params):
                weight = tf.get_variable("weight", [])
                with tf.device("/device:GPU:0"):
                    product = tf.multiply(features, weight, name="product")
                return Model(
                    loss=tf.reduce_mean(tf.square(product - labels)),
                    optimizer=tf.train.GradientDescentOptimizer(0.1),
                    hooks=[Tell()],
                )
            """
        )
    )
    job = {
        "program": "program.py",
        "roles": {"ps": 1, "worker": {"count": len(GPUS), "gpus": 1}},
        "steps": 300,
        "session": {"log_device_placement": True, "gpu_options": {"allow_growth": True}},
    }
    host = {"ssh_conn_id": "local", "python": sys.executable, "workdir": str(tmp_path / "tfps")}
    with airflowless(Inventory.load({"hosts": {"here": host}}), job, tmp_path, "gpu/one/each") as training:
        assert training.run(180).outcome == "succeeded", training.transitions
        taken = [t.gpus for t in training.handle.tasks if t.task.role == "worker"]
        assert sorted(taken) == [(i,) for i in range(len(GPUS))]
        for i in range(len(GPUS)):
            log = training.log(f"worker:{i}")
            assert f"product: (Mul): /job:worker/replica:0/task:{i}/device:GPU:0" in log
            used = [int(line.partition(" ")[2]) for line in log.splitlines() if line.startswith("MiB ")]
            assert used[-1] < float(GPUS[0][1]) / 4
        # The ps has no GPU, so all of its ops are on its CPU.
        assert "/job:ps/replica:0/task:0/device:GPU" not in "".join(
            training.log(f"worker:{i}") for i in range(len(GPUS))
        )
