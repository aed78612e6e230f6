"""The inventory: the hosts that one may use.

Reads mappings, YAML files and Airflow connections; asks no host anything. Airflow is imported only when a
connection has to be looked up and the caller brought no function of its own.

    Inventory.load({"gpu-a": 4, "gpu-b": 4})        # names are ssh connection ids, values are GPUs
    Inventory.load("gpu_lab")                       # a connection of type tfps or ssh
    Inventory.load("hosts.yaml", base_dir=dag_folder)
    Inventory.load(["gpu_a", "gpu_b"])              # ssh connection ids
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self

from tfps_runtime.protocol import LOCAL

from airflow_tfps.errors import SpecError
from airflow_tfps.fields import (
    NAME,
    NOT_IN_YAML,
    Convert,
    Matches,
    NotEmpty,
    Range,
    Reader,
    is_known,
    join,
    nearest,
    show,
    to_plain,
    yaml_fields,
)
from airflow_tfps.yaml_text import YamlError, parse_yaml

LOOPBACK = "127.0.0.1"
CONNECTION_TYPE = "tfps"
"""Of the Airflow connection whose extra holds an inventory."""

_ADDRESS = Matches(r"(?!-)[A-Za-z0-9._:%-]{1,255}", "a host name or an IP address")
_NO_OPTION = Matches(r"(?!-).*", "a name or a path, and not begin with a dash")
_MAX_PATH = Matches(r".{0,2000}", "a path of at most 2,000 characters")
_LOWEST_PORT, _HIGHEST_PORT = 1024, 65535


class ConnectionLike(Protocol):
    """What is read of an Airflow connection."""

    conn_type: str | None
    host: str | None
    extra: str | None


GetConnection = Callable[[str], ConnectionLike]
"""Looks a connection up by its id; raises LookupError if there is none."""


def _ports(value: object) -> object:
    """`20000-29999` or `[20000, 29999]`, both ends included."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", value)):
        value = [int(match[1]), int(match[2])]
    match value:
        case [int(first), int(last)] if not isinstance(first, bool) and not isinstance(last, bool):
            if _LOWEST_PORT <= first <= last <= _HIGHEST_PORT:
                return (first, last)
    shown = "-".join(map(show, value)) if isinstance(value, list) and len(value) == 2 else show(value)
    allowed = f"from {_LOWEST_PORT} to {_HIGHEST_PORT}"
    raise ValueError(f"must be a range of ports like 20000-29999, {allowed}, is {shown}")


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """A host. Short form: just its GPUs."""

    SHORT: ClassVar[str] = "gpus"

    name: str = field(default="", metadata=NOT_IN_YAML)
    """The key in `hosts`; what logs, plans and pages call it."""
    ssh_conn_id: Annotated[str, NotEmpty()] = ""
    """Airflow connection of type ssh; default: the name. `local` is this machine, without SSH."""
    address: Annotated[str, _ADDRESS] = ""
    """Where the other hosts reach its TF tasks; default: the connection's host."""
    gpus: Annotated[int, Range(0, 64)] | None = None
    """How many GPUs one may use; default: as many as `nvidia-smi` reports."""
    python: Annotated[str, NotEmpty(), _NO_OPTION, _MAX_PATH] = "python3"
    """Its Python, the one that has TensorFlow."""
    workdir: Annotated[str, Matches(r"(/|~/).+", "an absolute path, or begin with ~/"), _MAX_PATH] = "~/.tfps"
    """Directory on the host for programs, logs and checkpoints; several hosts may share it."""
    ports: Annotated[tuple[int, ...], Convert(_ports)] = (20000, 29999)
    """Ports for its TF tasks, first and last."""

    @property
    def is_local(self) -> bool:
        """Whether it is this very machine, reached without SSH."""
        return self.ssh_conn_id == LOCAL

    @property
    def is_loopback(self) -> bool:
        """Whether its address is understood by itself only."""
        return self.address in ("localhost", "::1") or self.address.startswith("127.")

    def endpoint(self, port: int) -> str:
        """`address:port` as TensorFlow's ClusterSpec wants it."""
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"


_DEFAULTS = ("gpus", "python", "workdir", "ports")
"""What `defaults` may set for all hosts."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The hosts one may use, in the order in which they were written. Every host has its address."""

    hosts: Mapping[str, HostSpec]
    """Name to host."""

    def __getitem__(self, name: str) -> HostSpec:
        return self.hosts[name]

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.hosts)

    def subset(self, names: Collection[str]) -> Inventory:
        """The hosts of these names, in the inventory's order."""
        return Inventory(hosts={name: host for name, host in self.hosts.items() if name in names})

    @classmethod
    def load(
        cls,
        hosts: str | Path | Sequence[str] | Mapping[str, Any] | Inventory,
        *,
        base_dir: Path | None = None,
        get_connection: GetConnection | None = None,
    ) -> Inventory:
        """The inventory that a DAG author named. Blocks while connections are looked up; asks no host.

        Args:
            hosts: A path ending in .yaml or .yml (relative to `base_dir`), any other text being the id of a
                connection of type `tfps` or `ssh`; a list of ssh connection ids; or a mapping.
            base_dir: What a relative path is relative to.
            get_connection: Looks a connection up; default: Airflow's.

        Raises:
            SpecError: with every fault, unknown connections among them.
        """
        if isinstance(hosts, Inventory):
            return hosts
        get_connection = get_connection or _airflow_connection
        data: object = hosts
        what = "inventory"
        if isinstance(hosts, Path) or (isinstance(hosts, str) and hosts.endswith((".yaml", ".yml"))):
            path = (base_dir or Path()) / Path(hosts).expanduser()
            what = f"inventory {path}"
            data = _read_file(path, what)
        elif isinstance(hosts, str) and hosts != LOCAL:
            what = f"inventory {hosts}"
            data = _read_connection(hosts, get_connection, what)
        elif isinstance(hosts, str):
            data = [hosts]
        reader = Reader()
        specs = _read_hosts(reader, data, "")
        resolved = {path: _with_address(reader, path, host, get_connection) for path, host in specs.items()}
        _refuse_doubles(reader, resolved)
        if reader.faults:
            raise SpecError(what, reader.faults)
        return cls(hosts={host.name: host for host in resolved.values()})

    def to_dict(self) -> dict[str, Any]:
        """Compact JSON for XComs: what is default is left out. `from_dict` reads it back."""
        hosts = {}
        for name, host in self.hosts.items():
            data = to_plain(host)
            if host.ssh_conn_id == name:
                del data["ssh_conn_id"]
            if "ports" in data:
                data["ports"] = "-".join(map(str, host.ports))
            hosts[name] = data
        return {"hosts": hosts}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; looks nothing up. Raises SpecError with every fault."""
        reader = Reader()
        specs = _read_hosts(reader, data, "")
        for path, host in specs.items():
            if is_known(host.address) and not host.address:
                reader.fault(f"{path}.address", "is missing")
        _refuse_doubles(reader, specs)
        if reader.faults:
            raise SpecError("inventory", reader.faults)
        return cls(hosts={host.name: host for host in specs.values()})


# --- where it comes from --------------------------------------------------------------------------


def _airflow_connection(conn_id: str) -> ConnectionLike:
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        connection: ConnectionLike = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException as error:
        raise LookupError(str(error)) from None
    return connection


def _read_file(path: Path, what: str) -> object:
    try:
        return parse_yaml(path.read_text("utf-8"))
    except OSError as error:
        raise SpecError(what, [f"the file cannot be read: {error.strerror}"]) from None
    except (YamlError, UnicodeDecodeError) as error:
        raise SpecError(what, [str(error)]) from None


def _read_connection(conn_id: str, get_connection: GetConnection, what: str) -> object:
    """The inventory in a connection's extra; a connection of type ssh is an inventory of one host."""
    try:
        connection = get_connection(conn_id)
    except LookupError:
        hint = f"add it, or end the name in .yaml if {conn_id} is a file"
        raise SpecError(what, [f"hosts: there is no connection {conn_id}; {hint}"]) from None
    if connection.conn_type == "ssh":
        return [conn_id]
    if connection.conn_type != CONNECTION_TYPE:
        kind = f"must be of type {CONNECTION_TYPE} or ssh, is {show(connection.conn_type)}"
        raise SpecError(what, [f"the connection {kind}"])
    try:
        extra = json.loads(connection.extra or "{}")
    except ValueError as error:
        raise SpecError(what, [f"the connection's extra is not JSON: {error}"]) from None
    if not isinstance(extra, dict):
        raise SpecError(what, ["the connection's extra must be a JSON object with hosts and defaults"])
    data: dict[str, object] = {"hosts": None}
    faults = []
    for key in ("hosts", "defaults"):  # other keys may be another tool's
        value = extra.get(key)
        try:
            data[key] = parse_yaml(value) if isinstance(value, str) else value
        except YamlError as error:
            faults.append(f"{key}: {error}")
    if faults:
        raise SpecError(what, faults)
    return data


# --- reading --------------------------------------------------------------------------------------


def _read_hosts(reader: Reader, data: object, path: str) -> dict[str, HostSpec]:
    """Path to host, for all hosts that could be read in part at least."""
    defaults: dict[str, Any] = {}
    if isinstance(data, Mapping) and "hosts" in data:
        for key in data:
            if key not in ("hosts", "defaults"):
                hint = nearest(key, ("hosts", "defaults")) or "; known are hosts, defaults"
                reader.fault(join(path, key), f"unknown key{hint}")
        defaults = _read_defaults(reader, data.get("defaults"), join(path, "defaults"))
        path, data = join(path, "hosts"), data["hosts"]
    if isinstance(data, (list, tuple)):
        entries = _entries_of_list(reader, data, path)
    elif isinstance(data, Mapping):
        entries = [(join(path, name), name, value) for name, value in data.items()]
    else:
        reader.fault(path or "hosts", f"must be a mapping or a list of ssh connection ids, is {show(data)}")
        return {}
    if not data:
        reader.fault(path or "hosts", "must not be empty: name at least one host")
    specs = {}
    for where, name, value in entries:
        host = _read_host(reader, where, name, value, defaults)
        if is_known(host):
            specs[where] = host
    return specs


def _entries_of_list(reader: Reader, data: Sequence[object], path: str) -> list[tuple[str, object, object]]:
    entries: list[tuple[str, object, object]] = []
    for i, name in enumerate(data):
        where = f"{path or 'hosts'}[{i}]"
        if not isinstance(name, str):
            reader.fault(where, f"must be an ssh connection id, is {show(name)}")
        elif name in data[:i]:
            reader.fault(where, f"{name} is listed twice")
        else:
            entries.append((where, name, None))
    return entries


def _read_defaults(reader: Reader, data: object, path: str) -> dict[str, Any]:
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        reader.fault(path, f"must be a mapping, is {show(data)}")
        return {}
    own = [key.name for key in yaml_fields(HostSpec)]
    known = {}
    for key, value in data.items():
        if key in _DEFAULTS:
            known[key] = value
        elif key in own:
            reader.fault(join(path, key), "is each host's own; write it there")
        else:
            hint = nearest(key, _DEFAULTS) or f"; known are {', '.join(_DEFAULTS)}"
            reader.fault(join(path, key), f"unknown key{hint}")
    host = reader.read(HostSpec, known, path)
    values = {key: getattr(host, key) for key in known}
    return {key: value for key, value in values.items() if is_known(value)}


def _read_host(reader: Reader, path: str, name: object, data: object, defaults: Mapping[str, Any]) -> Any:
    """A HostSpec with UNKNOWN where it has faults, or UNKNOWN."""
    if not isinstance(name, str) or (message := NAME(name)):
        what = message if isinstance(name, str) else f"must be text, is {show(name)}; put it into quotes"
        return reader.fault(path, f"the host's name {what}")
    if isinstance(data, (list, tuple)):
        return reader.fault(path, "must be a mapping or the number of GPUs, is a list")
    if not isinstance(data, Mapping):
        data = {} if data is None else {HostSpec.SHORT: data}
    own = {key: value for key, value in data.items() if value is not None}
    host = reader.read(HostSpec, {"ssh_conn_id": name, **defaults, **own}, path)
    return replace(host, name=name)


def _with_address(reader: Reader, path: str, host: HostSpec, get_connection: GetConnection) -> HostSpec:
    address: Any = host.address
    if not is_known(host.ssh_conn_id):
        return host
    if host.is_local:
        address = address or LOOPBACK
    else:
        found = _address_of(reader, path, host.ssh_conn_id, get_connection)
        address = address if address or not is_known(address) else found
    return replace(host, address=address)


def _address_of(reader: Reader, path: str, conn_id: str, get_connection: GetConnection) -> Any:
    where = f"{path}.ssh_conn_id"
    try:
        connection = get_connection(conn_id)
    except LookupError:
        return reader.fault(where, f"there is no connection {conn_id}; add one of type ssh")
    if connection.conn_type != "ssh":
        return reader.fault(
            where, f"connection {conn_id} must be of type ssh, is {show(connection.conn_type)}"
        )
    if not connection.host:
        return reader.fault(where, f"connection {conn_id} has no host")
    if message := _ADDRESS(connection.host):
        return reader.fault(where, f"the host of connection {conn_id} {message}; write the host's address")
    return connection.host


def _refuse_doubles(reader: Reader, specs: Mapping[str, HostSpec]) -> None:
    """The same machine under two names would be given out twice."""
    seen: dict[tuple[str, str], str] = {}
    for path, host in specs.items():
        if not (is_known(host.address) and is_known(host.ssh_conn_id)):
            continue
        machine = (host.address, host.ssh_conn_id)
        if machine in seen:
            reader.fault(
                path,
                f"is {seen[machine]} once more (address {host.address}, connection {host.ssh_conn_id}); "
                "if that is meant, give them different addresses, such as 127.0.0.2",
            )
        seen.setdefault(machine, host.name)
