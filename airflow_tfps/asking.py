"""What a trigger asks Airflow for: states of tasks, XComs; best effort.

The messages between a trigger and its supervisor are internal to Airflow: all use of them is here, and a trigger goes
on without an answer.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import termios
import time
from typing import Any

import structlog

log = logging.getLogger(__name__)

UNKNOWN_STATE = "unknown"
READ_SECS, READ_POLL_SECS = 5.0, 0.02
"""How long a trigger that is over waits for its log to be read, and how often it looks."""


async def ask(message: Any) -> Any:
    """Send one message to Airflow and return the answer; None where that cannot be done (`dag.test()`)."""
    try:
        from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

        return await SUPERVISOR_COMMS.asend(message)
    except (ImportError, AttributeError, RuntimeError, ValueError, TypeError, OSError) as error:
        log.debug("Airflow does not answer: %s", error)
        return None


def xcom_request(where: Any, key: str, value: Any = None) -> Any:
    """A message that reads an XCom of the trigger's own task, or with `value` writes it."""
    from airflow.sdk.execution_time.comms import GetXCom, SetXCom

    place = {
        "key": key,
        "dag_id": where.dag_id,
        "run_id": where.run_id,
        "task_id": where.task_id,
        "map_index": where.map_index,
    }
    return GetXCom(**place) if value is None else SetXCom(**place, value=value)


async def task_state(where: Any, task_id: str) -> str | None:
    """The state of a task in the trigger's run and map index; UNKNOWN_STATE when Airflow does not answer."""
    return await state_of(where.dag_id, where.run_id, task_id, where.map_index)


async def state_of(dag_id: str, run_id: str, task_id: str, map_index: int | None) -> str | None:
    """The state of a task; None where there is none, UNKNOWN_STATE when Airflow does not answer."""
    from airflow.sdk.execution_time.comms import GetTaskStates, TaskStatesResult

    index = None if map_index is None or map_index < 0 else map_index
    answer = await ask(GetTaskStates(dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=index))
    if not isinstance(answer, TaskStatesResult):
        return UNKNOWN_STATE
    key = task_id if index is None else f"{task_id}_{index}"
    return (answer.task_states.get(run_id) or {}).get(key)


async def until_log_is_read() -> None:
    """Wait, for `READ_SECS` at most, until the supervisor has all that the triggers have logged so far.

    It stops writing a trigger's log file when it hears that the trigger is over, on another socket than the log's
    (3.3.2, `TriggerRunnerSupervisor._handle_request`): what it has not read by then, the last words, would be missing
    in the task's log. Where logs are not sent to a supervisor (`dag.test()`) there is nothing to wait for.
    """
    until = time.monotonic() + READ_SECS
    with contextlib.suppress(AttributeError, ValueError, OSError):
        log_socket = structlog.get_config()["logger_factory"].io.fileno()
        while _unread(log_socket) and time.monotonic() < until:  # noqa: ASYNC110  nobody tells when it is read
            await asyncio.sleep(READ_POLL_SECS)


def _unread(fd: int) -> int:
    """Bytes written to a socket that its other end has not read (unix(7), SIOCOUTQ). Raises OSError for other files."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.TIOCOUTQ, count)
    return count[0]
