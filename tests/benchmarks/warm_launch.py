"""How long from `ensure` to the first global step, against a bare `import tensorflow` in a fresh interpreter.

    python tests/benchmarks/warm_launch.py [--pairs 5]

1 ps + 2 workers on one host (`local` transport), the two interleaved so that both see the same machine. Page cache and
bytecode are warm: one pair that does not count goes first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = Path(__file__).parents[2] / "dags" / "jobs" / "linear_regression.yaml"
BOUND = 1.5


def bare_import() -> float:
    """Seconds that a fresh interpreter takes to import TensorFlow."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import tensorflow"], check=True, capture_output=True)
    return time.monotonic() - started


def first_step(workdir: str) -> tuple[float, float]:
    """Seconds from `ensure` until the chief reports a global step, and those that the nursery's imports took."""
    from tfps_runtime.protocol import Kind, TrainingId

    from airflow_tfps import follow
    from airflow_tfps.hook import ClusterHook
    from airflow_tfps.inventory import Inventory
    from airflow_tfps.spec import JobSpec

    host = {"ssh_conn_id": "local", "python": sys.executable, "workdir": workdir, "gpus": 0}
    inventory = Inventory.load({"hosts": {"here": host}})
    job = JobSpec.from_file(JOB)

    async def wait_for_a_step() -> None:
        messages = follow.follow(handle, lease_secs=60)
        try:
            async for message, _ in messages:
                if message["type"] == Kind.PROGRESS and message["progress"]["global_step"] >= 1:
                    return
        finally:
            await messages.aclose()

    with ClusterHook(inventory=inventory) as hook:
        started = time.monotonic()
        handle = hook.ensure(job, TrainingId("benchmark/run/warm", secrets.token_hex(4)))
        try:
            hook.launch(handle)
            asyncio.run(wait_for_a_step())
            took = time.monotonic() - started
            nursery = float(hook.status(handle)["here"]["nursery_secs"])
        finally:
            hook.stop(handle, "measured", grace_secs=0)
    return took, nursery


def main() -> int:
    """Print each pair, the medians and their ratio; exit code 1 beyond the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="tfps-bench-"))
    imports, launches = [], []
    with tempfile.TemporaryDirectory(prefix="tfps-bench-") as workdir:
        for i in range(pairs + 1):
            bare, (launch, nursery) = bare_import(), first_step(workdir)
            note = "warm-up" if i == 0 else f"pair {i}"
            print(
                f"{note}: import {bare:.2f} s, ensure to first step {launch:.2f} s (nursery {nursery:.2f} s)",
                flush=True,
            )
            if i:
                imports.append(bare)
                launches.append(launch)
    ratio = statistics.median(launches) / statistics.median(imports)
    print(
        f"medians of {pairs}: import {statistics.median(imports):.2f} s, "
        f"ensure to first step {statistics.median(launches):.2f} s, ratio {ratio:.2f} (bound {BOUND})"
    )
    return 0 if ratio <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
