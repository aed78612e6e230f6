"""What one TF task is given when it is started: environment, arguments, seed, and what a harness program is told.

Pure; imports the standard library and the words of `protocol`. The agent writes the context down and launches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Optional

from tfps_runtime.launch import Launch
from tfps_runtime.placeholders import fill, values_for
from tfps_runtime.protocol import (
    CONTEXT_VARIABLE,
    Paths,
    Reservation,
    ReserveRequest,
    StartRequest,
    TaskContext,
    TaskSpec,
)


@dataclass(frozen=True)
class Assignment:
    """A TF task's start. `argv` is a command's; else the program runs in a Python of ours, forked if `warm`."""

    launch: Launch
    warm: bool
    argv: Optional[list[str]]
    context: Optional[TaskContext]


def assign(
    request: ReserveRequest,
    start: StartRequest,
    reservation: Reservation,
    paths: Paths,
    spec: TaskSpec,
    *,
    attempt: int,
) -> Assignment:
    """Put together what the `attempt`-th start of a TF task needs. A task without GPUs sees none."""
    task, program = spec.name, start.program
    values = values_for(
        task,
        host=request.host,
        cluster=start.cluster,
        checkpoint_dir=start.checkpoint.directory,
        steps=start.steps,
        inputs=start.inputs,
    )
    env = {name: fill(value, values) for name, value in {**request.env, **spec.env}.items()}
    env.update(start.secrets)
    env["TF_CONFIG"] = json.dumps(
        {"cluster": start.cluster, "task": {"type": task.role, "index": task.index}}
    )
    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, reservation.gpus.get(spec.task, []))) or "-1"
    context = None
    if program.module is not None:
        env[CONTEXT_VARIABLE] = paths.context(task)
        context = _context(request, start, paths, spec, module=program.module, attempt=attempt)
    launch = Launch(
        task=spec.task,
        log=paths.log(task),
        directory=working_directory(start, reservation, paths, spec),
        program=program,
        argv=tuple(fill(argument, values) for argument in program.args),
        env=env,
        seed=None if request.seed is None else f"{request.seed}/{spec.task}/{attempt}",
        compat=request.compat,
    )
    return Assignment(
        launch=launch,
        warm=spec.warm and bool(request.preload) and program.command is None,
        argv=None if program.command is None else [fill(argument, values) for argument in program.command],
        context=context,
    )


def working_directory(start: StartRequest, reservation: Reservation, paths: Paths, spec: TaskSpec) -> str:
    """A TF task's own directory; of a script's chief the checkpoint directory.

    Scripts have their logdir written into them, as a relative path. There a retry finds it again.
    """
    if start.program.module is None and spec.is_chief and reservation.checkpoint_dir is not None:
        return reservation.checkpoint_dir
    return paths.task_dir(spec.name)


def _context(
    request: ReserveRequest,
    start: StartRequest,
    paths: Paths,
    spec: TaskSpec,
    *,
    module: str,
    attempt: int,
) -> TaskContext:
    return TaskContext(
        task=spec.task,
        host=request.host,
        cluster=start.cluster,
        chief=start.chief,
        program=module,
        checkpoint=start.checkpoint,
        progress_path=paths.progress(spec.name),
        result_path=paths.result(spec.name),
        mode=start.mode,
        replication=start.replication,
        replicas_to_aggregate=start.replicas_to_aggregate,
        steps=start.steps,
        hparams=start.hparams,
        inputs=start.inputs,
        session=start.session,
        start_from=start.start_from,
        seed=request.seed,
        grace_secs=request.grace_secs,
        attempt=attempt,
    )
