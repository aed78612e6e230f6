"""What a training holds on a host, and how: its lock, ports, GPUs and checkpoint directory.

Standard library only. Everything here is held by the agent's process and released by the kernel when it dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from tfps_runtime.protocol import (
    OWNER_FILE,
    LockRecord,
    Owner,
    Paths,
    ProtocolError,
    RefusedError,
    TrainingId,
    machine_path,
    run_dir,
)
from tfps_runtime.whole import write_new, write_whole

_LOCK_PATH = re.compile(re.escape(run_dir(0))[:-1] + r"[0-9]+/[0-9a-f]{12}\.lock\Z")
MAX_USED_MIB = 300
"""A GPU with more memory in use belongs to somebody."""


def ensure_run_dir() -> str:
    """Make the host-local directory of this user; refuse one that another user prepared."""
    path = run_dir()
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    check_run_dir()
    return path


def check_run_dir() -> None:
    """Refuse the host-local directory if another user prepared it; its absence is fine.

    Before anything in it is believed: whoever owns it could put a socket there and be sent a job's secrets. One of our
    own that others may use is made private.
    """
    path = run_dir()
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RefusedError("workdir", f"{path} is not a directory of this user; remove it and try again")
    if stat.S_IMODE(found.st_mode) != 0o700:
        os.chmod(path, 0o700)


def refusal(error: OSError, what: str) -> RefusedError:
    """What the file system said, as a refusal. A full disk may have room at the next try; nothing else mends itself."""
    return RefusedError("workdir", what, transient=error.errno in (errno.ENOSPC, errno.EDQUOT))


# --- the agent's lock ----------------------------------------------------------------------------------------------
#
# A lock of the open file description (fcntl(2)): bound to the agent's descriptor, not inherited over exec, and, unlike
# flock(2), it can be asked about without being taken, so that a look never disturbs another look or a start.

_FLOCK = "hhlli0l"  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid


def _flock(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


class Lock:
    """An agent's lock: held means the agent lives. Its file says whose it is."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def acquire(cls, path: str, record: Optional[LockRecord]) -> Lock:
        """Take the lock without waiting. Raises RefusedError(`alive`) while another process holds it.

        Without a `record` the file goes on saying what it said: for who only clears away.
        """
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
            except BlockingIOError:
                os.close(fd)
                whose = "this training" if record is None else record.training
                raise RefusedError("alive", f"an agent of {whose} lives on this host") from None
            # The former holder removes the file before it lets go: what was locked may no longer be at the path.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
                    if record is not None:
                        os.ftruncate(fd, 0)
                        os.write(fd, record.dumps().encode())
                    return cls(path, fd)
            os.close(fd)

    def release(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._fd)


def is_held(path: str) -> bool:
    """Whether a living process holds the lock at `path`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK)))
    finally:
        os.close(fd)
    return bool(found[0] != fcntl.F_UNLCK)


def is_lock_path(path: str) -> bool:
    """Whether `path` is where an agent of some user has its lock: a file may say anything, and this one is opened."""
    return _LOCK_PATH.match(path) is not None


def read_lock(path: str) -> Optional[LockRecord]:
    """What the lock file says, or None when it is absent, empty or not ours."""
    try:
        with open(path, encoding="utf-8") as file:
            return LockRecord.loads(file.read(65536))
    except (OSError, ProtocolError, UnicodeDecodeError):
        return None


def locks() -> Iterator[tuple[str, LockRecord]]:
    """Lock files of this user's agents on this machine, of dead ones too, with what they say."""
    try:
        names = sorted(os.listdir(run_dir()))
    except FileNotFoundError:
        return
    for name in names:
        path = os.path.join(run_dir(), name)
        if name.endswith(".lock") and not name.startswith("gpu-"):
            record = read_lock(path)
            if record is not None:
                yield path, record


def living() -> Iterator[tuple[str, LockRecord]]:
    """Locks of the agents of this user that live on this machine, with what they say."""
    return ((path, record) for path, record in locks() if is_held(path))


def clear_lock(lock: str) -> bool:
    """Remove the lock file of an agent that was killed, and its socket; False, and nothing, while one lives.

    Under the lock, so that no new agent of the training comes in between and loses its socket.
    """
    try:
        held = Lock.acquire(lock, None)
    except RefusedError:
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lock[: -len(".lock")] + ".sock")
    held.release()
    return True


# --- ports ---------------------------------------------------------------------------------------------------------


class Port:
    """A TCP port that nobody else can take and that nothing listens on.

    A plain bind excludes everyone; SO_REUSEPORT set *afterwards* lets TensorFlow, told TF_GRPC_REUSE_PORT=true,
    bind beside it, again and again over restarts. A connection to it is refused until TensorFlow listens.
    """

    def __init__(self, number: int, sockets: list[socket.socket]) -> None:
        self.number = number
        self._sockets = sockets

    @classmethod
    def hold(cls, number: int) -> Optional[Port]:
        """Hold port `number` on all addresses, or None when it is in use."""
        sockets: list[socket.socket] = []
        try:
            for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104
                try:
                    held = socket.socket(family, socket.SOCK_STREAM)
                except OSError as error:
                    if family == socket.AF_INET6 and error.errno == errno.EAFNOSUPPORT:
                        continue
                    raise
                sockets.append(held)
                if family == socket.AF_INET6:
                    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    held.bind((address, number))
                except OSError as error:
                    if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
                        sockets.pop().close()  # IPv6 is switched off on this host
                        continue
                    raise
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            for held in sockets:
                held.close()
            return None
        return cls(number, sockets)

    def release(self) -> None:
        for held in self._sockets:
            held.close()


def hold_ports(names: Sequence[str], ports: Sequence[int], salt: str) -> dict[str, Port]:
    """Hold one port for each name out of `ports` (first, last). All or none.

    Trainings begin their search at different places, so that two of them rarely try the same port.
    """
    if len(ports) != 2 or not 0 < ports[0] <= ports[1] < 65536:
        raise RefusedError("bad_request", f"not a range of ports: {list(ports)}")
    first, last = ports
    count = last - first + 1
    if count < len(names):
        raise RefusedError("port", f"{len(names)} ports are needed, {first}-{last} has {count}")
    held: dict[str, Port] = {}
    offset = zlib.crc32(salt.encode()) % count
    for i in range(count):
        if len(held) == len(names):
            break
        port = Port.hold(first + (offset + i) % count)
        if port is not None:
            held[names[len(held)]] = port
    if len(held) < len(names):
        for port in held.values():
            port.release()
        raise RefusedError(
            "busy", f"only {len(held)} of {len(names)} ports are free in {first}-{last}", transient=True
        )
    return held


# --- GPUs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi reports it; `index` in PCI bus order, the order CUDA_DEVICE_ORDER=PCI_BUS_ID uses."""

    index: int
    bus: str
    used_mib: int


def list_gpus(timeout: float = 20.0) -> list[Gpu]:
    """Ask `nvidia-smi`. No GPU driver means no GPUs; a driver that does not answer is an error."""
    query = ["nvidia-smi", "--query-gpu=pci.bus_id,memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        return []
    except OSError as error:  # a folder of the PATH that the user may not enter, too
        raise RefusedError("gpu", f"nvidia-smi: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise RefusedError(
            "gpu", f"nvidia-smi did not answer within {timeout:.0f} s", transient=True
        ) from None
    if answer.returncode != 0:
        message = (answer.stderr or answer.stdout).strip().splitlines()
        raise RefusedError("gpu", f"nvidia-smi: {message[0][:200] if message else answer.returncode}")
    rows = []
    for line in answer.stdout.splitlines():
        bus, _, used = line.partition(",")
        with contextlib.suppress(ValueError):
            rows.append((bus.strip().lower(), int(used)))
    return [Gpu(index, bus, used) for index, (bus, used) in enumerate(sorted(rows))]


class GpuLock:
    """A GPU held against other trainings of this user."""

    def __init__(self, gpu: Gpu, fd: int) -> None:
        self.gpu = gpu
        self._fd = fd

    @classmethod
    def hold(cls, gpu: Gpu) -> Optional[GpuLock]:
        name = "".join(c if c.isalnum() else "-" for c in gpu.bus)
        fd = os.open(
            os.path.join(ensure_run_dir(), f"gpu-{name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return cls(gpu, fd)

    def release(self) -> None:
        os.close(self._fd)


def hold_gpus(wanted: dict[str, int]) -> tuple[dict[str, list[int]], list[GpuLock]]:
    """Hold as many GPUs for each name as it wants. All or none; RefusedError(`busy`) when too few are free."""
    total = sum(wanted.values())
    if total == 0:
        return {}, []
    gpus = list_gpus()
    if len(gpus) < total:
        raise RefusedError("gpu", f"{total} GPUs are needed, the host has {len(gpus)}")
    held: list[GpuLock] = []
    for gpu in gpus:
        if len(held) < total and gpu.used_mib < MAX_USED_MIB:
            lock = GpuLock.hold(gpu)
            if lock is not None:
                held.append(lock)
    if len(held) < total:
        for lock in held:
            lock.release()
        raise RefusedError(
            "busy", f"{total} GPUs are needed, {len(held)} of {len(gpus)} are free right now", transient=True
        )
    free = [lock.gpu.index for lock in held]
    chosen = {}
    for name, count in wanted.items():
        chosen[name], free = free[:count], free[count:]
    return chosen, held


# --- the checkpoint directory -----------------------------------------------------------------------------------------


def read_owner(directory: str) -> Optional[Owner]:
    """What the directory's owner file says; None when it is absent, damaged, or names no lock of an agent."""
    try:
        with open(os.path.join(directory, OWNER_FILE), encoding="utf-8") as file:
            owner = Owner.loads(file.read(65536))
    except (OSError, ProtocolError, UnicodeDecodeError):
        return None
    return owner if is_lock_path(owner.lock) else None


def write_owner(directory: str, owner: Owner) -> None:
    write_whole(os.path.join(directory, OWNER_FILE), owner.dumps() + "\n")


def machine() -> str:
    """A name of this machine, for as long as the directory of its locks exists; machine ids are cloned with images."""
    path = machine_path()
    while True:
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            return file.read(64)
        ensure_run_dir()
        with contextlib.suppress(FileExistsError):  # another process was faster
            write_new(path, os.urandom(16).hex())


def _may_write(owner: Owner, training: TrainingId) -> bool:
    """Whether the owner of a checkpoint directory may still write there.

    On this machine its lock tells. On another one an incarnation of the same key is gone, since whoever starts the next
    stops it first; of others there is only their word: that they have ended, or by when they will have.
    """
    if owner.ended:
        return False
    if owner.machine in ("", machine()):
        return is_held(owner.lock)
    return TrainingId.parse(owner.training).key != training.key and time.time() < owner.until


def own_checkpoint_dir(directory: str, paths: Paths, *, is_fixed: bool, lease_secs: float) -> str:
    """Claim the directory that the training's checkpoints go to; returns the one to use.

    An unfinished training's directory is taken up again by the next incarnation of the same key. A finished one
    stays as it is: the next training of the key writes to `<directory>-2`, `-3`, … (a fixed directory is for
    scripts that manage it themselves and is reused). Raises RefusedError(`checkpoint_owned`) while a living
    training writes there.
    """
    number = 1
    while True:
        candidate = directory if number == 1 else f"{directory}-{number}"
        os.makedirs(candidate, mode=0o700, exist_ok=True)
        owner = read_owner(candidate)
        if owner is not None and owner.training != str(paths.training):
            if _may_write(owner, paths.training):
                raise RefusedError(
                    "checkpoint_owned",
                    f"{candidate} is being written by training {owner.training}, on {owner.host}",
                    transient=True,
                )
            if owner.finished and not is_fixed:
                number += 1
                continue
        until = time.time() + lease_secs
        write_owner(
            candidate,
            Owner(str(paths.training), paths.host, paths.lock, machine=machine(), until=until),
        )
        return candidate


def change_owner(directory: str, training: str, **values: Any) -> None:
    """Write something else about this training, if it still owns the directory. Raises OSError."""
    owner = read_owner(directory)
    if owner is not None and owner.training == training:
        write_owner(directory, replace(owner, **values))
