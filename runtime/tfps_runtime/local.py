"""`python -m tfps_runtime run PROGRAM --local`: a harness program in this one process, without a cluster.

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


def main(arguments: Sequence[str]) -> int:
    """Parse the command line, run, print the result as JSON. Blocks until training has ended."""
    parser = argparse.ArgumentParser(prog="python -m tfps_runtime run", description=main.__doc__)
    parser.add_argument("program", help="Python file with model_fn and input_fn")
    parser.add_argument("--local", action="store_true", required=True, help="in this one process")
    parser.add_argument("--steps", type=int, help="global step at which training ends; default: input's end")
    parser.add_argument("--hparam", type=_pair, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--input", type=_pair, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--checkpoint-dir", help="default: a temporary directory")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    if not os.path.isfile(options.program):
        parser.error(f"there is no file {options.program}")

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
