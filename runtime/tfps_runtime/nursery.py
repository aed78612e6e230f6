"""A process that has imported what the TF tasks need, once, and forks them.

Standard library only. Single-threaded and without a session, a GPU or an open file of its own, so that a fork is sound.
The stdlib's forkserver leaves its children alive when it or its parent dies, and reports them dead; here the kernel
kills the children when the nursery dies, and the nursery when the agent dies.

Messages on the socket (SOCK_SEQPACKET, JSON): `{"launch": Launch}` in; out `{"ready": secs}`, `{"broken": why}`,
`{"spawned": task, "pid": n}`, `{"exited": pid, "code"|"signal": n}`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

from tfps_runtime.launch import Launch, become, die_with_parent
from tfps_runtime.protocol import Exit

MAX_MESSAGE = 256 * 1024


def exit_of(status: int) -> Exit:
    """A wait status as an `Exit`."""
    if os.WIFSIGNALED(status):
        return Exit(signal=os.WTERMSIG(status))
    return Exit(code=os.WEXITSTATUS(status))


def reap() -> list[Any]:
    """Every child that has ended, as (pid, Exit)."""
    ended: list[Any] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, exit_of(status)))


def main() -> int:
    """`python … nursery FD PARENT MODULE…`: import the modules, then serve forks until the socket closes."""
    fd, parent, modules = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    die_with_parent(parent)
    channel = socket.socket(fileno=fd)

    def say(message: dict[str, Any]) -> None:
        channel.send(json.dumps(message).encode())

    started = time.monotonic()
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001  whatever a module raises at import, the agent is told
            traceback.print_exc()
            say({"broken": f"cannot import {name}: {type(error).__name__}: {error}"[:2000]})
            return 1
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_reader, False)
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    say({"ready": round(time.monotonic() - started, 3)})
    me = os.getpid()
    inherited = (fd, wake_reader, wake_writer)
    gc.collect()
    gc.freeze()  # the forks share these objects' pages for longer
    while True:
        readable, _, _ = select.select([fd, wake_reader], [], [])
        if wake_reader in readable:
            os.read(wake_reader, 4096)
            for pid, ended in reap():
                say({"exited": pid, **{k: v for k, v in ended.to_json().items() if v is not None}})
        if fd in readable:
            data = channel.recv(MAX_MESSAGE)
            if not data:
                return 0
            launch = Launch.from_json(json.loads(data)["launch"])
            pid = os.fork()
            if pid == 0:
                become(launch, me, inherited)
            say({"spawned": launch.task, "pid": pid})
