"""The TF task of an evaluation or a promotion: one process beside the training, on the host where the checkpoint lies.

    assess.py evaluate --program digits.py --checkpoint /data/ckpt/model.ckpt-1000 --input eval=/data/eval.npz
    assess.py export … --model-dir /srv/digits --id nightly/1/promote --rule '{"metric": "auc"}' --metrics '{"auc": 1}'

Run as a script by an agent; its result is `result.json` in the working directory (see `protocol.Result`). The
checkpoint is held by hard links first, so that the trainer's clean-up cannot take it away. `export` evaluates the
current model of the directory on the same inputs, with the program it came with, and writes a SavedModel only if the
rule is kept; whether it becomes the current model is decided by `models.promote`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfps_runtime.failure import first_line
from tfps_runtime.launch import die_with_parent
from tfps_runtime.models import (
    COMPARED,
    EXPORTED,
    EXTRA,
    RECALLED,
    Compared,
    ModelDirectory,
    hold_checkpoint,
)
from tfps_runtime.protocol import EXIT_TRY_AGAIN, ProtocolError, Result, dump, load
from tfps_runtime.rules import Rule, decide, value_of
from tfps_runtime.training import configure_logging, evaluate, export
from tfps_runtime.training.model import ProgramError
from tfps_runtime.training.train import TRY_AGAIN
from tfps_runtime.whole import write_whole

_log = logging.getLogger("tfps")

RECIPE = "evaluate.json"
"""In a version's EXTRA: what evaluates it again, by paths relative to EXTRA."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; gives the exit code, as in training: EXIT_TRY_AGAIN for what another try may mend.

    Blocks. All other errors propagate, and are final: the program is wrong, or the checkpoint is gone.
    """
    given = _parser().parse_args(arguments)
    given.inputs = dict(pair.split("=", 1) for pair in given.pairs)
    configure_logging()
    held = Path("held").absolute()
    try:
        checkpoint = hold_checkpoint(given.checkpoint, str(held))
        job = {
            "program": os.path.join(given.program, given.entry) if given.entry else given.program,
            "hparams": given.hparams,
            "session": given.session,
            "seed": given.seed,
        }
        if given.what == "evaluate":
            metrics = _evaluate({**job, "checkpoint": checkpoint}, given.inputs)
        else:
            metrics = _export(given, job, checkpoint)
    except TRY_AGAIN as error:
        _log.info("leaves, to be tried again: %s", first_line(error))
        return EXIT_TRY_AGAIN
    finally:
        shutil.rmtree(held, ignore_errors=True)
    write_whole("result.json", Result(_step(given.checkpoint), given.checkpoint, metrics).dumps() + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="assess.py", description=__doc__)
    parser.add_argument("what", choices=("evaluate", "export"))
    parser.add_argument("--program", required=True)
    parser.add_argument("--entry", help="the program in a folder `--program`")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--hparams", type=load, default={})
    parser.add_argument("--session", type=load, default={})
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input", dest="pairs", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--model-dir")
    parser.add_argument("--id")
    parser.add_argument("--staging")
    parser.add_argument("--rule", type=load)
    parser.add_argument("--metrics", type=load, default={})
    return parser


def _step(checkpoint: str) -> int:
    found = re.search(r"-(\d+)\Z", checkpoint)
    return int(found[1]) if found else 0


def _evaluate(job: dict[str, Any], inputs: dict[str, str]) -> dict[str, float]:
    metrics = evaluate(
        job["program"], job["checkpoint"], job["hparams"], inputs, session=job["session"], seed=job["seed"]
    )
    if not metrics:
        raise ProgramError(f"{job['program']}: input_fn gives no input in mode 'eval'")
    _log.info("evaluated %s: %s", job["checkpoint"], ", ".join(f"{k} {v:.6g}" for k, v in metrics.items()))
    return metrics


def _export(given: argparse.Namespace, job: dict[str, Any], checkpoint: str) -> dict[str, float]:
    """Compare with the current model, and export if that is worth while; gives the current model's metrics."""
    rule = Rule.from_json(given.rule)
    rule.check()
    value = value_of(rule, given.metrics)
    directory = ModelDirectory(given.model_dir)
    staging = Path(directory.staging(given.staging))
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    compared = _compare(directory, given.inputs)
    write_whole(str(staging / COMPARED), compared.dumps() + "\n", mode=0o666)
    current = compared.metrics.get(rule.metric)
    if compared.version is not None and directory.record(compared.version).get("id") == given.id:
        _log.info("version %d is this very model", compared.version)
        return compared.metrics
    if current is None and compared.version is not None and rule.compare != "absolute":
        raise ProgramError(
            f"the current model, version {compared.version}, has no metric {rule.metric}; "
            f"there are: {', '.join(sorted(compared.metrics)) or 'none'}"
        )
    decision = decide(rule, value, current)
    _log.info("%s", decision.reason)
    if decision.is_good:
        exported = staging / EXPORTED
        export(job["program"], checkpoint, str(exported), job["hparams"], given.inputs, seed=job["seed"])
        _add_recipe(exported / EXTRA, given, job, checkpoint)
        _log.info("exported %s", given.checkpoint)
    return compared.metrics


def _add_recipe(extra: Path, given: argparse.Namespace, job: dict[str, Any], checkpoint: str) -> None:
    """Put beside a SavedModel what evaluates it again, whatever becomes of its training."""
    program, source = extra / "program", Path(given.program)
    program.mkdir(parents=True)
    if given.entry:
        shutil.copytree(source, program, dirs_exist_ok=True)
    else:
        shutil.copy(source, program)
    held = hold_checkpoint(checkpoint, str(extra / "checkpoint"))
    recipe = {
        **job,
        "program": f"program/{given.entry or source.name}",
        "checkpoint": f"checkpoint/{os.path.basename(held)}",
    }
    write_whole(str(extra / RECIPE), dump(recipe) + "\n", mode=0o666, is_durable=True)


def _compare(directory: ModelDirectory, inputs: dict[str, str]) -> Compared:
    """The current model's metrics on these inputs; those of its promotion if it cannot be evaluated again."""
    version = directory.current
    if version is None:
        return Compared()
    extra = Path(directory.version_path(version)) / EXTRA
    try:
        recipe = load((extra / RECIPE).read_text("utf-8"))
        job = {**recipe, **{key: str(extra / recipe[key]) for key in ("program", "checkpoint")}}
        metrics = _in_child(lambda: _evaluate(job, inputs))
    except (OSError, ProtocolError, KeyError, TypeError, ProgramError) as error:
        known = directory.record(version).get("metrics") or {}
        _log.warning("version %d cannot be evaluated again: %s", version, first_line(error))
        return Compared(version, known, f"{RECALLED}: {first_line(error)[:200]}")
    return Compared(version, metrics)


def _in_child(function: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Call a function in a fork: programs of two trainings may have modules of the same names. Raises ProgramError."""
    answer, parent = Path("compared.tmp").absolute(), os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(parent)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            answer.write_text(dump(_answered(function)), "utf-8")
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise ProgramError(f"its evaluation ended with {os.waitstatus_to_exitcode(status)}")
    found = json.loads(answer.read_text("utf-8"))
    answer.unlink()
    if "error" in found:
        raise ProgramError(found["error"])
    return dict(found["metrics"])


def _answered(function: Callable[[], dict[str, float]]) -> dict[str, Any]:
    try:
        return {"metrics": function()}
    except Exception as error:  # noqa: BLE001  (a process's outermost frame)
        return {"error": f"{type(error).__name__}: {first_line(error)}"}


if __name__ == "__main__":
    sys.exit(main())
