"""The cluster as one TF task sees it: its server, whom it talks to, and what is placed where.

cluster = Cluster.from_context(context)
server = cluster.start_server(cluster.config(context.session))
with cluster.placement():
    ...                         # variables go to the ps, everything else stays on this replica
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

import tensorflow.compat.v1 as tf
from google.protobuf import json_format

from tfps_runtime.failure import first_line
from tfps_runtime.protocol import Task, TaskContext
from tfps_runtime.training.model import ProgramError

PS = "ps"


@dataclass(frozen=True)
class Cluster:
    """Addresses of all TF tasks, and which of them this process is. Without addresses: one process, no server."""

    task: Task = Task("worker", 0)  # noqa: RUF009  (frozen, so shared safely)
    chief: Task = Task("worker", 0)  # noqa: RUF009
    addresses: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def from_context(cls, context: TaskContext) -> Cluster:
        """Raises ProgramError if between-graph replication is impossible on this cluster."""
        if not context.cluster:
            return cls()
        cluster = cls(context.name, Task.parse(context.chief), context.cluster)
        if cluster.task.index >= len(cluster.addresses.get(cluster.task.role, ())):
            raise ProgramError(f"{cluster.task} is not in the cluster {dict(cluster.addresses)}")
        if len(cluster.replicas) > 1 and not cluster.ps_count:
            raise ProgramError("replicas share variables through ps tasks: give the job at least one ps")
        return cluster

    @property
    def is_local(self) -> bool:
        return not self.addresses

    @property
    def is_ps(self) -> bool:
        return self.task.role == PS

    @property
    def is_chief(self) -> bool:
        return self.task == self.chief

    @property
    def ps_count(self) -> int:
        return len(self.addresses.get(PS, ()))

    @property
    def replicas(self) -> tuple[Task, ...]:
        """The TF tasks that train, the chief first: their order is the order of shards and tokens."""
        if self.is_local:
            return (self.task,)
        workers = (Task("worker", i) for i in range(len(self.addresses.get("worker", ()))))
        return (self.chief, *(worker for worker in workers if worker != self.chief))

    @property
    def replica_index(self) -> int:
        return self.replicas.index(self.task)

    @property
    def device(self) -> str:
        """Where this replica's ops go; empty in one process."""
        return "" if self.is_local else f"/job:{self.task.role}/task:{self.task.index}"

    @contextlib.contextmanager
    def input_device(self) -> Iterator[None]:
        """Input runs on this replica's CPU, whatever op it is made of."""
        with tf.device(self.device + "/device:CPU:0"):
            yield

    @contextlib.contextmanager
    def placement(self) -> Iterator[None]:
        """Global variables are spread over the ps by size; local variables and all other ops stay here."""
        if not self.ps_count:
            with tf.device(self.device):
                yield
            return
        setter = tf.train.replica_device_setter(
            ps_device=f"/job:{PS}/device:CPU:0",
            worker_device=self.device,
            cluster=tf.train.ClusterSpec(self.addresses),
            ps_strategy=balance_by_bytes(self.ps_count),
        )
        with tf.device(setter), tf.variable_creator_scope(self._keep_local_variables):
            yield

    def _keep_local_variables(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        # The device setter looks at the kind of op only, and would share this replica's local variables (tf.metrics,
        # the synchroniser's step) with every other replica on a ps.
        if tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get("collections") or ()):
            with tf.device(self.device):
                return next_creator(**kwargs)
        return next_creator(**kwargs)

    def config(self, session: Mapping[str, Any]) -> Any:
        """A ConfigProto of the job's `session` (proto JSON names), with device filters.

        Filters: a replica talks to the ps and to itself. Without them each session waits for every TF task of the
        cluster, and one lost worker stops them all (tensorflow/tensorflow#14662).
        """
        config = tf.ConfigProto()
        try:
            json_format.ParseDict(dict(session), config)
        except json_format.ParseError as error:
            raise ProgramError(f"the job's session options: {first_line(error)}") from None
        if not self.is_local and not self.is_ps:
            config.device_filters[:] = [f"/job:{PS}", self.device]
        return config

    def start_server(self, config: Any) -> Any:
        """Start this TF task's server; it listens when this returns.

        Raises tf.errors.UnavailableError if its port is taken.
        """
        try:
            return tf.train.Server(
                tf.train.ClusterSpec(self.addresses),
                job_name=self.task.role,
                task_index=self.task.index,
                config=config,
            )
        except tf.errors.UnknownError as error:  # "Could not start gRPC server"
            address = self.addresses[self.task.role][self.task.index]
            raise tf.errors.UnavailableError(
                None, None, f"{self.task} cannot listen at {address}: {error.message}"
            ) from error

    def unreachable_ps(self, timeout_secs: float = 1.0) -> list[str]:
        """The ps tasks whose port takes no connection now, each as `ps:0 (10.0.0.1:2222)`. Blocks for each."""
        return [
            f"{PS}:{index} ({address})"
            for index, address in enumerate(self.addresses.get(PS, ()))
            if not _is_listening(address, timeout_secs)
        ]


def serve(addresses: Mapping[str, list[str]], task: Task) -> Any:
    """A server for one TF task of a cluster in this process; it listens when this returns, for as long as it lives."""
    return tf.train.Server(tf.train.ClusterSpec(addresses), job_name=task.role, task_index=task.index)


def balance_by_bytes(tasks: int) -> Callable[[Any], int]:
    """A strategy for `replica_device_setter`: each variable goes to the ps with the fewest bytes so far.

    Depends only on the order in which a graph makes its variables, so every replica that builds the same graph gets
    the same placement. An optimizer's slots are counted where they would have gone, though they are colocated with
    their variable; they are made last, when nothing is left to place.
    """
    load = [0] * tasks

    def choose(op: Any) -> int:
        task = load.index(min(load))
        load[task] += _bytes_of(op)
        return task

    return choose


def _bytes_of(op: Any) -> int:
    shape = tf.TensorShape(op.get_attr("shape"))
    elements: int | None = shape.num_elements()
    size: int = tf.as_dtype(op.get_attr("dtype")).size or 1
    return max(1, (elements or 0) * size)


def _is_listening(address: str, timeout_secs: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_secs):
            return True
    except OSError:
        return False
