"""Makes `docs/keys.md`, the tables of all keys of jobs and inventories, from the dataclasses.

python docs/make_keys.py            # write docs/keys.md
python docs/make_keys.py --check    # exit 1 if it is not up to date
"""  # noqa: INP001  (a script, not a package)

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import typing
from pathlib import Path
from typing import Annotated, Any

from airflow_tfps.fields import Above, Range, default_of, describe, hints_of, to_plain, yaml_fields
from airflow_tfps.inventory import HostSpec
from airflow_tfps.spec import CheckpointSpec, JobSpec, RoleSpec, Timeouts

PAGE = Path(__file__).with_name("keys.md")

HEAD = """\
# Keys

Made by `docs/make_keys.py` from the code; change the docstrings there. Every fault of a file is reported at
once, each with its path.
"""

JOB = "`roles`, `checkpoint` and `timeouts` have tables of their own below."
INVENTORY = """\
`hosts` maps a host's name to its keys, or just to its number of GPUs; it may also be a list of ssh
connection ids. `defaults` beside it sets `gpus`, `python`, `workdir` or `ports` for all hosts. The same two
keys, as JSON or as YAML text, are the extra of an Airflow connection of type `tfps`."""
PLACEHOLDERS = """\
In `args`, `command` and `env` these are replaced, and all other braces are left alone:

| Placeholder | Becomes |
|---|---|
| `{job_name}` | the TF task's role |
| `{task_index}` | its index |
| `{task}` | both, like `worker:1` |
| `{host}` | its host's name in the inventory |
| `{ps_hosts}`, `{worker_hosts}`, `{<role>_hosts}` | `address:port` of the role, with commas between |
| `{checkpoint_dir}` | the training's checkpoint directory |
| `{steps}` | the job's `steps` |
| `{inputs.NAME}` | the path of that input on the host |
"""

SECTIONS: tuple[tuple[str, type, str], ...] = (
    ("Job", JobSpec, JOB),
    ("`roles.<role>`", RoleSpec, "Or just the count: `roles: {ps: 1, worker: 2}`."),
    ("`checkpoint`", CheckpointSpec, ""),
    ("`timeouts`", Timeouts, ""),
    ("Inventory: `hosts.<name>`", HostSpec, INVENTORY),
)


def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, as one line."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[field.target.id] = " ".join(text.split())
    return docs


def value_words(kind: Any) -> str:
    """A field's type and limits in words."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        limits = [limit for extra in arguments[1:] if (limit := _limit(extra))]
        return ", ".join([describe(kind), *limits])
    inner = [argument for argument in arguments if typing.get_origin(argument) is Annotated]
    if type(None) in arguments and inner:
        return value_words(inner[0])
    return describe(kind)


def _limit(extra: object) -> str | None:
    match extra:
        case Range(least=least, most=None):
            return f"≥ {least}"
        case Range(least=least, most=most):
            return f"{least} to {most}"
        case Above(limit=limit):
            return f"> {limit}"
    return None


def default_words(field: dataclasses.Field[Any]) -> str:
    """A field's default as it would be written."""
    default = default_of(field)
    if default is dataclasses.MISSING:
        return "required"
    if default is None or default == "" or dataclasses.is_dataclass(default):
        return ""
    if field.name == "ports":
        return f"`{default[0]}-{default[1]}`"
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    text = default if isinstance(default, str) else json.dumps(to_plain(default))
    return f"`{text}`".replace('"', "")


def table(kind: type) -> str:
    docs, hints = field_docs(kind), hints_of(kind)
    rows = ["| Key | Value | Default | |", "|---|---|---|---|"]
    for field in yaml_fields(kind):
        cells = (f"`{field.name}`", value_words(hints[field.name]), default_words(field), docs[field.name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, kind, words in SECTIONS:
        parts.append("\n".join(filter(None, [f"## {title}\n", words and words + "\n", table(kind)])) + "\n")
        if kind is JobSpec:
            parts.append(f"## Placeholders\n\n{PLACEHOLDERS}")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    text = page()
    if "--check" in arguments:
        is_fresh = PAGE.exists() and PAGE.read_text("utf-8") == text
        if not is_fresh:
            sys.stderr.write("docs/keys.md is not up to date: run python docs/make_keys.py\n")
        return 0 if is_fresh else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
