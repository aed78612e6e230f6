"""A training without TensorFlow, for tests of everything around it: binds its port, prints steps, saves, ends.

What it does is told by files in the folder `--control`, so that a test decides when something happens:

    finish              everyone ends well
    exit-worker-0       that TF task ends with the exit code in it; is taken away, and works once, if `once` follows that
    early-worker-1      that TF task ends well at once, before it listens
    deaf-worker-1       while it is there, that TF task does not listen
    stuck-worker-1      while it is there, that TF task makes no step
    stubborn-worker-1   when it starts, it ignores SIGTERM, and so do the child and the grandchild that it leaves
    slow-save           while it is there, a save stops before its `data`, `index` or `state`, whichever it holds

Each process leaves a file `pids/<role>-<index>-<pid>` with its start time. Python 3.9, standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

from tfps_runtime.checkpoint import latest_checkpoint

STEP_SECS = 0.1
SAVE_STEPS = 10
TABLE_MAGIC = 0xDB4775248B80FB57


def start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rsplit(b")", 1)[1].split()[19])


def write(path: str, content: bytes) -> None:
    """Write a file that appears whole."""
    with open(path + ".partial", "wb") as file:
        file.write(content)
    os.replace(path + ".partial", path)


def listen(port: int) -> None:
    """Accept connections on a port that the agent holds, as TensorFlow's server does."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind(("", port))
    server.listen(16)

    def accept() -> None:
        while True:
            with server.accept()[0] as client:
                client.recv(
                    1
                )  # the client closes first: TIME_WAIT on our side would keep the port from the next

    threading.Thread(target=accept, daemon=True).start()


def block(*entries: tuple[bytes, bytes]) -> bytes:
    """A block of LevelDB's table format: short entries, one restart point."""
    rows = b"".join(bytes([0, len(key), len(value)]) + key + value for key, value in entries)
    return rows + struct.pack("<II", 0, 1)


def trailer(content: bytes) -> bytes:
    """What follows a block: no compression, and the masked CRC-32C of both."""
    crc = 0xFFFFFFFF
    for byte in content + b"\0":
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return b"\0" + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def index_table() -> bytes:
    """The index of a checkpoint with one shard and one tensor, the global step (8 bytes)."""
    header, tensor = bytes.fromhex("08011a020801"), bytes.fromhex("080912002808")
    data = block((b"", header), (b"global_step", tensor))
    meta = block()
    index = block((b"global_step", bytes([0, len(data)])))
    meta_at, index_at = len(data) + 5, len(data) + len(meta) + 10
    handles = bytes([meta_at, len(meta), index_at, len(index)])  # all below 128: varints of one byte
    footer = handles.ljust(40, b"\0") + struct.pack("<Q", TABLE_MAGIC)
    return data + trailer(data) + meta + trailer(meta) + index + trailer(index) + footer


class Disk:
    """The checkpoint directory."""

    def __init__(self, directory: str, control: str, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        self._saved: list[int] = []
        self._slow = os.path.join(control, "slow-save")

    def save(self, step: int) -> None:
        """Leave a checkpoint as TensorFlow does: data first, then the index, then the state file."""
        prefix = f"model.ckpt-{step}"
        data = struct.pack("<q", step)
        parts = [
            ("data", f"{prefix}.data-00000-of-00001", data),
            ("index", f"{prefix}.index", index_table()),
            ("state", "checkpoint", f'model_checkpoint_path: "{prefix}"\n'.encode()),
        ]
        for part, name, content in parts:
            self._pause(part, name)
            write(os.path.join(self._directory, name), content)
        self._clean_up(step)

    def _clean_up(self, step: int) -> None:
        """Delete what is too old, the index first, as TensorFlow does; with `keep` 0 nothing."""
        self._saved = [*(saved for saved in self._saved if saved != step), step]
        while self._keep and len(self._saved) > self._keep:
            prefix = os.path.join(self._directory, f"model.ckpt-{self._saved.pop(0)}")
            for suffix in (".index", ".data-00000-of-00001"):
                os.unlink(prefix + suffix)

    def _pause(self, part: str, name: str) -> None:
        """Stand still in the midst of a save, with half of the next file there, as long as the test wants it."""
        while self._is_to_pause(part):
            with open(os.path.join(self._directory, name + ".partial"), "wb") as file:
                file.write(b"half")
            time.sleep(STEP_SECS)

    def _is_to_pause(self, part: str) -> bool:
        try:
            with open(self._slow, encoding="ascii") as file:
                return file.read() == part
        except FileNotFoundError:
            return False

    def saved_step(self) -> int:
        """The global step of the newest checkpoint, 0 without one."""
        newest = latest_checkpoint(self._directory)
        return 0 if newest is None else newest.global_step


def leave_children() -> None:
    """Ignore SIGTERM and start a child in this process group and a grandchild in a session of its own; both do, too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]  # ignored signals are inherited
    subprocess.Popen(sleeper)
    subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-c",
            f"import subprocess; subprocess.Popen({sleeper!r}, start_new_session=True)",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", required=True)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--keep", type=int, default=0)
    arguments = parser.parse_args()

    config = json.loads(os.environ["TF_CONFIG"])
    role, index = config["task"]["type"], config["task"]["index"]
    pids = os.path.join(arguments.control, "pids")
    os.makedirs(pids, exist_ok=True)
    write(os.path.join(pids, f"{role}-{index}-{os.getpid()}"), str(start_time(os.getpid())).encode())
    here = f"-{role}-{index}"

    def is_told(name: str) -> bool:
        return os.path.exists(os.path.join(arguments.control, name))

    if is_told("early" + here):
        return 0
    if is_told("stubborn" + here):
        leave_children()
    while is_told("deaf" + here):
        time.sleep(STEP_SECS)
    if role != "evaluator":  # which has no port
        listen(int(config["cluster"][role][index].rpartition(":")[2]))
    if role == "ps":
        while True:
            signal.pause()

    is_chief = role == "chief" or (role == "worker" and index == 0 and "chief" not in config["cluster"])
    disk = Disk(arguments.checkpoint_dir, arguments.control, arguments.keep)
    step = disk.saved_step() if is_chief else 0
    sys.stdout.write(f"starting at step {step}\n")
    while not is_told("finish"):
        path = os.path.join(arguments.control, "exit" + here)
        if os.path.exists(path):
            sys.stdout.write("told to fail\n")
            with open(path, encoding="ascii") as file:
                code, *once = file.read().split()
            if once:
                os.unlink(path)
            return int(code)
        if not is_told("stuck" + here):
            step += 1
            sys.stdout.write(f"step {step} loss {1 / step:.6f}\n")
            if is_chief and step % SAVE_STEPS == 0:
                disk.save(step)
        sys.stdout.flush()
        time.sleep(STEP_SECS)
    if is_chief:
        disk.save(step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
