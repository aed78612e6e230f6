"""How long it takes to list the tensors of a large checkpoint, against TensorFlow's own reader; and in how much memory.

    python tests/benchmarks/reader_speed.py [--tensors 10000] [--pairs 9]

Both list name, dtype and shape of every tensor of the same files, which TensorFlow wrote: ours in fresh interpreters
without TensorFlow, with the tables for checksums to build; TensorFlow's in one that has imported it, after a call that
does not count. One after the other, so that both see the same machine; compared are the medians. Exits with 1 when ours takes more than 3 times as long, or more than 100 MB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "runtime"
TIMES, MEGABYTES = 3.0, 100.0

SAVE = """
import sys, tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
parts, prefix = int(sys.argv[1]), sys.argv[2]
names = [f"tower_{i % 4}/layer_{i // 40}/block_{i}/kernel" for i in range(parts)]
with tf.Graph().as_default(), tf.Session() as session:
    values = [tf.zeros((i % 7 + 1, 3)) for i in range(8)]
    save = tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=names, shape_and_slices=[""] * parts,
        tensors=[values[i % 8] for i in range(parts)])
    session.run(save)
    session.run(tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[prefix], destination_prefix=prefix + "-1", delete_old_dirs=False))
"""

THEIRS = """
import json, sys, time, tensorflow as tf
prefix = sys.argv[1]
for _ in sys.stdin:
    began = time.perf_counter()
    reader = tf.train.load_checkpoint(prefix)
    dtypes = reader.get_variable_to_dtype_map()
    found = [(name, dtypes[name], tuple(shape)) for name, shape in reader.get_variable_to_shape_map().items()]
    secs = time.perf_counter() - began
    print(json.dumps({"secs": secs, "tensors": len(found)}), flush=True)
"""

OURS = """
import json, resource, sys, time
from tfps_runtime.checkpoint import read_index
began = time.perf_counter()
index = read_index(sys.argv[1])
found = [(t.name, t.dtype, t.shape) for t in index.tensors.values()]
secs = time.perf_counter() - began
assert "tensorflow" not in sys.modules
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"secs": secs, "tensors": len(found), "kilobytes": peak}))
"""


def python(script: str, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={"PYTHONPATH": str(RUNTIME)},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python(SAVE, str(options.tensors), f"{folder}/large")
        prefix = f"{folder}/large-1"
        ours, theirs = [], []
        with subprocess.Popen(
            [sys.executable, "-c", THEIRS, prefix],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            for _ in range(options.pairs + 1):
                process.stdin.write("\n")
                theirs.append(json.loads(process.stdout.readline()))
                ours.append(python(OURS, prefix))
            process.stdin.close()
        del ours[0], theirs[0]
        size = Path(f"{prefix}.index").stat().st_size
    assert {one["tensors"] for one in ours + theirs} == {options.tensors}
    own, other = (statistics.median(one["secs"] for one in side) for side in (ours, theirs))
    megabytes = max(one["kilobytes"] for one in ours) / 1024
    print(f"{options.tensors} tensors, an index of {size >> 10} KiB, {options.pairs} times each")
    print(f"TensorFlow {other * 1e3:7.1f} ms (median; best {min(one['secs'] for one in theirs) * 1e3:.1f})")
    print(f"ours       {own * 1e3:7.1f} ms (median; best {min(one['secs'] for one in ours) * 1e3:.1f})")
    print(f"{own / other:.2f} times as long (at most {TIMES:g}), {megabytes:.0f} MB (at most {MEGABYTES:g})")
    return int(own > TIMES * other or megabytes > MEGABYTES)


if __name__ == "__main__":
    sys.exit(main())
