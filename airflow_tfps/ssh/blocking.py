"""The blocking transport, for workers: paramiko. See `airflow_tfps.ssh` for the contract."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST

from airflow_tfps.errors import AuthenticationError, HostUnreachableError, SpecError
from airflow_tfps.ssh import Completed
from airflow_tfps.ssh.dial import Line, dial
from airflow_tfps.ssh.settings import HANDSHAKE_SECS, Settings
from airflow_tfps.ssh.wire import (
    CHUNK,
    STDERR_BYTES,
    DroppedError,
    Lines,
    lost,
    no_answer,
    quote,
    signal_number,
    unread,
)

if TYPE_CHECKING:
    from airflow_tfps.ssh import Stream

_FAILURES = (paramiko.SSHException, OSError, EOFError)

# Every failure is raised to us; paramiko would log it too, as an error with its traceback, even where a second try
# succeeds. A channel of our own leaves the loggers of other users of paramiko alone.
_LOG_CHANNEL = f"{__name__}.paramiko"
logging.getLogger(_LOG_CHANNEL).setLevel(logging.CRITICAL)


def connect(settings: Settings) -> SshTransport:
    """Connect, verify the host's key, authenticate. One try."""
    line = dial(settings)
    try:
        connection = _Connection(line.sock, disabled_algorithms=settings.disabled_algorithms)
        connection.set_log_channel(_LOG_CHANNEL)
        try:
            _handshake(connection, settings)
        except BaseException:
            connection.close()
            raise
    except _FAILURES as error:
        ...
