"""Whatever crosses the wire, or is asked of a host, only our own errors come out, and soon."""

from __future__ import annotations

import io
import json
import socket
from typing import Any

import pytest
from fuzzing import ANYTHING, FUZZ, HANDLE, ID, JSON, PYTHON_BOMBS, check_size, damaged, mutated
from hypothesis import example, given, strategies as st
from test_protocol import MESSAGES, smallest
from tfps_runtime.agent import check_names
from tfps_runtime.commands import paths_of
from tfps_runtime.followers import Connection
from tfps_runtime.protocol import (
    MAX_DEPTH,
    Message,
    ProtocolError,
    RefusedError,
    ReserveRequest,
    TrainingId,
    check_place,
    dump,
    load,
)
from tfps_runtime.uploads import put

from airflow_tfps import remote
from airflow_tfps.errors import SpecError
from airflow_tfps.handle import Handle


@FUZZ
@given(st.data(), st.sampled_from(MESSAGES))
def test_messages(data, cls):
    """Any text is a message that survives the wire, or a ProtocolError."""
    good = smallest(cls)
    text = data.draw(
        st.one_of(
            damaged(good, JSON).map(lambda d: json.dumps(d, allow_nan=False)),
            mutated(json.dumps(good).encode()).map(lambda b: b.decode("utf-8", "replace")),
            st.binary(max_size=60).map(lambda b: b.decode("utf-8", "replace")),
        )
    )
    read(cls, text)


def read(cls: type[Message], text: str) -> None:
    try:
        message = cls.loads(text)
    except ProtocolError:
        return
    assert cls.loads(message.dumps()) == message


BOMBS = {
    "lists": "[" * 100_000,
    "closed lists": "[" * 900 + "]" * 900,
    "objects": '{"a":' * 900 + "1" + "}" * 900,
    "one level too many": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
    "digits": "1" * 5000,
    "digits after the point": "0." + "1" * 5000,
    "an exponent": "1e400",
    "not a number": '{"time": NaN}',
    "half a character": '"\\ud800"',
    "keys twice": '{"type": "beat", "type": "gone"}',
    "wide": "[" + "[]," * 300_000 + "[]]",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs(kind):
    """JSON that is small on the wire and large, deep or odd in memory is a ProtocolError, or can be written again."""
    try:
        data = load(BOMBS[kind])
    except ProtocolError:
        return
    assert load(dump(data)) == data


def test_what_may_be_nested_can_be_dumped():
    """The limit on the depth leaves room for what `dump` needs, in whatever frame it is called."""
    data = load("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert dump({"inside": data})


@FUZZ
@given(damaged(HANDLE.to_json(), ANYTHING))
@example({**HANDLE.to_json(), "training": "a\ud800#0a1b2c3d"})
@example({**HANDLE.to_json(), "checkpoint_dir": "\ud800"})
@example({**HANDLE.to_json(), "base_dir": "\ud800"})
@example({**HANDLE.to_json(), "tasks": [*HANDLE.to_json()["tasks"], ["worker:2", "gpu-b", None, []]]})
@example({**HANDLE.to_json(), "tasks": [*HANDLE.to_json()["tasks"], ["worker:1", "gpu-b", 5, []]]})
def test_handles(data):
    """What comes out of an XCom is a handle with which everything can be asked, or a SpecError."""
    read_handle(data)


@pytest.mark.parametrize("bomb", PYTHON_BOMBS)
@pytest.mark.parametrize("key", ["", *HANDLE.to_json(), "task", "host", "port", "gpus", "gpu", "blob"])
def test_bombs_in_handles(key, bomb):
    """What Python can hold and JSON cannot is one fault."""
    whole = HANDLE.to_json()
    row = ["ps:0", "gpu-a", 2000, []]
    places = {"task": 0, "host": 1, "port": 2, "gpus": 3}
    if key in places:
        row[places[key]] = bomb
    if key == "gpu":
        row[3] = [bomb]
    if key in whole:
        whole[key] = bomb
    elif key == "blob":
        whole["blobs"]["program"] = bomb
    else:
        whole["tasks"] = [row, *whole["tasks"][1:]]
    read_handle(whole if key else bomb)


def read_handle(data: Any) -> None:
    try:
        handle = Handle.from_json(data)
    except SpecError as error:
        check_size(error)
        return
    assert Handle.from_json(json.loads(json.dumps(handle.to_json()))) == handle
    assert handle.cluster
    for host in handle.hosts:
        remote.request_line(handle.request(host))
        handle.paths(host).lock.encode()


# --- what is asked of hosts ---

REQUEST = {"training": str(ID), "host": "gpu-a", "workdir": "/w", "tasks": [{"task": "ps:0", "env": {"A": "b"}}],
           "preload": ["json"], "env": {"X": "1"}, "checkpoint_dir": "/c"}  # fmt: skip


@FUZZ
@given(damaged(REQUEST, JSON))
@example({**REQUEST, "host": "../../etc"})
@example({**REQUEST, "host": "/etc"})
@example({**REQUEST, "host": "a\ud800"})
@example({**REQUEST, "workdir": "relative"})
@example({**REQUEST, "workdir": "~nobody-at-all/x"})
@example({**REQUEST, "training": "k\ud800#0a1b2c3d"})
@example({**REQUEST, "preload": ["-c", "x y", "\0"]})
@example({**REQUEST, "env": {"A=B": "x", "": "y"}})
@example({**REQUEST, "tasks": [{"task": "../x:0"}]})
@example({**REQUEST, "tasks": [{"task": "ps:0"}, {"task": "ps:0"}]})
def test_requests(data):
    """What an agent is asked is refused before anything is held, or has only paths below the workdir."""
    request = load(json.dumps(data, allow_nan=False)) if is_short(data) else data
    try:
        paths = paths_of(request) if isinstance(request, dict) else None
        wanted = ReserveRequest.from_json(request)
        workdir = check_place(wanted.host, wanted.workdir)
        check_names(wanted)
    except ProtocolError:
        return
    assert paths is not None
    TrainingId.parse(wanted.training)
    for path in (paths.spec, paths.lock, *(paths.log(task.name) for task in wanted.tasks)):
        path.encode()
        assert ".." not in path.removeprefix(workdir).split("/")


def is_short(data: Any) -> bool:
    """Whether `load` takes it: its numbers have few enough digits."""
    try:
        load(json.dumps(data, allow_nan=False))
    except ProtocolError:
        return False
    return True


@FUZZ
@given(
    damaged({"workdir": "/dev/null/w", "name": "x", "sha256": "0" * 16, "size": 4, "kind": "tar"}, JSON),
    st.binary(max_size=8),
)
def test_uploads(request, content):
    """An upload that makes no sense is refused; nothing is written outside (here: nothing can be)."""
    if not isinstance(request, dict):
        return
    try:
        put(request, io.BytesIO(content))
    except (ProtocolError, RefusedError, KeyError, OSError):  # as the command catches them
        return
    assert request.get("only_ask")


@FUZZ
@given(st.lists(st.binary(max_size=40) | mutated(b'{"command": "status"}\n'), max_size=4))
@example([b"[" * 100_000 + b"\n"])
@example([b"\xff\n", b"NaN\n"])
def test_the_agents_socket(chunks):
    """Bytes on an agent's socket are messages, refusals or a closed connection."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    with ours, theirs:
        for chunk in filter(None, chunks):
            theirs.sendall(chunk)
            connection.receive()
        theirs.shutdown(socket.SHUT_WR)
        while not connection.is_closed:
            connection.receive()
