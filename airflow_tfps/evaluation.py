"""What evaluates a checkpoint, or exports it: a job of one TF task beside the training.

A training's result carries an *origin*: its job, the host of its checkpoints and the hashes of what was uploaded. So an
evaluation runs the very program that was trained, from whatever DAG and worker. Asks the host what is there, and brings
what is not; starts nothing.

    source = Source.read(training=result)
    job = Assessment(hook, source, inputs={"eval": "host:/data/holdout"}).harness_job("evaluate")
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_tfps import deploy
from airflow_tfps.errors import SpecError
from airflow_tfps.handle import EVALUATOR, Handle
from airflow_tfps.hook import checkpoint_step
from airflow_tfps.inventory import Inventory
from airflow_tfps.spec import JobSpec

if TYPE_CHECKING:
    from airflow_tfps.hook import ClusterHook

_DATA = "data_"
"""Begins the names of the training's inputs among those of an evaluation."""
_PRELOAD = ("tensorflow", "numpy", "tfps_runtime.training")


def origin_of(handle: Handle) -> dict[str, Any]:
    """What evaluates a checkpoint of a training: its job, its chief's host, its uploads. JSON without secrets."""
    job = handle.job
    return {
        "job": job.to_dict(),
        "base_dir": None if job.base_dir is None else str(job.base_dir),
        "hosts": handle.inventory.subset([handle.chief_host]).to_dict(),
        "blobs": {key: list(blob) for key, blob in handle.blobs.items()},
    }


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint on a host, and what is known of the training that wrote it."""

    checkpoint: str
    """Its prefix."""
    global_step: int
    host: str
    inventory: Inventory
    job: JobSpec | None = None
    blobs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    training_id: str | None = None
    pin: Mapping[str, str] | None = None
    """`directory` and `owner`, if the checkpoint is a pin."""

    @classmethod
    def read(
        cls,
        training: Any = None,
        checkpoint: Any = None,
        *,
        hosts: Any = None,
        host: str | None = None,
        base_dir: Path | None = None,
        job: JobSpec | None = None,
    ) -> Source:
        """From what DAGs pass on: a handle or a result of a training, a checkpoint's prefix or what a sensor found.

        `job` is the training's, if that does not say it. Looks up Airflow connections. Raises SpecError.
        """
        origin: Mapping[str, Any] = {}
        found: dict[str, Any] = {}
        if isinstance(training, Mapping) and "tasks" in training:
            handle = Handle.from_json(training)
            origin = origin_of(handle)
            found = {"host": handle.chief_host, "training_id": str(handle.training)}
        elif isinstance(training, Mapping):
            origin = training.get("origin") or {}
            found = {k: training.get(k) for k in ("checkpoint", "host", "training_id", "global_step", "pin")}
        elif training is not None:
            raise SpecError("training", [f"a training's handle or result is needed, got {_show(training)}"])
        if isinstance(checkpoint, Mapping):
            keys = ("checkpoint", "prefix", "global_step", "host")
            found.update({k: v for k, v in checkpoint.items() if k in keys}, pin=checkpoint.get("pin"))
            found["checkpoint"] = found.get("prefix") or found.get("checkpoint")
        elif checkpoint is not None:
            found.update(checkpoint=str(checkpoint), global_step=None, pin=None)
        prefix = found.get("checkpoint")
        if not isinstance(prefix, str) or not prefix:
            raise SpecError(
                "checkpoint",
                ["there is none: pass the result of a training that has saved one, or a checkpoint's prefix"],
            )
        inventory, name = _place(origin, hosts, host or found.get("host"), base_dir)
        step = found.get("global_step")
        folder = Path(origin["base_dir"]) if origin.get("base_dir") else None
        if origin.get("job"):
            job = JobSpec.from_dict(origin["job"], base_dir=folder)
        return cls(
            checkpoint=prefix,
            global_step=checkpoint_step(prefix) if step is None else int(step),
            host=name,
            inventory=inventory,
            job=job,
            blobs={str(k): tuple(map(str, v)) for k, v in (origin.get("blobs") or {}).items()},
            training_id=found.get("training_id"),
            pin=_read_pin(found.get("pin")),
        )

    @property
    def name(self) -> str:
        return "evaluation" if self.job is None else self.job.name


def _read_pin(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if isinstance(value, Mapping) and all(isinstance(value.get(k), str) for k in ("directory", "owner")):
        return {"directory": value["directory"], "owner": value["owner"]}
    raise SpecError("pin", ["directory and owner are needed, as CheckpointSensor gives them"])


def _place(
    origin: Mapping[str, Any], hosts: Any, host: str | None, base_dir: Path | None
) -> tuple[Inventory, str]:
    """The inventory of the one host that is asked, and its name."""
    if hosts is not None:
        inventory = Inventory.load(hosts, base_dir=base_dir)
    elif origin.get("hosts") and host in Inventory.from_dict(origin["hosts"]).names:
        inventory = Inventory.from_dict(origin["hosts"])
    elif host is not None:
        inventory = Inventory.load([host])
    else:
        raise SpecError(
            "host", ["nothing says where the checkpoint lies: pass host (an ssh connection id, or local)"]
        )
    if host is None and len(inventory.names) == 1:
        (host,) = inventory.names
    if host is None or host not in inventory.names:
        known = ", ".join(inventory.names[:20])
        raise SpecError("host", [f"{host or 'no host'} is named, and the inventory has {known}"])
    return inventory.subset([host]), host


def _show(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """The program on the host."""

    path: str
    entry: str
    """The program's file in the folder `path`; empty if `path` is the program."""
    blob: tuple[str, str]


class Assessment:
    """Makes the job of one evaluation or export; `hook` is connected to the host of `source`.

    Args:
        hook: Asks the host what is there.
        source: The checkpoint.
        inputs: Over the training's, name by name.
        program: Instead of the training's: a file of this machine.
        gpus: GPUs of the process.
        base_dir: What relative paths in `inputs`, `program` and a script are relative to.
    """

    def __init__(
        self,
        hook: ClusterHook,
        source: Source,
        *,
        inputs: Mapping[str, Any] | None = None,
        program: str | None = None,
        gpus: int = 0,
        base_dir: Path | None = None,
    ) -> None:
        self._hook = hook
        self.source = source
        self._changes = {str(name): str(value) for name, value in (inputs or {}).items()}
        self._program = program
        self._gpus = gpus
        self._base_dir = base_dir

    def harness_job(self, what: str, **options: Any) -> tuple[JobSpec, dict[str, Any]]:
        """The job of `training.assess`, and the origin of what it finds. Uploads the program if it is gone."""
        source, uploaded = self.source, self._bring_program()
        settings: Mapping[str, Any] = {} if source.job is None else source.job.hparams
        session: Mapping[str, Any] = {} if source.job is None else source.job.session
        seed = source.job.seed if source.job is not None else None
        args = [
            what,
            "--program={inputs.program}",
            f"--checkpoint={_literal(source.checkpoint)}",
            f"--hparams={_json(dict(settings))}",
            f"--session={_json(dict(session))}",
            f"--seed={seed or 0}",
        ]
        if uploaded.entry:
            args.append(f"--entry={uploaded.entry}")
        inputs = self._inputs()
        args += [f"--input={name}={{inputs.{_DATA}{name}}}" for name in inputs]
        args += [
            f"--{name.replace('_', '-')}={_literal(value) if isinstance(value, str) else _json(value)}"
            for name, value in options.items()
        ]
        job = self._job(
            {
                "script": str(deploy.assess_script()),
                "args": args,
                "preload": list(_PRELOAD),
                "inputs": {
                    "program": f"host:{uploaded.path}",
                    **{f"{_DATA}{name}": value for name, value in inputs.items()},
                },
            }
        )
        return job, self._origin(inputs, uploaded)

    def own_job(
        self,
        *,
        script: str | None = None,
        command: Sequence[Any] | None = None,
        args: Sequence[Any] = (),
        files: Sequence[str] = (),
        more_inputs: Mapping[str, str] | None = None,
    ) -> tuple[JobSpec, dict[str, Any]]:
        """The job of a script or command of one's own, which finds the checkpoint's prefix as `{inputs.checkpoint}`."""
        inputs = self._inputs()
        what: dict[str, Any] = {"command": list(command)} if command is not None else {"script": str(script)}
        if script is not None and self.source.job is not None and self.source.job.compat is not None:
            what["compat"] = self.source.job.compat
        if args:
            what["args"] = list(args)
        if files:
            what["files"] = list(files)
        given = {**inputs, "checkpoint": f"host:{self.source.checkpoint}", **(more_inputs or {})}
        return self._job({**what, "inputs": given}), self._origin(inputs, None)

    # --- its parts

    def _job(self, what: Mapping[str, Any]) -> JobSpec:
        trained = self.source.job
        data: dict[str, Any] = {
            "name": self.source.name,
            "roles": {EVALUATOR: {"gpus": self._gpus, "restarts": 0}},
            **what,
        }
        if trained is not None:
            known = trained.to_dict()
            data.update({key: known[key] for key in ("env", "secrets", "timeouts") if key in known})
        return JobSpec.from_dict(data, base_dir=self._base_dir)

    def _bring_program(self) -> Uploaded:
        source, job = self.source, self.source.job
        if self._program is not None:
            path = (self._base_dir or Path()) / Path(self._program).expanduser()
            if not path.is_file():
                raise SpecError("program", [f"there is no file {path} on this machine"])
            blob = deploy.blob("program", str(path))
            return Uploaded(path=self._hook.put(source.host, blob), entry="", blob=(blob.sha256, blob.name))
        if job is None or job.program is None:
            raise SpecError(
                "program",
                ["the training is no harness program: pass program, or a script or command of your own"],
            )
        entry = Path(job.program).name if job.files else ""
        sha256, name = (*source.blobs.get("program", ("", "")), "")[:2]
        there = self._there("program")
        if there is None:
            missing = [fault for fault in job.missing_files() if not fault.startswith("inputs.")]
            if missing:
                raise SpecError(f"job {job.name}", missing)
            blob = next(blob for blob in deploy.blobs_of(replace(job, inputs={})) if blob.key == "program")
            there = self._hook.put(source.host, blob)
            there = there.removesuffix(f"/{blob.entry}") if blob.entry else there
            sha256, name = blob.sha256, blob.name
        return Uploaded(path=there, entry=entry, blob=(sha256, name))

    def _there(self, key: str) -> str | None:
        """Where what was uploaded for the training lies on the host; None if it is gone, or was never there."""
        blob = self.source.blobs.get(key)
        if blob is None:
            return None
        spec = self.source.inventory[self.source.host]
        request = {"workdir": spec.workdir, "sha256": blob[0], "name": blob[1], "size": 0, "only_ask": True}
        answer = self._hook.call(self.source.host, "put", request)
        return str(answer["path"]) if answer["is_there"] else None

    def _inputs(self) -> dict[str, str]:
        """Name to value as a job writes it: on the host where possible."""
        job, found = self.source.job, {}
        for name, value in (job.inputs if job is not None else {}).items():
            there = None if value.startswith("host:") else self._there(f"inputs.{name}")
            if there is not None:
                found[name] = f"host:{there}"
            elif job is not None and name in job.local_inputs:
                found[name] = str(job.local_inputs[name].absolute())
            else:
                found[name] = value
        return {**found, **self._changes}

    def _origin(self, inputs: Mapping[str, str], uploaded: Uploaded | None) -> dict[str, Any]:
        """What evaluates, or exports, the same once more: the training's origin with these inputs and this program."""
        source = self.source
        origin: dict[str, Any] = {"hosts": source.inventory.to_dict(), "blobs": {}, "base_dir": None}
        if uploaded is not None:
            origin["blobs"]["program"] = list(uploaded.blob)
        if source.job is not None:
            job = source.job.to_dict()
            job["inputs"] = dict(inputs)
            origin["base_dir"] = None if source.job.base_dir is None else str(source.job.base_dir)
            if self._program is not None:
                job.update(
                    program=str((self._base_dir or Path()) / Path(self._program).expanduser()), files=[]
                )
            origin["job"] = job
        elif uploaded is not None:
            origin["job"] = {
                "program": str((self._base_dir or Path()) / Path(str(self._program)).expanduser()),
                "inputs": dict(inputs),
                "roles": {"ps": 1, "worker": 1},
            }
        return origin


def provenance(
    source: Source, inputs: Mapping[str, str], blobs: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Where a model comes from: training, checkpoint, and hashes of job, code and inputs.

    An input that lies on the hosts has its path, which says nothing about its contents.
    """
    job = source.job
    text = json.dumps(job.to_dict() if job is not None else {}, sort_keys=True)
    return {
        "training_id": source.training_id,
        "checkpoint": source.checkpoint,
        "global_step": source.global_step,
        "host": source.host,
        "job": source.name,
        "job_hash": hashlib.sha256(text.encode()).hexdigest()[: deploy.HASH_DIGITS],
        "code": next(iter(blobs.get("program") or source.blobs.get("script") or ()), None),
        "inputs": {name: _fingerprint(value) for name, value in inputs.items()},
    }


def _fingerprint(value: str) -> str:
    """The content's hash of what was uploaded, which is part of its path; else the value."""
    found = re.search(rf"/blobs/([0-9a-f]{{{deploy.HASH_DIGITS}}})/", value)
    return found[1] if found and value.startswith("host:") else value


def _json(value: Any) -> str:
    """JSON in which no text can be taken for a placeholder."""
    return _literal(json.dumps(value), escape="\\u007b")


def _literal(text: str, escape: str | None = None) -> str:
    """Text that goes through the replacing of placeholders as it is. Raises SpecError if that cannot be."""
    pattern = re.compile(r"\{(?=[A-Za-z_])")
    if escape is None and pattern.search(text):
        raise SpecError(
            "evaluation", [f"{text!r}: braces around a name are for placeholders; use another path"]
        )
    return pattern.sub(lambda _: str(escape), text)
