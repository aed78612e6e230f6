"""Commands about checkpoint directories: `checkpoints` tells what is complete as it appears, `pin` keeps it.

Standard library only. A watcher that pins goes on for a while after its follower has gone, without a word: a sensor
that hands over what it has found, or a triggerer that dies, must not miss what the trainer deletes meanwhile. The next
watcher of the same owner tells what was pinned, and the former ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any, Optional

from tfps_runtime.answers import say
from tfps_runtime.checkpoint import Checkpoint, complete_checkpoints, watch
from tfps_runtime.pins import (
    PIN_SECS,
    PINS_AT_MOST,
    Pin,
    pin as pin_checkpoint,
    pins,
    pins_dir,
    release,
    renew,
    sweep,
)
from tfps_runtime.protocol import Kind, ProtocolError, RefusedError, digest

BEAT_EVERY_SECS = 5.0
RENEW_EVERY_SECS = 600.0
POLL_SECS = 0.2
PINNING_POLL_SECS = 0.05
"""A trainer that keeps one checkpoint deletes it as soon as it has the next."""


def checkpoints(request: dict[str, Any]) -> None:
    """Complete checkpoints in a directory, one line each; with `follow`, new ones as they appear and beats between.

    Without `follow` the last line is the newest once more, or `caught_up` when there is none. With `pin`, each is
    pinned for that owner before it is told; what vanishes before it can be pinned is not told. With `at_most` it ends
    after so many. When its follower has gone it goes on pinning for `linger_secs`, but no more than were still wanted,
    and not when `wanted_secs` are over.
    """
    began = time.monotonic()
    directory = _directory(request)
    keeper = _Keeper(directory, str(request["pin"])) if request.get("pin") else None
    found = watch(
        directory,
        after_step=int(request.get("after_step", -1)),
        after_time=float(request.get("after_time", float("inf"))),
        min_step=int(request.get("min_step", 0)),
        newer_than=float(request.get("newer_than", 0.0)),
        newest=bool(request.get("newest")),
        poll_secs=POLL_SECS if keeper is None else PINNING_POLL_SECS,
        also=list if keeper is None else keeper.kept,
    )
    at_most = sys.maxsize if request.get("at_most") is None else int(request["at_most"])
    left = _tell(found, keeper, at_most, is_endless=bool(request.get("follow")))
    if keeper is not None and left:
        secs = float(request.get("linger_secs", 0.0))
        if request.get("wanted_secs") is not None:
            secs = min(secs, began + float(request["wanted_secs"]) - time.monotonic())
        _linger(found, keeper, secs, left)
    elif keeper is not None:
        keeper.leave()


def _tell(
    found: Iterator[Optional[Checkpoint]], keeper: Optional[_Keeper], left: int, *, is_endless: bool
) -> int:
    """Say what is found until nobody listens any more, or wants more; how many were still wanted."""
    newest: Optional[dict[str, Any]] = None
    has_looked = False
    said = time.monotonic()
    for checkpoint in found:
        if checkpoint is not None:
            message: dict[str, Any] = {"type": "checkpoint", "checkpoint": checkpoint.to_json()}
            if keeper is not None:
                is_gone, kept = keeper.keep(checkpoint)
                if is_gone:
                    continue
                message["pin"] = None if kept is None else kept.to_json()
            newest = message
            left -= 1
            try:
                say(message)
            except BrokenPipeError:
                _hush()
                return left
            if left <= 0:
                return 0
            continue
        if not is_endless:
            say({"type": Kind.CAUGHT_UP} if newest is None else newest)
            return 0
        if keeper is not None:
            keeper.renew()
        if not has_looked or time.monotonic() - said >= BEAT_EVERY_SECS:
            said = time.monotonic()
            kind = Kind.BEAT if has_looked else Kind.CAUGHT_UP
            has_looked = True
            try:
                say({"type": kind, "time": time.time()})
            except BrokenPipeError:
                _hush()
                return left
        if select.select([sys.stdin], [], [], 0)[0] and not os.read(sys.stdin.fileno(), 4096):
            return left
    return 0


def _hush() -> None:
    """Nobody reads any more: what is still to be flushed goes nowhere, instead of failing at the very end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def _linger(found: Iterator[Optional[Checkpoint]], keeper: _Keeper, secs: float, left: int) -> None:
    """Go on pinning in a process of its own until the next watcher of the owner comes, or the time is over."""
    if secs <= 0 or os.fork():
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    until = time.monotonic() + secs
    for checkpoint in found:
        if time.monotonic() > until or not keeper.is_the_last:
            break
        if checkpoint is not None:
            with contextlib.suppress(RefusedError):
                left -= keeper.keep(checkpoint)[1] is not None
            if left <= 0:
                break
    keeper.leave()
    os._exit(0)


class _Keeper:
    """Pins for an owner. The last watcher of an owner says so in a file, beside the pins."""

    def __init__(self, directory: str, owner: str) -> None:
        self._directory = directory
        self._owner = owner
        self._renewed = float("-inf")
        self._token = f"{os.getpid()} {time.time_ns()}"
        self._marker = os.path.join(pins_dir(directory), f".{digest(owner)}")
        self._is_marked = False
        sweep(directory)
        self._mark()

    def _mark(self) -> None:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(self._marker), 0o700)
            with open(self._marker, "w", encoding="ascii") as file:
                file.write(self._token)
            self._is_marked = True
        except FileNotFoundError:  # where the checkpoints will be is not there yet
            pass
        except OSError as error:
            raise RefusedError(
                "workdir", f"pins go to {os.path.dirname(self._marker)}: {error.strerror}"
            ) from None

    @property
    def is_the_last(self) -> bool:
        try:
            with open(self._marker, encoding="ascii", errors="replace") as file:
                return file.read() == self._token
        except OSError:
            return False

    def leave(self) -> None:
        """Nobody watches any more."""
        if self.is_the_last:
            with contextlib.suppress(OSError):
                os.unlink(self._marker)
                os.rmdir(os.path.dirname(self._marker))

    def kept(self) -> list[Checkpoint]:
        """The checkpoints that are pinned; their files in the trainer's directory may be gone."""
        return [one.checkpoint for one in pins(self._directory, self._owner)]

    def keep(self, checkpoint: Checkpoint) -> tuple[bool, Optional[Pin]]:
        """Whether it was gone, and its pin; without one when the owner has as many as it may."""
        if not self._is_marked:
            self._mark()
        taken = pins(self._directory, self._owner)
        if len(taken) >= PINS_AT_MOST and checkpoint not in [one.checkpoint for one in taken]:
            return False, None
        kept = pin_checkpoint(self._directory, checkpoint, self._owner)
        return kept is None, kept

    def renew(self) -> None:
        """Now and then, as long as somebody watches."""
        if time.monotonic() - self._renewed >= RENEW_EVERY_SECS:
            self._renewed = time.monotonic()
            renew(self._directory, self._owner)
            if self.is_the_last:
                self._mark()


def pin(request: dict[str, Any]) -> None:
    """Pins of a checkpoint directory: `action` is `pin`, `list` or `release`; answers with those that it is about.

    `pin` takes the complete checkpoint of `step`, or the newest, for `owner`, with a lease of `secs`. `list` gives the
    owner's, or all. `release` lets go of the owner's, or of the one of `step`. Every call sweeps.
    """
    directory = _directory(request)
    owner, action = request.get("owner"), request.get("action", "list")
    step = None if request.get("step") is None else int(request["step"])
    sweep(directory)
    if action == "list":
        found = pins(directory, owner)
    elif not isinstance(owner, str) or not owner:
        raise ProtocolError("owner is needed")
    elif action == "release":
        found = release(directory, owner, step)
        if step is None:
            with contextlib.suppress(OSError):  # ends a watcher that lingers
                os.unlink(os.path.join(pins_dir(directory), f".{digest(owner)}"))
                os.rmdir(pins_dir(directory))
    elif action == "pin":
        found = [_pin_one(directory, owner, step, float(request.get("secs", PIN_SECS)))]
    else:
        raise ProtocolError(f"action {str(action)[:40]!r} is none of pin, list, release")
    say({"type": "pins", "pins": [one.to_json() for one in found]})


def _pin_one(directory: str, owner: str, step: Optional[int], secs: float) -> Pin:
    taken = {one.global_step: one for one in pins(directory, owner)}
    for _ in range(10):  # the newest may be deleted in favour of the next
        wanted = [c for c in complete_checkpoints(directory) if step in (None, c.global_step)]
        if not wanted and step in taken:
            wanted = [taken[step].checkpoint]
        if not wanted:
            break
        if len(taken) >= PINS_AT_MOST and wanted[-1].global_step not in taken:
            raise RefusedError("pins", f"{owner} has {len(taken)} pins of {directory}: release some")
        found = pin_checkpoint(directory, wanted[-1], owner, secs=secs)
        if found is not None:
            return found
    what = "no complete checkpoint" if step is None else f"no complete checkpoint of global step {step}"
    raise RefusedError("not_found", f"there is {what} in {directory}")


def _directory(request: dict[str, Any]) -> str:
    directory = request["directory"]
    if not isinstance(directory, str) or not directory or "\0" in directory:
        raise ProtocolError("directory is needed")
    return os.path.expanduser(directory)
