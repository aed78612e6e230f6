"""Health checks of the compose stack, from within a container; cheap, since each runs every few seconds for ever.

    python healthy.py api                   # the API server and what it needs answer
    python healthy.py TriggererJob 60       # the component of this container has noted its heartbeat, at most 60 s ago
    python healthy.py worker                # the Celery worker of this container answers through the broker

`airflow jobs check` and `airflow celery inspect` say the same and take several seconds of CPU for it. Exits with 0 or
with a message.
"""

from __future__ import annotations

import configparser
import json
import os
import socket
import sys
import urllib.request

HEARTBEAT = """
    SELECT extract(epoch FROM now() - max(latest_heartbeat)) FROM job
    WHERE hostname = %s AND job_type = %s AND state = 'running'
"""


def api() -> None:
    with urllib.request.urlopen("http://127.0.0.1:8080/api/v2/monitor/health", timeout=10) as answer:
        report = json.load(answer)
    if report["metadatabase"]["status"] != "healthy":
        sys.exit("the database does not answer")


def job(kind: str, secs: float, config: configparser.RawConfigParser) -> None:
    import psycopg2

    dsn = config["database"]["sql_alchemy_conn"].replace("+psycopg2", "")
    with psycopg2.connect(dsn, connect_timeout=5) as connection, connection.cursor() as cursor:
        cursor.execute(HEARTBEAT, (socket.gethostname(), kind))
        (age,) = cursor.fetchone()
    if age is None or age > secs:
        sys.exit(f"no {kind} runs here" if age is None else f"the last heartbeat was {age:.0f} s ago")


def worker(config: configparser.RawConfigParser) -> None:
    from celery import Celery

    name = f"celery@{socket.gethostname()}"
    app = Celery(broker=config["celery"]["broker_url"])
    if not app.control.ping(destination=[name], timeout=5):
        sys.exit(f"{name} does not answer")


def main() -> None:
    what, *rest = sys.argv[1:]
    config = configparser.RawConfigParser()
    config.read(os.environ["AIRFLOW_CONFIG"])
    if what == "api":
        api()
    elif what == "worker":
        worker(config)
    else:
        job(what, float(rest[0]), config)


if __name__ == "__main__":
    main()
