"""What an Airflow `ssh` connection says, read once for both backends, and the verdict on a host's key.

The ssh provider's own SSHHook does the reading, so a connection that works for SSHOperator means the same
here. Its `get_conn` is not used: there an entry in known_hosts beats the `host_key` extra, the error for an
unknown key does not show the key, and a proxy command that dies is never noticed (paramiko.ProxyCommand spins
at its end of file). Beyond the hook: the extras `host_proxy_cmd`, `known_hosts` and `keepalive_interval`,
ProxyJump in ~/.ssh/config, `private_key_passphrase` for a `key_file` too, and all of known_hosts that OpenSSH
understands but host certificates.

Imports Airflow, paramiko and asyncssh, so it is imported only when a connection is made.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh
import paramiko
from airflow.providers.common.compat.connection import get_async_connection
from airflow.providers.ssh.hooks.ssh import SSHHook
from airflow.sdk import BaseHook, Connection
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from airflow_tfps.errors import AuthenticationError, HostKeyError, SpecError
from airflow_tfps.ssh.wire import words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from airflow_tfps.ssh import Endpoint

CONNECT_SECS = 10.0
"""For the TCP connection, unless the extra `conn_timeout` says otherwise; what the hook documents."""

HANDSHAKE_SECS = 30.0
"""For the banner and key exchange, and again for the authentication; the hook's `banner_timeout`."""

KEEPALIVE_SECS = 30
"""Between two signs of life on an idle connection; the hook's `keepalive_interval`."""

KEEPALIVE_MISSES = 3
"""A connection is lost when that many of them in a row go unanswered."""

_KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
_UNSAFE = ("no_host_key_check", "ignore_hostkey_verification", "allow_host_key_change")


@dataclass(frozen=True, kw_only=True)
class Key:
    """A private key that can be read."""

    text: str = field(repr=False)
    pkey: paramiko.PKey = field(repr=False)
    """The same, parsed."""
    certificate: Path | None = None
    """`<key file>-cert.pub`, where there is one."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to reach one host, with every default filled in."""

    host: str
    """Name in the inventory."""
    conn_id: str
    address: str
    port: int
    login: str
    password: str | None = field(default=None, repr=False)
    passphrase: str | None = field(default=None, repr=False)
    keys: tuple[Key, ...] = ()
    """In the order in which they are offered, after the agent's."""
    look_for_keys: bool = True
    """Whether to offer the agent's keys and `~/.ssh/id_*`. (The hook's word is about the files only, but asyncssh
    uses either both or none.)
    """
    trusted: tuple[str, ...] = ()
    """Host keys as `type base64`."""
    revoked: tuple[str, ...] = ()
    trusted_from: str = "known_hosts"
    """Where they stand, for messages."""
    proxy: tuple[str, ...] = ()
    """argv of a command whose standard input and output are the connection."""
    compress: bool = True
    connect_secs: float = CONNECT_SECS
    handshake_secs: float = HANDSHAKE_SECS
    keepalive_secs: int = KEEPALIVE_SECS
    keepalive_misses: int = KEEPALIVE_MISSES
    ciphers: tuple[str, ...] = ()
    disabled_algorithms: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.login}@{self.address}:{self.port}"

    @property
    def known_hosts_name(self) -> str:
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"

    def key_types(self) -> list[str]:
        """Host key algorithms to ask for, those of the trusted keys first.

        As OpenSSH does: a host with several keys would otherwise show one that is not known here.
        """
        known = {key.split()[0].replace("ssh-rsa", "rsa-sha2-512") for key in self.trusted}
        disabled = self.disabled_algorithms.get("keys", ())
        return sorted((k for k in _KEY_TYPES if k not in disabled), key=lambda k: k not in known)

    def refused(self, tried: Sequence[str]) -> AuthenticationError:
        """Say which keys (fingerprints) and whether a password were offered in vain."""
        with_what = ", ".join(tried) or "nothing: there is neither a key nor a password"
        return AuthenticationError(
            self.host,
            f"{self.address}:{self.port} does not let {self.login!r} in with {with_what}. Add the public key "
            f"to ~{self.login}/.ssh/authorized_keys there, or correct login, key or password of connection "
            f"{self.conn_id!r}",
        )

    def verify(self, offered: str) -> None:
        """Accept the host's key, `type base64`, or raise HostKeyError that shows it and says what to do."""
        if offered in self.trusted and offered not in self.revoked:
            return
        kind, shown = offered.split(maxsplit=1)[0], fingerprint(offered)
        if offered in self.revoked:
            raise HostKeyError(self.host, f"its host key {shown} is revoked in {self.trusted_from}")
        name = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(kind, "ecdsa")
        advice = (
            f"Compare with what `ssh-keygen -lf /etc/ssh/ssh_host_{name}_key.pub` prints on the host itself. "
            f'If it is the same, trust it: set the extra "host_key" of connection {self.conn_id!r} to '
            f'"{offered}", or add this line to ~/.ssh/known_hosts wherever Airflow runs tasks and triggers: '
            f"{self.known_hosts_name} {offered}"
        )
        if not self.trusted:
            raise HostKeyError(self.host, f"the host key of {self.where} is not known: {shown}. {advice}")
        expected = ", ".join(fingerprint(key) for key in self.trusted)
        raise HostKeyError(
            self.host,
            f"the host key of {self.where} has changed: it shows {shown}, but {self.trusted_from} has "
            f"{expected}. The host was reinstalled, or somebody sits in between; nothing was sent. {advice}",
        )


def fingerprint(key: str) -> str:
    """Render a key, `type base64`, as `ssh-keygen -l` does: SHA256 of the blob, base64 without padding."""
    kind, blob = key.split()[:2]
    digest = base64.b64encode(hashlib.sha256(base64.b64decode(blob)).digest()).decode().rstrip("=")
    return f"{kind} SHA256:{digest}"


def fetch(endpoint: Endpoint) -> Connection:
    """Get the Airflow connection, in a worker. Raises SpecError when it does not exist."""
    try:
        return BaseHook.get_connection(endpoint.ssh_conn_id)
    except AirflowNotFoundException:
        raise _missing(endpoint) from None


async def fetch_async(endpoint: Endpoint) -> Connection:
    """`fetch` in a trigger, where asking the supervisor must not block."""
    try:
        return await get_async_connection(endpoint.ssh_conn_id)
    except AirflowNotFoundException:
        raise _missing(endpoint) from None


def read(endpoint: Endpoint, connection: Connection) -> Settings:
    """Read a connection, ~/.ssh/config and known_hosts. Raises SpecError.

    Blocks, on files and on the masking of secrets; a trigger calls it in a thread.
    """
    extra: dict[str, Any] = connection.extra_dejson
    faults = [
        f"extra.{key}: host keys are always verified here; remove it and set extra.host_key"
        for key in _UNSAFE
        if str(extra.get(key)).lower() == "true"
    ]
    what = f"connection {endpoint.ssh_conn_id!r} (host {endpoint.host})"
    if faults:
        raise SpecError(what, faults)
    try:
        return _settings(endpoint, _Reader(connection), extra)
    except (AirflowException, paramiko.SSHException, ValueError, OSError) as error:
        raise SpecError(what, [str(error)]) from error


class _Reader(SSHHook):
    """The provider's hook, given a connection that was fetched before."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        super().__init__(ssh_conn_id=connection.conn_id)

    def get_connection(self, conn_id: str) -> Connection:  # type: ignore[override]  # noqa: ARG002
        return self._connection


def _settings(endpoint: Endpoint, hook: SSHHook, extra: Mapping[str, Any]) -> Settings:
    ssh = Path("~/.ssh").expanduser()
    address, port, login = str(hook.remote_host), int(hook.port or 22), str(hook.username)
    passphrase = extra.get("private_key_passphrase") or extra.get("passphrase") or hook.password or None
    if hook.host_key is not None:
        trusted = [f"{hook.host_key.get_name()} {hook.host_key.get_base64()}"]
        revoked: list[str] = []
        trusted_from = "extra.host_key"
    else:
        known_hosts = Path(extra.get("known_hosts") or ssh / "known_hosts").expanduser()
        trusted, revoked = _known(known_hosts, address, port)
        trusted_from = str(known_hosts)
    return Settings(
        host=endpoint.host,
        conn_id=endpoint.ssh_conn_id,
        address=address,
        port=port,
        login=login,
        password=hook.password.strip() if hook.password else None,  # as the hook does
        passphrase=passphrase,
        keys=tuple(_keys(hook, extra, ssh, passphrase)),
        look_for_keys=hook.look_for_keys,
        trusted=tuple(trusted),
        revoked=tuple(revoked),
        trusted_from=trusted_from,
        proxy=_proxy(hook, extra.get("host_proxy_cmd"), ssh / "config"),
        compress=hook.compress,
        connect_secs=float(hook.conn_timeout or CONNECT_SECS),
        keepalive_secs=int(extra.get("keepalive_interval") or KEEPALIVE_SECS),
        ciphers=tuple(hook.ciphers or ()),
        disabled_algorithms=hook.disabled_algorithms or {},
    )


def _keys(hook: SSHHook, extra: Mapping[str, Any], ssh: Path, passphrase: str | None) -> Iterator[Key]:
    if hook.pkey is not None:
        yield Key(text=extra["private_key"], pkey=hook.pkey)
    if extra.get("key_file"):
        yield _key(hook, Path(extra["key_file"]).expanduser(), passphrase)
    optional = [ssh / f"id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")] if hook.look_for_keys else []
    if hook.key_file and not extra.get("key_file"):
        optional.insert(0, Path(hook.key_file).expanduser())  # IdentityFile of ~/.ssh/config
    for path in optional:
        # Absent, or locked by another passphrase: OpenSSH goes on as well.
        with contextlib.suppress(ValueError):
            yield _key(hook, path, passphrase)


def _key(hook: SSHHook, path: Path, passphrase: str | None) -> Key:
    try:
        text = path.read_text()
        pkey = hook._pkey_from_private_key(text, passphrase)  # noqa: SLF001  paramiko itself has no such thing
    except (AirflowException, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error} Is private_key_passphrase right?"
        raise ValueError(f"extra.key_file: {path}: {reason}") from error
    certificate = path.with_name(f"{path.name}-cert.pub")
    if not certificate.is_file():
        return Key(text=text, pkey=pkey)
    pkey.load_certificate(str(certificate))
    return Key(text=text, pkey=pkey, certificate=certificate)


def _proxy(hook: SSHHook, of_extra: str | None, config: Path) -> tuple[str, ...]:
    """Command line of a proxy: the extra's, else ProxyCommand of ~/.ssh/config, else its ProxyJump."""
    address, port = str(hook.remote_host), int(hook.port or 22)
    if of_extra:
        values = {"%h": address, "%p": str(port), "%r": str(hook.username), "%%": "%"}
        return tuple(re.sub("%[hpr%]", lambda m: values[m[0]], word) for word in shlex.split(of_extra))
    if not config.is_file():
        return ()
    # The first value counts, and the connection's are on the command line, as it were: the hook itself would put
    # port 22 in place of %p, whatever the connection says.
    first = f"Host *\n  Port {port}\n  User {hook.username}\n"
    found = paramiko.SSHConfig.from_text(first + config.read_text()).lookup(address)
    if found.get("proxycommand"):
        return tuple(shlex.split(found["proxycommand"]))
    jump = found.get("proxyjump") or "none"
    if jump.lower() == "none":
        return ()
    return _jump([hop.strip() for hop in jump.split(",")], f"[{address}]:{port}")


def _jump(hops: Sequence[str], target: str) -> tuple[str, ...]:
    """What OpenSSH makes of ProxyJump: the last hop forwards our stream, and is itself reached through the others.

    Every hop's host key is verified too, whatever ~/.ssh/config says: `-J` would not tell the hops before the last.
    BatchMode, since nobody is there to answer a question.
    """
    *before, last = hops
    via: tuple[str, ...] = ()
    if before:  # ssh has a shell run this; %h and %p are the last hop's, and a % of the others is none
        escaped = [hop.replace("%", "%%") for hop in before]
        via = ("-o", f"ProxyCommand={words(_jump(escaped, '[%h]:%p'))}")
    last = last if last.startswith("ssh://") else f"ssh://{last}"
    return ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", *via, "-W", target, last)


def _known(file: Path, address: str, port: int) -> tuple[list[str], list[str]]:
    """Look a host up in a known_hosts file, passing over lines that make no sense, as OpenSSH does."""
    known = asyncssh.import_known_hosts("")
    if file.is_file():
        for line in file.read_text(errors="replace").splitlines():
            try:
                known.load(line)
            except ValueError:
                continue
    keys, _, revoked, *_ = asyncssh.match_known_hosts(known, address, "", None if port == 22 else port)
    return [public_text(key) for key in keys], [public_text(key) for key in revoked]


def public_text(key: asyncssh.SSHKey) -> str:
    """Write a public key as `type base64`."""
    return " ".join(key.export_public_key().decode().split()[:2])


def _missing(endpoint: Endpoint) -> SpecError:
    return SpecError(
        f"host {endpoint.host}",
        [f"ssh_conn_id: Airflow has no connection {endpoint.ssh_conn_id!r}; add one of type ssh"],
    )
