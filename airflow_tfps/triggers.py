"""Triggers: they observe and renew the lease; they start nothing, restart nothing and hold no worker slot.

Imported by DAG files through the operators, so nothing heavy is imported here. A trigger ends with one event; the
operator's resume carries out what it says.

What Airflow does to a trigger, and what follows (measured on 3.3.2): `on_kill` comes on mark failed, mark success,
clear, a deleted run and a run's time-out, but also when the trigger merely moves to another triggerer, and it is
cancelled again after about a second; so the work is done in a task of its own, after asking Airflow what has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_tfps.asking import UNKNOWN_STATE, ask, state_of, task_state, until_log_is_read, xcom_request
from airflow_tfps.errors import TfpsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from airflow_tfps.handle import Handle
    from airflow_tfps.judge import Rules

log = logging.getLogger(__name__)

TRAINING_XCOM = "tfps_training"
"""Key of the XCom in which a deferred task says which training it waits for."""
PROGRESS_XCOM = "progress"
PROGRESS_SECS = 3.0
SETTLE_SECS = 3.0
"""How long a verdict waits for the last `progress` to be written."""
UNSURE_LEASE_SECS = 30.0

_kills: set[asyncio.Task[None]] = set()
"""Stops under way: the event loop itself keeps no reference to its tasks."""


async def _let_the_task_end(where: Any, began: float) -> None:
    """Wait until the task `where`, deferred at `began` (monotonic), has ended for the scheduler, too; and for the log.

    A worker may notice `min_heartbeat_interval` seconds late that the process of a deferred task has ended. If the task
    is queued again by then, the scheduler takes that old end for the new process's and fails the task (3.3.2,
    `process_executor_events`).
    """
    from airflow.sdk.configuration import conf

    if where is None:  # `dag.test()`
        return
    late = conf.getfloat("workers", "min_heartbeat_interval", fallback=5.0) + 1.0
    await asyncio.sleep(max(began + late - time.monotonic(), 0.0))
    await until_log_is_read()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End tasks and wait for their ends; what they were about to say does not matter."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _HandleTrigger(BaseTrigger):
    """A trigger about one training; with `ends_training`, a kill by the user ends that."""

    def __init__(self, *, handle: Mapping[str, Any], ends_training: bool, version: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle = dict(handle)
        self.ends_training = ends_training
        self.version = version
        self._has_fired = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        return name, {"handle": self.handle, "ends_training": self.ends_training, "version": self.version}

    def _handle(self) -> Handle:
        from airflow_tfps.handle import Handle

        return Handle.from_json(self.handle)

    async def on_kill(self) -> None:
        """The user ended the task, or the trigger has only moved: ask Airflow, then stop the training or leave it."""
        task = asyncio.get_running_loop().create_task(self._end())
        _kills.add(task)
        task.add_done_callback(_kills.discard)
        await asyncio.shield(task)
        await until_log_is_read()

    async def _end(self) -> None:
        from airflow_tfps import follow

        if self._has_fired or not self.ends_training:
            return
        handle = self._handle()
        waits = await self._task_waits_for(str(handle.training))
        if waits is True:
            log.info("%s: the trigger has moved, the training goes on", handle.training)
            return
        if waits is None:
            log.warning(
                "%s: Airflow does not answer; the hosts stop in %.0f s", handle.training, UNSURE_LEASE_SECS
            )
            await follow.renew(handle, UNSURE_LEASE_SECS)
            return
        log.info("%s: stopping, because the task was ended by the user", handle.training)
        # A host that is away is asked until its lease must have run out: it may come back before that.
        errors = await follow.stop(
            handle,
            "the Airflow task was ended by the user",
            patience_secs=handle.job.timeouts.lease_secs,
        )
        for host, error in errors.items():
            log.error("%s: could not be stopped, its lease will end it: %s", host, error)

    async def _task_waits_for(self, training: str) -> bool | None:
        """Whether the task is still deferred for this very training; None when Airflow does not say."""
        where = self.task_instance
        if where is None:
            return None
        state = await task_state(where, where.task_id)
        if state == UNKNOWN_STATE:
            return None
        if state != "deferred":
            return False
        said = await ask(xcom_request(where, TRAINING_XCOM))
        return getattr(said, "value", None) == training


class Notices:
    """Writes the XCom `progress` of the trigger's task beside the trigger's own work; best effort.

    Nobody waits for it: at the first request of all its triggers a triggerer builds Airflow's API in its own process,
    which takes 5 s of CPU, 20 s on a busy machine. Only the newest value is kept for writing. Under `dag.test()` a
    trigger has no way to write an XCom.
    """

    def __init__(self, where: Any) -> None:
        self._where = where
        self._next: Mapping[str, Any] | None = None
        self._writing: asyncio.Task[None] | None = None

    def put(self, value: Mapping[str, Any]) -> None:
        """Have a value written."""
        if self._where is None:
            return
        self._next = value
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def settle(self, secs: float) -> None:
        """Wait until the last value is written, for at most `secs`."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=secs)

    async def _write(self) -> None:
        while self._next is not None:
            value, self._next = self._next, None
            await ask(xcom_request(self._where, PROGRESS_XCOM, dict(value)))


class ReadyTrigger(_HandleTrigger):
    """Waits until every TF task but the chief can be reached from every host.

    One event: `{"ready": true}` or `{"ready": false, "reason": …}`. For a sensor it never stops anything: that may be
    cleared while the training goes on.
    """

    def __init__(self, *, handle: Mapping[str, Any], ends_training: bool = False, version: int = 1) -> None:
        super().__init__(handle=handle, ends_training=ends_training, version=version)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from airflow_tfps import follow
        from airflow_tfps.progress import Board
        from airflow_tfps.readiness import check_probes, probe_request

        began = time.monotonic()
        handle = self._handle()
        until = began + handle.job.timeouts.ready_secs
        through: set[str] = set()
        """TF tasks that have ended well: nobody can reach them, and nobody needs to."""

        async def probe(host: str) -> tuple[str, dict[str, Any]]:
            secs = max(until - time.monotonic(), 0.0)
            return host, await follow.probe(
                handle, host, probe_request(handle, host, secs, through), timeout=secs
            )

        if self.ends_training:  # from here on somebody stops it who is told to
            await follow.renew(handle, handle.job.timeouts.lease_secs)
        notices = Notices(self.task_instance)
        notices.put(Board(handle).to_json())
        found: dict[str, dict[str, Any]] = {}
        tasks: list[asyncio.Task[tuple[str, dict[str, Any]]]] = []
        try:
            while len(found) < len(handle.hosts):
                tasks = [asyncio.create_task(probe(host)) for host in handle.hosts if host not in found]
                for done in asyncio.as_completed(tasks):
                    host, answer = await done
                    found[host] = answer
                    ended = {str(task) for task in answer.get("through", ())} - through
                    if answer.get("failed") or ended:
                        break  # the other hosts wait in vain: for what comes after it, or for what has ended
                await _cancel(tasks)
                if answer.get("failed"):
                    break
                through |= ended
            check_probes(handle, found)
            event: dict[str, Any] = {"ready": True}
        except TfpsError as error:
            event = {"ready": False, "reason": str(error), "transient": error.transient}
        finally:
            await _cancel(tasks)
        await _let_the_task_end(self.task_instance, began)
        self._has_fired = True
        yield _event(event)


class TrainingTrigger(_HandleTrigger):
    """Follows a training until there is a verdict over it.

    One event: the `Verdict` as JSON. Meanwhile the chief's log goes to the task log, each line once over restarts of
    the triggerer, and a bounded XCom `progress` is kept up to date. A kill by the user stops the training on all hosts.

    Args:
        handle: The training's.
        ends_training: Whether a kill by the user ends it.
        exits_are_final: Whether exit codes 1-127 mean what the harness means by them; default: of harness programs.
        version: Of these arguments.
    """

    def __init__(
        self,
        *,
        handle: Mapping[str, Any],
        ends_training: bool = True,
        exits_are_final: bool | None = None,
        version: int = 1,
    ) -> None:
        super().__init__(handle=handle, ends_training=ends_training, version=version)
        self.exits_are_final = exits_are_final

    def serialize(self) -> tuple[str, dict[str, Any]]:
        name, arguments = super().serialize()
        return name, {**arguments, "exits_are_final": self.exits_are_final}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from tfps_runtime.protocol import Kind

        from airflow_tfps import follow
        from airflow_tfps.judge import UNREACHABLE, Verdict, judge
        from airflow_tfps.progress import Board

        began = time.monotonic()
        handle = self._handle()
        rules = _rules(handle, exits_are_final=self.exits_are_final)
        board = Board(handle)
        events: list[Mapping[str, Any]] = []
        verdict = None
        notices, sent = Notices(self.task_instance), 0.0
        messages = follow.follow(handle, lease_secs=handle.job.timeouts.lease_secs)
        try:
            async for message, follower in messages:
                kind = message["type"]
                for line in board.see(message):
                    log.info("%s", line)
                if kind == Kind.LOG:
                    _write_log(message)
                    await follower.acknowledge(message["task"], message["offset"])
                elif "seq" in message or kind in (Kind.GONE, UNREACHABLE):
                    host = message["host"]  # whose last such event is replaced
                    events = [
                        e for e in events if not (e["type"] == kind == UNREACHABLE and e["host"] == host)
                    ]
                    events.append(message)
                    verdict = judge(rules, events)
                now = time.monotonic()
                if verdict is not None or now - sent >= PROGRESS_SECS:
                    sent = now
                    notices.put(board.to_json(None if verdict is None else verdict.outcome))
                if verdict is not None:
                    break
        except TfpsError as error:
            verdict = Verdict(outcome="failed", reason=str(error), transient=error.transient)
        finally:
            await messages.aclose()
        if verdict is None:
            verdict = Verdict(
                outcome="failed", reason="every host's agent has ended without a result", transient=True
            )
        await notices.settle(SETTLE_SECS)
        await _let_the_task_end(self.task_instance, began)
        self._has_fired = True
        yield _event(verdict.to_json())


class QueueTrigger(BaseTrigger):
    """Lets some seconds pass before another look at hosts that are busy; nothing is held meanwhile."""

    def __init__(self, *, secs: float, version: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.secs = secs
        self.version = version

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "airflow_tfps.triggers.QueueTrigger", {"secs": self.secs, "version": self.version}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.sleep(self.secs)
        yield _event({})


def _event(payload: Mapping[str, Any]) -> TriggerEvent:
    return TriggerEvent(dict(payload))  # type: ignore[no-untyped-call]


def _rules(handle: Handle, *, exits_are_final: bool | None = None) -> Rules:
    from airflow_tfps.judge import Rules

    job = handle.job
    return Rules(
        tasks={str(t.task): t.host for t in handle.tasks},
        chief=str(handle.chief),
        mode=job.mode,
        replicas_to_aggregate=job.replicas_to_aggregate,
        success_policy=job.success_policy,
        unreachable_secs=job.timeouts.unreachable_secs,
        is_in_graph=job.replication == "in_graph",
        exits_are_final=job.program is not None if exits_are_final is None else exits_are_final,
    )


def _write_log(message: Mapping[str, Any]) -> None:
    for line in message["lines"]:
        log.info("[%s@%s] %s", message["task"], message["host"], line)


class CheckpointTrigger(BaseTrigger):
    """Waits for complete checkpoints in a directory on a host, which pushes them as they appear, or in object storage.

    One event: `{"checkpoint": {...}}`, or with null and a `reason`; `skip` says that the training ended first, `late`
    that the time was over. With `which="every"` the event is `{"checkpoints": [...]}`, with a `reason` when no more
    will come.

    Args:
        host: An inventory of one host, as JSON; None for object storage.
        directory: On that host, or a URL.
        training: Handle of the training, for `which="final"`.
        which: `latest`, `every` or `final`.
        min_step: Only global steps from here on.
        newer_than: Only checkpoints whose index is younger, in seconds since the epoch.
        train_task_id: The task whose end ends the waiting.
        train_run: Where that is, if not in the trigger's run and map index: `{"dag_id", "run_id", "map_index"}`.
        deadline: In seconds since the epoch.
        after: For `every`, what was found before: `{"global_step", "time"}`.
        pin: For `every` on a host, the owner for whom each is pinned.
        room: For `every`, how many to take at most.
        poll_secs: Between two looks into object storage.
    """

    TRAIN_POLL_SECS = 5.0
    """Airflow pushes nothing to a trigger: whether train is over must be asked."""
    GATHER_SECS = 1.0
    """What comes within so short a time after the first goes into the same event."""
    CLOSE_SECS = 10.0

    def __init__(
        self,
        *,
        host: Mapping[str, Any] | None,
        directory: str,
        deadline: float,
        training: Mapping[str, Any] | None = None,
        which: str = "latest",
        min_step: int = 0,
        newer_than: float = 0.0,
        train_task_id: str | None = None,
        train_run: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
        pin: str | None = None,
        room: int = 20,
        poll_secs: float = 30.0,
        version: int = 1,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.host = None if host is None else dict(host)
        self.directory = directory
        self.deadline = deadline
        self.training = None if training is None else dict(training)
        self.which = which
        self.min_step = min_step
        self.newer_than = newer_than
        self.train_task_id = train_task_id
        self.train_run = None if train_run is None else dict(train_run)
        self.after = None if after is None else dict(after)
        self.pin = pin
        self.room = room
        self.poll_secs = poll_secs
        self.version = version
        self._trouble: str | None = None
        """Why the directory cannot be looked at just now."""
        self._has_looked = False
        self._is_over = asyncio.Event()
        """Set when the training's task is over in Airflow."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "airflow_tfps.triggers.CheckpointTrigger", {
            "host": self.host,
            "directory": self.directory,
            "deadline": self.deadline,
            "training": self.training,
            "which": self.which,
            "min_step": self.min_step,
            "newer_than": self.newer_than,
            "train_task_id": self.train_task_id,
            "train_run": self.train_run,
            "after": self.after,
            "pin": self.pin,
            "room": self.room,
            "poll_secs": self.poll_secs,
            "version": self.version,
        }

    @property
    def _room(self) -> int:
        return self.room if self.which == "every" else 1

    async def run(self) -> AsyncIterator[TriggerEvent]:
        began = time.monotonic()
        found: list[dict[str, Any]] = []
        arrived = asyncio.Event()
        watching = asyncio.create_task(self._watch(found, arrived))
        try:
            event = await self._event(watching, found, arrived)
        except TfpsError as error:
            event = {"reason": str(error), "transient": error.transient}
        finally:
            if len(found) < self._room:  # else it is about to end, and closes its connection
                watching.cancel()
            await asyncio.wait({watching}, timeout=self.CLOSE_SECS)
            watching.cancel()
        if self.which == "every":
            event["checkpoints"] = found[: self.room]
        else:
            event["checkpoint"] = found[0] if found else None
        await _let_the_task_end(self.task_instance, began)
        yield _event(event)

    async def _event(
        self, watching: asyncio.Task[None], found: list[dict[str, Any]], arrived: asyncio.Event
    ) -> dict[str, Any]:
        """Wait for what ends the waiting: `found`, or a reason why there will be nothing."""
        looking = asyncio.create_task(arrived.wait())
        try:
            while True:
                left = self.deadline - time.time()
                limit = max(min(left, self.TRAIN_POLL_SECS), 0.0)
                await asyncio.wait({watching, looking}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()
                if found:
                    if self.which == "every" and len(found) < self.room:
                        await asyncio.wait({watching}, timeout=self.GATHER_SECS)
                    return {}
                if left <= 0:
                    reason = f"no complete checkpoint in {self.directory} in time"
                    return {"late": True, "reason": reason + (f": {self._trouble}" if self._trouble else "")}
                if await self._train_is_over():
                    self._is_over.set()
                    while not (self._has_looked or self._trouble or found or time.time() > self.deadline):
                        await asyncio.wait(
                            {watching, looking}, timeout=0.1, return_when=asyncio.FIRST_COMPLETED
                        )
                        if watching.done():
                            watching.result()
                    secs = self.TRAIN_POLL_SECS + (self.poll_secs if self.host is None else 0.0)
                    await asyncio.wait({watching, looking}, timeout=secs, return_when=asyncio.FIRST_COMPLETED)
                    if found:
                        return {}
                    if self._trouble:  # what it left cannot be seen: that is no reason to skip
                        return {"reason": self._trouble, "transient": True}
                    kind = "newer" if self.after is not None else "such"
                    reason = f"the training is over and left no {kind} checkpoint in {self.directory}"
                    return {"skip": True, "reason": reason}
        finally:
            looking.cancel()

    async def _watch(self, found: list[dict[str, Any]], arrived: asyncio.Event) -> None:
        """Put what is found into `found`, until there is no more room."""
        from airflow_tfps.inventory import Inventory
        from airflow_tfps.watch import watch

        spec = None
        if self.host is not None:
            [spec] = Inventory.from_dict(self.host).hosts.values()
        if self.which == "final" and self.training is not None:
            await self._training_has_ended()
        cursor: dict[str, Any] = {}
        if self.which == "every":
            after = self.after or {"global_step": -1, "time": 0.0}
            cursor = {"after_step": int(after["global_step"]), "after_time": float(after["time"])}
        found_here = watch(
            spec,
            self.directory,
            **cursor,
            min_step=self.min_step,
            newer_than=self.newer_than,
            newest=self.which == "final",
            pin=self.pin if spec is not None else None,
            at_most=self._room,
            until=self.deadline,
            poll_secs=self.poll_secs,
            on_trouble=self._note,
        )
        async with contextlib.aclosing(found_here):
            async for one in found_here:
                found.append({**one, "host": None if spec is None else spec.name})
                arrived.set()
                if len(found) >= self._room:
                    return

    def _note(self, trouble: str | None) -> None:
        self._trouble = trouble
        self._has_looked = self._has_looked or trouble is None

    async def _training_has_ended(self) -> None:
        """Wait until the training has succeeded, or its task is over in Airflow: one that failed may be tried again."""
        tasks = [asyncio.create_task(self._verdict()), asyncio.create_task(self._is_over.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done() and not tasks[0].result() and self.train_task_id is not None:
                await self._is_over.wait()
        finally:
            await _cancel(tasks)

    async def _verdict(self) -> bool:
        """Wait for the verdict over the training: whether it has succeeded. Renews no lease."""
        from airflow_tfps import follow
        from airflow_tfps.handle import Handle
        from airflow_tfps.judge import judge

        assert self.training is not None
        handle = Handle.from_json(self.training)
        events = []
        messages = follow.follow(handle, lease_secs=None)
        try:
            async for message, _ in messages:
                events.append(message)
                verdict = judge(_rules(handle), events) if "seq" in message else None
                if verdict is not None:
                    return verdict.outcome == "succeeded"
        finally:
            await messages.aclose()
        return False

    async def _train_is_over(self) -> bool:
        where = self.task_instance
        if where is None or self.train_task_id is None:
            return False
        place = self.train_run or {
            "dag_id": where.dag_id, "run_id": where.run_id, "map_index": where.map_index
        }  # fmt: skip
        state = await state_of(task_id=self.train_task_id, **place)
        return state in ("success", "failed", "skipped", "upstream_failed", "removed")
