"""Checkpoints of a training: saved by the chief on its own disk, found again by whoever comes next.

Only the checkpoint directory of the training is restored from; weights to start with (`start_from`) are read once,
when there is no checkpoint yet, and leave the global step at 0.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from tfps_runtime.checkpoint import complete_checkpoints, remove_unfinished
from tfps_runtime.failure import first_line
from tfps_runtime.protocol import CheckpointOptions
from tfps_runtime.training.model import ProgramError

_log = logging.getLogger("tfps")

NAME = "model.ckpt"


class Checkpoints:
    """Saves and restores the current graph's global variables. Build it inside the replica's placement.

    Args:
        options: directory (made if absent), times, how many to keep.
        start_from: prefix or directory of a checkpoint with weights to start from, or None.
        names: the model's names of variables -> those in `start_from`, see `Model.start_from_names`.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        start_from: str | None = None,
        names: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        self.directory = options.directory
        self._start_from = start_from
        # Unsharded, tensors come to the chief, whose disk alone gets the files. Sharded, each ps writes its part to
        # its own disk, which is of use only if that is everybody's disk.
        self._saver = tf.train.Saver(
            sharded=options.sharded,
            max_to_keep=options.max_to_keep,
            save_relative_paths=True,
            name="tfps/save",
        )
        self._warm = _WarmStart(start_from, names) if start_from is not None else None
        Path(self.directory).mkdir(parents=True, exist_ok=True)
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise ProgramError(f"the checkpoint directory {self.directory} is not writable")
        self._saver.recover_last_checkpoints(
            self._existing()
        )  # max_to_keep counts those of an earlier process too

    def restore(self, session: Any) -> None:
        """Load the newest checkpoint, or else the weights to start from, or leave the variables as they are.

        Raises ProgramError if the checkpoint belongs to another model.
        """
        newest = self.newest()
        if newest is not None:
            try:
                self._saver.restore(session, newest)
            except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, ValueError) as error:
                raise ProgramError(
                    f"{newest} does not fit the program's model: {first_line(error)}; "
                    "use a fresh checkpoint directory for a changed model"
                ) from error
            _log.info("restored %s", newest)
        elif self._warm is not None:
            self._warm.restore(session)
            _log.info("started from %d weights of %s", len(self._warm.names), self._start_from)

    def newest(self) -> str | None:
        """Prefix of the newest checkpoint in the directory."""
        existing = self._existing()
        return existing[-1] if existing else None

    def _existing(self) -> list[str]:
        """Prefixes of the complete checkpoints, by global step, whether or not the state file has heard of them.

        A process that was killed in a save, or a machine that lost its power, may leave that behind or empty.
        """
        return [
            found.prefix
            for found in complete_checkpoints(self.directory)
            if Path(found.prefix).name.startswith(f"{NAME}-")
        ]

    def save(self, session: Any, step: int) -> str:
        """Save as `model.ckpt-<step>`; blocks until the files are in place. Gives the prefix."""
        prefix: str = self._saver.save(session, str(Path(self.directory) / NAME), global_step=step)
        _log.info("saved %s", prefix)
        return prefix


class Saving:
    """The chief's checkpoints: every `every_secs`, and when the training ends without an error.

    Not at the start: a checkpoint of step 0 would look like news to whoever watches the directory.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        global_step: Any,
        every_secs: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints = checkpoints
        self._global_step = global_step
        self._every_secs = every_secs
        self._clock = clock
        self._due = clock() + every_secs
        self.latest: str | None = None
        """Prefix of the last one that this process saved."""

    def begin(self, session: Any, coord: Any) -> None:
        """Clear away what a save has left that was killed. A session has restored what there is."""
        del session, coord
        removed = remove_unfinished(self._checkpoints.directory, NAME)
        if removed:
            _log.info("removed %s, left by a save that was killed", ", ".join(removed))

    def look(self, session: Any, status: Any) -> bool:
        """Save if it is time; never ends the training."""
        del status
        if self._clock() >= self._due:
            self._save(session)
        return False

    def end(self, session: Any) -> None:
        self._save(session)

    def _save(self, session: Any) -> None:
        step = int(session.run(self._global_step))
        newest = self._checkpoints.newest()
        if newest is None or not newest.endswith(f"-{step}"):
            self.latest = self._checkpoints.save(session, step)
        self._due = self._clock() + self._every_secs


class _WarmStart:
    """Restores the model's variables, all but the global step, from a checkpoint of an earlier training."""

    def __init__(self, start_from: str, names: Mapping[str, str | None]) -> None:
        prefix = tf.train.latest_checkpoint(start_from) if Path(start_from).is_dir() else start_from
        if prefix is None or not tf.train.checkpoint_exists(prefix):
            raise ProgramError(f"start_from: there is no checkpoint at {start_from}")
        self._prefix = prefix
        shapes = tf.train.load_checkpoint(prefix).get_variable_to_shape_map()
        trainable = {variable.op.name for variable in tf.trainable_variables()}
        found: dict[str, list[Any]] = {}
        faults: list[str] = []
        for variable in tf.global_variables():
            if variable is tf.train.get_global_step():
                continue
            own, shape = saved_as(variable)
            name = _renamed(own, names)
            if name is None:
                continue
            if shapes.get(name) == shape:
                found.setdefault(name, []).append(variable)
            elif variable.op.name in trainable:
                there = f"has the shape {shapes[name]}" if name in shapes else "is absent"
                what = name if name == own else f"{name}, for {own},"
                faults.append(f"{what} {shape} {there}")
        if faults:
            raise ProgramError(f"start_from {prefix} does not fit the program's model: " + "; ".join(faults))
        if not found:
            raise ProgramError(f"start_from {prefix}: start_from_names leaves nothing to take from it")
        self.names = sorted(found)
        # Parts of one variable are restored under the name of the whole.
        self._saver = tf.train.Saver(
            {name: parts if len(parts) > 1 else parts[0] for name, parts in found.items()},
            name="tfps/start_from",
        )

    def restore(self, session: Any) -> None:
        self._saver.restore(session, self._prefix)


def _renamed(name: str, names: Mapping[str, str | None]) -> str | None:
    """The name in the checkpoint of the model's variable `name`; None: it is not taken from there."""
    if name in names:
        return names[name]
    prefixes = [prefix for prefix in names if prefix.endswith("/") and name.startswith(prefix)]
    if not prefixes:
        return name
    prefix = max(prefixes, key=len)
    there = names[prefix]
    return None if there is None else there + name[len(prefix) :]


def saved_as(variable: Any) -> tuple[str, list[int]]:
    """Name and shape under which a saver stores a variable: a partition's are those of the whole."""
    partition = variable._get_save_slice_info()  # noqa: SLF001  (there is no public way to ask)
    if partition is None:
        return variable.op.name, variable.shape.as_list()
    return partition.full_name, list(partition.full_shape)
