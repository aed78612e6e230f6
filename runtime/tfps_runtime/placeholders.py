"""The placeholders of a job's `args`, `command` and `env`.

Standard library only (Python 3.9); `airflow_tfps` imports it too. Pure. Not `str.format`: arguments are full
of braces that are none of ours (JSON, shell variables, regular expressions), and those stay as they are.

    values = values_for(Task("worker", 1), host="gpu-a", cluster=cluster, checkpoint_dir="/data/ckpt",
    steps=1000) fill("--task_index={task_index}", values)       # --task_index=1
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tfps_runtime.protocol import Task

NAMES: frozenset[str] = frozenset(
    {"job_name", "task_index", "task", "ps_hosts", "worker_hosts", "checkpoint_dir", "steps", "host"}
)
"""What can always be named; beside these `{<role>_hosts}` of each role and `{inputs.NAME}` of each input."""

HOSTS_SUFFIX = "_hosts"
INPUTS_PREFIX = "inputs."

# `${task}` is a shell's variable and `{{task}}` a template's: both are left alone. A closing brace may
# follow, as in the JSON text {"index": {task_index}}.
_TOKEN = re.compile(r"(?<![{$])\{([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)?)\}")


def fill(text: str, values: Mapping[str, str]) -> str:
    """`text` with each `{name}` that `values` knows replaced, once; all other braces stay as they are."""
    return _TOKEN.sub(lambda match: values.get(match[1], match[0]), text)


def names_in(text: str) -> list[str]:
    """What stands in `text` in the form of a placeholder, known or not, in order."""
    return _TOKEN.findall(text)


def values_for(
    task: Task,
    *,
    host: str,
    cluster: Mapping[str, Sequence[str]],
    checkpoint_dir: str,
    steps: int | None = None,
    inputs: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The placeholders' values for one TF task.

    `cluster` is TensorFlow's: role to addresses in the order of their indices. `host` is the name in the
    inventory. Without `steps` the placeholder `{steps}` has no value and stays in the text.
    """
    values = {"ps_hosts": "", "worker_hosts": ""}
    values.update({f"{role}{HOSTS_SUFFIX}": ",".join(addresses) for role, addresses in cluster.items()})
    values.update({f"{INPUTS_PREFIX}{name}": path for name, path in (inputs or {}).items()})
    values.update(
        job_name=task.role,
        task_index=str(task.index),
        task=str(task),
        host=host,
        checkpoint_dir=checkpoint_dir,
    )
    if steps is not None:
        values["steps"] = str(steps)
    return values
