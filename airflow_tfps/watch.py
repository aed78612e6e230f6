"""Watching a checkpoint directory from an event loop: on a host, which looks and pushes what is complete, or in object
storage, which is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from tfps_runtime.checkpoint import Checkpoint
from tfps_runtime.protocol import ProtocolError

from airflow_tfps import follow, forms, remote
from airflow_tfps.errors import CommandError, HostUnreachableError, SpecError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

    from airflow_tfps.inventory import HostSpec

log = logging.getLogger(__name__)

LINGER_SECS = 120.0
"""A watcher on a host goes on pinning for this long after its follower has gone."""
POLL_SECS = 30.0
"""Between two looks into object storage."""


def is_object_storage(directory: str) -> bool:
    """Whether a directory is a URL of object storage rather than a path on a host."""
    return "://" in directory


async def watch(
    spec: HostSpec | None,
    directory: str,
    *,
    after_step: int = -1,
    after_time: float | None = None,
    min_step: int = 0,
    newer_than: float = 0.0,
    newest: bool = False,
    pin: str | None = None,
    at_most: int | None = None,
    until: float | None = None,
    poll_secs: float = POLL_SECS,
    on_trouble: Callable[[str | None], None] = lambda _: None,
) -> AsyncGenerator[dict[str, Any]]:
    """Complete checkpoints of a directory as they appear, by global step, over lost connections; endless, or `at_most`.

    Yields `{"checkpoint": prefix, "global_step", "size", "time"}`, with `pin` also `{"pin": {"directory", "owner"}}`,
    null where it could not be pinned; then `checkpoint` is that in the pin. Raises what the host refuses, SpecError for
    object storage that cannot be used.

    Args:
        spec: The host; None for object storage.
        directory: On the host, or a URL.
        after_step: Only what comes after this cursor: a higher global step, or
        after_time: a younger one, for a training that begins again in the same directory.
        min_step: Only global steps from here on.
        newer_than: Only those written from then on, in seconds since the epoch.
        newest: Only the newest of those that are there at the first look, and later ones after it.
        pin: The owner for whom the host pins each before it tells it. Not in object storage.
        at_most: How many are wanted: the host pins no more.
        until: Until when any are wanted, in seconds since the epoch: the host pins none later.
        poll_secs: Between two looks into object storage.
        on_trouble: Told why there is no answer just now, and None when there is one again.
    """
    request: dict[str, Any] = {
        "directory": directory, "after_step": after_step, "min_step": min_step, "newer_than": newer_than,
        "newest": newest,
    }  # fmt: skip
    if after_time is not None:
        request["after_time"] = after_time
    if spec is None:
        messages = _from_storage(request, poll_secs, on_trouble)
    else:
        if pin is not None:
            request.update(pin=pin, linger_secs=LINGER_SECS)
        if at_most is not None:
            request["at_most"] = at_most
        messages = _from_host(spec, {**request, "follow": True}, until, on_trouble)
    async with contextlib.aclosing(messages):
        async for message in messages:
            found = _read(spec, message)
            answer = {
                "checkpoint": found.prefix, "global_step": found.global_step, "size": found.size, "time": found.time,
            }  # fmt: skip
            if pin is not None:
                kept = message.get("pin")
                answer["pin"] = None
                if isinstance(kept, dict) and isinstance(kept.get("prefix"), str):
                    answer.update(checkpoint=kept["prefix"], pin={"directory": directory, "owner": pin})
            yield answer


def _read(spec: HostSpec | None, message: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint that a message tells of. Raises CommandError for one that makes no sense."""
    name = "object storage" if spec is None else spec.name
    try:
        found = (
            Checkpoint.from_json(message["checkpoint"])
            if spec is None
            else forms.checkpoint_of(name, message)
        )
    except ProtocolError as error:
        raise CommandError(name, f"checkpoints: {error}", transient=False) from None
    if found is None:
        raise CommandError(name, "checkpoints: a message without a checkpoint", transient=False)
    return found


# --- on a host ------------------------------------------------------------------------------------------------------


async def _from_host(
    spec: HostSpec, request: dict[str, Any], until: float | None, on_trouble: Callable[[str | None], None]
) -> AsyncGenerator[dict[str, Any]]:
    """The host's messages that tell of a checkpoint; `request` keeps where one stands."""
    from airflow_tfps.ssh import Completed, connect_async

    failures, trouble = 0, None
    while True:
        if until is not None:
            request["wanted_secs"] = max(until - time.time(), 0.0)
        try:
            async with await connect_async(remote.endpoint(spec)) as transport:
                argv = remote.argv(spec, "checkpoints")
                async with transport.stream(argv, remote.request_line(request)) as stream:
                    async for message in _messages(spec.name, stream):
                        failures, trouble = 0, None
                        on_trouble(None)
                        if message.get("type") == "checkpoint":
                            found = _read(spec, message)
                            request["after_step"] = max(request["after_step"], found.global_step)
                            if "after_time" in request:
                                request["after_time"] = max(request["after_time"], found.time)
                            if "at_most" in request:
                                request["at_most"] -= 1
                            yield message
                            if request.get("at_most") == 0:
                                return
                ended = Completed(returncode=stream.returncode or 0, stdout=b"", stderr=stream.stderr)
                if remote.lacks_runtime(ended):
                    await follow.install(transport, spec)
                elif ended.returncode:
                    raise remote.not_ready(spec.name, "checkpoints", ended)
                else:
                    raise HostUnreachableError(spec.name, "the watch of the directory has ended by itself")
        except HostUnreachableError as error:
            on_trouble(str(error))
            if str(error) != trouble:
                trouble = str(error)
                log.warning("%s; trying again", error)
            await asyncio.sleep(follow.BACKOFF_SECS[min(failures, len(follow.BACKOFF_SECS) - 1)])
            failures += 1


async def _messages(host: str, stream: Any) -> AsyncIterator[dict[str, Any]]:
    lines = aiter(stream)
    while True:
        try:
            async with asyncio.timeout(follow.SILENT_SECS):
                line = await anext(lines)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise HostUnreachableError(host, f"no word for {follow.SILENT_SECS:.0f} s") from None
        message = remote.read_line(host, line)
        if message is not None:
            yield message


async def standing(spec: HostSpec | None, directory: str) -> tuple[int, float]:
    """The highest global step and the youngest time of what is complete in a directory now; -1 and 0.0 without any.

    Raises what the host refuses, HostUnreachableError, CommandError for object storage that does not answer.
    """
    if spec is None:
        from airflow_tfps.storage import Storage

        try:
            found = await asyncio.to_thread(lambda: Storage(directory).complete())
        except (ImportError, ValueError) as error:
            raise SpecError(directory, [f"object storage that cannot be used: {error}"]) from None
        except OSError as error:
            raise CommandError("object storage", f"{directory}: {error}", transient=True) from None
    else:
        from airflow_tfps.ssh import connect_async

        async with await connect_async(remote.endpoint(spec)) as transport:
            answers = await follow.call_for_all(transport, spec, "checkpoints", {"directory": directory})
        found = [one for one in (forms.checkpoint_of(spec.name, answer) for answer in answers) if one]
    return max((c.global_step for c in found), default=-1), max((c.time for c in found), default=0.0)


# --- in object storage ----------------------------------------------------------------------------------------------


async def _from_storage(
    request: dict[str, Any], poll_secs: float, on_trouble: Callable[[str | None], None]
) -> AsyncGenerator[dict[str, Any]]:
    """The same, from looks in a thread: what the libraries of object stores do may block."""
    from airflow_tfps.storage import Storage

    try:
        storage = await asyncio.to_thread(Storage, request["directory"])
    except (ImportError, ValueError) as error:
        raise SpecError(request["directory"], [f"object storage that cannot be used: {error}"]) from None
    after_step, after_time = request["after_step"], request.get("after_time")
    trouble = None
    while True:
        began = time.monotonic()
        fresh = []
        try:
            fresh = [
                c
                for c in await asyncio.to_thread(storage.complete)
                if (c.global_step > after_step or (after_time is not None and c.time > after_time))
                and c.global_step >= request["min_step"]
                and c.time >= request["newer_than"]
            ]
            trouble = None
            on_trouble(None)
        except OSError as error:
            on_trouble(str(error))
            if str(error) != trouble:
                trouble = str(error)
                log.warning("%s: %s; looking again every %.0f s", request["directory"], error, poll_secs)
        for found in fresh[-1:] if request["newest"] else fresh:
            after_step = max(after_step, found.global_step)
            yield {"type": "checkpoint", "checkpoint": found.to_json()}
        if after_time is not None:
            after_time = max(after_time, *(c.time for c in fresh), after_time)
        await asyncio.sleep(max(poll_secs - (time.monotonic() - began), 0.0))
