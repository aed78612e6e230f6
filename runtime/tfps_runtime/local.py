"""`python -m tfps_runtime run PROGRAM --local`: a program in this one process, for debugging.

    python -m tfps_runtime run digits.py --local --steps 100
    python -m tfps_runtime run mnist.py --local --script --compat tf1 -- --job_name={job_name} --ps_hosts={ps_hosts} …

A harness program runs without a cluster: the same `input_fn` and `model_fn`, one session. A script makes its own
`Server`, so it gets a cluster, all of it in this process: it is `worker:0`, beside a `ps:0`. Standard library only
until the program runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tfps_runtime.launch import Launch, clean_environment, run_program
from tfps_runtime.placeholders import fill, values_for
from tfps_runtime.protocol import Program, Task
from tfps_runtime.reserve import hold_ports

PORTS = (20000, 29999)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=VALUE is needed")
    return name, value


def _value(text: str) -> Any:
    """An hparam as JSON writes it; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and run the program; blocks until it has ended.

    A harness program's result is printed as JSON; a script's exit code is returned.
    """
    arguments = list(arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m tfps_runtime run", description=__doc__.partition("\n\n")[0], epilog=_EPILOG
    )
    parser.add_argument("program", help="Python file with model_fn and input_fn, or a script")
    parser.add_argument("--local", action="store_true", required=True, help="in this one process")
    parser.add_argument("--steps", type=int, help="global step at which training ends; default: input's end")
    parser.add_argument("--hparam", type=_pair, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--input", type=_pair, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--checkpoint-dir", help="default: a temporary directory")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--script", action="store_true", help="it has a training loop of its own")
    parser.add_argument("--compat", choices=["tf1"], help="`import tensorflow` means tensorflow.compat.v1")
    options = parser.parse_args(arguments[:cut])
    if not os.path.isfile(options.program):
        parser.error(f"there is no file {options.program}")
    if options.script:
        if options.hparam or options.seed is not None:
            parser.error("--hparam and --seed are for harness programs; a script takes arguments after --")
        with tempfile.TemporaryDirectory(prefix="tfps-") as scratch:
            return _run_script(options, arguments[cut + 1 :], options.checkpoint_dir or scratch)
    if arguments[cut + 1 :] or options.compat:
        parser.error("--compat and arguments after -- go with --script")

    from tfps_runtime import training  # TensorFlow comes in here

    result = training.run_local(
        options.program,
        steps=options.steps,
        hparams={name: _value(value) for name, value in options.hparam},
        inputs=dict(options.input),
        checkpoint_dir=options.checkpoint_dir,
        seed=options.seed,
    )
    sys.stdout.write(json.dumps(result.to_json(), indent=2) + "\n")
    return 0


_EPILOG = "After -- come a script's arguments; the same placeholders as in a job's args are replaced."


def _run_script(options: argparse.Namespace, arguments: Sequence[str], checkpoint_dir: str) -> int:
    """Run it as the only worker of a cluster in this process, in the checkpoint directory; gives its exit code."""
    worker, ps = Task("worker", 0), Task("ps", 0)
    ports = hold_ports([str(ps), str(worker)], PORTS, str(os.getpid()))
    cluster = {task.role: [f"127.0.0.1:{ports[str(task)].number}"] for task in (ps, worker)}
    config = {"cluster": cluster, "task": {"type": worker.role, "index": worker.index}}
    environment = clean_environment({"TF_CONFIG": json.dumps(config)})
    os.environ.clear()
    os.environ.update(environment)  # before TensorFlow is imported, which reads some of it

    script, checkpoint_dir = os.path.abspath(options.program), os.path.abspath(checkpoint_dir)
    inputs = {name: os.path.abspath(path) for name, path in options.input}
    values = values_for(
        worker,
        host="localhost",
        cluster=cluster,
        checkpoint_dir=checkpoint_dir,
        steps=options.steps,
        inputs=inputs,
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
            compat=options.compat,
        )
    )
    del server
    return code
