"""Harness programs in this one process, without a cluster: `python -m tfps_runtime run PROGRAM --local`, and what one
does with a checkpoint: `evaluate`, `predict`, `export`.

Standard library only until the program runs. For debugging: the same `input_fn` and `model_fn`, one session.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


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


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m tfps_runtime {command}", description=main.__doc__)
    parser.add_argument("program", help="Python file with model_fn and input_fn")
    if command == "run":
        parser.add_argument("--local", action="store_true", required=True, help="in this one process")
        parser.add_argument(
            "--steps", type=int, help="global step at which training ends; default: input's end"
        )
        parser.add_argument("--checkpoint-dir", help="default: a temporary directory")
    else:
        parser.add_argument("checkpoint", help="prefix of a checkpoint, as /data/ckpt/model.ckpt-1000")
    if command == "export":
        parser.add_argument("directory", help="for the SavedModel; must not exist")
    parser.add_argument("--hparam", type=_pair, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--input", type=_pair, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--seed", type=int)
    return parser


def main(command: str, arguments: Sequence[str]) -> int:
    """Parse the command line, do it, print what comes of it as JSON. Blocks until the end.

    `run` prints the result, `evaluate` the metrics, `predict` a line for each batch, `export` nothing.
    """
    parser = _parser(command)
    options = parser.parse_args(arguments)
    if not os.path.isfile(options.program):
        parser.error(f"there is no file {options.program}")
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
