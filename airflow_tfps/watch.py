"""Watching a checkpoint directory on a host from an event loop: the host looks, and pushes what is complete."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from airflow_tfps import follow, forms, remote
from airflow_tfps.errors import HostUnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_tfps.inventory import HostSpec


async def watch(
    spec: HostSpec, directory: str, *, after_step: int = -1, newer_than: float = 0.0, newest: bool = False
) -> AsyncIterator[dict[str, Any]]:
    """Complete checkpoints of a directory as they appear, by global step, over lost connections. Endless.

    With `newest` only the newest of those that are there at the first look comes, and later ones after it.
    Yields `{"checkpoint": prefix, "global_step", "size", "time"}`. Raises what the host refuses.
    """
    from airflow_tfps.ssh import Completed, connect_async

    failures = 0
    while True:
        try:
            async with await connect_async(remote.endpoint(spec)) as transport:
                request = {
                    "directory": directory,
                    "after_step": after_step,
                    "newer_than": newer_than,
                    "newest": newest,
                    "follow": True,
                }
                async with transport.stream(
                    remote.argv(spec, "checkpoints"), remote.request_line(request)
                ) as stream:
                    async for message in _messages(spec.name, stream):
                        failures = 0
                        found = forms.checkpoint_of(spec.name, message)
                        if found is not None and found.global_step > after_step:
                            after_step = found.global_step
                            yield {
                                "checkpoint": found.prefix,
                                "global_step": found.global_step,
                                "size": found.size,
                                "time": found.time,
                            }
                if remote.lacks_runtime(
                    Completed(returncode=stream.returncode or 0, stdout=b"", stderr=stream.stderr)
                ):
                    await follow.install(transport, spec)
                elif stream.returncode:
                    raise remote.not_ready(
                        spec.name,
                        "checkpoints",
                        Completed(returncode=stream.returncode, stdout=b"", stderr=stream.stderr),
                    )
        except HostUnreachableError:
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
