"""A script with a training loop of its own, in this one process: it is `worker:0`, beside a `ps:0`.

Such a script makes its own `Server`, so it gets a cluster, all of it here. Standard library only until it runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from tfps_runtime.launch import Launch, clean_environment, run_program
from tfps_runtime.placeholders import fill, values_for
from tfps_runtime.protocol import Program, Task
from tfps_runtime.reserve import hold_ports

PORTS = (20000, 29999)


def run(
    script: str,
    arguments: Sequence[str],
    *,
    steps: int | None,
    inputs: Mapping[str, str],
    checkpoint_dir: str,
    compat: str | None,
) -> int:
    """Run it with its `arguments`, placeholders replaced, in the checkpoint directory; gives its exit code.

    Blocks until the script has ended. Changes this process's environment and working directory.
    """
    worker, ps = Task("worker", 0), Task("ps", 0)
    ports = hold_ports([str(ps), str(worker)], PORTS, str(os.getpid()))
    cluster = {task.role: [f"127.0.0.1:{ports[str(task)].number}"] for task in (ps, worker)}
    config = {"cluster": cluster, "task": {"type": worker.role, "index": worker.index}}
    environment = clean_environment({"TF_CONFIG": json.dumps(config)})
    os.environ.clear()
    os.environ.update(environment)  # before TensorFlow is imported, which reads some of it

    script, checkpoint_dir = os.path.abspath(script), os.path.abspath(checkpoint_dir)
    values = values_for(
        worker,
        host="localhost",
        cluster=cluster,
        checkpoint_dir=checkpoint_dir,
        steps=steps,
        inputs={name: os.path.abspath(path) for name, path in inputs.items()},
    )
    os.makedirs(checkpoint_dir, exist_ok=True)
    os.chdir(checkpoint_dir)

    from tfps_runtime.training.cluster import serve  # TensorFlow comes in here

    server = serve(cluster, ps)
    code = run_program(
        Launch(
            task=str(worker),
            log="",
            directory=checkpoint_dir,
            program=Program(script=script),
            argv=tuple(fill(argument, values) for argument in arguments),
            compat=compat,
        )
    )
    del server
    return code
