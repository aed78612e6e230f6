"""A job: a program and how to run it.

The dataclasses are the schema of a job file; the tables in `docs/keys.md` are made from their docstrings.
Rules over several keys are in `job_rules`. Imports no Airflow; reading a file is the only I/O.

    job = JobSpec.load("jobs/ctr.yaml", base_dir=dag_folder, templated=True)    # while a DAG file is parsed
    job = JobSpec.from_dict(rendered, template=job.to_dict(), base_dir=job.base_dir)    # in a task
    job = job.override(hparams={"learning_rate": 0.1}, steps=20_000)

Each constructor raises SpecError with every fault. A job read with `templated=True` may hold `Template`, text
with a Jinja template, in place of any scalar; it can be looked at and written out again, but not planned.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from tfps_runtime.protocol import ROLE_NAME, slug

from airflow_tfps.errors import SpecError
from airflow_tfps.fields import (
    NAME,
    NOT_IN_YAML,
    Convert,
    Matches,
    NotEmpty,
    Range,
    Reader,
    Seconds,
    TextOrNumber,
    is_known,
    show,
    to_plain,
)
from airflow_tfps.job_rules import job_faults, placeholder_faults, placeholder_hints
from airflow_tfps.templates import Rendered, Template, is_template, map_templates, mark_rendered
from airflow_tfps.yaml_text import YamlError, parse_yaml, plain_scalar

_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
_HOST_PATH = Matches(r"(/|~/).*|~", "an absolute path on the host, or begin with ~/")
_SOURCE = Matches(
    r"none|previous|(/|~/|[a-z0-9]+://).*", "none, previous, or an absolute path of a checkpoint"
)

HostName = Annotated[str, NAME]
RoleName = Annotated[
    str, Matches(ROLE_NAME.pattern, "a TensorFlow job name in lower case: letters, digits, '_', at most 32")
]
Variable = Annotated[str, Matches(_IDENTIFIER, "a name of an environment variable")]
InputName = Annotated[str, Matches(_IDENTIFIER, "letters, digits and '_', the first no digit")]


def _steps(value: object) -> object:
    if isinstance(value, Rendered):
        value = value.value
    if isinstance(value, str) and re.fullmatch(r"\+[0-9]{1,18}", value.strip()):
        value = value.strip()
        least = int(value) >= 1
    elif isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value.strip()):
        value = int(value)
        least = value >= 1
    elif isinstance(value, int) and not isinstance(value, bool):
        least = 1 <= value < 2**63
    else:
        raise ValueError(f"must be an integer, or '+N' for N more than the directory holds, is {show(value)}")
    if not least:
        raise ValueError(f"must be >= 1, is {show(value)}")
    return value


@dataclass(frozen=True)
class SecretRef:
    """Where a secret is: an attribute of an Airflow connection, or an Airflow variable."""

    kind: Literal["conn", "var"]
    id: str
    attribute: str = ""
    """Of a connection: `password`, `login` or `extra.KEY`."""

    @classmethod
    def parse(cls, text: str) -> SecretRef:
        """Read `conn:ID#password`, `conn:ID#login`, `conn:ID#extra.KEY` or `var:NAME`. Raises ValueError.

        The message never holds `text`: it may be a secret, written where its reference belongs.
        """
        match = re.fullmatch(r"conn:([^#\s]+)#(password|login|extra\.[^\s]+)|var:(\S+)", text)
        if match is None:
            raise ValueError("must be conn:ID#password, conn:ID#login, conn:ID#extra.KEY or var:NAME")
        return cls("var", match[3]) if match[3] else cls("conn", match[1], match[2])


def _secret(value: object) -> object:
    if not isinstance(value, str) or is_template(value):
        raise ValueError("must be conn:ID#password or var:NAME as plain text; secrets are never templated")
    SecretRef.parse(value)
    return value


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """The TF tasks of one role. Short form: just the count."""

    SHORT: ClassVar[str] = "count"

    count: Annotated[int, Range(1, 10_000)] = 1
    """How many TF tasks."""
    gpus: Annotated[int, Range(0, 64)] = 0
    """GPUs of each TF task, its own for the whole training. A ps sees none."""
    restarts: Annotated[int, Range(0, 1000)] = 3
    """How often its host starts a TF task again in place before it has failed for good."""
    hosts: tuple[HostName, ...] = ()
    """Hosts of the inventory that may run it; empty: all."""
    env: Mapping[Variable, TextOrNumber] = field(default_factory=dict)
    """Environment of this role only, over the job's `env`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Where the chief saves, and how."""

    base_dir: Annotated[str, _HOST_PATH] | None = None
    """Directory on the chief's host; each training gets its own below. Default: `<workdir>/checkpoints`."""
    dir: Annotated[str, _HOST_PATH] | None = None
    """The very directory, for a script that goes on in its own logdir; instead of `base_dir`."""
    save_checkpoint_secs: Seconds = 60.0
    """Seconds between checkpoints (harness programs)."""
    save_summaries_secs: Seconds = 60.0
    """Seconds between summaries (harness programs)."""
    max_to_keep: Annotated[int, Range(0)] = 5
    """Checkpoints that are kept; 0 keeps all (harness programs)."""
    sharded: bool = False
    """Each ps writes its own part. Needs one host or `shared: true` (harness programs)."""
    shared: bool = False
    """Every host sees the directory at the same path. Otherwise the chief stays where it began."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long to wait for what, in seconds."""

    ready_secs: Seconds = 300.0
    """For every TF task to listen and to be reachable, once its host has been asked."""
    stall_secs: Seconds = 600.0
    """Without progress of its own until a running TF task counts as stuck."""
    grace_secs: Annotated[float, Range(0)] = 30.0
    """Between SIGTERM, on which a harness program saves, and SIGKILL."""
    lease_secs: Annotated[float, Range(60)] = 3600.0
    """Without word from Airflow until the hosts save and stop by themselves. It is renewed every 30 s."""
    unreachable_secs: Seconds = 300.0
    """Without a connection to a ps's or the chief's host until the try has failed."""
    queue_secs: Seconds = 3600.0
    """For ports and GPUs that others hold."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job. Exactly one of `program`, `script` and `command` is set."""

    name: Annotated[str, NAME] = ""
    """What assets and people call the job; default: the program's file name without its ending."""
    program: Annotated[str, Matches(r".+\.py", "a Python file (.py)")] | None = None
    """Python file with `model_fn` and `input_fn`, for the training harness. Relative to the job file."""
    script: Annotated[str, NotEmpty()] | None = None
    """Python file with its own training loop, run as `__main__` with `args`. Relative to the job file."""
    files: tuple[Annotated[str, NotEmpty()], ...] = ()
    """Modules and folders that `program` or `script` imports or reads; they go beside it. Relative to the job file."""
    command: Annotated[tuple[TextOrNumber, ...], NotEmpty()] | None = None
    """Any program on the hosts, as a list of arguments; always started afresh, never forked."""
    args: tuple[TextOrNumber, ...] = ()
    """Arguments of `script` or `command`; placeholders are replaced."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """Reaches `model_fn` and `input_fn` as `params`. Airflow's own `params` is another thing."""
    inputs: Mapping[InputName, Annotated[str, NotEmpty(), Matches(r"(?!host:(?!/|~/)).*", "host:/path")]] = (
        field(default_factory=dict)
    )
    """Name to data: `host:/path` is on the hosts; a URL or a path, relative to the job file, is uploaded."""
    mode: Literal["async", "sync"] = "async"
    """Whether each worker's gradients are applied as they come, or a step waits for all of them."""
    replication: Literal["between_graph", "in_graph"] = "between_graph"
    """Whether every worker builds its own graph, or the chief one graph for all (then always synchronous)."""
    replicas_to_aggregate: Annotated[int, Range(1)] | None = None
    """Gradients that a sync step waits for; fewer than workers makes the rest backups. Default: all."""
    steps: Annotated[int | str, Convert(_steps)] | None = None
    """Global step at which this training ends; `+N`, with a fixed `checkpoint.dir`: N more than it holds."""
    roles: Annotated[Mapping[RoleName, RoleSpec], NotEmpty()]
    """`ps`, `chief`, `worker`, `evaluator` (a script or in-graph program: any names) to their TF tasks."""
    session: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TensorFlow's `ConfigProto`, such as `gpu_options: {allow_growth: true}`."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    """Where the chief saves, and how."""
    start_from: Annotated[str, _SOURCE] = "none"
    """Initial weights, at step 0: `none`, `previous` (the job's last training) or a checkpoint's path."""
    launch: Literal["warm", "spawn"] = "warm"
    """Whether TF tasks are forked from a process that has imported TensorFlow, or started afresh."""
    preload: tuple[Annotated[str, Matches(r"[A-Za-z_][\w.]*", "a module's name")], ...] = (
        "tensorflow",
        "numpy",
    )
    """Modules that this process imports once per host; nothing for a `command`."""
    compat: Literal["tf1"] | None = None
    """`tf1`: `import tensorflow as tf` means `tensorflow.compat.v1` for this script."""
    success_policy: Literal["chief", "all_workers"] = "chief"
    """Whose success ends the training."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """How long to wait for what, in seconds."""
    env: Mapping[Variable, TextOrNumber] = field(default_factory=dict)
    """Environment of all TF tasks. It is public: secrets go into `secrets`."""
    secrets: Mapping[Variable, Annotated[str, Convert(_secret, sees_templates=True)]] = field(
        default_factory=dict
    )
    """Environment variable to `conn:ID#password`, `conn:ID#login`, `conn:ID#extra.KEY` or `var:NAME`."""
    seed: Annotated[int, Range(0, 2**31 - 1)] | None = None
    """Of `random`, NumPy and TensorFlow; every TF task adds its own number."""
    progress: Annotated[str, NotEmpty()] | None = None
    """Regular expression for a script's log lines, with a group `step` and, if it likes, `loss`."""
    base_dir: Path | None = field(default=None, metadata=NOT_IN_YAML)
    """What relative paths are relative to; default: the working directory."""

    # --- reading and writing ---

    @classmethod
    def load(
        cls,
        job: str | Path | Mapping[str, Any] | JobSpec,
        *,
        base_dir: Path | None = None,
        templated: bool = False,
    ) -> Self:
        """A job from whatever a DAG author passes: a file relative to `base_dir`, a mapping, or a JobSpec.

        A JobSpec made by hand is checked here. Raises SpecError with every fault.
        """
        if isinstance(job, JobSpec):
            return cls.from_dict(job.to_dict(), base_dir=job.base_dir or base_dir, templated=templated)
        if isinstance(job, (str, Path)):
            return cls.from_file((base_dir or Path()) / Path(job).expanduser(), templated=templated)
        return cls.from_dict(job, base_dir=base_dir, templated=templated)

    @classmethod
    def from_file(cls, path: str | Path, *, templated: bool = False) -> Self:
        """Read a job file; its folder becomes `base_dir`. Raises SpecError with every fault."""
        path = Path(path)
        what = f"job {path}"
        try:
            data = parse_yaml(path.read_text("utf-8"), as_text=("steps",))
        except OSError as error:
            raise SpecError(what, [f"the file cannot be read: {error.strerror}"]) from None
        except (YamlError, UnicodeDecodeError) as error:
            raise SpecError(what, [str(error)]) from None
        return cls._read(data, what=what, base_dir=path.absolute().parent, templated=templated)

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        *,
        base_dir: Path | None = None,
        templated: bool = False,
        template: Mapping[str, Any] | None = None,
    ) -> Self:
        """Read a job from parsed YAML. Raises SpecError with every fault.

        Args:
            data: The job as a mapping.
            base_dir: What relative paths are relative to.
            templated: Whether text with a Jinja template may stand in place of any scalar.
            template: The same mapping before Airflow rendered it. Only what was a template there is converted
                (`"10000"` to a number), so that an hparam written as the text `"007"` stays text.
        """
        if template is not None:
            data = mark_rendered(template, data)
        name = data.get("name") if isinstance(data, Mapping) else None
        what = f"job {name}" if isinstance(name, str) and name else "job"
        return cls._read(data, what=what, base_dir=base_dir, templated=templated)

    @classmethod
    def _read(cls, data: object, *, what: str, base_dir: Path | None, templated: bool) -> Self:
        reader = Reader(templated=templated)
        job = reader.read(cls, data)
        if is_known(job):
            for path, message in job_faults(job, reader.given):
                reader.fault(path, message)
        if reader.faults:
            raise SpecError(what, reader.faults)
        job = dataclasses.replace(job, base_dir=base_dir)
        derived = {} if "name" in reader.given else {"name": _default_name(job)}
        if job.command is not None:
            derived["preload"] = ()  # type: ignore[assignment]
        return dataclasses.replace(job, **derived)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The job as `from_dict` reads it, without what is default: plain JSON, templates as text."""
        data: dict[str, Any] = to_plain(self)
        if self.name == _default_name(self):
            data.pop("name", None)
        if self.command is not None and not self.preload:
            data.pop("preload", None)
        return data

    # --- from parse time to run time ---

    @property
    def is_templated(self) -> bool:
        """Whether anything in it is still to be rendered."""
        return _has_template(self)

    def render(self, render: Callable[[str], object]) -> Self:
        """This job with each template replaced by what `render` makes of it, converted and checked again.

        `render` gets templates only. Raises SpecError with every fault.
        """
        return self.from_dict(map_templates(self.to_dict(), render), base_dir=self.base_dir)

    def override(
        self,
        *,
        hparams: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        steps: int | str | None = None,
        mode: str | None = None,
        templated: bool = False,
    ) -> Self:
        """This job with some values replaced, checked again. None, or a template that came to nothing, replaces none.

        `hparams` and `inputs` are merged name by name. Values that Airflow rendered come through
        `templates.mark_rendered`, else text stays text. Raises SpecError with every fault.
        """
        data = self.to_dict()
        given = {"hparams": hparams, "inputs": inputs, "steps": steps, "mode": mode}
        for key, value in given.items():
            if value is None or (isinstance(value, Rendered) and value.is_blank):
                continue
            if key in ("hparams", "inputs"):
                data[key] = _merged(data.get(key, {}), value)
            else:
                data[key] = value
        templated = templated or self.is_templated
        return self._read(data, what=f"job {self.name}".rstrip(), base_dir=self.base_dir, templated=templated)

    # --- what it needs on this machine ---

    def local_path(self, path: str) -> Path:
        """`path` of a program, script or input on this machine."""
        return (self.base_dir or Path()) / Path(path.removeprefix("file://")).expanduser()

    @property
    def local_inputs(self) -> Mapping[str, Path]:
        """The inputs that are files or directories of this machine: neither on the hosts nor behind a URL."""
        return {
            name: self.local_path(value)
            for name, value in self.inputs.items()
            if not value.startswith("host:") and (value.startswith("file://") or "://" not in value)
        }

    def missing_files(self) -> tuple[str, ...]:
        """A fault for each program, script and local input that does not exist on this machine."""
        faults = []
        for key, path in (("program", self.program), ("script", self.script)):
            if path is not None and not self.local_path(path).is_file():
                faults.append(f"{key}: there is no file {self.local_path(path)} on this machine")
        faults.extend(
            f"files[{i}]: there is no file or folder {self.local_path(path)} on this machine"
            for i, path in enumerate(self.files)
            if not self.local_path(path).exists()
        )
        faults.extend(
            f"inputs.{name}: no file {path} on this machine; a path on the hosts is written host:{path}"
            for name, path in self.local_inputs.items()
            if not path.exists()
        )
        return tuple(faults)

    def hints(self) -> tuple[str, ...]:
        """What is allowed and looks like a mistake, for `plan` and `preflight` to show."""
        return tuple(placeholder_hints(self))

    def check_runnable(self) -> None:
        """Check what only matters once it runs: files on this machine, placeholders that nothing fills.

        Touches no host. Raises SpecError with every fault.
        """
        faults = [*self.missing_files(), *placeholder_faults(self)]
        if self.is_templated:
            faults.append("some values are still templates")
        if "evaluator" in self.roles and self.program is not None:
            faults.append(
                "roles.evaluator: a program is evaluated by its chief after the last step; remove it"
            )
        if faults:
            raise SpecError(f"job {self.name}", faults)


def _merged(old: Mapping[str, Any], more: object) -> object:
    """`old` with `more` over it; what is no mapping stays, and becomes a fault."""
    if isinstance(more, Rendered):  # one template for the whole mapping
        more = plain_scalar(more.value) if isinstance(more.value, str) else more.value
    return {**old, **more} if isinstance(more, Mapping) else more


def _default_name(job: JobSpec) -> str:
    """The program's stem; nothing as long as that is a template."""
    path = job.program or job.script or (job.command[0] if job.command else "")
    return "" if isinstance(path, Template) else slug(Path(path).stem).lstrip("._-") or "job"


def _has_template(value: object) -> bool:
    if isinstance(value, Template):
        return True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_has_template(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return any(map(_has_template, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_template, value))
