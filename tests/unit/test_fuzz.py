"""Whatever comes in, only our own errors come out, and soon: specs, messages, handles, answers, checkpoint bytes.

1,000 examples of each; 10,000 by `make fuzz`. What once broke something stands beside its test as an explicit example.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import shutil
import socket
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from test_protocol import MESSAGES, smallest
from tfps_runtime.agent import check_names
from tfps_runtime.checkpoint import complete_checkpoints, read_state
from tfps_runtime.commands import paths_of
from tfps_runtime.followers import Connection
from tfps_runtime.protocol import (
    MAX_DEPTH,
    Message,
    ProtocolError,
    RefusedError,
    ReserveRequest,
    Task,
    TaskState,
    TrainingId,
    check_place,
    dump,
    load,
)
from tfps_runtime.uploads import put

from airflow_tfps import forms, remote
from airflow_tfps.errors import CommandError, NotReadyError, SpecError, TfpsError
from airflow_tfps.follow import MAX_EVENTS, HostFollower
from airflow_tfps.handle import Handle, PlacedTask
from airflow_tfps.inventory import Inventory
from airflow_tfps.judge import Rules, judge
from airflow_tfps.progress import MAX_BYTES, Board
from airflow_tfps.readiness import check_probes
from airflow_tfps.spec import JobSpec
from airflow_tfps.ssh import Completed
from airflow_tfps.ssh.wire import Lines
from airflow_tfps.yaml_text import YamlError, parse_yaml, plain_scalar

EXAMPLES = 10_000 if settings.get_current_profile_name() == "fuzz" else 1_000
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)

TEXT = st.text(st.characters(codec=None), max_size=12)
"""With NUL, controls and halves of characters."""
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 3),
    st.sampled_from([10**400, -(2**63) - 1, 2**63, 1e308, -0.0, "5", "NaN", "", "~", "../x", "x" * 5000]),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXT,
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
ANYTHING = st.recursive(
    st.one_of(SCALARS, st.floats(), st.binary(max_size=4), st.dates()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.one_of(TEXT, st.integers(), st.none(), st.booleans()), inner, max_size=3),
    ),
    max_leaves=6,
)
"""What YAML and Python can put in place of a value."""


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def nested_pair(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    return value


def endless_mapping() -> Any:
    value: dict[str, Any] = {}
    value["x"] = value
    return value


def endless() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


PYTHON_BOMBS = [
    pytest.param(bomb, id=name)
    for name, bomb in {
        "nested": nested(3000),
        "endless list": endless(),
        "endless mapping": endless_mapping(),
        "huge number": 10**5000,
        "huge key": {10**5000: 1},
        "nested key": {nested_pair(3000): 1},
        "many digits": "1" * 5000,
    }.items()
]
"""What Python can hold and JSON cannot, or what is too large for it."""


@st.composite
def damaged(draw: Callable[..., Any], value: Any, with_: st.SearchStrategy[Any]) -> Any:
    """A copy of `value` (plain JSON) in which up to three places are replaced, taken away, or new."""
    whole = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 3))):
        place: Any = whole
        key: Any = 0
        while isinstance(place[key], (dict, list)) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
            key = draw(
                st.sampled_from(sorted(place, key=str) if isinstance(place, dict) else range(len(place)))
            )
        match draw(st.sampled_from(["replace", "replace", "take away", "add"])):
            case "take away" if place is not whole:
                del place[key]
            case "add" if isinstance(place, dict):
                place[draw(TEXT)] = draw(with_)
            case _:
                place[key] = draw(with_)
    return whole[0]


@st.composite
def mutated(draw: Callable[..., Any], data: bytes) -> bytes:
    """Bytes in which a few were changed, cut out, cut off or put in."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(out) - 1, 0)))
        match draw(st.sampled_from(["change", "change", "cut out", "cut off", "put in"])):
            case "change" if out:
                out[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
            case "cut out":
                del out[at : at + draw(st.integers(1, 40))]
            case "cut off":
                del out[at:]
            case _:
                out[at:at] = draw(st.binary(max_size=8))
    return bytes(out)


def check_size(error: Exception) -> None:
    """A message is for people to read."""
    assert len(str(error)) < 20_000


# --- what people write ----------------------------------------------------------------------------------------------

JOB = {
    "program": "ctr.py",
    "hparams": {"learning_rate": 0.1, "layers": [1, 2]},
    "inputs": {"train": "host:/data"},
    "roles": {"ps": {"count": 1, "env": {"A": "b"}}, "worker": {"count": 2, "gpus": 1, "hosts": ["gpu-a"]}},
    "checkpoint": {"base_dir": "/ckpt"},
    "timeouts": {"stall_secs": 5},
    "env": {"X": "1"},
    "secrets": {"KEY": "conn:minio#password"},
    "steps": 100,
    "seed": 7,
}
HOSTS = {
    "hosts": {"gpu-a": {"address": "10.0.0.1", "gpus": 4, "ports": "2000-2999"}, "gpu-b": {"address": "::1"}}
}


@FUZZ
@given(st.one_of(damaged(JOB, ANYTHING), ANYTHING), st.booleans())
def test_jobs(data, templated):
    """A job that survives JSON, or a SpecError."""
    read_job(data, templated)


def read_job(data: Any, templated: bool) -> None:
    try:
        job = JobSpec.from_dict(data, templated=templated)
    except SpecError as error:
        check_size(error)
        return
    text = json.dumps(job.to_dict(), allow_nan=False)
    assert JobSpec.from_dict(json.loads(text), templated=templated).to_dict() == job.to_dict()


@pytest.mark.parametrize("bomb", PYTHON_BOMBS)
@pytest.mark.parametrize(
    "key",
    ["", "name", "steps", "hparams", "inputs", "roles", "args", "env", "secrets", "checkpoint", "session"],
)
def test_bombs_in_jobs(key, bomb):
    """What Python can hold and JSON cannot is one fault."""
    for data in [bomb] if not key else [{**JOB, key: bomb}, {**JOB, key: {"x": bomb}}, {**JOB, key: [bomb]}]:
        read_job(data, False)
        read_job(data, True)


YAML = b"""# a job
name: digits
program: digits.py
roles: {ps: 1, worker: &w {count: 2, gpus: 1}}
hparams: {rate: 1e-3, other: *w, text: "a\\u00e9", none: ~, day: 2024-01-01}
steps: +5
"""


@FUZZ
@given(mutated(YAML))
@example(b"a: &a [*a]")
@example(b"? [a]\n: 1")
@example(b"x: !!python/object/apply:os.system [id]")
@example(b"x: 0b")
@example(b"x: 2024-13-45")
@example(b"x: !!int ''")
@example(b"x: !!float ''")
@example(b"x: !!timestamp nonsense")
@example(b"x: !!binary \xc3\xa9")
@example(b"x: ! y")
@example(b"x: !!bool maybe")
@example(b"x: 1" + b":1" * 3000 + b".5")
@example(b"[" * 5000)
@example(b"{" * 5000)
@example(b"x: " + b"1" * 5000)
@example(b"x: 1" + b":1" * 3000)
@example(b"a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nroles: {ps: [*b,*b,*b,*b,*b,*b]}")
def test_job_files(data):
    """Any bytes in a file are YAML or not; what is YAML is a job or not."""
    try:
        parsed = parse_yaml(data.decode("utf-8", "replace"), as_text=("steps",))
    except YamlError as error:
        check_size(error)
        return
    read_job(parsed, False)


@FUZZ
@given(st.text("0123456789:.-+eExXbBoO_ ~[]{},'\"nulltrefas", max_size=20) | TEXT)
@example("0b")
@example("1" + ":1" * 3000 + ".5")
@example("[" * 5000)
def test_rendered_values(text):
    """What a template comes to is a number, a truth value, null, a list, a mapping, or the text itself."""
    json.dumps(plain_scalar(text), default=str)


def test_a_file_that_is_no_text_is_a_fault(tmp_path):
    """Bytes come before YAML."""
    (tmp_path / "job.yaml").write_bytes(b"name: \xff\xfe\0")
    with pytest.raises(SpecError):
        JobSpec.from_file(tmp_path / "job.yaml")


@FUZZ
@given(st.one_of(damaged(HOSTS, ANYTHING), ANYTHING))
def test_inventories(data):
    """Hosts that survive JSON, or a SpecError; also when connections have to be looked up."""
    read_inventory(data)


@pytest.mark.parametrize("bomb", PYTHON_BOMBS)
@pytest.mark.parametrize("key", ["", "hosts", "defaults", "gpu-a", "address", "gpus", "ports", "workdir"])
def test_bombs_in_inventories(key, bomb):
    """What Python can hold and JSON cannot is one fault."""
    host = {"address": "10.0.0.1"}
    read_inventory(
        {
            "": bomb,
            "hosts": {"hosts": bomb},
            "defaults": {"hosts": {"a": host}, "defaults": bomb},
            "gpu-a": {"hosts": {"gpu-a": bomb}},
        }.get(key, {"hosts": {"gpu-a": {**host, key: bomb}, "gpu-b": {**host, key: [bomb, bomb]}}})
    )


def read_inventory(data: Any) -> None:
    try:
        inventory = Inventory.from_dict(data)
    except SpecError:
        inventory = None
    if inventory is not None:
        assert Inventory.from_dict(json.loads(json.dumps(inventory.to_dict()))) == inventory
    if isinstance(data, (dict, list)):
        try:
            Inventory.load(data, get_connection=no_connection)
        except SpecError:
            return


def no_connection(conn_id: str) -> Any:
    raise LookupError(conn_id)


# --- what crosses the wire ------------------------------------------------------------------------------------------


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


ID = TrainingId("dag/manual__1/training", "0a1b2c3d")


def make_handle() -> Handle:
    return Handle(
        training=ID,
        job=JobSpec.from_dict({**JOB, "roles": {"ps": 1, "worker": 2}}),
        inventory=Inventory.from_dict(HOSTS),
        tasks=(
            PlacedTask(task=Task("ps", 0), host="gpu-a", port=2000),
            PlacedTask(task=Task("worker", 0), host="gpu-a", port=2001, gpus=(0,)),
            PlacedTask(task=Task("worker", 1), host="gpu-b", port=2002, gpus=(1,)),
        ),
        chief=Task("worker", 0),
        checkpoint_dir="/ckpt/x",
        blobs={"program": ("0" * 16, "ctr.py")},
    )


HANDLE = make_handle()


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


# --- what hosts say -------------------------------------------------------------------------------------------------

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


# --- what is asked of hosts -----------------------------------------------------------------------------------------

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


# --- what lies on disk ----------------------------------------------------------------------------------------------

INDEX, INDEX_OF_SHARDS = (
    zlib.decompress(base64.b64decode(text))
    for text in (
        "eNpjYGDjYJRi4mBk4OZPz8lPSsyJLy5JLeBgEWIRYuLg0OAwTewTnczAKFwOFGIVYuY4wajAoXGC0fTD061SDEDACCLyrs79wcApVK7vmJKYXpSYAtUeo3CBUSPGtHlt4RwGRpEKqAl7WBXWMGnsYTXlf8F2DG7EhG/P98I5Bz4t3MDAyFTO4AokK7zs4BL751bv6WXkmMUowkAQhP9u6FYpdb8NANNALIE=",
        "eNpjYGDjYJZi4mBkYORP5GARYhFi4kjRSDHt61BcxcAomAQVMpJg1DAyLYzMZWIAAkYQwfop7yoDo3AyQoWCEUwNo2AKVFhOgklDztQgc2EHXKM476rZcM6BTws3MDAyJTFYAskUOxO4hP7lcwrlHC2MIgyEQfjvhm6VUvfbAB9/HDU=",
    )
)
"""As TensorFlow writes them: four tensors in one shard of 1,000 bytes; others in three, of at most 100 bytes."""
STATE = b'model_checkpoint_path: "/old/place/model.ckpt-7"\nall_model_checkpoint_paths: "model.ckpt-7"\n'


@pytest.fixture(scope="module")
def directory():
    folder = Path(tempfile.mkdtemp(prefix="tfps-fuzz-"))
    yield folder
    shutil.rmtree(folder)


@FUZZ
@given(st.one_of(mutated(INDEX), mutated(INDEX_OF_SHARDS), st.binary(max_size=200)), mutated(STATE))
@example(b"\xff" * 40 + INDEX[-8:], b"")
@example(INDEX[:-48] + b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" * 4 + INDEX[-8:], b"\xff\xfe\0")
@example(INDEX[:-48] + b"\x80" * 40 + INDEX[-8:], STATE + b"\\")
def test_checkpoint_bytes(directory, index_bytes, state):
    """A damaged index is no checkpoint, or needs no byte that is not there; a damaged state file says nothing."""
    place = Path(tempfile.mkdtemp(dir=directory))
    (place / "model.ckpt-7.index").write_bytes(index_bytes)
    (place / "checkpoint").write_bytes(state)
    for shard in range(3):
        (place / f"model.ckpt-7.data-{shard:05}-of-00003").write_bytes(b"x" * 100)
    (place / "model.ckpt-7.data-00000-of-00001").write_bytes(b"x" * 1000)
    for found in complete_checkpoints(str(place)):
        assert found.global_step == 7
        assert found.size <= len(index_bytes) + 1300
    newest, paths = read_state(str(place))
    for path in [newest, *paths]:
        assert path is None or Path(path).parent == place
    shutil.rmtree(place)
