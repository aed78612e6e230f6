"""Operators for what comes of a checkpoint: evaluate it, promote it to a served model, roll back.

    training = TrainingTaskGroup("training", hosts="gpu_lab", job="jobs/ctr.yaml")
    evaluation = EvaluateOperator(task_id="evaluate", training=training, inputs={"eval": "host:/data/holdout"})
    PromoteOperator(task_id="promote", evaluation=evaluation, metric="auc", min_gain=0.001, model_dir="/srv/ctr")

Evaluation and export are one TF task on the host of the checkpoint, with a reservation and an agent of their own; the
task is deferred meanwhile. Imported by DAG files: nothing heavy at import.
"""

from __future__ import annotations

import posixpath
import time
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from tfps_runtime.protocol import digest, training_key

from airflow_tfps.assessing import BEGUN_KEY, PIN_KEY, Assessing, assessment_of, job_name_of, output_of
from airflow_tfps.assets import evaluation_asset, model_asset, tell_assets
from airflow_tfps.errors import CommandError, SpecError, TrainingFailedError
from airflow_tfps.operators import RETRIES, RETRY_DELAY, airflow_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta
    from pathlib import Path

    from airflow.sdk import Context
    from tfps_runtime.protocol import TrainingId

    from airflow_tfps.evaluation import Source
    from airflow_tfps.handle import Handle
    from airflow_tfps.hook import ClusterHook
    from airflow_tfps.spec import JobSpec

COMPARISONS = 3
"""How often an export is compared anew because another promotion came first, within one try."""


class EvaluateOperator(Assessing):
    """Evaluate a checkpoint on its host, beside the training and never in its cluster; deferred meanwhile.

    Returns `{"metrics", "global_step", "checkpoint", "host", "training_id", "metrics_path", "pin", "origin"}`. The
    metrics are also in `<checkpoint>.metrics.json` on the host and in an event of the asset `tfps://evaluation/NAME`.
    Program, hparams and inputs are the training's unless given here. Stopped like `train` when the task is killed,
    failed or cleared.

    A pinned checkpoint is evaluated from its pin. That is released after a successful evaluation, unless another
    evaluation or promotion of the DAG comes after this one, or beside it after the same task; then the result has the
    `pin`. It stays when the evaluation fails. If it has been released before, the task is skipped.

    Args:
        training: A TrainingTaskGroup, a TrainOperator, their `.output`, or a handle together with `checkpoint`.
        checkpoint: Instead of the training's last one: a prefix, or what CheckpointSensor found.
        job: The training's job, if `training` does not say it: a file, relative to the DAG file, or a mapping.
        inputs: Over the training's, name by name.
        program: Instead of the training's: a file with `model_fn` and `input_fn`, relative to the DAG file.
        script: A Python file of your own instead, relative to the DAG file. It finds the checkpoint's prefix as
            `{inputs.checkpoint}` in `args`, and leaves `result.json` in its working directory:
            `{"global_step": 1000, "metrics": {"auc": 0.9}}`.
        command: Any program on the host instead, as a list of arguments; otherwise as `script`.
        args: Arguments of `script`.
        files: Modules and folders that `script` needs.
        job_name: Names the asset; default: the training's job.
        **kwargs: `gpus`, `hosts`, `host`, `base_dir` and `release_pin`, see `Assessing`.
    """

    template_fields: Sequence[str] = (
        "training",
        "checkpoint",
        "inputs",
        "program",
        "script",
        "command",
        "args",
        "hosts",
        "host",
    )
    template_fields_renderers = {"training": "json", "inputs": "json"}  # noqa: RUF012  Airflow's form
    ui_color = "#dcefe9"

    def __init__(
        self,
        *,
        training: Any = None,
        checkpoint: Any = None,
        job: str | Path | Mapping[str, Any] | JobSpec | None = None,
        inputs: Mapping[str, Any] | None = None,
        program: str | None = None,
        script: str | None = None,
        command: Sequence[Any] | None = None,
        args: Sequence[Any] = (),
        files: Sequence[str] = (),
        job_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        name = job_name or job_name_of(training)
        if name is not None:
            kwargs.setdefault("outlets", [evaluation_asset(name)])
        super().__init__(**kwargs)
        self.training = output_of(training)
        self.checkpoint = output_of(checkpoint)
        self.job = job
        self.inputs = inputs
        self.program = program
        self.script = script
        self.command = command
        self.args = args
        self.files = files
        self.job_name = name

    def _source(self) -> Source:
        from airflow_tfps.evaluation import Source
        from airflow_tfps.spec import JobSpec
        from airflow_tfps.spec_files import folder_of

        folder = folder_of(self)
        job = None if self.job is None else JobSpec.load(self.job, base_dir=folder)
        return Source.read(
            self.training, self.checkpoint, hosts=self.hosts, host=self.host, base_dir=folder, job=job
        )

    def _job(
        self, context: Context, hook: ClusterHook, source: Source, training: TrainingId
    ) -> tuple[JobSpec, Any]:
        del context, training
        assessment = assessment_of(self, hook, source, self.inputs, self.program)
        given = [name for name in ("program", "script", "command") if getattr(self, name) is not None]
        if len(given) > 1:
            raise SpecError(self.task_id, [f"{given[1]}: not beside {given[0]}"])
        if self.script is not None or self.command is not None:
            job, origin = assessment.own_job(
                script=self.script, command=self.command, args=self.args, files=self.files
            )
        else:
            job, origin = assessment.harness_job("evaluate")
        return job, {
            "origin": origin,
            "checkpoint": source.checkpoint,
            "global_step": source.global_step,
            "training_id": source.training_id,
        }

    def _finish(
        self, context: Context, hook: ClusterHook, handle: Handle, result: Mapping[str, Any], count: int
    ) -> dict[str, Any]:
        del count
        begun: Any = context["task_state_store"].get(BEGUN_KEY)
        metrics = dict(result.get("metrics") or {})
        if not metrics:
            raise TrainingFailedError(
                f"{self.task_id}: it has left no metrics; a script or command writes result.json in its working "
                'directory: {"global_step": …, "metrics": {…}}',
                transient=False,
            )
        host = handle.chief_host
        found: dict[str, Any] = {
            "metrics": metrics,
            "global_step": begun["global_step"],
            "checkpoint": begun["checkpoint"],
            "host": host,
            "training_id": begun["training_id"],
        }
        ti = context["ti"]
        noted = {
            **found,
            "dag_id": ti.dag_id,
            "run_id": ti.run_id,
            "task_id": ti.task_id,
            "time": time.time(),
        }
        noted["inputs"] = dict(begun["origin"].get("job", {}).get("inputs", {}))
        pin: Any = context["task_state_store"].get(PIN_KEY)
        beside = begun["checkpoint"]
        if pin and self._releases():  # what lies in the pin goes with it
            beside, pin = posixpath.join(pin["directory"], posixpath.basename(beside)), None
        answer = hook.call(host, "note", {"checkpoint": beside, "evaluation": noted})
        found.update(
            metrics_path=answer["path"],
            pin={key: pin[key] for key in ("directory", "owner")} if pin else None,
            origin=begun["origin"],
        )
        self.log.info("%s: %s", begun["checkpoint"], ", ".join(f"{k} {v:.6g}" for k, v in metrics.items()))
        tell_assets(self, context, found)
        return found


class PromoteOperator(Assessing):
    """Make a checkpoint the current model of a model directory if it is good enough; else skip, saying why.

    Returns `{"version", "path", "former", "metric", "value", "former_value", "reason", "metrics", "checkpoint",
    "global_step", "host", "model_dir", "removed"}`. On the host of the checkpoint, deferred meanwhile, the current
    model is evaluated on the same inputs and a SavedModel is exported; then `<model_dir>/<version>/` appears and
    `current` is switched, each at once. Two promotions cannot interleave: the one that comes second is compared anew.
    An event of the asset `tfps://model/NAME` follows.

    Args:
        evaluation: An EvaluateOperator, its `.output`, or a training's result, whose metrics are the chief's.
        metric: Name of the metric that decides.
        model_dir: Directory on the host of the checkpoint.
        compare: `better` than the current model by `min_gain`; `not_worse` by more than `tolerance`; `absolute`: only
            the `threshold` counts. The first model needs only the threshold, if there is one.
        min_gain: Least gain; 0: any.
        tolerance: Of `not_worse`.
        threshold: Least value (largest, when lower is better), with each `compare`.
        higher_is_better: Whether a larger value is a gain.
        keep: Versions that stay, the current one and the one before always among them.
        on_promotion: Called with the result after a promotion, on the worker; an error fails the task, and a retry
            calls it again.
        command: For a training that is no harness program: a program on the host that writes a SavedModel to
            `{inputs.export_dir}`, of the checkpoint `{inputs.checkpoint}`. The current model is not evaluated again;
            its metrics are those of its promotion.
        name: Names the asset; default: the training's job, else the last part of `model_dir`.
        **kwargs: `gpus`, `hosts`, `host`, `base_dir` and `release_pin`, see `Assessing`.
    """

    template_fields: Sequence[str] = (
        "evaluation",
        "metric",
        "model_dir",
        "min_gain",
        "tolerance",
        "threshold",
        "command",
        "hosts",
        "host",
    )
    template_fields_renderers = {"evaluation": "json"}  # noqa: RUF012  Airflow's form
    ui_color = "#f3dfe6"

    def __init__(
        self,
        *,
        evaluation: Any,
        metric: str,
        model_dir: str,
        compare: Literal["better", "not_worse", "absolute"] = "better",
        min_gain: float | str = 0.0,
        tolerance: float | str = 0.0,
        threshold: float | str | None = None,
        higher_is_better: bool = True,
        keep: int = 5,
        on_promotion: Callable[[dict[str, Any]], object] | None = None,
        command: Sequence[Any] | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        name = name or job_name_of(evaluation) or _last_part(model_dir)
        if name is not None:
            kwargs.setdefault("outlets", [model_asset(name)])
        super().__init__(**kwargs)
        self.evaluation = output_of(evaluation)
        self.metric = metric
        self.model_dir = model_dir
        self.compare = compare
        self.min_gain = min_gain
        self.tolerance = tolerance
        self.threshold = threshold
        self.higher_is_better = higher_is_better
        self.keep = keep
        self.on_promotion = on_promotion
        self.command = command
        self.name = name

    def _source(self) -> Source:
        from airflow_tfps.evaluation import Source
        from airflow_tfps.spec_files import folder_of

        return Source.read(self.evaluation, hosts=self.hosts, host=self.host, base_dir=folder_of(self))

    def _rule(self) -> dict[str, Any]:
        """As the host reads it. Raises SpecError."""
        rule: dict[str, Any] = {
            "metric": str(self.metric),
            "compare": self.compare,
            "higher_is_better": bool(self.higher_is_better),
        }
        faults = []
        for key in ("min_gain", "tolerance", "threshold"):
            value = getattr(self, key)
            if value is None or value == "":
                continue
            try:
                rule[key] = float(value)
            except (TypeError, ValueError):
                faults.append(f"{key}: must be a number, is {value!r}")
        metrics = self._metrics()
        if rule["metric"] not in metrics:
            there = ", ".join(sorted(metrics)) or "none"
            faults.append(f"metric: the evaluation has no metric {rule['metric']!r}; there are: {there}")
        if not str(self.model_dir).startswith(("/", "~/")):
            faults.append(f"model_dir: must be an absolute path on the host, is {self.model_dir!r}")
        if faults:
            raise SpecError(self.task_id, faults)
        return rule

    def _metrics(self) -> dict[str, float]:
        found = self.evaluation.get("metrics") if hasattr(self.evaluation, "get") else None
        return {str(k): float(v) for k, v in (found or {}).items()}

    def _job(
        self, context: Context, hook: ClusterHook, source: Source, training: TrainingId
    ) -> tuple[JobSpec, Any]:
        from airflow_tfps.evaluation import provenance

        rule, id_ = self._rule(), f"{training.key}@{source.checkpoint}"
        staging = str(training)
        assessment = assessment_of(self, hook, source, None, None)
        if self.command is not None:
            folder = posixpath.join(self.model_dir, f".staging-{digest(staging)}", "model")
            job, origin = assessment.own_job(
                command=self.command, more_inputs={"export_dir": f"host:{folder}"}
            )
        else:
            job, origin = assessment.harness_job(
                "export",
                model_dir=self.model_dir,
                id=id_,
                staging=staging,
                rule=rule,
                metrics=self._metrics(),
            )
        ti, date = context["ti"], context.get("logical_date")
        inputs = origin.get("job", {}).get("inputs", {})
        return job, {
            "model_dir": self.model_dir,
            "id": id_,
            "staging": staging,
            "rule": rule,
            "metrics": self._metrics(),
            "keep": self.keep,
            "may_recall": self.command is not None,
            "provenance": {
                "dag_id": ti.dag_id,
                "run_id": ti.run_id,
                "task_id": ti.task_id,
                "logical_date": None if date is None else date.isoformat(),
                **provenance(source, inputs, origin["blobs"]),
            },
        }

    def _finish(
        self, context: Context, hook: ClusterHook, handle: Handle, result: Mapping[str, Any], count: int
    ) -> dict[str, Any]:
        del result
        begun: Any = context["task_state_store"].get(BEGUN_KEY)
        host = handle.chief_host
        try:
            answer = hook.call(host, "promote", begun)
        except CommandError as error:
            if error.code != "model_changed" or count >= COMPARISONS:
                raise
            self.log.info("%s; comparing anew", error)
            again: dict[str, Any] = self._begin(context, time.time(), count + 1)
            return again
        if not answer["promoted"]:
            self.log.info("not promoted: %s", answer["reason"])  # Airflow shows no reason of a skip
            raise AirflowSkipException(f"not promoted: {answer['reason']}")
        self.log.info("version %s is the current model: %s", answer["version"], answer["reason"])
        keys = ("version", "path", "former", "metric", "value", "former_value", "reason", "removed")
        found = {
            **{key: answer.get(key) for key in keys},
            "metrics": begun["metrics"],
            "checkpoint": begun["provenance"]["checkpoint"],
            "global_step": begun["provenance"]["global_step"],
            "host": host,
            "model_dir": posixpath.dirname(str(answer["path"])),
        }
        tell_assets(self, context, found)
        if self.on_promotion is not None:
            self.on_promotion(found)
        return found


class RollbackOperator(BaseOperator):
    """Make the model before the current one the current one again, in one switch; once in each run of the DAG.

    Returns `{"version", "path", "former", "reason", "host", "model_dir"}`. No version is removed.

    Args:
        model_dir: Directory on the host.
        hosts: Inventory, as for ProvisionClusterOperator.
        host: Name of the host in it; not needed if it has but one.
        to: A version instead of the one before.
        withdraw: Hide the version that is left, from a server that takes the highest number.
        reason: Goes into the history.
    """

    template_fields: Sequence[str] = ("model_dir", "hosts", "host", "to", "reason")
    ui_color = "#f3dfe6"

    def __init__(
        self,
        *,
        model_dir: str,
        hosts: Any,
        host: str | None = None,
        to: int | str | None = None,
        withdraw: bool = False,
        reason: str = "",
        base_dir: str | None = None,
        retries: int = RETRIES,
        retry_delay: timedelta | float = RETRY_DELAY,
        **kwargs: Any,
    ) -> None:
        super().__init__(retries=retries, retry_delay=retry_delay, **kwargs)
        self.model_dir = model_dir
        self.hosts = hosts
        self.host = host
        self.to = to
        self.withdraw = withdraw
        self.reason = reason
        self.base_dir = base_dir

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow_tfps.hook import ClusterHook
        from airflow_tfps.inventory import Inventory
        from airflow_tfps.spec_files import folder_of

        ti = context["ti"]
        with airflow_errors():
            inventory = Inventory.load(self.hosts, base_dir=folder_of(self))
            host = self.host or (inventory.names[0] if len(inventory.names) == 1 else None)
            if host not in inventory.names:
                names = ", ".join(inventory.names[:20])
                raise AirflowFailException(f"host: {host!r} is not one of {names}; which one has the models?")
            request = {
                "model_dir": self.model_dir,
                "id": training_key(ti.dag_id, ti.run_id, ti.task_id, ti.map_index or -1),
                "to": None if self.to in (None, "") else int(self.to),
                "withdraw": self.withdraw,
                "reason": self.reason,
                "provenance": {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id},
            }
            with ClusterHook(inventory=inventory) as hook:
                answer = hook.call(str(host), "rollback", request)
        self.log.info("version %s is the current model again, after %s", answer["version"], answer["former"])
        return {
            **{key: answer[key] for key in ("version", "path", "former", "reason")},
            "host": host,
            "model_dir": posixpath.dirname(str(answer["path"])),
        }


def _last_part(path: str) -> str | None:
    return None if "{" in path else posixpath.basename(path.rstrip("/")) or None
