"""Rules over several keys of a job.

Pure. Each rule yields (path, what is wrong) and passes over values that are faulty already or still to be
rendered, so that one reading reports everything. A fault that would show as a hang on the hosts says what
hangs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from tfps_runtime import placeholders

from airflow_tfps.fields import is_known, nearest
from airflow_tfps.templates import Template

if TYPE_CHECKING:
    from airflow_tfps.spec import JobSpec

Faults = Iterator[tuple[str, str]]

PS, CHIEF, WORKER, EVALUATOR = "ps", "chief", "worker", "evaluator"
TRAINING_ROLES = (CHIEF, WORKER)
"""Those whose TF tasks compute gradients."""

_KINDS = ("program", "script", "command")
_HARNESS_ONLY = (
    "hparams",
    "replication",
    "replicas_to_aggregate",
    "session",
    "start_from",
    "checkpoint.save_checkpoint_secs",
    "checkpoint.save_summaries_secs",
    "checkpoint.max_to_keep",
    "checkpoint.sharded",
)
_ONLY_WITH = {
    "args": ("script", "command"),
    "progress": ("script", "command"),
    "compat": ("script",),
    "files": ("program", "script"),
    "seed": ("program", "script"),
    "preload": ("program", "script"),
}
_WHY = {
    "args": "a harness program gets its values through hparams and inputs",
    "progress": "a harness program reports its progress itself",
    "files": "a command is on the hosts already",
    "compat": "a harness program imports tensorflow.compat.v1 itself",
    "seed": "nothing passes it on to a command; use args",
    "preload": "a command is always started afresh",
}
_PROXIES = frozenset(f"{kind}_proxy" for kind in ("http", "https", "ftp", "all", "no", "grpc"))
_OURS = {
    "TF_CONFIG": "it is made from the placement",
    "CUDA_VISIBLE_DEVICES": "say how many GPUs in roles.<role>.gpus; which ones is decided on the host",
    "CUDA_DEVICE_ORDER": "GPUs are numbered in the order of their PCI buses",
    "TF_GRPC_REUSE_PORT": "the agent holds the ports",
}


def job_faults(job: JobSpec, given: Collection[str]) -> Faults:
    """Every fault of the rules; `given` are the paths of the keys that were written."""
    kinds = [kind for kind in _KINDS if kind in given]
    if len(kinds) != 1:
        what = f"not both {' and '.join(kinds)}" if kinds else "none is there"
        yield "program", f"exactly one of program, script and command is needed; {what}"
    kind = kinds[0] if len(kinds) == 1 else None
    if kind is not None:
        yield from _keys_of_kind(job, kind, given)
    if is_known(job.roles):
        yield from _roles(job, kind)
    yield from _files(job)
    if is_known(job.replication) and job.replication == "in_graph":
        yield from _in_graph(job, given)
    yield from _aggregation(job)
    yield from _checkpoint(job)
    yield from _progress(job)
    yield from _environment(job)


def _keys_of_kind(job: JobSpec, kind: str, given: Collection[str]) -> Faults:
    if kind != "program":
        for path in _HARNESS_ONLY:
            if path in given:
                yield path, f"only a harness program uses it, a {kind} does not; pass it on in args"
    for path, kinds in _ONLY_WITH.items():
        # An empty list says nothing: what a command preloads, for one.
        if path in given and kind not in kinds and getattr(job, path) != ():
            yield path, f"goes with {' or '.join(kinds)} only: {_WHY[path]}"
    if kind == "command" and "launch" in given and job.launch == "warm":
        yield "launch", "a command is always started afresh; write spawn, or leave it out"


def _files(job: JobSpec) -> Faults:
    taken = {_name(path) for path in (job.program, job.script) if path is not None and is_known(path)}
    for i, path in enumerate(job.files if is_known(job.files) else ()):
        if isinstance(path, Template):
            continue
        name = _name(path)
        if name in {"", ".", ".."} | taken:
            yield (
                f"files[{i}]",
                f"must have a name of its own, for all of them go into one folder; is {name!r}",
            )
        taken.add(name)


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _count(job: JobSpec, role: str) -> int | None:
    """How many TF tasks a role has; None when that is not known."""
    spec = job.roles.get(role)
    if spec is None:
        return 0
    return spec.count if is_known(spec) and is_known(spec.count) else None


def _roles(job: JobSpec, kind: str | None) -> Faults:
    ps = job.roles.get(PS)
    if ps is not None and is_known(ps) and is_known(ps.gpus) and ps.gpus:
        yield "roles.ps.gpus", f"must be 0, is {ps.gpus}: a ps sees no GPU, it only holds variables"
    for role in (CHIEF, EVALUATOR):
        count = _count(job, role)
        if count is not None and count > 1:
            yield f"roles.{role}.count", f"must be 1, is {count}: there is one {role}"
    between_graph = kind == "program" and is_known(job.replication) and job.replication == "between_graph"
    if between_graph:
        known = (PS, CHIEF, WORKER, EVALUATOR)
        for role in job.roles:
            if role not in known:
                hint = nearest(role, known) or f"; known are {', '.join(known)}"
                yield f"roles.{role}", f"unknown role{hint} (other names go with in_graph, script or command)"
        if PS not in job.roles:
            yield "roles.ps", "between-graph replication needs a ps, which holds the variables; add ps: 1"
    is_evaluation = kind in ("script", "command") and set(job.roles) == {EVALUATOR}
    if all(role in (PS, EVALUATOR) for role in job.roles) and not is_evaluation:
        yield "roles", "a role beside ps and evaluator is needed, or nobody trains; add worker: 1"


def _in_graph(job: JobSpec, given: Collection[str]) -> Faults:
    if "mode" in given and job.mode == "async":
        yield (
            "mode",
            "in-graph steps are synchronous: each has the gradients of all; write sync, or leave it out",
        )
    if is_known(job.success_policy) and job.success_policy == "all_workers":
        yield "success_policy", "in-graph workers only serve and never end by themselves; leave it at chief"


def _aggregation(job: JobSpec) -> Faults:
    path, wanted = "replicas_to_aggregate", job.replicas_to_aggregate
    if wanted is None or not is_known(wanted):
        return
    if is_known(job.mode) and job.mode != "sync":
        yield path, "goes with mode: sync only; an async step waits for nobody"
    if is_known(job.replication) and job.replication == "in_graph":
        yield path, "goes with between-graph replication only; an in-graph step has the gradients of all"
    if not is_known(job.roles):
        return
    counts = [_count(job, role) for role in TRAINING_ROLES]
    total = sum(count for count in counts if count is not None)
    if None not in counts and wanted > total:
        yield (
            path,
            (
                f"must be <= {total}, the number of workers and chief, is {wanted}: "
                f"every step would wait for ever for {_gradients(wanted - total)} that nobody sends"
            ),
        )


def _gradients(number: int) -> str:
    return "a gradient" if number == 1 else f"{number} gradients"


def _checkpoint(job: JobSpec) -> Faults:
    checkpoint = job.checkpoint
    if not is_known(checkpoint):
        return
    if checkpoint.base_dir is not None and checkpoint.dir is not None:
        yield (
            "checkpoint.dir",
            "not beside base_dir: either each training gets its own directory, or all share this",
        )
    if is_known(job.steps) and isinstance(job.steps, str) and checkpoint.dir is None:
        steps = job.steps.removeprefix("+")
        yield "steps", f"+{steps} needs a fixed checkpoint.dir; all others begin at 0: write {steps}"


def _progress(job: JobSpec) -> Faults:
    if job.progress is None or not is_known(job.progress):
        return
    try:
        pattern = re.compile(job.progress)
    except (re.error, OverflowError, RecursionError) as error:
        yield "progress", f"must be a regular expression: {error}"
        return
    if "step" not in pattern.groupindex:
        yield "progress", r"needs a group named step, like (?P<step>\d+)"


def _environment(job: JobSpec) -> Faults:
    places: dict[str, Mapping[str, str]] = {"env": job.env, "secrets": job.secrets}
    for role, spec in job.roles.items() if is_known(job.roles) else ():
        if is_known(spec):
            places[f"roles.{role}.env"] = spec.env
    for path, variables in places.items():
        for name in variables if is_known(variables) else ():
            if name.lower() in _PROXIES:
                yield (
                    f"{path}.{name}",
                    "proxy variables are removed: gRPC between TF tasks would go into the proxy",
                )
            elif name in _OURS:
                yield f"{path}.{name}", f"is set on the host: {_OURS[name]}"
            elif name.startswith("TFPS_"):
                yield f"{path}.{name}", "names that begin with TFPS_ are set on the host"
            elif path != "secrets" and is_known(job.secrets) and name in job.secrets:
                yield f"{path}.{name}", "is among the secrets too; keep one"


# --- placeholders -------------------------------------------------------------------------------------------


def _texts(job: JobSpec) -> Iterator[tuple[str, str]]:
    """Path and text of all that placeholders are replaced in."""
    yield from ((f"args[{i}]", text) for i, text in enumerate(job.args))
    yield from ((f"command[{i}]", text) for i, text in enumerate(job.command or ()))
    yield from ((f"env.{name}", text) for name, text in job.env.items())
    for role, spec in job.roles.items():
        yield from ((f"roles.{role}.env.{name}", text) for name, text in spec.env.items())


def placeholder_faults(job: JobSpec) -> Iterator[str]:
    """Placeholders of ours that have no value: they would reach the program as they are."""
    for path, text in _texts(job):
        for name in placeholders.names_in(text):
            if name.startswith(placeholders.INPUTS_PREFIX):
                wanted = name.removeprefix(placeholders.INPUTS_PREFIX)
                if wanted not in job.inputs:
                    yield f"{path}: {{{name}}}: there is no input {wanted}{nearest(wanted, job.inputs)}"
            elif name == "steps" and job.steps is None:
                yield f"{path}: {{steps}}: the job has no steps"


def placeholder_hints(job: JobSpec) -> Iterator[str]:
    """What looks like a placeholder and is none. It may well be meant so, hence no fault."""
    known = placeholders.NAMES | {role + placeholders.HOSTS_SUFFIX for role in job.roles}
    for path, text in _texts(job):
        if isinstance(text, Template):
            continue
        for name in placeholders.names_in(text):
            if name not in known and not name.startswith(placeholders.INPUTS_PREFIX):
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
                if close:
                    yield f"{path}: {{{name}}} is left as it is; did you mean {{{close[0]}}}?"
