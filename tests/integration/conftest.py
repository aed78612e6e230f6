"""Real hosts and clusters for tests: SSH servers (ours, and OpenSSH where it is installed), TensorFlow on loopback.

    def test_x(embedded_hosts, define):
        hosts = embedded_hosts("gpu-a", "gpu-b")        # also sets AIRFLOW_CONN_GPU_A, AIRFLOW_CONN_GPU_B
        with connect(Endpoint(host="gpu-a", ssh_conn_id="gpu_a")) as transport: ...
        endpoint = define(hosts["gpu-a"], private_key=None, key_file="/x")       # a variant of the connection

No database: Airflow reads connections from the environment.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from airflow_tfps.demo.hosts import DemoHost, connection_json, read_hosts
from airflow_tfps.inventory import Inventory
from airflow_tfps.ssh import Completed, Endpoint, connect, connect_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).parent))

from clusters import Nursery, Trainings
from stage import ProgramCluster, ScriptCluster, Stage, free_addresses

if "AIRFLOW_HOME" not in os.environ:  # before anything imports Airflow
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-home-")
    atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)

T = TypeVar("T")

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def wait_until(condition: Callable[[], T], what: str, secs: float = 20.0) -> T:
    """Poll until `condition` returns something true, and return it."""
    deadline = time.monotonic() + secs
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {secs:g} s: {what}"
        time.sleep(0.02)
    return result


@pytest.fixture(name="wait_until", scope="session")
def _wait_until() -> Callable[..., object]:
    return wait_until


def conn_variable(name: str) -> str:
    return f"AIRFLOW_CONN_{name.upper().replace('-', '_')}"


@pytest.fixture(scope="session")
def embedded_hosts(tmp_path_factory) -> Iterator[Callable[..., dict[str, DemoHost]]]:
    """Factory: start demo hosts of these names in a process, and define their Airflow connections."""
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())

        def start(*names: str) -> dict[str, DemoHost]:
            home = tmp_path_factory.mktemp("hosts")
            arguments = [argument for name in names for argument in ("--host", name)]
            process = subprocess.Popen(
                [sys.executable, "-m", "airflow_tfps.demo.hosts", "--home", str(home), *arguments]
            )
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            wait_until(
                lambda: (home / "hosts.json").exists() or process.poll() is not None, "demo hosts start"
            )
            hosts = read_hosts(home)
            for name, host in hosts.items():
                environment.setenv(conn_variable(name), json.dumps(connection_json(host)))
            return hosts

        yield start


@pytest.fixture(scope="session")
def demo_host(embedded_hosts) -> DemoHost:
    return embedded_hosts("demo-a")["demo-a"]


@pytest.fixture(scope="session")
def sshd_host(tmp_path_factory) -> Iterator[DemoHost]:
    """OpenSSH's sshd on a loopback port.

    Beside `key_file` lie `host_rsa.pub`, a second host key, and `ca_ed25519`, whose user certificates it accepts.
    """
    if SSHD is None:
        pytest.skip("OpenSSH's sshd is not installed")
    home = tmp_path_factory.mktemp("sshd")
    for name in ("host_ed25519", "host_rsa", "id_ed25519", "ca_ed25519"):
        kind = name.partition("_")[2]
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", kind, "-f", str(home / name)], check=True)
    (home / "id_ed25519.pub").rename(home / "authorized_keys")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's, for privilege separation
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (home / "sshd_config").write_text(
        f"""
        Port {port}
        ListenAddress 127.0.0.1
        HostKey {home}/host_ed25519
        HostKey {home}/host_rsa
        AuthorizedKeysFile {home}/authorized_keys
        TrustedUserCAKeys {home}/ca_ed25519.pub
        AuthenticationMethods publickey
        PermitRootLogin prohibit-password
        PidFile none
        StrictModes no
        UsePAM no
        MaxStartups 30
        MaxSessions 30
        """
    )
    log = home / "log"
    process = subprocess.Popen([SSHD, "-D", "-f", str(home / "sshd_config"), "-E", str(log)])
    try:
        wait_until(lambda: process.poll() is not None or is_listening(port), "sshd listens")
        assert process.poll() is None, log.read_text()
        yield DemoHost(
            port=port,
            login=getpass.getuser(),
            host_key=public_key(home / "host_ed25519.pub"),
            key_file=str(home / "id_ed25519"),
            home=str(Path.home()),
        )
    finally:
        process.terminate()
        process.wait(20)


def public_key(path: Path) -> str:
    return " ".join(path.read_text().split()[:2])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def define(monkeypatch) -> Callable[..., Endpoint]:
    """Define an Airflow connection to a host; keywords change it (extra's keys too), None takes a key away."""

    def define(host: DemoHost, /, name: str = "defined", **changes: object) -> Endpoint:
        connection = connection_json(host)
        for key, value in changes.items():
            place = connection if key in {"host", "port", "login", "password"} else connection["extra"]
            place[key] = value
            if value is None:
                del place[key]
        monkeypatch.setenv(conn_variable(name), json.dumps(connection))
        return Endpoint(host=name, ssh_conn_id=name)

    return define


@pytest.fixture
def user_home(tmp_path, monkeypatch) -> Path:
    """A home directory of the user who runs Airflow, with an empty ~/.ssh; no agent."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


class Relay:
    """Forwards TCP connections from a port of its own; can drop the first ones, and cut all of them."""

    def __init__(self, target: int, drop_first: int = 0) -> None:
        self._target = target
        self._left_to_drop = drop_first
        self._sockets: list[socket.socket] = []
        self.accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                if self._left_to_drop:
                    self._left_to_drop -= 1
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for one in self._sockets:
            one.close()


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    """Factory: a Relay in front of a host, and the host as seen through it."""
    with contextlib.ExitStack() as stack:

        def make(host: DemoHost, **options: int) -> tuple[Relay, DemoHost]:
            one = Relay(host.port, **options)
            stack.callback(one.close)
            return one, dataclasses.replace(host, port=one.port)

        yield make


class Sync:
    """`connect_async` behind the same face as `connect`, so that one test drives both."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._runner = asyncio.Runner()
        try:
            self._transport = self._run(connect_async(endpoint))
        except BaseException:
            self._runner.close()
            raise

    def _run(self, awaitable):
        async def wait():
            return await awaitable

        return self._runner.run(wait())

    def run(self, argv, stdin=b"", *, timeout=None) -> Completed:
        return self._run(self._transport.run(argv, stdin, timeout=timeout))

    @contextlib.contextmanager
    def stream(self, argv, stdin=b"") -> Iterator[SyncStream]:
        context = self._transport.stream(argv, stdin)
        stream = self._run(context.__aenter__())
        try:
            yield SyncStream(stream, self._run)
        finally:
            self._run(context.__aexit__(None, None, None))

    def close(self) -> None:
        self._run(self._transport.close())
        self._runner.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class SyncStream:
    def __init__(self, stream, run) -> None:
        self._stream = stream
        self._run = run
        self._lines = None

    def __iter__(self) -> Iterator[str]:
        lines = aiter(self._stream)
        while True:
            try:
                line = self._run(anext(lines))
            except StopAsyncIteration:
                return
            yield line

    def send(self, line: str) -> None:
        self._run(self._stream.send(line))

    @property
    def returncode(self):
        return self._stream.returncode

    @property
    def stderr(self):
        return self._stream.stderr


@pytest.fixture(params=["demo", "openssh"])
def host(request) -> DemoHost:
    return request.getfixturevalue({"demo": "demo_host", "openssh": "sshd_host"}[request.param])


@pytest.fixture(params=[connect, Sync], ids=["paramiko", "asyncssh"])
def open_(request):
    return request.param


@pytest.fixture(params=["demo", "openssh", "local"])
def endpoint(request, define) -> Endpoint:
    if request.param == "local":
        return Endpoint(host="here", ssh_conn_id="local")
    return define(request.getfixturevalue({"demo": "demo_host", "openssh": "sshd_host"}[request.param]))


@pytest.fixture
def transport(open_, endpoint):
    with open_(endpoint) as transport:
        yield transport


@pytest.fixture(scope="session")
def stage(tmp_path_factory) -> Iterator[Stage]:
    """The product's nursery with TensorFlow imported, shared by all tests."""
    stage = Stage(tmp_path_factory.mktemp("stage"))
    yield stage
    stage.close()


@pytest.fixture
def script_cluster(stage, tmp_path) -> Iterator[Callable[..., ScriptCluster]]:
    """Make clusters of a script's processes, or with `fields` of a harness program's; they are gone afterwards."""
    made: list[ScriptCluster] = []

    def make(script: Path, *args: str, compat: str | None = "tf1", env=None, fields=None, **roles: int):
        directory = tmp_path / f"cluster-{len(made)}"
        (directory / "checkpoints").mkdir(parents=True)
        addresses = free_addresses(sum(roles.values()))
        cluster = {role: [addresses.pop() for _ in range(count)] for role, count in roles.items()}
        if fields is not None:
            made.append(ProgramCluster(stage, directory, script, args, cluster, fields=fields))
        else:
            made.append(ScriptCluster(stage, directory, script, args, cluster, compat, env or {}))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def here(tmp_path) -> Inventory:
    """This machine as the only host, with a workdir of the test's own."""
    host = {"ssh_conn_id": "local", "python": sys.executable, "workdir": str(tmp_path / "tfps"), "gpus": 0}
    return Inventory.load({"hosts": {"here": host}})


@pytest.fixture(scope="session")
def forks(tmp_path_factory) -> Iterator[Nursery]:
    """The one process that has imported TensorFlow."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "log")
    yield nursery
    nursery.close()


@pytest.fixture
def train(forks, tmp_path) -> Iterator[Trainings]:
    """Make trainings; whatever they started is gone afterwards."""
    trainings = Trainings(forks, tmp_path)
    yield trainings
    trainings.close()


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> dict[str, str]:
    """scikit-learn's digits as the inputs of the bundled program."""
    import numpy as np
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = data.data[order], data.target[order]
    paths = {}
    for name, part in (("train", slice(0, 1400)), ("eval", slice(1400, None))):
        paths[name] = str(tmp_path_factory.mktemp(name))
        np.savez(Path(paths[name]) / "digits.npz", x=x[part], y=y[part])
    return paths
