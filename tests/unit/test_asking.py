"""What a trigger asks Airflow for."""

from __future__ import annotations

import subprocess
import sys

WITH_A_SUPERVISOR = """
import asyncio, logging, os, socket
from airflow.sdk.log import configure_logging
from airflow_tfps.asking import until_log_is_read

ours, supervisors = socket.socketpair()
output = os.fdopen(os.dup(ours.fileno()), "wb", buffering=0)
configure_logging(json_output=True, output=output, sending_to_supervisor=True)  # as triggers have it

async def main():
    await asyncio.wait_for(until_log_is_read(), 1)
    logging.getLogger("airflow_tfps").warning("last words")
    waiting = asyncio.create_task(until_log_is_read())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert b"last words" in supervisors.recv(4096)
    await asyncio.wait_for(waiting, 1)

asyncio.run(main())
"""

WITHOUT_ONE = """
import asyncio
from airflow_tfps.asking import until_log_is_read
asyncio.run(asyncio.wait_for(until_log_is_read(), 1))
"""


def test_a_trigger_that_is_over_waits_until_its_log_is_read() -> None:
    """Until the other end has read it, and without one not at all."""
    for program in (WITH_A_SUPERVISOR, WITHOUT_ONE):
        done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
