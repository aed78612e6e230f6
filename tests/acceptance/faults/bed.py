"""Three hosts as Linux namespaces, for faults that no single machine can have: dead hosts, cut links, full disks.

Each host has a network, mount, PID and UTS namespace of its own: its own address behind a bridge, a home, a
`/var/tmp` and a stock OpenSSH. Killing it kills everything that runs there, at one blow; its disk stays. The
bridge is in a namespace, too, so that no firewall rule of the machine reaches it. One bed at a time; what an earlier
one left is cleared first.

    with Bed(Path("/tmp/bed")) as bed:
        bed.hosts["gpu_a"].kill()
        bed.hosts["gpu_a"].boot()
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from airflow_tfps.demo.processes import describe, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAMES = ("gpu_a", "gpu_b", "gpu_c")
NETWORK = "198.18.77"
"""Of the addresses set aside for measuring networks (RFC 2544)."""
PREFIX = "tfpsf-"
"""Of every namespace and interface; an interface's name has at most 15 characters."""
SWITCH = f"{PREFIX}net"
GATE = f"{PREFIX}gate"
"""This machine's own interface into the bed's network."""
GIVE_UP_SECS = 20.0

Process = tuple[int, int]
"""Pid and start time: names a process for good."""


def missing() -> str | None:
    """Why there can be no bed on this machine; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacks = [name for name in ("ip", "unshare", "nsenter", "mount") if shutil.which(name) is None]
    if sshd() is None:
        lacks.append("sshd")
    if lacks:
        return f"{', '.join(lacks)} not installed (on Debian: iproute2, util-linux, openssh-server)"
    probe = f"{PREFIX}probe"
    try:
        run("ip", "netns", "add", probe)
        run(
            "ip",
            "netns",
            "exec",
            probe,
            "unshare",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--mount-proc",
            "true",
        )
        run("ip", "link", "add", f"{PREFIX}a", "type", "veth", "peer", "name", f"{PREFIX}b")
        run("ip", "link", "del", f"{PREFIX}a")
    except BedError as error:
        return f"this machine gives no namespaces: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return None


def sshd() -> str | None:
    return shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.defpath)


class BedError(AssertionError):
    """The bed could not be made, or something of it is left."""


def run(*argv: str) -> str:
    """Run a command; its output. Raises BedError with what it complained about."""
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BedError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def wait(condition: Callable[[], Any], secs: float, what: str) -> Any:
    until = time.monotonic() + secs
    while not (found := condition()):
        if time.monotonic() > until:
            raise BedError(f"not within {secs:g} s: {what}")
        time.sleep(0.05)
    return found


class Host:
    """One host. `boot` and `kill` may be called again and again; the files stay."""

    def __init__(self, name: str, number: int, folder: Path, client_key: str) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.folder = folder
        self.namespace = PREFIX + name
        self._link = f"{PREFIX}{name}"
        self._hardware = f"02:00:00:00:77:{number:02x}"
        self._shell: subprocess.Popen[bytes] | None = None
        self._init: int | None = None
        for part in ("home", "var-tmp"):
            (folder / part).mkdir(parents=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
        (folder / "authorized_keys").write_text(client_key)
        # As it is installed but for where its files are: MaxStartups, MaxSessions and AcceptEnv are sshd's own.
        (folder / "sshd_config").write_text(
            f"ListenAddress {self.address}\nHostKey {folder}/host_key\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPasswordAuthentication no\nUsePAM no\n"
        )
        shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
        # All of it: a file that something else is mounted on may be replaced outside, which takes the mount away.
        shutil.copytree("/etc", folder / "etc", symlinks=True)
        (folder / "etc" / "passwd").write_text(
            f"root:x:0:0:root:{folder}/home:{shell}\nsshd:x:101:65534::/run/sshd:/usr/sbin/nologin\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        )
        # What a company's set-up script puts there; bash reads it for commands that come over SSH, too.
        (folder / "home" / ".bashrc").write_text(
            "export http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9\n"
        )

    @property
    def home(self) -> str:
        """Of its user, as this machine sees it."""
        home = self.folder / "home"
        return str(home if self._init is None else self.path(home))

    @property
    def host_key(self) -> str:
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    # --- power

    def boot(self) -> None:
        """Start it and wait until its sshd answers. Nothing happens when it runs."""
        if self._init is None:
            run("ip", "netns", "add", self.namespace)
            run(
                "ip",
                "-n",
                SWITCH,
                "link",
                "add",
                self._link,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                self.namespace,
            )
            run("ip", "-n", SWITCH, "link", "set", self._link, "master", "bridge", "up")
            # A machine has the same hardware address after it was off: others remember it.
            run("ip", "-n", self.namespace, "link", "set", "eth0", "address", self._hardware)
            run("ip", "-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", self.namespace, "link", "set", device, "up")
            self._shell = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.namespace),
                    *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *(sys.executable, str(Path(__file__).with_name("init.py")), self.name, str(self.folder), sshd() or ""),
                ],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath), "TFPS_BED": str(self.folder)},
            )  # fmt: skip
            self._init = wait(self._find_init, GIVE_UP_SECS, f"{self.name} boots")
        wait(self.is_up, GIVE_UP_SECS, f"sshd of {self.name} answers")

    def _find_init(self) -> int | None:
        assert self._shell is not None
        if self._shell.poll() is not None:
            raise BedError(f"{self.name} did not boot: exit code {self._shell.returncode}")
        for pid in pids():
            if parent(pid) == self._shell.pid and inner_pid(pid) == 1:
                return pid
        return None

    def is_up(self) -> bool:
        try:
            with socket.create_connection((self.address, 22), 0.5) as connection:
                connection.settimeout(1.0)
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def kill(self) -> None:
        """Power off: the network is gone first, so that nobody is told, then every process is."""
        self.cut()
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    self._init, signal.SIGKILL
                )  # with the first process the kernel kills all of the namespace
        if self._shell is not None:
            self._shell.wait(GIVE_UP_SECS)
        # Connections that were open keep the namespace for minutes after its last process, and the link with it.
        for argv in (("-n", SWITCH, "link", "del", self._link), ("netns", "del", self.namespace)):
            subprocess.run(["ip", *argv], check=False, capture_output=True)
        self._init = self._shell = None

    # --- network

    def cut(self) -> None:
        """Pull the cable: packets are dropped, nobody is told."""
        subprocess.run(
            ["ip", "-n", SWITCH, "link", "set", self._link, "down"], check=False, capture_output=True
        )

    def mend(self) -> None:
        """Plug it in again."""
        run("ip", "-n", SWITCH, "link", "set", self._link, "up")
        wait(self.is_up, GIVE_UP_SECS, f"{self.name} can be reached again")

    def restart_sshd(self) -> None:
        """Kill the server and all its connections; its first process starts a new one. What was started stays."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/exe") == sshd():
                    os.kill(pid, signal.SIGKILL)
        wait(self.is_up, GIVE_UP_SECS, f"sshd of {self.name} answers again")

    # --- inside

    def run(self, *argv: str) -> str:
        """Run a command on the host, as its root; its output."""
        assert self._init is not None
        return run("nsenter", f"--target={self._init}", "--mount", "--uts", "--net", "--pid", *argv)

    def popen(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a command in the host's network. It is no process of the host's: killing that does not end it."""
        assert self._init is not None
        inside = ("nsenter", f"--target={self._init}", "--net")
        return subprocess.Popen([*inside, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    def pids(self) -> list[int]:
        """All processes of the host, by their pids on this machine."""
        if self._init is None:
            return []
        return [pid for pid in pids() if pid_namespace(pid) == pid_namespace(self._init)]

    def by_inner_pid(self) -> dict[Process, int]:
        """(pid there, start time) of each living process to its pid here."""
        found = {}
        for pid in self.pids():
            inner, started = inner_pid(pid), start_time(pid)
            if inner is not None and started is not None:
                found[inner, started] = pid
        return found

    def open_ports(self) -> set[int]:
        """TCP ports on which somebody listens there."""
        return self._ports(states={"0A"})

    def held_ports(self, candidates: Sequence[int]) -> list[int]:
        """Which of these ports somebody holds there, listening or not."""
        if self._init is None:
            return []
        program = (
            "import socket, sys\n"
            "for port in map(int, sys.argv[1:]):\n"
            "    for family, address in ((socket.AF_INET, '0.0.0.0'), (socket.AF_INET6, '::')):\n"
            "        with socket.socket(family) as probe:\n"
            "            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
            "            if family == socket.AF_INET6: probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)\n"
            "            try: probe.bind((address, port))\n"
            "            except OSError: print(port)\n"
        )
        said = self.run(sys.executable, "-S", "-c", program, *map(str, candidates))
        return sorted(set(map(int, said.split())))

    def _ports(self, states: set[str]) -> set[int]:
        found = set()
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{self._init}/net/{name}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] in states:
                        found.add(int(fields[1].rpartition(":")[2], 16))
        return found

    def path(self, path: str | Path) -> Path:
        """A path on the host, as this machine sees it."""
        return Path(f"/proc/{self._init}/root{path}")


class Bed:
    """All three hosts. Entering makes it, leaving takes it away, an exception too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self._mutex: socket.socket | None = None

    def __enter__(self) -> Self:
        self._mutex = socket.socket(socket.AF_UNIX)
        try:
            self._mutex.bind("\0tfps-faults")  # an abstract name: gone with the process, whatever happens
        except OSError:
            raise BedError("another bed is in use on this machine: wait until it has ended") from None
        self.clear()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for host in self.hosts.values():
            with contextlib.suppress(BedError, subprocess.TimeoutExpired):
                host.kill()
        self.clear()
        if self._mutex is not None:
            self._mutex.close()
        left = self.left()
        if left:
            raise BedError(f"left of the bed: {left}")

    def _make(self) -> None:
        self.folder.mkdir(parents=True, mode=0o700)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", str(self.folder / "client_key"))
        run("ip", "netns", "add", SWITCH)
        run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        run("ip", "link", "add", GATE, "type", "veth", "peer", "name", "gate", "netns", SWITCH)
        run("ip", "-n", SWITCH, "link", "set", "gate", "master", "bridge", "up")
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", GATE)
        run("ip", "link", "set", GATE, "up")
        key = (self.folder / "client_key.pub").read_text()
        for number, name in enumerate(NAMES, start=2):
            self.hosts[name] = Host(name, number, self.folder / name, key)
        for host in self.hosts.values():
            host.boot()

    def connection(self, name: str) -> dict[str, Any]:
        """An Airflow connection of type ssh to a host."""
        host = self.hosts[name]
        extra = {"private_key": (self.folder / "client_key").read_text(), "host_key": host.host_key}
        return {"conn_type": "ssh", "host": host.address, "login": "root", "extra": extra}

    def clear(self) -> None:
        """Remove everything that bears the bed's names, whoever left it."""
        for namespace in namespaces():
            for pid in run("ip", "netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "link", "del", GATE], check=False, capture_output=True)
        with contextlib.suppress(BedError):
            wait(lambda: not self.left(), GIVE_UP_SECS, "everything ends")
        shutil.rmtree(self.folder, ignore_errors=True)

    def left(self) -> list[str]:
        """What there is of a bed: namespaces, interfaces, processes."""
        found = [f"namespace {name}" for name in namespaces()]
        found += [f"interface {name}" for name in links() if name.startswith(PREFIX)]
        return found + [describe(pid) for pid in self._processes()]

    def _processes(self) -> list[int]:
        """Airflow's and the hosts', by their environment; not a shell that somebody has left in the folder."""
        names = ("TFPS_BED", "AIRFLOW_HOME", "LIVE_CONTROL")
        return [pid for name in names for pid in processes(f"{name}={self.folder}/")]


# --- the kernel's books -------------------------------------------------------------------------------------------


def namespaces() -> list[str]:
    names = (line.split()[0] for line in run("ip", "netns", "list").splitlines() if line)
    return [name for name in names if name.startswith(PREFIX)]


def links() -> list[str]:
    return [link["ifname"] for link in json.loads(run("ip", "-json", "link"))]


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _stat(pid: int) -> list[bytes] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None


def parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def start_time(pid: int) -> int | None:
    """In clock ticks since boot; None for a zombie, too."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == b"Z" else int(fields[19])


def inner_pid(pid: int) -> int | None:
    """The pid that a process has in its own namespace."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), None)
