"""A training without TensorFlow, for tests of everything around it: binds its port, prints steps, saves, ends.

What it does is told by files in the folder `--control`, so that a test decides when something happens: `finish`
ends it well, `exit-worker-0` holds the exit code with which that TF task ends, and while `deaf-worker-1` is there
that TF task does not listen. Each process leaves a file `pids/<role>-<index>-<pid>` with its start time.
Python 3.9, standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import sys
import threading
import time

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
    server.bind(("127.0.0.1", port))
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


def save(directory: str, step: int) -> None:
    """Leave a checkpoint as TensorFlow does: data first, then the index, then the state file."""
    prefix = f"model.ckpt-{step}"
    write(os.path.join(directory, f"{prefix}.data-00000-of-00001"), struct.pack("<q", step))
    write(os.path.join(directory, f"{prefix}.index"), index_table())
    write(os.path.join(directory, "checkpoint"), f'model_checkpoint_path: "{prefix}"\n'.encode())


def saved_step(directory: str) -> int:
    """The global step of the newest checkpoint, 0 without one."""
    try:
        with open(os.path.join(directory, "checkpoint"), encoding="utf-8") as file:
            return int(file.readline().rstrip('"\n').rpartition("-")[2])
    except FileNotFoundError:
        return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", required=True)
    parser.add_argument("--checkpoint-dir", required=True)
    arguments = parser.parse_args()

    config = json.loads(os.environ["TF_CONFIG"])
    role, index = config["task"]["type"], config["task"]["index"]
    pids = os.path.join(arguments.control, "pids")
    os.makedirs(pids, exist_ok=True)
    write(os.path.join(pids, f"{role}-{index}-{os.getpid()}"), str(start_time(os.getpid())).encode())
    while os.path.exists(os.path.join(arguments.control, f"deaf-{role}-{index}")):
        time.sleep(STEP_SECS)
    listen(int(config["cluster"][role][index].rpartition(":")[2]))
    if role == "ps":
        while True:
            signal.pause()

    is_chief = index == 0
    step = saved_step(arguments.checkpoint_dir) if is_chief else 0
    sys.stdout.write(f"starting at step {step}\n")
    while not os.path.exists(os.path.join(arguments.control, "finish")):
        code = os.path.join(arguments.control, f"exit-{role}-{index}")
        if os.path.exists(code):
            sys.stdout.write("told to fail\n")
            with open(code, encoding="ascii") as file:
                return int(file.read())
        step += 1
        sys.stdout.write(f"step {step} loss {1 / step:.6f}\n")
        sys.stdout.flush()
        if is_chief and step % SAVE_STEPS == 0:
            save(arguments.checkpoint_dir, step)
        time.sleep(STEP_SECS)
    if is_chief:
        save(arguments.checkpoint_dir, step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
