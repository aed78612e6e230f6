"""Whatever hosts say, only our own errors come out, and soon: events, answers, lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fuzzing import FUZZ, HANDLE, ID, JSON, check_size, damaged, mutated
from hypothesis import example, given, strategies as st
from tfps_runtime.protocol import (
    Task,
    TaskState,
    dump,
)

from airflow_tfps import forms, remote
from airflow_tfps.errors import CommandError, NotReadyError, TfpsError
from airflow_tfps.follow import MAX_EVENTS, HostFollower
from airflow_tfps.judge import Rules, judge
from airflow_tfps.progress import MAX_BYTES, Board
from airflow_tfps.readiness import check_probes
from airflow_tfps.ssh import Completed
from airflow_tfps.ssh.wire import Lines

SAID: list[dict[str, Any]] = [
    {"type": "task", "seq": 1, "time": 1.5, "task": "ps:0", "state": "RUNNING", "attempt": 1, "pid": 5, "started": 9},
    {"type": "task", "seq": 2, "task": "worker:0", "state": "FAILED", "attempt": 2, "exit": {"code": 1}, "reason": "x"},
    {"type": "training", "seq": 3, "state": "FAILED", "reason": "worker:0 failed", "last": True},
    {"type": "result", "seq": 4, "task": "worker:0", "result": {"global_step": 5, "metrics": {"auc": 0.5}}},
    {"type": "progress", "task": "worker:0", "progress": {"time": 1.0, "global_step": 5, "loss": 0.5}},
    {"type": "log", "task": "worker:0", "offset": 12, "lines": ["step 1", "step 2"]},
    {"type": "caught_up"},
    {"type": "beat", "time": 1.0, "lease_secs": 5.0},
    {"type": "gone", "state": "LOST"},
    {"type": "unreachable", "host": "gpu-a", "secs": 1e9},
    {"type": "checkpoint", "checkpoint": {"prefix": "/c/m-5", "global_step": 5, "size": 9, "time": 1.0}},
    {"type": "error", "code": "gone", "message": "no agent", "transient": True},
]  # fmt: skip
RULES = Rules(tasks={str(t.task): t.host for t in HANDLE.tasks}, chief="worker:0")


LOOP = asyncio.new_event_loop()
"""One for all: making one takes longer than what is tried in it."""


class Script:
    """A command's output, as a transport hands it on."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[str]:
        for line in self._lines:
            yield line


async def follow(lines: list[str]) -> list[dict[str, Any]]:
    """What a trigger does with a host's lines."""
    follower = HostFollower(HANDLE, "gpu-a", logs=("worker:0",), lease_secs=None)
    board, seen = Board(HANDLE), []
    async for message in follower._messages(Script(lines)):
        assert message["host"] == "gpu-a"
        for line in board.see(message):
            assert len(line) < 10_000
        if message["type"] == "log":
            assert all(isinstance(line, str) for line in message["lines"])
        seen.append(message)
        judge(RULES, seen)
    assert len(dump(board.to_json())) <= MAX_BYTES
    remote.request_line({"from_seq": follower._seen, "told": follower._told})
    return seen


SAID_LINES = st.one_of(
    st.sampled_from(SAID).flatmap(lambda m: damaged(m, JSON)).map(lambda m: json.dumps(m, allow_nan=False)),
    st.sampled_from(SAID).flatmap(lambda m: mutated(json.dumps(m).encode())).map(lambda b: b.decode("utf-8", "replace")),
    st.sampled_from(SAID).map(json.dumps),
)  # fmt: skip


@FUZZ
@given(st.lists(SAID_LINES, max_size=4))
@example([json.dumps({"type": "log", "task": "worker:0"})])
@example([json.dumps({"type": "log", "task": "worker:0", "offset": "x", "lines": 5})])
@example([json.dumps({"type": "unreachable", "secs": "x"})])
@example([json.dumps({"type": "task", "seq": 1, "task": "worker:1", "state": "SUCCEEDED"})])
@example([json.dumps({"type": "gone", "time": "soon", "exit": 5})])
@example([json.dumps({"type": "training", "state": "FAILED", "reason": "x" * 100_000})])
@example(
    [json.dumps({"type": "progress", "task": "worker:0", "progress": {"time": 1, "global_step": 10**4000}})]
)
@example(
    [
        json.dumps({"type": "progress", "task": "worker:0", "progress": {"time": 1, "global_step": 2**62, "loss": 5e-324}})
    ] * 300
)  # fmt: skip
def test_following(lines):
    """Whatever a host's follower prints, a trigger goes on, or ends with one of our errors; the board stays small."""
    try:
        LOOP.run_until_complete(follow(lines))
    except TfpsError as error:
        check_size(error)


def test_a_host_that_never_stops_telling_is_given_up():
    """Every event is kept and judged again with the next one: there is an end to that."""
    follower = HostFollower(HANDLE, "gpu-a", logs=(), lease_secs=None)

    async def hear() -> int:
        return sum([1 async for _ in follower._messages(Script([json.dumps(SAID[0])] * (MAX_EVENTS + 1)))])

    with pytest.raises(CommandError, match=f"sent more than {MAX_EVENTS} events"):
        LOOP.run_until_complete(hear())


STATUS = {"type": "status", "state": "RUNNING", "is_alive": True, "reason": None, "result": {"global_step": 5},
          "tasks": [{"task": "ps:0", "state": "RUNNING", "attempt": 1, "exit": {"code": 0}, "progress": {"time": 1.0, "global_step": 1}}]}  # fmt: skip
RESERVE = {
    "training": str(ID),
    "host": "gpu-a",
    "tasks": [{"task": "ps:0", "has_port": True}],
    "checkpoint_dir": "/c",
}
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("preflight", {"type": "preflight", "faults": [], "time": 1.0, "proxies": ["x"], "gpus": [{"bus": "0"}], "public": ["8.8.8.8"]}),
    ("put", {"type": "blob", "path": "/w/blobs/0/x", "is_there": True}),
    ("reserve", {"training": str(ID), "host": "gpu-a", "ports": {"ps:0": 2000}, "gpus": {"ps:0": [1]}, "checkpoint_dir": "/c"}),
    ("status", STATUS),
    ("launch", STATUS),
    ("probe", {"type": "probe", "missing": {"ps:0": "why"}, "failed": None}),
    ("sweep", {"removed": [{"what": "lock", "name": "/x", "bytes": 5}], "is_complete": True, "faults": [], "count": 1, "bytes": 5}),
    ("trainings", {"trainings": [{**STATUS, "training": str(ID), "chief": "ps:0", "grace_secs": 5, "changed": 1.5}], "count": 1}),
    ("logs", {"type": "log", "lines": ["x"], "offset": 5}),
    ("stop", {"type": "stopped", "stopped": {str(ID): "STOPPED"}}),
    ("checkpoints", SAID[10]),
]  # fmt: skip


@pytest.mark.parametrize(("command", "answer"), ANSWERS)
def test_the_answers_here_are_good_ones(command, answer):
    """What is damaged below is right before that."""
    forms.check_answer("gpu-a", command, RESERVE, answer)


@pytest.mark.parametrize(
    ("command", "change", "said"),
    [
        ("reserve", {"version": 7}, "version: 7 is not understood"),
        ("reserve", {"training": "k#ffffffff"}, "another one than was asked for"),
        ("reserve", {"ports": {}}, "ps:0 has no port"),
        ("reserve", {"ports": {"ps:0": 70_000}}, "ps:0 has no port"),
        ("reserve", {"checkpoint_dir": None}, "checkpoint_dir: is missing"),
        ("reserve", {"checkpoint_dir": "x" * 10_000}, "an absolute path is needed"),
        ("put", {"path": "relative"}, "an absolute path is needed"),
        ("put", {"is_there": "yes"}, "put.is_there: bool is needed, not str"),
        (
            "status",
            {"tasks": [{"task": "ps:0", "state": "SLEEPING"}]},
            r"tasks\[0\].state: unknown value 'SLEEPING'",
        ),
        ("status", {"is_alive": None}, "is_alive: bool is needed"),
        ("logs", {"lines": [5]}, r"lines\[0\]: str is needed"),
        ("checkpoints", {"checkpoint": {"prefix": "/x"}}, "'global_step' is missing"),
    ],
)
def test_an_answer_that_makes_no_sense_says_why(command, change, said):
    """The message names the host, the command, and the place."""
    with pytest.raises(
        CommandError, match=f"^gpu-a: {command} was answered with what makes no sense.*{said}"
    ) as caught:
        forms.check_answer("gpu-a", command, RESERVE, {**dict(ANSWERS)[command], **change})
    assert (caught.value.code, caught.value.transient) == ("protocol", False)


@FUZZ
@given(st.data(), st.sampled_from(ANSWERS))
def test_answers(data, known):
    """Whatever a command answers, the hook has what it needs, or one of our errors."""
    command, good = known
    answer = data.draw(damaged(good, JSON))
    stdout = b"Welcome!\n" + json.dumps(answer, allow_nan=False).encode() + b"\n\xff\n"
    completed = Completed(returncode=data.draw(st.integers(-2, 2)), stdout=stdout, stderr=b"")
    try:
        found = remote.answers("gpu-a", command, completed)
        if not found:
            return
        forms.check_answer("gpu-a", command, RESERVE, found[-1])
    except TfpsError as error:
        check_size(error)
        return
    said = found[-1]
    match command:
        case "preflight":
            assert all(isinstance(x, str) for key in ("faults", "proxies") for x in said[key])
        case "put":
            assert said["path"].startswith("/")
            assert said["is_there"] in (True, False)
        case "reserve":
            assert 0 < said["ports"]["ps:0"] < 65536
            assert said["checkpoint_dir"].startswith("/")
        case "status" | "launch":
            assert said["is_alive"] in (True, False)
            assert all(Task.parse(t["task"]) and TaskState(t["state"]) for t in said["tasks"])
            dict(said.get("result") or {}).get("metrics")
        case "probe":
            try:
                check_probes(HANDLE, {"gpu-a": said})
            except NotReadyError:
                return
        case "logs":
            assert all(isinstance(line, str) for line in said["lines"])
        case "sweep":
            assert sum(one["bytes"] for one in said["removed"]) is not None
        case "trainings":
            assert all(isinstance(float(one.get("changed") or 0.0), float) for one in said["trainings"])
            assert all(isinstance(row["task"], str) for one in said["trainings"] for row in one["tasks"])
        case "stop":
            assert said["stopped"].get(str(ID), "").isascii() or True
        case "checkpoints":
            assert forms.checkpoint_of("gpu-a", said) is None or said["checkpoint"]["global_step"] is not None


@FUZZ
@given(st.lists(st.binary(max_size=30), max_size=6))
@example([b"\xff" * (5 << 20)])
@example([b"x" * (3 << 20), b"x" * (3 << 20)])
@example([b"\xc3", b"\xa9\n"])
def test_lines(chunks):
    """However a stream is cut: the same lines; one without an end is an error before it fills the memory."""
    lines = Lines("gpu-a")
    found = []
    try:
        for chunk in [*filter(None, chunks), b""]:
            found += lines.feed(chunk)
    except TfpsError:
        assert sum(map(len, chunks)) > 4 << 20
        return
    assert "\n".join(found) == b"".join(chunks).decode("utf-8", "replace").removesuffix("\n")
