"""Programs in this one process, from a command line: `run PROGRAM --local`, and what one does with a checkpoint.

    python -m tfps_runtime run digits.py --local --steps 100
    python -m tfps_runtime run mnist.py --local --script --compat tf1 -- --job_name={job_name} --ps_hosts={ps_hosts} …
    python -m tfps_runtime evaluate digits.py /data/ckpt/model.ckpt-1000

A harness program runs without a cluster: the same `input_fn` and `model_fn`, one session. Standard library only until
the program runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tfps_runtime import local_script


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


_EPILOG = "After -- come a script's arguments; the same placeholders as in a job's args are replaced."


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m tfps_runtime {command}",
        description=main.__doc__,
        epilog=_EPILOG if command == "run" else None,
    )
    if command == "run":
        parser.add_argument("program", help="Python file with model_fn and input_fn, or a script")
        parser.add_argument("--local", action="store_true", required=True, help="in this one process")
        parser.add_argument(
            "--steps", type=int, help="global step at which training ends; default: input's end"
        )
        parser.add_argument("--checkpoint-dir", help="default: a temporary directory")
        parser.add_argument("--script", action="store_true", help="it has a training loop of its own")
        parser.add_argument(
            "--compat", choices=["tf1"], help="`import tensorflow` means tensorflow.compat.v1"
        )
    else:
        parser.add_argument("program", help="Python file with model_fn and input_fn")
        parser.add_argument("checkpoint", help="prefix of a checkpoint, as /data/ckpt/model.ckpt-1000")
    if command == "export":
        parser.add_argument("directory", help="for the SavedModel; must not exist")
    parser.add_argument("--hparam", type=_pair, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--input", type=_pair, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--seed", type=int)
    return parser


def main(command: str, arguments: Sequence[str]) -> int:
    """Parse the command line, do it, print what comes of it as JSON. Blocks until the end.

    `run` prints a harness program's result and gives a script's exit code, `evaluate` prints the metrics, `predict` a
    line for each batch, `export` nothing.
    """
    arguments = list(arguments)
    cut = arguments.index("--") if command == "run" and "--" in arguments else len(arguments)
    more = arguments[cut + 1 :]
    parser = _parser(command)
    options = parser.parse_args(arguments[:cut])
    if not os.path.isfile(options.program):
        parser.error(f"there is no file {options.program}")
    if command == "run" and options.script:
        if options.hparam or options.seed is not None:
            parser.error("--hparam and --seed are for harness programs; a script takes arguments after --")
        return _run_script(options, more)
    if more or (command == "run" and options.compat):
        parser.error("--compat and arguments after -- go with --script")
    hparams = {name: _value(value) for name, value in options.hparam}
    inputs = dict(options.input)

    from tfps_runtime import training  # TensorFlow comes in here

    training.configure_logging()
    if command == "run":
        result = training.run_local(
            options.program,
            steps=options.steps,
            hparams=hparams,
            inputs=inputs,
            checkpoint_dir=options.checkpoint_dir,
            seed=options.seed,
        )
        _print(result.to_json(), indent=2)
        return 0
    what = (options.program, options.checkpoint)
    seed = options.seed or 0
    if command == "evaluate":
        _print(training.evaluate(*what, hparams, inputs, seed=seed), indent=2)
    elif command == "predict":
        for batch in training.predict(*what, hparams, inputs, seed=seed):
            _print(_plain(batch))
    else:
        training.export(*what, options.directory, hparams, inputs, seed=seed)
    return 0


def _run_script(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="tfps-") as scratch:
        return local_script.run(
            options.program,
            arguments,
            steps=options.steps,
            inputs=dict(options.input),
            checkpoint_dir=options.checkpoint_dir or scratch,
            compat=options.compat,
        )


def _print(value: Any, indent: int | None = None) -> None:
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")


def _plain(value: Any) -> Any:
    """Arrays as lists, bytes as text."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return _plain(value.tolist()) if hasattr(value, "tolist") else value
