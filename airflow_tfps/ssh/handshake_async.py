"""Opening an asyncssh connection: key exchange, the host's key, authentication. See `airflow_tfps.ssh`.

asyncssh reads no configuration of its own here: what counts is `Settings`, as for paramiko.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import asyncssh

from airflow_tfps.errors import HostKeyError, HostNotReadyError, HostUnreachableError, SpecError, TfpsError
from airflow_tfps.ssh.dial import Line, dial_async
from airflow_tfps.ssh.settings import Settings, fingerprint, public_text
from airflow_tfps.ssh.wire import DroppedError

_ALGORITHMS = {
    "ciphers": "encryption_algs",
    "macs": "mac_algs",
    "kex": "kex_algs",
    "pubkeys": "signature_algs",
}
"""Words of the extra `disabled_algorithms` (they are paramiko's), and asyncssh's options."""


async def open_connection(settings: Settings) -> tuple[asyncssh.SSHClientConnection, Line]:
    """Connect, verify the host's key, authenticate; one try. Raises as `airflow_tfps.ssh.connect` does."""
    logger = logging.getLogger("asyncssh")
    if logger.level == logging.NOTSET:  # it reports every channel at INFO, into the task's log
        logger.setLevel(logging.WARNING)
    line = await dial_async(settings)
    started = time.monotonic()
    client = _Client(settings)
    try:
        options = await asyncio.to_thread(_options, settings)
        async with asyncio.timeout(settings.handshake_secs):
            connection = await asyncssh.connect(
                settings.address,
                settings.port,
                sock=line.sock,
                config=None,
                client_factory=lambda: client,
                **options,
            )
    except BaseException as error:
        failure = _failure(settings, line, client, error, time.monotonic() - started)
        await asyncio.to_thread(line.close)
        if failure is None:
            raise
        raise failure from error
    return connection, line


class _Client(asyncssh.SSHClient):
    """Asked about the host's key, since asyncssh itself is told of no known hosts."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.rejection: HostKeyError | None = None

    def validate_host_public_key(
        self,
        host: str,  # noqa: ARG002
        addr: str,  # noqa: ARG002
        port: int,  # noqa: ARG002
        key: asyncssh.SSHKey,
    ) -> bool:
        try:
            self._settings.verify(public_text(key))
        except HostKeyError as error:
            self.rejection = error
            return False
        return True


def _options(settings: Settings) -> dict[str, Any]:
    keys = [asyncssh.import_private_key(key.text, settings.passphrase) for key in settings.keys]
    pairs = [
        key if given.certificate is None else (key, str(given.certificate))
        for key, given in zip(keys, settings.keys, strict=True)
    ]
    options: dict[str, Any] = {
        "username": settings.login,
        "password": settings.password,
        # An empty list would mean the keys in ~/.ssh to asyncssh, and None no agent.
        "client_keys": pairs or (() if settings.look_for_keys else None),
        "agent_path": () if settings.look_for_keys else None,
        "known_hosts": ([], [], []),
        "x509_trusted_certs": None,
        "server_host_key_algs": settings.key_types(),
        "gss_kex": False,  # would replace the host's key
        "gss_auth": False,
        "compression_algs": ["zlib@openssh.com", "none"] if settings.compress else ["none"],
        "keepalive_interval": settings.keepalive_secs,
        "keepalive_count_max": settings.keepalive_misses,
    }
    for word, names in settings.disabled_algorithms.items():
        if word in _ALGORITHMS:
            options[_ALGORITHMS[word]] = "-" + ",".join(names)
    if settings.ciphers:
        options["encryption_algs"] = list(settings.ciphers)
    return options


def _failure(
    settings: Settings, line: Line, client: _Client, error: BaseException, secs: float
) -> TfpsError | None:
    """Translate what went wrong; None for what is not about the connection."""
    if client.rejection is not None:
        return client.rejection
    if isinstance(error, asyncssh.PermissionDenied) or "authentication failures" in str(error):
        tried = [fingerprint(f"{key.pkey.get_name()} {key.pkey.get_base64()}") for key in settings.keys]
        return settings.refused(tried + ["a password"] * (settings.password is not None))
    if isinstance(error, asyncssh.KeyExchangeFailed):
        return HostNotReadyError(settings.host, f"no SSH algorithm in common: {error}")
    if isinstance(error, ValueError):  # asyncssh.KeyImportError is one
        return SpecError(f"connection {settings.conn_id!r}", [f"extra: {error}"])
    if not isinstance(error, (asyncssh.Error, OSError)):
        return None
    silence = f"silent for {settings.handshake_secs:g} s" if isinstance(error, TimeoutError) else ""
    reason = line.explain(str(error) or silence or "connection closed")
    # A host that is silent for long would be so again.
    kind = DroppedError if secs < settings.connect_secs else HostUnreachableError
    return kind(settings.host, f"{settings.where} broke off the handshake: {reason}")
