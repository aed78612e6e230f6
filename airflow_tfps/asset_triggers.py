"""Triggers of assets: an event, and with it DAG runs, for each new complete checkpoint of a directory.

    checkpoints = Asset(
        "checkpoints",
        watchers=[AssetWatcher(name="ckpt", trigger=CheckpointEventTrigger(host="gpu_a", directory="/data/ckpt"))],
    )

    @dag(schedule=[checkpoints])
    def evaluate(): ...      # context["triggering_asset_events"][checkpoints][-1].extra["payload"]["checkpoint"]

Imported by DAG files: nothing heavy at import. Airflow starts such a trigger again when it ends, after a restart of the
triggerer, and on another one; what it has told is in the asset's state store, so that none is told again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Self

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_tfps.errors import SpecError, TfpsError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from airflow_tfps.inventory import HostSpec

log = logging.getLogger(__name__)

SEEN_KEY = "tfps_checkpoints"
SETTLED_SECS = 5.0
"""After so long an event of ours has reached Airflow, or its trigger was ended."""
AGAIN_SECS = 10.0
"""So long after the last of several events the last is told again.

An event that comes while the scheduler makes the run for the one before is recorded, but starts no run: the scheduler
takes its notice for the former one's (3.3.2, `_create_dag_runs_asset_triggered`). The next run gets it, too.
"""
RETRY_SECS = (5.0, 15.0, 60.0)


class CheckpointEventTrigger(BaseEventTrigger):
    """Tells each new complete checkpoint of a directory, once, in order; endless.

    An event's payload, `extra["payload"]` of the asset event, is `{"checkpoint", "global_step", "host", "size",
    "time", "again"}`; with `pin` also `pin`: `{"directory", "owner"}` for `ClusterHook.release_pins`, or null when the
    host could not pin it. After several events within ten seconds of each other the last is told once more, with
    `again`: that only brings along those of which Airflow made no run, and is itself no news.

    What lies there when the asset is watched for the first time is no news, unless `existing`. A training that begins
    again in the same directory, from a lower global step, is told.

    Args:
        directory: On `host`, or a URL of object storage.
        host: ssh connection id, or `local` for the triggerer's machine.
        hosts: Inventory that holds `host`, if it needs another interpreter or workdir than usual.
        min_step: Only global steps from here on.
        pin: Whether the host pins each before it is told, 20 at a time: whoever is started by the event releases it.
        existing: Whether what is there at the first look counts.
        poll_secs: Between two looks into object storage.
    """

    def __init__(
        self,
        *,
        directory: str,
        host: str = "local",
        hosts: str | Sequence[str] | Mapping[str, Any] | None = None,
        min_step: int = 0,
        pin: bool = False,
        existing: bool = False,
        poll_secs: float = 30.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.directory = directory
        self.host = host
        self.hosts = hosts
        self.min_step = min_step
        self.pin = pin
        self.existing = existing
        self.poll_secs = poll_secs
        self._told: dict[str, Any] | None = None
        """As `_seen`, and what was told since."""
        self._keeping: set[asyncio.Task[None]] = set()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "airflow_tfps.asset_triggers.CheckpointEventTrigger", {
            "directory": self.directory,
            "host": self.host,
            "hosts": self.hosts,
            "min_step": self.min_step,
            "pin": self.pin,
            "existing": self.existing,
            "poll_secs": self.poll_secs,
        }

    @property
    def owner(self) -> str:
        """For whom checkpoints are pinned: all runs that this trigger starts."""
        return f"asset/{self.host}/{self.directory}"

    async def run(self) -> AsyncIterator[TriggerEvent]:
        try:
            async with contextlib.aclosing(self._endless()) as events:
                async for event in events:
                    yield event
        finally:
            for task in self._keeping:
                task.cancel()

    async def _endless(self) -> AsyncGenerator[TriggerEvent]:
        failures, said = 0, ""
        while True:
            events = self._events()
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        failures, said = 0, ""
                        yield event
            except TfpsError as error:
                # To end would be to be started again at once, for ever.
                if str(error) != said:
                    said = str(error)
                    log.error("%s: %s; trying again", self.directory, said)  # noqa: TRY400  no traceback
            await asyncio.sleep(RETRY_SECS[min(failures, len(RETRY_SECS) - 1)])
            failures += 1

    async def _events(self) -> AsyncGenerator[TriggerEvent]:
        from airflow_tfps.watch import is_object_storage, watch

        spec = None if is_object_storage(self.directory) else await asyncio.to_thread(self._spec)
        seen = self._told = self._told or await self._seen(spec)
        found = watch(
            spec,
            self.directory,
            after_step=seen["global_step"],
            after_time=seen["time"],
            min_step=self.min_step,
            newer_than=seen["since"],
            pin=self.owner if self.pin and spec is not None else None,
            poll_secs=self.poll_secs,
        )
        payload: dict[str, Any] = {}
        told, is_owed = float("-inf"), False
        async with contextlib.aclosing(found), _Next(found) as coming:
            while True:
                one = await coming.take(AGAIN_SECS if is_owed else None)
                if one is None:
                    is_owed = False
                    yield TriggerEvent({**payload, "again": True})  # type: ignore[no-untyped-call]
                    continue
                payload = {**one, "host": None if spec is None else self.host, "again": False}
                yield TriggerEvent(payload)  # type: ignore[no-untyped-call]
                is_owed, told = time.monotonic() - told < AGAIN_SECS, time.monotonic()
                seen["global_step"] = max(seen["global_step"], one["global_step"])
                seen["time"] = max(seen["time"], one["time"])
                task = asyncio.create_task(self._keep_later(dict(seen)))
                self._keeping.add(task)
                task.add_done_callback(self._keeping.discard)

    def _spec(self) -> HostSpec:
        from airflow_tfps.inventory import Inventory

        inventory = Inventory.load([self.host] if self.hosts is None else self.hosts)
        if self.host not in inventory.hosts:
            raise SpecError("CheckpointEventTrigger", [f"host: {self.host} is not in the inventory"])
        return inventory[self.host]

    async def _seen(self, spec: HostSpec | None) -> dict[str, Any]:
        """The highest global step told, the youngest time, and from when on anything counts.

        At the first look that is what lies there, by the host's own clock: Airflow's may be another.
        """
        from airflow_tfps.watch import standing

        kept: Any = None
        if self.asset_state_store is not None:
            kept = await self.asset_state_store.aget(self._key)
        if isinstance(kept, dict):
            return {
                "global_step": int(kept["global_step"]),
                "time": float(kept["time"]),
                "since": float(kept["since"]),
            }
        step, youngest = (-1, 0.0) if self.existing else await standing(spec, self.directory)
        seen = {"global_step": step, "time": youngest, "since": 0.0}
        await self._keep(seen)
        return seen

    async def _keep_later(self, seen: Mapping[str, Any]) -> None:
        """Airflow takes no event of a trigger that it has forgotten, and ends that one only a moment later.

        What was told in that moment must be told again by the next trigger: twice rather than never.
        """
        await asyncio.sleep(SETTLED_SECS)
        await self._keep(seen)

    async def _keep(self, seen: Mapping[str, Any]) -> None:
        if self.asset_state_store is not None:
            await self.asset_state_store.aset(self._key, dict(seen))

    @property
    def _key(self) -> str:
        """An asset may be watched in several places."""
        from tfps_runtime.protocol import digest

        return f"{SEEN_KEY}/{digest(self.host, self.directory)}"


class _Next:
    """Takes what an endless iterator brings, or stops waiting for it without losing it."""

    def __init__(self, found: AsyncIterator[dict[str, Any]]) -> None:
        self._found = found
        self._coming: asyncio.Future[dict[str, Any]] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)

    async def take(self, secs: float | None) -> dict[str, Any] | None:
        """The next one; None when it does not come within `secs`."""
        if self._coming is None:
            self._coming = asyncio.ensure_future(anext(self._found))
        await asyncio.wait({self._coming}, timeout=secs)
        if not self._coming.done():
            return None
        coming, self._coming = self._coming, None
        return coming.result()
