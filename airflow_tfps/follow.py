"""Following a training from an event loop: one connection per host, pushed events, and nothing started or decided.

For triggers. Reconnects with back-off and resumes by sequence number; acknowledges log lines, so that the next follower
does not repeat them; renews the lease. `stop` is here too, for a trigger that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from tfps_runtime.protocol import BEAT_SECS, Kind, dump

from airflow_tfps import deploy, forms, remote
from airflow_tfps.errors import CommandError, HostUnreachableError, TfpsError
from airflow_tfps.judge import UNREACHABLE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from airflow_tfps.handle import Handle
    from airflow_tfps.inventory import HostSpec
    from airflow_tfps.ssh import AsyncTransport

log = logging.getLogger(__name__)

SILENT_SECS = 4 * BEAT_SECS
"""A follower that has heard nothing for this long takes the link for lost."""
RENEW_SECS = 30.0
MAX_EVENTS = 20_000
"""Numbered messages of one host: a training has a handful for each start of a TF task."""
BACKOFF_SECS = (0.5, 1.0, 2.0, 5.0, 10.0)
COMMAND_SECS = 60.0


async def call(
    transport: AsyncTransport,
    spec: HostSpec,
    command: str,
    request: Mapping[str, Any],
    *,
    timeout: float = COMMAND_SECS,
) -> dict[str, Any]:
    """Run one command of the runtime on a host; its last answer."""
    return (await call_for_all(transport, spec, command, request, timeout=timeout))[-1]


async def call_for_all(
    transport: AsyncTransport,
    spec: HostSpec,
    command: str,
    request: Mapping[str, Any],
    *,
    timeout: float = COMMAND_SECS,
) -> list[dict[str, Any]]:
    """As `call`, for commands that answer with several lines; there is at least one."""
    completed = await transport.run(remote.argv(spec, command), remote.request_line(request), timeout=timeout)
    if remote.lacks_runtime(completed):
        await install(transport, spec)
        completed = await transport.run(
            remote.argv(spec, command), remote.request_line(request), timeout=timeout
        )
    found = remote.answers(spec.name, command, completed)
    if not found:
        raise remote.not_ready(spec.name, command, completed)
    for answer in found if command == "checkpoints" else found[-1:]:
        forms.check_answer(spec.name, command, request, answer)
    return found


async def install(transport: AsyncTransport, spec: HostSpec) -> None:
    """Bring the runtime to a host that has another version of it: this side was upgraded while the training ran."""
    runtime = await asyncio.to_thread(deploy.build_runtime)
    await transport.run(remote.install_argv(spec), runtime.content, timeout=COMMAND_SECS)


class HostFollower:
    """One host's events of a training, as an endless stream over lost connections.

    Yields the agent's messages with the `host` added, and an `unreachable` event about every second while there is no
    connection. Ends after the agent's last word, or after `gone`.
    """

    def __init__(self, handle: Handle, host: str, *, logs: tuple[str, ...], lease_secs: float | None) -> None:
        self._handle = handle
        self._spec = handle.spec(host)
        self._host = host
        self._logs = logs
        self._lease_secs = lease_secs
        self._seen = 0
        self._events = 0
        self._told: dict[str, int] = {}
        """TF task -> offset up to which its log was heard."""
        self._stream: Any = None
        self._lost_since: float | None = None
        self.is_caught_up = False
        """Whether what it tells now happens now, and is no history."""
        self._tasks = frozenset(str(placed.task) for placed in handle.on(host))

    async def ask_for_stacks(self) -> None:
        """Have every TF task on this host write the stacks of its threads into its log. A lost link is no error."""
        await self._send({"dump": True})

    async def acknowledge(self, task: str, offset: int) -> None:
        """Tell the agent that a log was written down up to `offset`. A lost link is no error."""
        await self._send({"ack": {"task": task, "offset": offset}})

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError, TfpsError, TimeoutError):
                async with asyncio.timeout(BEAT_SECS):
                    await self._stream.send(dump(dict(message)))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """See the class. Raises HostKeyError and AuthenticationError: waiting does not mend those."""
        failures = 0
        while True:
            try:
                async for message in self._connected():
                    failures = 0
                    if self._lost_since is not None:
                        self._lost_since = None
                        yield self._unreachable()  # for no seconds: it is back
                    yield message
                    if message.get("last") is True or message["type"] == Kind.GONE:
                        return
                raise HostUnreachableError(self._host, "the follower's connection ended")
            except (HostUnreachableError, CommandError, TimeoutError) as error:
                if isinstance(error, CommandError) and not error.transient:
                    raise
                if self._lost_since is None:
                    self._lost_since = time.monotonic()
                    log.info("%s: connection lost (%s); reconnecting", self._host, error)
            pause = BACKOFF_SECS[min(failures, len(BACKOFF_SECS) - 1)]
            failures += 1
            until = time.monotonic() + pause
            while (left := until - time.monotonic()) > 0:
                yield self._unreachable()
                await asyncio.sleep(min(left, 1.0))

    def _unreachable(self) -> dict[str, Any]:
        since = self._lost_since
        return {
            "type": UNREACHABLE,
            "host": self._host,
            "secs": 0.0 if since is None else time.monotonic() - since,
        }

    async def _connected(self) -> AsyncIterator[dict[str, Any]]:
        from airflow_tfps.ssh import Completed, connect_async

        async with await connect_async(remote.endpoint(self._spec)) as transport:
            request = {
                **self._handle.request(self._host),
                "from_seq": self._seen,
                "logs": list(self._logs),
                "told": self._told,
                **({} if self._lease_secs is None else {"renew": self._lease_secs}),
            }
            argv = remote.argv(self._spec, "follow")
            async with transport.stream(argv, remote.request_line(request)) as stream:
                self._stream, self.is_caught_up = stream, False
                try:
                    async for message in self._messages(stream):
                        yield message
                finally:
                    self._stream = None
                if remote.lacks_runtime(
                    Completed(returncode=stream.returncode or 0, stdout=b"", stderr=stream.stderr)
                ):
                    await install(transport, self._spec)

    async def _messages(self, stream: Any) -> AsyncIterator[dict[str, Any]]:
        lines = aiter(stream)
        renewed = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(SILENT_SECS):
                    line = await anext(lines)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise HostUnreachableError(self._host, f"no word for {SILENT_SECS:.0f} s") from None
            said = remote.read_line(self._host, line)
            message = None if said is None else forms.message_of(self._host, said, self._tasks)
            if message is None:
                continue
            if self._lease_secs is not None and time.monotonic() - renewed >= RENEW_SECS:
                renewed = time.monotonic()
                await self._send({"renew": self._lease_secs})
            if "seq" in message:
                self._events += 1
                self._seen = max(self._seen, message["seq"])
                if self._events > MAX_EVENTS:
                    raise CommandError(self._host, f"sent more than {MAX_EVENTS} events", code="protocol")
            if message["type"] == Kind.CAUGHT_UP:
                self.is_caught_up = True
            if message["type"] == Kind.LOG:
                self._told[message["task"]] = message["offset"]
            yield {**message, "host": self._host}


async def follow(
    handle: Handle, *, lease_secs: float | None
) -> AsyncGenerator[tuple[dict[str, Any], HostFollower]]:
    """The events of all hosts of a training as they come, each with the follower that heard it.

    Without `lease_secs` it only watches: no lease is renewed, and no log is read, since each line is told only once.
    With it, a stall on one host has the TF tasks of all others dump their stacks, too, before the kill.
    Ends when every host has said its last word. Raises what a host's follower raises.
    """
    chief = handle.chief_host
    followers = [
        HostFollower(
            handle,
            host,
            logs=(str(handle.chief),) if host == chief and lease_secs is not None else (),
            lease_secs=lease_secs,
        )
        for host in handle.hosts
    ]
    queue: asyncio.Queue[tuple[HostFollower, dict[str, Any] | BaseException | None]] = asyncio.Queue(100)

    async def pump(follower: HostFollower) -> None:
        try:
            async for message in follower.events():
                if lease_secs is not None and message.get("stalled") is True and follower.is_caught_up:
                    # What a TF task waits for is often seen on another host; its own agent has asked there already.
                    await asyncio.gather(*(f.ask_for_stacks() for f in followers if f is not follower))
                await queue.put((follower, message))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  carried to whoever iterates
            await queue.put((follower, error))
        else:
            await queue.put((follower, None))

    tasks = [asyncio.create_task(pump(f)) for f in followers]
    left = len(tasks)
    try:
        while left:
            follower, message = await queue.get()
            if message is None:
                left -= 1
            elif isinstance(message, BaseException):
                raise message
            else:
                yield message, follower
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def probe(handle: Handle, host: str, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
    """Wait on a host until the addresses in `request` can be reached; over lost connections, up to `timeout`."""
    from airflow_tfps.ssh import connect_async

    spec = handle.spec(host)
    until = time.monotonic() + timeout
    attempt = 0
    while True:
        left = max(until - time.monotonic(), 0.0)
        try:
            async with await connect_async(remote.endpoint(spec)) as transport:
                wanted = {**request, "timeout_secs": left}
                return await call(transport, spec, "probe", wanted, timeout=left + COMMAND_SECS)
        except HostUnreachableError:
            if left <= 0:
                raise
        await asyncio.sleep(BACKOFF_SECS[min(attempt, len(BACKOFF_SECS) - 1)])
        attempt += 1


async def stop(handle: Handle, reason: str, *, patience_secs: float = 0.0) -> dict[str, TfpsError]:
    """End a training on all its hosts, the chief's first; returns the hosts where that failed, with the error.

    Hosts that cannot be reached are tried again for `patience_secs`; their lease ends them otherwise. The others wait
    for the chief's host until it has ended, since it may save, or until it could not be reached once.
    """
    errors: dict[str, TfpsError] = {}
    chief_was_asked = asyncio.Event()

    async def end(host: str) -> None:
        if host != handle.chief_host:
            await chief_was_asked.wait()
        try:
            await _stop_host(handle, host, reason, patience_secs, missed=chief_was_asked)
        except TfpsError as error:
            errors[host] = error
        if host == handle.chief_host:
            chief_was_asked.set()

    await asyncio.gather(*(end(host) for host in handle.hosts))
    return errors


async def _stop_host(
    handle: Handle, host: str, reason: str, patience_secs: float, *, missed: asyncio.Event
) -> None:
    """End a training on a host; `missed` is set when that could not be reached."""
    from airflow_tfps.ssh import connect_async

    spec, grace = handle.spec(host), handle.job.timeouts.grace_secs
    until = time.monotonic() + patience_secs
    attempt = 0
    while True:
        try:
            async with await connect_async(remote.endpoint(spec)) as transport:
                request = {**handle.request(host), "reason": reason}
                await call(transport, spec, "stop", request, timeout=2 * grace + COMMAND_SECS)
                return
        except HostUnreachableError as error:
            missed.set()
            if time.monotonic() >= until:
                raise
            if attempt == 0:
                log.warning("%s; trying again for %.0f s", error, patience_secs)
        await asyncio.sleep(BACKOFF_SECS[min(attempt, len(BACKOFF_SECS) - 1)])
        attempt += 1


async def renew(handle: Handle, secs: float) -> None:
    """Let every host end the training by itself in `secs`, be that sooner or later than before; best effort."""
    from airflow_tfps.ssh import connect_async

    async def one(host: str) -> None:
        spec = handle.spec(host)
        with contextlib.suppress(TfpsError):
            async with await connect_async(remote.endpoint(spec)) as transport:
                await call(transport, spec, "renew", {**handle.request(host), "lease_secs": secs})

    await asyncio.gather(*(one(h) for h in handle.hosts))
