"""Opening a paramiko connection: key exchange, the host's key, authentication. See `airflow_tfps.ssh`.

On paramiko.Transport and not on SSHClient: that one reports a refused RSA key as an unreadable ECDSA key, and
looks host keys up in ways of its own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST
from paramiko.ssh_exception import IncompatiblePeer

from airflow_tfps.errors import HostNotReadyError, HostUnreachableError, SpecError
from airflow_tfps.ssh.dial import Line, dial
from airflow_tfps.ssh.settings import Settings, fingerprint
from airflow_tfps.ssh.wire import DroppedError

FAILURES = (paramiko.SSHException, OSError, EOFError)
"""What paramiko raises when a connection or a channel is no more."""

# Every failure is raised to us; paramiko would also log it as an error with its traceback, even where a
# second try succeeds. A channel of our own leaves the loggers of other users of paramiko alone.
_LOG_CHANNEL = "airflow_tfps.ssh.paramiko"


def open_connection(settings: Settings) -> tuple[Connection, Line]:
    """Connect, verify the host's key, authenticate; one try. Raises as `airflow_tfps.ssh.connect` does.
    Blocks.
    """
    logging.getLogger(_LOG_CHANNEL).setLevel(logging.CRITICAL)
    line = dial(settings)
    started = time.monotonic()
    with contextlib.ExitStack() as undo:
        undo.callback(line.close)
        try:
            connection = Connection(line.sock, disabled_algorithms=settings.disabled_algorithms)
            undo.callback(connection.close)
            _negotiate(connection, settings)
            _authenticate(connection, settings)
        except IncompatiblePeer as error:
            raise HostNotReadyError(settings.host, f"no SSH algorithm in common: {error}") from error
        except ValueError as error:
            raise SpecError(f"connection {settings.conn_id!r}", [f"extra.ciphers: {error}"]) from error
        except FAILURES as error:
            reason = line.explain(str(error) or "connection closed")
            # A host that is silent for long would be so again.
            quick = time.monotonic() - started < settings.connect_secs
            raise (DroppedError if quick else HostUnreachableError)(
                settings.host, f"{settings.where} broke off the handshake: {reason}"
            ) from error
        connection.set_keepalive(settings.keepalive_secs)
        undo.pop_all()
    return connection, line


class Connection(paramiko.Transport):
    """Remembers by which signal a command was killed; paramiko drops that and reports it like a lost link."""

    def __init__(self, sock: Any, **options: Any) -> None:
        super().__init__(sock, **options)
        self.set_log_channel(_LOG_CHANNEL)
        self.exit_signals: dict[int, str] = {}
        """By number of the channel."""

    @staticmethod
    def _on_request(channel: Any, message: paramiko.Message) -> None:
        position = message.packet.tell()
        if message.get_text() == "exit-signal":
            message.get_boolean()
            channel.transport.exit_signals[channel.chanid] = message.get_text()
        message.packet.seek(position)
        channel._handle_request(message)  # noqa: SLF001  there is no public place for this

    _channel_handler_table = {  # noqa: RUF012  as in paramiko
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]  # noqa: SLF001
        MSG_CHANNEL_REQUEST: _on_request.__func__,  # type: ignore[attr-defined]
    }


def _negotiate(connection: Connection, settings: Settings) -> None:
    connection.banner_timeout = connection.auth_timeout = settings.handshake_secs
    connection.use_compression(settings.compress)
    options = connection.get_security_options()
    options.key_types = settings.key_types()
    if settings.ciphers:
        options.ciphers = settings.ciphers
    connection.start_client(timeout=settings.handshake_secs)
    key = connection.get_remote_server_key()
    settings.verify(f"{key.get_name()} {key.get_base64()}")


def _authenticate(connection: Connection, settings: Settings) -> None:
    """Offer the agent's keys, ours, the password. Raises AuthenticationError, or FAILURES when the link is
    lost.
    """
    tried: list[str] = []
    started = time.monotonic()
    try:
        agent = paramiko.Agent().get_keys() if settings.look_for_keys else ()
        for key in [*agent, *(key.pkey for key in settings.keys)]:
            tried.append(fingerprint(f"{key.get_name()} {key.get_base64()}"))
            try:
                if not connection.auth_publickey(settings.login, key):
                    return
                break  # accepted, and a password is wanted too
            except paramiko.BadAuthenticationType:
                break  # the host takes no keys at all
            except paramiko.AuthenticationException:
                if not connection.is_active():
                    raise
        if settings.password is not None:
            tried.append("a password")
            if not connection.auth_password(settings.login, settings.password):
                return
    except paramiko.AuthenticationException as error:
        # paramiko uses this class for a lost link and for silence, too; a host that has refused one key
        # before may hang up at the next (`MaxAuthTries`).
        if time.monotonic() - started >= settings.handshake_secs or (
            not connection.is_active() and len(tried) < 2
        ):
            raise paramiko.SSHException(str(error)) from error
    raise settings.refused(tried)
