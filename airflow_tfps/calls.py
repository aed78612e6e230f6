"""Calls of the runtime on hosts, for code that may block: connections, commands, uploads.

`hook.ClusterHook` is what others use. One connection per host serves all calls of a hook; hosts are asked side by side.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self, TypeVar

from airflow.sdk import BaseHook
from tfps_runtime.protocol import SweepRequest

from airflow_tfps import deploy, forms, remote
from airflow_tfps.errors import CommandError, HostError, HostNotReadyError, HostUnreachableError, TfpsError
from airflow_tfps.inventory import Inventory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from airflow_tfps.ssh import Transport

log = logging.getLogger(__name__)
T = TypeVar("T")

PARALLEL = 16
COMMAND_SECS = 60.0
UPLOAD_SECS = 1800.0


class HostsHook(BaseHook):
    """The hosts of an inventory, by connections that are made when they are needed.

    Without `inventory`, that of the Airflow connection `tfps_conn_id` (type `tfps`). Methods block.
    """

    conn_name_attr = "tfps_conn_id"
    default_conn_name = "tfps_default"
    conn_type = "tfps"
    hook_name = "TensorFlow parameter servers"

    def __init__(self, tfps_conn_id: str = default_conn_name, *, inventory: Inventory | None = None) -> None:
        super().__init__()
        self.tfps_conn_id = tfps_conn_id
        self._inventory = inventory
        self._transports: dict[str, Transport] = {}

    @property
    def inventory(self) -> Inventory:
        if self._inventory is None:
            self._inventory = Inventory.load(self.tfps_conn_id)
        return self._inventory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; what runs on the hosts goes on."""
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            with contextlib.suppress(OSError, TfpsError):
                transport.close()

    def test_connection(self) -> tuple[bool, str]:
        """For the connection form: reach every host and look at what it has."""
        try:
            reports = self.preflight()
        except TfpsError as error:
            return False, str(error)
        return True, f"{len(reports)} hosts are ready: " + ", ".join(sorted(reports))

    # --- talking ------------------------------------------------------------------------------------------------

    def connect(self, hosts: Iterable[str]) -> None:
        """Connect to hosts that are not connected yet; all or none."""
        from airflow_tfps.ssh import connect_all

        missing = [h for h in hosts if h not in self._transports]
        if missing:
            self._transports.update(connect_all([remote.endpoint(self.inventory[h]) for h in missing]))

    def call(
        self,
        host: str,
        command: str,
        request: Mapping[str, Any],
        *,
        content: bytes = b"",
        timeout: float = COMMAND_SECS,
    ) -> dict[str, Any]:
        """Run one command of the runtime on a host, bringing the runtime there first if need be; its last answer."""
        return self.call_for_all(host, command, request, content=content, timeout=timeout)[-1]

    def call_for_all(
        self,
        host: str,
        command: str,
        request: Mapping[str, Any],
        *,
        content: bytes = b"",
        timeout: float = COMMAND_SECS,
    ) -> list[dict[str, Any]]:
        """As `call`, for commands that answer with several lines; there is at least one."""
        spec, transport = self.inventory[host], self._transport(host)
        stdin = remote.request_line(request) + content
        try:
            completed = transport.run(remote.argv(spec, command), stdin, timeout=timeout)
            if remote.lacks_runtime(completed):
                runtime = deploy.build_runtime()
                log.info("%s: installing the runtime %s", host, runtime.hash)
                installed = transport.run(remote.install_argv(spec), runtime.content, timeout=UPLOAD_SECS)
                if installed.returncode != 0:
                    raise remote.not_ready(host, "installing the runtime", installed)
                completed = transport.run(remote.argv(spec, command), stdin, timeout=timeout)
        except HostUnreachableError:
            self._forget(host, transport)
            raise
        found = remote.answers(host, command, completed)
        if not found:
            raise remote.not_ready(host, command, completed)
        for answer in found if command == "checkpoints" else found[-1:]:
            forms.check_answer(host, command, request, answer)
        return found

    @contextlib.contextmanager
    def stream(
        self, host: str, command: str, request: Mapping[str, Any]
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """Run a command that goes on answering; leaving the context ends it. The runtime must be there."""
        spec, transport = self.inventory[host], self._transport(host)
        with transport.stream(remote.argv(spec, command), remote.request_line(request)) as lines:
            said = (remote.read_line(host, line) for line in lines)
            found = (forms.message_of(host, one) for one in said if one is not None)
            yield (message for message in found if message is not None)

    def host_key(self, host: str) -> str | None:
        """Fingerprint of the key with which a host proved who it is; None for this machine. Connects."""
        return getattr(self._transport(host), "host_key", None)

    def _transport(self, host: str) -> Transport:
        """The connection to a host, made if need be."""
        self.connect([host])
        transport = self._transports.get(host)
        if transport is None:  # `close` has come in between, in the handler of a signal
            raise HostUnreachableError(host, "the connection was closed")
        return transport

    def _forget(self, host: str, transport: Transport) -> None:
        """Drop a connection that was lost: what comes next, clearing away above all, connects anew."""
        if self._transports.get(host) is transport:
            del self._transports[host]
        with contextlib.suppress(OSError, TfpsError):
            transport.close()

    def on_each(self, hosts: Iterable[str], do: Callable[[str], T]) -> dict[str, T]:
        """Do something on hosts side by side; waits for all, then raises the error that a retry can mend least."""
        names = list(hosts)
        if not names:
            return {}
        with ThreadPoolExecutor(max_workers=min(PARALLEL, len(names))) as pool:
            futures = {name: pool.submit(do, name) for name in names}
        errors = [e for e in (f.exception() for f in futures.values()) if e is not None]
        for error in errors:
            if not isinstance(error, TfpsError):
                raise error
        if errors:
            raise min(errors, key=lambda e: e.transient)  # type: ignore[attr-defined]
        return {name: future.result() for name, future in futures.items()}

    # --- preparing ----------------------------------------------------------------------------------------------

    def preflight(
        self,
        hosts: Iterable[str] | None = None,
        *,
        preload: Sequence[str] = (),
        gpus: Mapping[str, int] | None = None,
        sweep_secs: float = 0.0,
    ) -> dict[str, dict[str, Any]]:
        """Look at hosts, all of the inventory by default: what each has. Raises HostNotReadyError for what it lacks.

        Warns in the log of an address that the whole internet reaches. With `sweep_secs` each removes, for about so
        long, what dead trainings left there; that fails nothing.
        """
        names = list(self.inventory.names if hosts is None else hosts)
        self.connect(names)

        def look(host: str) -> dict[str, Any]:
            spec = self.inventory[host]
            request: dict[str, Any] = {
                "workdir": spec.workdir,
                "address": spec.address,
                "preload": list(preload),
                "gpus": (gpus or {}).get(host, 0),
            }
            if sweep_secs:
                swept = SweepRequest(workdir=spec.workdir, host=host, max_secs=sweep_secs)
                request["sweep"] = swept.to_json()
            report = self.call(host, "preflight", request)
            _log_sweep(host, report.get("swept"))
            if report["faults"]:
                raise HostNotReadyError(host, "; ".join(report["faults"]))
            if report.get("public"):
                log.warning(
                    "%s: its address %s is public (%s): whoever reaches ports %d-%d there can run code, since "
                    "TensorFlow's gRPC asks for no password; let in the other hosts only",
                    host,
                    spec.address,
                    ", ".join(report["public"][:5])[:200],
                    *spec.ports,
                )
            return report

        return self.on_each(names, look)

    def sweep(
        self, hosts: Iterable[str] | None = None, *, max_secs: float = 600.0, **limits: float | bool
    ) -> dict[str, dict[str, Any]]:
        """Remove what dead trainings left on hosts, all of the inventory by default; what each answered.

        Nothing of a living training and no checkpoint is touched. Blocks for up to about `max_secs`. `limits` are the
        other fields of `SweepRequest`.
        """

        def one(host: str) -> dict[str, Any]:
            workdir = self.inventory[host].workdir
            request = SweepRequest.from_json(
                {"workdir": workdir, "host": host, "max_secs": max_secs, **limits}
            )
            return self.call(host, "sweep", request.to_json(), timeout=max_secs + COMMAND_SECS)

        return self.on_each(self.inventory.names if hosts is None else hosts, one)

    def put(self, host: str, blob: deploy.Blob) -> str:
        """Bring a program or an input to a host, unless it is there; its path there."""
        request = blob.request(self.inventory[host].workdir)
        answer = self.call(host, "put", {**request, "only_ask": True})
        if not answer["is_there"]:
            log.info("%s: uploading %s (%d bytes)", host, blob.name, blob.size)
            answer = self.call(host, "put", request, content=blob.content(), timeout=UPLOAD_SECS)
        path: str = answer["path"]
        return posixpath.join(path, blob.entry) if blob.entry else path


def _log_sweep(host: str, swept: Any) -> None:
    if isinstance(swept, dict) and swept.get("count"):
        log.info("%s: swept %s leftovers, %s bytes", host, swept["count"], swept.get("bytes"))
    for fault in (swept.get("faults") or ())[:5] if isinstance(swept, dict) else ():
        log.warning("%s: not swept: %s", host, fault)


def raise_all(errors: Sequence[TfpsError]) -> None:
    """Raise what hosts raised side by side, as one error that names them all; nothing for no errors."""
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    names = ", ".join(sorted({e.host for e in errors if isinstance(e, HostError)}))
    message = "; ".join(map(str, errors))
    if all(isinstance(e, HostUnreachableError) for e in errors):
        raise HostUnreachableError(names, message)
    raise CommandError(names, message, transient=all(e.transient for e in errors))
