"""What operators share that evaluate or export a checkpoint: one TF task beside the training, and the checkpoint's pin.

The task has a reservation and an agent of its own on the host of the checkpoint, and is followed by the trigger of
trainings while the operator is deferred. A checkpoint that comes with a pin is held by it until nobody needs it any
more. Imported by DAG files: nothing heavy at import.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseOperator, TaskGroup
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.definitions.xcom_arg import XComArg
from airflow.sdk.exceptions import AirflowSkipException
from tfps_runtime.protocol import TrainingId, training_key

from airflow_tfps.assets import tell_assets
from airflow_tfps.errors import BusyError, CommandError, HostError, TfpsError
from airflow_tfps.operators import (
    HANDLE_KEY,
    RETRIES,
    RETRY_DELAY,
    UNHEARD_LEASE_SECS,
    Following,
    airflow_errors,
    queue,
)
from airflow_tfps.triggers import TRAINING_XCOM, TrainingTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from airflow.sdk import Context

    from airflow_tfps.evaluation import Assessment, Source
    from airflow_tfps.handle import Handle
    from airflow_tfps.hook import ClusterHook
    from airflow_tfps.inventory import Inventory
    from airflow_tfps.spec import JobSpec

BEGUN_KEY = "begun"
PIN_KEY = "pin"
OUTCOME_KEY = "outcome"
"""In the task state store: what came of a checkpoint whose pin was released, for a try that comes after that."""


class Assessing(Following):
    """One TF task beside the training: begun here, followed by a trigger, ended in `finish`.

    A pin of the checkpoint is renewed before, and released after the task has done its work, unless another task of
    the DAG that evaluates or promotes comes after it, or beside it, after the same task. It stays after a failure.

    Args:
        gpus: GPUs of the process.
        hosts: Inventory that holds the host, if nothing else says it.
        host: Name of the host in it.
        base_dir: What relative paths are relative to; default: the DAG file's folder.
        release_pin: Whether to release the pin in the end, whatever other tasks there are.
    """

    command: Sequence[Any] | None = None
    script: str | None = None

    def __init__(
        self,
        *,
        gpus: int = 0,
        hosts: Any = None,
        host: str | None = None,
        base_dir: str | None = None,
        release_pin: bool | None = None,
        retries: int = RETRIES,
        retry_delay: timedelta | float = RETRY_DELAY,
        **kwargs: Any,
    ) -> None:
        super().__init__(retries=retries, retry_delay=retry_delay, **kwargs)
        self.gpus = gpus
        self.hosts = hosts
        self.host = host
        self.base_dir = base_dir
        self.release_pin = release_pin
        self._is_killed = False

    def execute(self, context: Context) -> Any:
        return self._begin(context, time.time(), 1)

    def begin_again(self, context: Context, event: Mapping[str, Any], since: float, count: int = 1) -> Any:
        """Resume after a look at a busy host."""
        del event
        return self._begin(context, since, count)

    def finish(self, context: Context, event: Mapping[str, Any], count: int = 1) -> Any:
        """Resume with the verdict: clear away, then return the result or raise."""
        from airflow_tfps.hook import ClusterHook
        from airflow_tfps.judge import Verdict

        with airflow_errors():
            handle, verdict = self._current(context), Verdict.from_json(event)
            with ClusterHook(inventory=handle.inventory) as hook:
                self._hook = hook
                if verdict.outcome != "succeeded":
                    report = self._report(hook, handle, verdict, self.task_id)
                    self._give_up(hook, handle, report, transient=verdict.transient)
                result = dict(verdict.result) or hook.result(handle)
                try:
                    hook.stop(handle, "it has finished")
                except HostError as error:
                    self.log.warning("%s; its lease ends what is left", error)
                try:
                    found = self._finish(context, hook, handle, result, count)
                except AirflowSkipException as skip:
                    self._let_go(context, hook, handle.chief_host, {"skipped": str(skip)})
                    raise
                self._let_go(context, hook, handle.chief_host, {"result": found})
                return found

    def on_kill(self) -> None:
        """Have `_begin` end what it has begun, which it is in the midst of; a deferred task's trigger does it.

        Comes in the handler of a signal, where locks of whatever was interrupted may be held, so that no host can be
        asked here. If only the worker restarts, nothing is lost: another try would begin anew, too.
        """
        self._is_killed = True
        super().on_kill()

    def _source(self) -> Source:
        """The checkpoint. Raises SpecError."""
        raise NotImplementedError

    def _job(
        self, context: Context, hook: ClusterHook, source: Source, training: TrainingId
    ) -> tuple[JobSpec, Any]:
        """The job of the TF task, and what `_finish` needs to know of it. Raises SpecError."""
        raise NotImplementedError

    def _finish(
        self, context: Context, hook: ClusterHook, handle: Handle, result: Mapping[str, Any], count: int
    ) -> Any:
        raise NotImplementedError

    # --- steps

    def _begin(self, context: Context, since: float, count: int) -> Any:
        from airflow_tfps.hook import ClusterHook

        with airflow_errors():
            source = self._source()
            training = TrainingId(self._key(context), secrets.token_hex(4))
            try:
                with ClusterHook(inventory=source.inventory) as hook:
                    self._hook = hook
                    hook.stop_key(training.key, "another try begins", grace_secs=0)
                    if self._is_pinned(hook, source):
                        self._start(context, hook, source, training, since=since, count=count)
            finally:  # after a deferral, too
                if self._is_killed:
                    self._end(source.inventory, training.key)
        return self._outcome(context, source)

    def _end(self, inventory: Inventory, key: str) -> None:
        from airflow_tfps.hook import ClusterHook

        try:
            with ClusterHook(inventory=inventory) as hook:
                hook.stop_key(key, "the Airflow task was killed", grace_secs=0)
        except TfpsError as error:
            self.log.warning("%s; its lease ends what is left", error)

    def _start(
        self,
        context: Context,
        hook: ClusterHook,
        source: Source,
        training: TrainingId,
        *,
        since: float,
        count: int,
    ) -> NoReturn:
        job, begun = self._job(context, hook, source, training)
        try:
            handle = hook.ensure(
                job, training, wait=False, lease_secs=UNHEARD_LEASE_SECS, chief_host=source.host
            )
        except BusyError as error:
            queue(self, "begin_again", error, job, since, count=count)
        store = context["task_state_store"]
        try:
            store.set(HANDLE_KEY, handle.to_json())
            store.set(BEGUN_KEY, begun)
            store.set(PIN_KEY, _pin_of(source))
            context["ti"].xcom_push(TRAINING_XCOM, str(training))
            hook.launch(handle)
        except BaseException:
            self._stop(hook, handle, "it could not be started")
            raise
        self.log.info("%s: started %s", training, handle.of(handle.chief).label)
        is_ours = self.command is None and self.script is None
        self.defer(
            trigger=TrainingTrigger(handle=handle.to_json(), exits_are_final=is_ours),
            method_name="finish",
            kwargs={"count": count},
            timeout=None,
        )

    def _key(self, context: Context) -> str:
        """DAG, run, task and map index: no training's, for no group has the id of a task."""
        ti = context["ti"]
        return training_key(
            ti.dag_id, ti.run_id, ti.task_id, ti.map_index if ti.map_index is not None else -1
        )

    def _current(self, context: Context) -> Handle:
        from airflow_tfps.handle import Handle

        return Handle.from_json(context["task_state_store"].get(HANDLE_KEY))

    # --- the pin

    def _is_pinned(self, hook: ClusterHook, source: Source) -> bool:
        """Whether a checkpoint that came with a pin has it, which is renewed; or gets it again from its trainer."""
        if source.pin is None:
            return True
        try:
            hook.pin(source.host, **source.pin, step=source.global_step)
        except CommandError as error:
            if error.code not in ("not_found", "pins"):
                raise
            return False
        return True

    def _outcome(self, context: Context, source: Source) -> Any:
        """What came of a checkpoint whose pin is gone: what this task has kept of it. Else there is nothing to do."""
        kept: Any = context["task_state_store"].get(OUTCOME_KEY)
        if isinstance(kept, dict) and kept.get("checkpoint") == source.checkpoint:
            self.log.info("%s was released after this task had done its work", source.checkpoint)
            if "skipped" in kept:
                raise AirflowSkipException(kept["skipped"])
            tell_assets(self, context, kept["result"])
            return kept["result"]
        reason = (
            f"{source.checkpoint} is not pinned any more: whoever was told of it before has done with it and released "
            "it (an event may be told twice), or nobody has used it for a week"
        )
        self.log.info("%s", reason)  # Airflow shows no reason of a skip
        raise AirflowSkipException(reason)

    def _releases(self) -> bool:
        """Whether the pin is released in the end: nobody else of this DAG may still need it."""
        return not self._others() if self.release_pin is None else self.release_pin

    def _others(self) -> list[str]:
        """Tasks that evaluate or promote after this one, or beside it or those that it has the pin from."""
        dag = self.get_dag()
        if dag is None:
            return []
        kinds = {t.task_id: t.operator_class if isinstance(t, MappedOperator) else type(t) for t in dag.tasks}
        alike = {task_id for task_id, kind in kinds.items() if issubclass(kind, Assessing)}
        me = dag.get_task(self.task_id)
        mine = {self.task_id, *alike.intersection(me.get_flat_relative_ids(upstream=True))}
        given = set().union(*(dag.get_task(task_id).upstream_task_ids for task_id in mine))
        after = me.get_flat_relative_ids(upstream=False)
        return sorted(t for t in alike - mine if t in after or dag.get_task(t).upstream_task_ids & given)

    def _let_go(self, context: Context, hook: ClusterHook, host: str, outcome: Mapping[str, Any]) -> None:
        """Release the pin, and keep what came of it: were this try's end lost, another could not do the work again."""
        store = context["task_state_store"]
        pin: Any = store.get(PIN_KEY)
        if not pin:
            return
        if not self._releases():
            self.log.info("its pin is kept; for %s", ", ".join(self._others()) or "whoever releases it")
            return
        store.set(OUTCOME_KEY, {"checkpoint": pin["checkpoint"], **outcome})
        try:
            hook.release_pins(host, pin["directory"], pin["owner"], step=pin["global_step"])
        except TfpsError as error:
            self.log.warning("%s; the pin's lease ends it", error)


def _pin_of(source: Source) -> dict[str, Any]:
    """As JSON that may be kept: Airflow keeps no null."""
    if source.pin is None:
        return {}
    return {**source.pin, "global_step": source.global_step, "checkpoint": source.checkpoint}


def assessment_of(
    operator: Assessing,
    hook: ClusterHook,
    source: Source,
    inputs: Mapping[str, Any] | None,
    program: str | None,
) -> Assessment:
    from airflow_tfps.evaluation import Assessment
    from airflow_tfps.spec_files import folder_of

    return Assessment(
        hook, source, inputs=inputs, program=program, gpus=operator.gpus, base_dir=folder_of(operator)
    )


def output_of(value: Any) -> Any:
    """A group's or an operator's result; anything else as it is."""
    return value.output if isinstance(value, (TaskGroup, BaseOperator)) else value  # type: ignore[union-attr]


def job_name_of(value: Any) -> str | None:
    """The name of the job that a group, an operator or an operator's result is about, if that is known by now."""
    if isinstance(value, XComArg):
        value = getattr(value, "operator", None)
    name = getattr(value, "job_name", None)
    return name if isinstance(name, str) else None
