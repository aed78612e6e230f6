"""Operators: provision, train, teardown. They hold parameters; `hook` does the work, `triggers` wait.

Imported by DAG files: nothing heavy at import. Usually used through `group.TrainingTaskGroup`.
"""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from tfps_runtime.protocol import ProtocolError, Task, TaskState, TrainingId, TrainingState, training_key

from airflow_tfps.assets import previous_trainings, tell_assets, training_asset
from airflow_tfps.errors import BusyError, HostError, SpecError, TfpsError, TrainingFailedError
from airflow_tfps.triggers import TRAINING_XCOM, QueueTrigger, ReadyTrigger, TrainingTrigger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from airflow.sdk import Context

    from airflow_tfps.handle import Handle
    from airflow_tfps.hook import ClusterHook
    from airflow_tfps.inventory import Inventory
    from airflow_tfps.judge import Verdict
    from airflow_tfps.spec import JobSpec

RETRIES = 2
RETRY_DELAY = timedelta(seconds=30)
"""Both are named parameters of the operators: Airflow looks only those up in `default_args`."""
QUEUE_POLL_SECS = 10.0
DEFER_SLACK_SECS = 60.0
"""A trigger keeps its own deadline and says what is missing; Airflow's time-out is the backstop after it."""

UNHEARD_LEASE_SECS = 60.0
"""How long something goes on that nobody will tear down, until its trigger is heard for the first time."""

TRAIN_IS_COMING = frozenset(
    {"scheduled", "queued", "running", "deferred", "up_for_retry", "up_for_reschedule"}
)
TRAIN_IS_OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
HANDLE_KEY = "handle"
BASE_KEY = "base"


@contextmanager
def airflow_errors() -> Iterator[None]:
    """Turn our errors into Airflow's: a final one fails the task without a retry."""
    try:
        yield
    except TfpsError as error:
        if error.transient:
            raise AirflowException(str(error)) from error
        raise AirflowFailException(str(error)) from error


def key_of(operator: BaseOperator, context: Context) -> str:
    """The key of the training that the operator's group is about: DAG, run, group, map index."""
    ti = context["ti"]
    group = operator.task_group
    group_id = group.group_id if group is not None and group.group_id else ""
    index = ti.map_index if ti.map_index is not None else -1
    return training_key(ti.dag_id, ti.run_id, group_id, index)


def _new_training(key: str) -> TrainingId:
    """A new incarnation of a key. Raises SpecError for ids of which no key can be made."""
    try:
        return TrainingId(key, secrets.token_hex(4))
    except ProtocolError as error:
        raise SpecError("the training's key", [f"{error}; trigger the DAG with another run id"]) from None


def queue(
    operator: BaseOperator, method_name: str, error: BusyError, job: JobSpec, since: float, **kwargs: Any
) -> NoReturn:
    """Defer until it is time for another look at busy hosts, holding nothing; `since`: the first look (epoch).

    The method then gets `since` and `kwargs`. Raises BusyError after the job's `queue_secs`.
    """
    if time.time() - since > job.timeouts.queue_secs:
        raise BusyError(f"still busy after {job.timeouts.queue_secs:.0f} s: {error}") from error
    operator.log.info("%s; looking again in %.0f s", error, QUEUE_POLL_SECS)
    operator.defer(
        trigger=QueueTrigger(secs=QUEUE_POLL_SECS),
        method_name=method_name,
        kwargs={"since": since, **kwargs},
        timeout=timedelta(seconds=QUEUE_POLL_SECS + DEFER_SLACK_SECS),
    )


class ProvisionClusterOperator(BaseOperator):
    """Reserve hosts, upload, start ps and non-chief workers; returns the training's handle.

    Ends as soon as the processes have been started: `ClusterReadySensor` waits for them without a worker slot. While
    ports or GPUs are taken the task is deferred, up to the job's `queue_secs`, holding nothing. Idempotent: a living
    training of the group is adopted while `train` still needs it, anything else of it is stopped first.

    Args:
        job: Job file, mapping or JobSpec. Read when the DAG is parsed by the group, its leaf values are templated.
        hosts: Inventory file, connection id, list of connection ids, mapping or Inventory.
        hparams: Merged over the job's; values may come from tasks.
        inputs: Merged over the job's.
        steps: Instead of the job's.
        mode: Instead of the job's.
        base_dir: What relative paths in `job` and `hosts` are relative to; default: the DAG file's folder.
        job_name: The job's name, whose asset tells of earlier trainings; for `start_from: previous`.
    """

    template_fields: Sequence[str] = ("job", "hosts", "hparams", "inputs", "steps", "mode")
    template_fields_renderers = {"job": "json", "hparams": "json", "inputs": "json"}  # noqa: RUF012  Airflow's form
    ui_color = "#d5e8f7"

    def __init__(
        self,
        *,
        job: str | Path | Mapping[str, Any] | JobSpec,
        hosts: str | list[str] | Mapping[str, Any] | Inventory,
        hparams: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        steps: int | str | None = None,
        mode: str | None = None,
        base_dir: str | None = None,
        job_name: str | None = None,
        retries: int = RETRIES,
        retry_delay: timedelta | float = RETRY_DELAY,
        **kwargs: Any,
    ) -> None:
        if job_name is not None:
            kwargs.setdefault("inlets", [training_asset(job_name)])
        super().__init__(retries=retries, retry_delay=retry_delay, **kwargs)
        self.job_name = job_name
        self.job = job
        self.hosts = hosts
        self.hparams = hparams
        self.inputs = inputs
        self.steps = steps
        self.mode = mode
        self.base_dir = base_dir
        self._hook: ClusterHook | None = None
        self._unrendered: dict[str, Any] = {}

    def render_template_fields(self, context: Context, jinja_env: Any = None) -> None:
        """Keep what the fields were before rendering: only what was a template is converted to its field's type."""
        self._unrendered = {
            name: getattr(self, name) for name in ("job", "hparams", "inputs", "steps", "mode")
        }
        super().render_template_fields(context, jinja_env)

    def execute(self, context: Context) -> dict[str, Any]:
        return self._provision(context, time.time())

    def provision_again(self, context: Context, event: Mapping[str, Any], since: float) -> dict[str, Any]:
        """Resume after a look at busy hosts."""
        del event
        return self._provision(context, since)

    def _provision(self, context: Context, since: float) -> dict[str, Any]:
        from airflow_tfps.hook import ClusterHook
        from airflow_tfps.spec_files import load_inventory, rendered_job

        with airflow_errors():
            job = rendered_job(self, self._unrendered)
            job.check_runnable()
            inventory = load_inventory(self)
            with ClusterHook(inventory=inventory) as hook:
                self._hook = hook
                adopted = self._adopt(context, hook)
                if adopted is not None:
                    return adopted
                key = key_of(self, context)
                training = _new_training(key)
                hook.stop_key(
                    key, "a new training of the same key begins", grace_secs=job.timeouts.grace_secs
                )
                lease = max(job.timeouts.lease_secs, 2 * _seconds(self.retry_delay) + 600)
                chief_host = self._chief_host(context)
                if job.start_from == "previous":
                    job, chief_host = self._start_from_previous(context, hook, job, chief_host)
                try:
                    handle = hook.ensure(job, training, wait=False, lease_secs=lease, chief_host=chief_host)
                except BusyError as error:
                    queue(self, "provision_again", error, job, since)
        data = handle.to_json()
        context["task_state_store"].set(HANDLE_KEY, data)
        return data

    def _adopt(self, context: Context, hook: ClusterHook) -> dict[str, Any] | None:
        """The handle kept from before, if nothing must be started: the training lives, or nobody will train."""
        from airflow_tfps.handle import Handle

        kept: Any = context["task_state_store"].get(HANDLE_KEY)
        state = train_state(self, context)
        if kept is None or state is None:
            return None
        handle = Handle.from_json(kept)
        if state in TRAIN_IS_OVER:
            self.log.info("train is %s: nothing is started for nobody", state)
            return dict(kept)
        if state in TRAIN_IS_COMING and is_alive(hook.status(handle)):
            self.log.info("adopting the living training %s (train is %s)", handle.training, state)
            return dict(kept)
        return None

    def _start_from_previous(
        self, context: Context, hook: ClusterHook, job: JobSpec, chief_host: str | None
    ) -> tuple[JobSpec, str | None]:
        """The job with the checkpoint of its last training, and where the chief must run to find it."""
        for found in previous_trainings(self, context, key_of(self, context)):
            checkpoint, host = str(found["checkpoint"]), str(found["host"])
            is_here = chief_host in (None, host) or job.checkpoint.shared
            if host in hook.inventory.names and is_here and hook.has_checkpoint(host, checkpoint):
                self.log.info("starting from %s on %s, of %s", checkpoint, host, found["training_id"])
                return replace(job, start_from=checkpoint), host
            self.log.info("%s on %s cannot be used any more", checkpoint, host)
        self.log.info("there is no former training to start from: starting anew")
        return replace(job, start_from="none"), chief_host

    def _chief_host(self, context: Context) -> str | None:
        """Where the chief ran before a retry or a clear: its checkpoints are there."""
        from airflow_tfps.handle import Handle

        kept = context["task_state_store"].get(HANDLE_KEY)
        return None if kept is None else Handle.from_json(kept).chief_host

    def on_kill(self) -> None:
        """Close the connections. What was reserved ends by its lease within two minutes."""
        if self._hook is not None:
            self._hook.close()


class Following(BaseOperator):
    """What operators share that wait, deferred, for the verdict over a training or an evaluation of their own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._hook: ClusterHook | None = None

    def _current(self, context: Context) -> Handle:
        """The handle of what this task has begun."""
        raise NotImplementedError

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Airflow's own end of a deferral (a time-out, a broken trigger) must not leave a training behind."""
        if next_method == "__fail__":
            from airflow_tfps.hook import ClusterHook

            handle = self._current(context)
            with ClusterHook(inventory=handle.inventory) as hook:
                self._stop(hook, handle, "its trigger failed")
        return super().resume_execution(next_method, next_kwargs, context)

    def on_kill(self) -> None:
        """Close the connections: the worker may only be restarting. The trigger's kill and the teardown stop."""
        if self._hook is not None:
            self._hook.close()

    def _report(self, hook: ClusterHook, handle: Handle, verdict: Verdict, what: str = "training") -> str:
        """What happened, and the end of the log of the task that failed first."""
        lines = [f"{what} {verdict.outcome}: {verdict.reason}"]
        if verdict.task is not None:
            try:
                tail = hook.log_tail(handle, Task.parse(verdict.task.partition("@")[0]))
                lines.append(f"the end of the log of {verdict.task}:")
                lines.extend(f"  {line}" for line in tail)
            except TfpsError as error:
                lines.append(f"its log cannot be read: {error}")
        return "\n".join(lines)

    def _give_up(self, hook: ClusterHook, handle: Handle, reason: str, *, transient: bool) -> NoReturn:
        self._stop(hook, handle, reason.splitlines()[0])
        raise TrainingFailedError(reason, transient=transient)

    def _stop(self, hook: ClusterHook, handle: Handle, reason: str) -> None:
        try:
            hook.stop(handle, reason)
        except TfpsError as error:
            self.log.warning("%s; the teardown tries again, the lease does the rest", error)


class TrainOperator(Following):
    """Start the chief and follow the training, deferred, until it has ended; then stop everything that is left.

    Returns `{"training_id", "global_step", "checkpoint", "host", "metrics", "finished", "origin"}`; `origin` is what
    evaluates the checkpoint: job, host, uploads. Needs neither `provision` nor `ready` to have just run: it attaches to
    the living training, or brings a new incarnation up, which continues from the last complete checkpoint. Raises
    AirflowFailException when another try cannot help.

    Args:
        handle: What ProvisionClusterOperator returned.
        job_name: The job's name. With it, the training's end is an event of the asset `tfps://training/NAME`.
    """

    template_fields: Sequence[str] = ("handle",)
    template_fields_renderers = {"handle": "json"}  # noqa: RUF012  Airflow's form
    ui_color = "#f7e3c8"

    def __init__(
        self,
        *,
        handle: Any,
        job_name: str | None = None,
        retries: int = RETRIES,
        retry_delay: timedelta | float = RETRY_DELAY,
        **kwargs: Any,
    ) -> None:
        if job_name is not None:
            kwargs.setdefault("outlets", [training_asset(job_name)])
        super().__init__(retries=retries, retry_delay=retry_delay, **kwargs)
        self.handle = handle
        self.job_name = job_name

    def execute(self, context: Context) -> dict[str, Any] | None:
        return self._train(context, time.time())

    def train_again(self, context: Context, event: Mapping[str, Any], since: float) -> dict[str, Any] | None:
        """Resume after a look at busy hosts."""
        del event
        return self._train(context, since)

    def _train(self, context: Context, since: float) -> dict[str, Any] | None:
        from airflow_tfps.errors import NotReadyError
        from airflow_tfps.hook import ClusterHook

        with airflow_errors():
            handle = self._current(context)
            with ClusterHook(inventory=handle.inventory) as hook:
                self._hook = hook
                statuses = hook.status(handle)
                if chief_succeeded(statuses, handle):
                    self.log.info("%s has ended already", handle.training)
                    return self._finish(context, hook, handle)
                if not is_alive(statuses):
                    try:
                        handle = self._replace(context, hook, handle, statuses)
                    except BusyError as error:
                        queue(self, "train_again", error, handle.job, since)
                elif self._is_alone(context):
                    hook.renew(handle, UNHEARD_LEASE_SECS)  # see `_launch`
                context["ti"].xcom_push(TRAINING_XCOM, str(handle.training))
                try:
                    hook.wait_ready(handle, timeout=0)
                except NotReadyError as error:
                    self.log.info("%s", error)
                    self.defer(
                        trigger=ReadyTrigger(handle=handle.to_json(), ends_training=True),
                        method_name="launch",
                        timeout=timedelta(seconds=handle.job.timeouts.ready_secs + DEFER_SLACK_SECS),
                    )
                self._launch(context, hook, handle)
        return None

    def launch(self, context: Context, event: Mapping[str, Any]) -> None:
        """Resume when the cluster is ready: start the chief, then follow."""
        from airflow_tfps.hook import ClusterHook

        with airflow_errors():
            handle = self._current(context)
            with ClusterHook(inventory=handle.inventory) as hook:
                self._hook = hook
                if not event.get("ready"):
                    self._give_up(
                        hook, handle, str(event.get("reason")), transient=bool(event.get("transient", True))
                    )
                self._launch(context, hook, handle)

    def finish(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any] | None:
        """Resume with the verdict: stop what is left, then return the result or raise."""
        from airflow_tfps.hook import ClusterHook
        from airflow_tfps.judge import Verdict

        with airflow_errors():
            handle, verdict = self._current(context), Verdict.from_json(event)
            with ClusterHook(inventory=handle.inventory) as hook:
                self._hook = hook
                if verdict.outcome == "succeeded":
                    return self._finish(context, hook, handle, verdict.result)
                report = self._report(hook, handle, verdict)
                return self._give_up(hook, handle, report, transient=verdict.transient)

    # --- steps

    def _current(self, context: Context) -> Handle:
        """The newest incarnation's handle: this task's own, unless `provision` has made another since."""
        from airflow_tfps.handle import Handle

        provisioned = Handle.from_json(self.handle)
        store = context["task_state_store"]
        if store.get(BASE_KEY) == str(provisioned.training):
            own = store.get(HANDLE_KEY)
            if own is not None:
                return Handle.from_json(own)
        return provisioned

    def _replace(
        self, context: Context, hook: ClusterHook, handle: Handle, statuses: Mapping[str, Mapping[str, Any]]
    ) -> Handle:
        """A new incarnation in place of a dead one."""
        dead = ", ".join(
            f"{host} {status['state']}" for host, status in statuses.items() if not status["is_alive"]
        )
        self.log.info("%s does not live any more (%s): starting a new incarnation", handle.training, dead)
        hook.stop(handle, "replaced by a new incarnation")
        training = _new_training(handle.training.key)
        lease = max(handle.job.timeouts.lease_secs, 2 * _seconds(self.retry_delay) + 600)
        if self._is_alone(context):
            lease = UNHEARD_LEASE_SECS  # see `_launch`
        fresh = hook.ensure(handle.job, training, wait=False, lease_secs=lease, chief_host=handle.chief_host)
        store = context["task_state_store"]
        store.set(HANDLE_KEY, fresh.to_json())
        from airflow_tfps.handle import Handle

        store.set(BASE_KEY, str(Handle.from_json(self.handle).training))
        return fresh

    def _is_alone(self, context: Context) -> bool:
        """Whether no teardown will come after this task: there is none, or a failed task was cleared, and only that."""
        if follower(TeardownClusterOperator, self) is None:
            return True
        return task_state(TeardownClusterOperator, self, context) in TRAIN_IS_OVER

    def _launch(self, context: Context, hook: ClusterHook, handle: Handle) -> NoReturn:
        hook.launch(handle)
        if self._is_alone(context):
            # A task that is ended before its trigger runs has nobody who would stop the training.
            hook.renew(handle, UNHEARD_LEASE_SECS)
        self.log.info("%s: started the chief, %s", handle.training, handle.of(handle.chief).label)
        self.defer(trigger=TrainingTrigger(handle=handle.to_json()), method_name="finish", timeout=None)

    def _finish(
        self, context: Context, hook: ClusterHook, handle: Handle, result: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Stop the stragglers and the ps; a training that has its result is not failed by an unreachable host."""
        from airflow_tfps.evaluation import origin_of

        if not result:
            result = hook.result(handle)
        try:
            states = hook.stop(handle, "the chief has finished")
            self.log.info("%s: %s", handle.training, ", ".join(f"{h} {s}" for h, s in sorted(states.items())))
        except HostError as error:
            self.log.warning("%s; the teardown tries again, the lease does the rest", error)
        found = {
            "training_id": str(handle.training),
            "global_step": result.get("global_step"),
            "checkpoint": result.get("checkpoint"),
            "host": handle.chief_host,
            "metrics": dict(result.get("metrics") or {}),
            "finished": True,
            "origin": origin_of(handle),
        }
        tell_assets(self, context, found)
        return found


class TeardownClusterOperator(BaseOperator):
    """End whatever is left of the group's training on every host of the inventory; the second line of defence.

    Finds it by key on the hosts, without any XCom. Fails when a host cannot be reached or something will not end.

    Args:
        handle: What ProvisionClusterOperator returned; only its inventory is used, when `hosts` is not given.
        hosts: As for ProvisionClusterOperator.
    """

    template_fields: Sequence[str] = ("handle", "hosts")
    template_fields_renderers = {"handle": "json"}  # noqa: RUF012  Airflow's form
    ui_color = "#e6e6e6"

    def __init__(
        self,
        *,
        handle: Any = None,
        hosts: str | list[str] | Mapping[str, Any] | Inventory | None = None,
        base_dir: str | None = None,
        retries: int = RETRIES,
        retry_delay: timedelta | float = RETRY_DELAY,
        **kwargs: Any,
    ) -> None:
        super().__init__(retries=retries, retry_delay=retry_delay, **kwargs)
        self.handle = handle
        self.hosts = hosts
        self.base_dir = base_dir

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow_tfps.handle import Handle
        from airflow_tfps.hook import ClusterHook
        from airflow_tfps.spec_files import load_inventory

        with airflow_errors():
            handle = Handle.from_json(self.handle) if self.handle else None
            if self.hosts is not None:
                inventory = load_inventory(self)
            elif handle is not None:
                inventory = handle.inventory
            else:
                raise AirflowFailException("neither a handle nor `hosts`: which hosts are to be torn down?")
            key = handle.training.key if handle is not None else key_of(self, context)
            grace = handle.job.timeouts.grace_secs if handle is not None else 30.0
            with ClusterHook(inventory=inventory) as hook:
                stopped = hook.stop_key(key, "teardown", grace_secs=grace)
        for host, trainings in sorted(stopped.items()):
            for training, state in trainings.items():
                self.log.info("%s: %s %s", host, training, state)
        return {"stopped": {host: list(found) for host, found in stopped.items() if found}}


def train_state(operator: BaseOperator, context: Context) -> str | None:
    """Airflow's state of the TrainOperator downstream of `operator` in its group; None when it is cleared or absent."""
    return task_state(TrainOperator, operator, context)


def task_state(kind: type[BaseOperator], operator: BaseOperator, context: Context) -> str | None:
    """Airflow's state of the first task of a kind downstream of `operator` in its group, of the same map index.

    None when it is cleared, has not been scheduled yet, or is absent.
    """
    ti = context["ti"]
    task_id = follower(kind, operator)
    if task_id is None:
        return None
    is_mapped = ti.map_index is not None and ti.map_index >= 0
    index = ti.map_index if is_mapped else None
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[task_id], run_ids=[ti.run_id], map_index=index)
    name = f"{task_id}_{index}" if is_mapped else task_id
    state: str | None = (states or {}).get(ti.run_id, {}).get(name)
    return state


def follower(kind: type[BaseOperator], operator: BaseOperator) -> str | None:
    """Id of the first task of a kind downstream of `operator` in its group."""
    group = operator.task_group
    for task in operator.get_flat_relatives(upstream=False):
        if isinstance(task, kind) and task.task_group is group:
            return task.task_id
    return None


def is_alive(statuses: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a training lives on all its hosts and nothing of it has failed or is being stopped."""
    over = (TrainingState.STOPPING.value, TrainingState.FAILED.value)
    return all(status["is_alive"] and status["state"] not in over for status in statuses.values())


def chief_succeeded(statuses: Mapping[str, Mapping[str, Any]], handle: Handle) -> bool:
    tasks = statuses[handle.chief_host]["tasks"]
    chief = str(handle.chief)
    return any(t["task"] == chief and t["state"] == TaskState.SUCCEEDED.value for t in tasks)


def _seconds(delay: timedelta | float) -> float:
    return delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
