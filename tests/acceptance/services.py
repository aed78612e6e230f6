"""PostgreSQL and Redis as processes of a test's own, on loopback, out of Debian's packages; nothing of them remains.

with Postgres() as database, Redis() as broker:
    connect(database.url), connect(broker.url)
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from airflow_tfps.demo.stack import free_port

START_SECS = 60.0
STOP_SECS = 20.0


def find(name: str) -> str | None:
    """The path of a server's program; PostgreSQL's are not in Debian's PATH."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for place in places:
        if (place / name).exists():
            return str(place / name)
    return shutil.which(name)


def missing(*packages: str) -> str | None:
    """Which of these Debian packages a test would need; None if all are there."""
    programs = {"postgresql": "initdb", "redis-server": "redis-server"}
    needed = [package for package in packages if find(programs[package]) is None]
    return f"needs the Debian packages {', '.join(needed)}" if needed else None


class Server:
    """A process that listens on a port of 127.0.0.1 from `with` on until its end."""

    def __init__(self) -> None:
        self.port = free_port()
        self.password = secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="tfps-service-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            with (self.folder / "log").open("wb") as log:
                self._process = self._start(log.fileno())
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            self._process.send_signal(2)  # of PostgreSQL: at once, without waiting for connections to close
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECS)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder)

    def _start(self, log: int) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def _wait(self) -> None:
        until = time.monotonic() + START_SECS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            said = (self.folder / "log").read_text("utf-8", "replace")
            assert self._process is not None
            assert self._process.poll() is None, said
            assert time.monotonic() < until, said
            time.sleep(0.1)


class Postgres(Server):
    """A cluster with the role and the database `airflow`."""

    @property
    def url(self) -> str:
        return f"postgresql+psycopg2://airflow:{self.password}@127.0.0.1:{self.port}/postgres"

    def _start(self, log: int) -> subprocess.Popen[bytes]:
        password, data = self.folder / "password", self.folder / "data"
        password.write_text(self.password)
        user = None
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            user = next(u for u in ("postgres", "nobody") if _has_user(u))
            for path in (self.folder, password, self.folder / "log"):
                shutil.chown(path, user)
        initdb = [find("initdb"), f"--pgdata={data}", "--username=airflow", f"--pwfile={password}"]
        done = subprocess.run(
            [*initdb, "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"],
            user=user,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
        options = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "fsync": "off",
        }
        return subprocess.Popen(
            [find("postgres"), "-D", str(data), *(f"--{key}={value}" for key, value in options.items())],
            user=user,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _wait(self) -> None:
        """Until it takes connections; it listens before."""
        import psycopg2

        super()._wait()
        until = time.monotonic() + START_SECS
        while True:
            try:
                psycopg2.connect(self.url.replace("+psycopg2", ""), connect_timeout=5).close()
            except psycopg2.OperationalError:
                assert time.monotonic() < until, (self.folder / "log").read_text("utf-8", "replace")
                time.sleep(0.1)
            else:
                return


class Redis(Server):
    """A broker that keeps nothing on disk."""

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def _start(self, log: int) -> subprocess.Popen[bytes]:
        (self.folder / "redis.conf").write_text(
            f'bind 127.0.0.1\nport {self.port}\nrequirepass {self.password}\nsave ""\nappendonly no\ndir {self.folder}\n'
        )
        return subprocess.Popen(
            [find("redis-server"), str(self.folder / "redis.conf")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _has_user(name: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False
