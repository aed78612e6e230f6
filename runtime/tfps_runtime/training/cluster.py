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
from tfps_runtime.training.placement import balance_by_bytes

PS = "ps"


@dataclass(frozen=True)
class Cluster:
    """Addresses of all TF tasks, and which of them this process is. Without addresses: one process, no server."""

    task: Task = Task("worker", 0)  # noqa: RUF009  (frozen, so shared safely)
    chief: Task = Task("worker", 0)  # noqa: RUF009
    addresses: Mapping[str, list[str]] = field(default_factory=dict)
    is_in_graph: bool = False
    """The chief builds one graph for all replicas and drives them; the others only serve."""

    @classmethod
    def from_context(cls, context: TaskContext) -> Cluster:
        """Raises ProgramError if the wanted replication is impossible on this cluster."""
        if not context.cluster:
            return cls()
        is_in_graph = context.replication == "in_graph"
        cluster = cls(context.name, Task.parse(context.chief), context.cluster, is_in_graph)
        if cluster.task.index >= len(cluster.addresses.get(cluster.task.role, ())):
            raise ProgramError(f"{cluster.task} is not in the cluster {dict(cluster.addresses)}")
        if len(cluster.replicas) > 1 and not cluster.ps_count and not is_in_graph:
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
    def is_server_only(self) -> bool:
        """Whether this task builds no graph and runs what others send: a ps, an in-graph worker."""
        return self.is_ps or (self.is_in_graph and not self.is_chief)

    @property
    def ps_count(self) -> int:
        return len(self.addresses.get(PS, ()))

    @property
    def replicas(self) -> tuple[Task, ...]:
        """The TF tasks that train, the chief first: their order is the order of shards and tokens."""
        if self.is_local:
            return (self.task,)
        roles = [role for role in self.addresses if role != PS] if self.is_in_graph else ["worker"]
        workers = (Task(role, i) for role in roles for i in range(len(self.addresses.get(role, ()))))
        return (self.chief, *(worker for worker in workers if worker != self.chief))

    @property
    def replica_index(self) -> int:
        return self.replicas.index(self.task)

    @property
    def device(self) -> str:
        """Where this replica's ops go; empty in one process."""
        return self.device_of(self.task)

    def device_of(self, task: Task) -> str:
        return "" if self.is_local else f"/job:{task.role}/task:{task.index}"

    @contextlib.contextmanager
    def input_device(self) -> Iterator[None]:
        """Input runs on this replica's CPU, whatever op it is made of."""
        with tf.device(self.device + "/device:CPU:0"):
            yield

    @contextlib.contextmanager
    def placement(self, replica: Task | None = None) -> Iterator[None]:
        """Global variables are spread over the ps by size; local variables and all other ops go to the replica.

        The replica is this task, or in-graph any other. Without a ps the variables are the chief's.
        """
        device = self.device_of(replica or self.task)
        if self.is_local or len(self.replicas) + self.ps_count == 1:
            with tf.device(device):
                yield
            return
        if self.ps_count:
            holder, count, strategy = PS, self.ps_count, balance_by_bytes(self.ps_count)
        else:
            holder, count, strategy = self.chief.role, 1, lambda _: self.chief.index
        setter = tf.train.replica_device_setter(
            ps_tasks=count,
            ps_device=f"/job:{holder}/device:CPU:0",
            worker_device=device,
            ps_strategy=strategy,
        )
        with tf.device(setter), tf.variable_creator_scope(_keep_local_variables(device)):
            yield

    def config(self, session: Mapping[str, Any]) -> Any:
        """A ConfigProto of the job's `session` (proto JSON names), with device filters.

        Filters: a replica talks to the ps and to itself. Without them each session waits for every TF task of the
        cluster, and one lost worker stops them all (tensorflow/tensorflow#14662). An in-graph chief does need all.
        """
        config = tf.ConfigProto()
        try:
            json_format.ParseDict(dict(session), config)
        except json_format.ParseError as error:
            raise ProgramError(f"the job's session options: {first_line(error)}") from None
        if not self.is_local and not self.is_ps and not self.is_in_graph:
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

    def unreachable(self, timeout_secs: float = 1.0) -> list[str]:
        """The TF tasks a session needs that take no connection now, as `ps:0 (10.0.0.1:2222)`. Blocks for each."""
        roles = self.addresses if self.is_in_graph else (PS,)
        return [
            f"{role}:{index} ({address})"
            for role in roles
            for index, address in enumerate(self.addresses.get(role, ()))
            if not _is_listening(address, timeout_secs)
        ]


def serve(addresses: Mapping[str, list[str]], task: Task) -> Any:
    """A server for one TF task of a cluster in this process; it listens when this returns, for as long as it lives."""
    return tf.train.Server(tf.train.ClusterSpec(addresses), job_name=task.role, task_index=task.index)


def _keep_local_variables(device: str) -> Callable[..., Any]:
    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        # The device setter looks at the kind of op only, and would share a replica's local variables (tf.metrics, say)
        # with every other replica on a ps.
        if tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get("collections") or ()):
            with tf.device(device):
                return next_creator(**kwargs)
        return next_creator(**kwargs)

    return create


def _is_listening(address: str, timeout_secs: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_secs):
            return True
    except OSError:
        return False
