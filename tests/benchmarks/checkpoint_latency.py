"""How long from the rename of a checkpoint's state file to the trigger's event, pushed from a host over SSH.

    python tests/benchmarks/checkpoint_latency.py [--checkpoints 100] [--secs 1.0]

A process writes checkpoints with the files, names and bytes of TensorFlow, in its order (data, index, state file, each
by rename, then what `max_to_keep: 1` deletes); it is a stand-in, since TensorFlow's own saves would add its noise.
`CheckpointEventTrigger` watches and pins over a real SSH connection to a host on loopback; for each event a consumer
checks every byte of the pinned checkpoint and releases it. Clocks are one. Exits with 1 when the 95th percentile is
beyond 1 s, a checkpoint is missed or told twice, or a file is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BOUND_SECS = 1.0

WRITER = """
import json, sys, time
from pathlib import Path
from bundles import delete, save
directory, count, secs = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
sys.stdin.readline()
due = time.monotonic()
for step in range(1, count + 1):
    save(directory, step)
    print(json.dumps([step, time.time()]), flush=True)
    delete(directory / f"model.ckpt-{step - 1}")
    due += secs
    time.sleep(max(due - time.monotonic(), 0))
"""


async def measure(host: str, directory: Path, count: int, secs: float) -> list[float]:
    """Seconds between rename and event, one for each checkpoint."""
    from tfps_runtime.checkpoint import verify

    from airflow_tfps.asset_triggers import CheckpointEventTrigger
    from airflow_tfps.hook import ClusterHook
    from airflow_tfps.inventory import Inventory

    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(directory), str(count), str(secs),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "runtime"), str(ROOT / "tests" / "unit")])},
    )  # fmt: skip
    assert writer.stdin is not None
    assert writer.stdout is not None
    trigger = CheckpointEventTrigger(host=host, directory=str(directory), pin=True, existing=True)
    told: dict[int, float] = {}
    hook = ClusterHook(inventory=Inventory.load([host]))

    def consume(found: dict) -> None:
        verify(found["checkpoint"])
        hook.release_pins(host, **found["pin"], step=found["global_step"])

    consumers = []
    try:
        hook.pins(host, str(directory))  # brings the runtime there: not what is measured
        writer.stdin.write(b"\n")
        async with asyncio.timeout(count * secs + 60):
            async for event in trigger.run():
                now = time.time()
                step = event.payload["global_step"]
                assert step not in told, f"{step} was told twice"
                assert event.payload["pin"] is not None, f"{step} was not pinned"
                told[step] = now
                consumers.append(asyncio.create_task(asyncio.to_thread(consume, event.payload)))
                if step == count:
                    break
        await asyncio.gather(*consumers)
        written = dict(map(json.loads, (await writer.stdout.read()).splitlines()))
        await writer.wait()
    finally:
        hook.release_pins(host, str(directory), trigger.owner)
        hook.close()
    missed = sorted(set(written) - set(told))
    assert not missed, f"missed: {missed}"
    return [told[step] - written[step] for step in sorted(told)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument("--secs", type=float, default=1.0)
    options = parser.parse_args()
    from airflow_tfps.demo.hosts import connection_json, read_hosts

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "airflow_tfps.demo.hosts", "--home", str(home), "--host", "gpu-a"]
        )
        try:
            while not (home / "hosts.json").exists():
                assert process.poll() is None
                time.sleep(0.05)
            os.environ["AIRFLOW_CONN_GPU_A"] = json.dumps(connection_json(read_hosts(home)["gpu-a"]))
            secs = asyncio.run(measure("gpu_a", home / "ckpt", options.checkpoints, options.secs))
        finally:
            process.terminate()
            process.wait(20)
    late = sorted(secs)
    p95 = late[max(int(len(late) * 0.95 + 0.999) - 1, 0)]
    print(
        f"{len(secs)} checkpoints, one each {options.secs:g} s, max_to_keep 1: none missed, each told once, each whole"
    )
    print(
        f"rename of the state file to the event: median {statistics.median(late):.3f} s, "
        f"p95 {p95:.3f} s (at most {BOUND_SECS:g}), longest {late[-1]:.3f} s"
    )
    return int(p95 > BOUND_SECS)


if __name__ == "__main__":
    sys.exit(main())
