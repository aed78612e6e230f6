"""The words of both sides: names, paths, and JSON that nobody may be trusted with."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import typing
from enum import Enum

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tfps_runtime import checkpoint, launch, protocol
from tfps_runtime.protocol import (
    MAX_LINE,
    TASK_TRANSITIONS,
    TRAINING_TRANSITIONS,
    Exit,
    Message,
    Paths,
    Progress,
    ProtocolError,
    RefusedError,
    Reservation,
    ReserveRequest,
    Result,
    Task,
    TaskSpec,
    TaskState,
    TrainingId,
    TrainingState,
    digest,
    dump,
    key_directory,
    load,
    slug,
    training_key,
)

ID = TrainingId("nightly/manual__2026-01-01T00:00:00+00:00/training", "0a1b2c3d")

MESSAGES = sorted(
    {
        member
        for module in (protocol, checkpoint, launch)
        for member in vars(module).values()
        if inspect.isclass(member) and issubclass(member, Message) and member is not Message
    },
    key=lambda cls: cls.__name__,
)

# --- every message ---------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LEAVES = {
    str: st.text(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    typing.Any: JSON,
}


def values_of(kind) -> st.SearchStrategy:
    """Whatever a field of this type may hold."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in LEAVES:
        return LEAVES[kind]
    if origin is typing.Union:
        return st.none() | values_of(arguments[0])
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(), values_of(arguments[1]), max_size=3)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    return messages_of(kind)


def messages_of(cls: type[Message]) -> st.SearchStrategy:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(cls)})


def smallest(cls: type[Message]) -> dict:
    """A message's required keys with values of the right types."""
    hints, found = typing.get_type_hints(cls), {}
    samples = {str: "x", int: 1, float: 1.5, bool: True}
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            kind = hints[field.name]
            origin = typing.get_origin(kind)
            if kind in samples:
                found[field.name] = samples[kind]
            elif origin in (tuple, list, dict):
                found[field.name] = origin()
            else:
                found[field.name] = smallest(kind)
    return found


def test_there_are_messages_to_check():
    """The list below is found by looking; it must not be empty by mistake."""
    assert {TaskSpec, ReserveRequest, Reservation, Exit, Progress, Result, launch.Launch} <= set(MESSAGES)


@pytest.mark.parametrize("cls", MESSAGES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_message_survives_the_wire(cls, data):
    """What one side writes the other reads, equal in value and in types."""
    message = data.draw(messages_of(cls))
    line = message.dumps()
    assert "\n" not in line
    assert line.isascii()
    assert cls.loads(line) == message


@pytest.mark.parametrize("cls", MESSAGES)
def test_every_message_refuses_keys_that_it_does_not_know(cls):
    """A misspelt key must not be taken for a default."""
    with pytest.raises(ProtocolError, match=f"{cls.__name__}: unknown key 'chef'"):
        cls.from_json({**smallest(cls), "chef": 1})


@pytest.mark.parametrize("cls", MESSAGES)
def test_every_message_names_what_is_missing(cls):
    """Required keys have no silent value."""
    for name in smallest(cls):
        data = smallest(cls)
        del data[name]
        with pytest.raises(ProtocolError, match=f"'{name}' is missing"):
            cls.from_json(data)


@pytest.mark.parametrize("cls", MESSAGES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_message_refuses_other_types_without_falling_over(cls, data):
    """Any JSON in place of any value gives a message or a ProtocolError, nothing else."""
    good = data.draw(messages_of(cls)).to_json()
    name = data.draw(st.sampled_from(sorted(good)))
    good[name] = data.draw(JSON)
    try:
        message = cls.from_json(json.loads(json.dumps(good)))
    except ProtocolError:
        return
    assert cls.loads(message.dumps()) == message


@pytest.mark.parametrize(
    "text", ["[]", "null", "1", '"x"', "{", "", "nonsense", "[" * 100_000, '{"a":' * 100_000]
)
def test_what_is_no_object_is_refused(text):
    """Nonsense, and nesting deeper than the parser goes, is the sender's error."""
    with pytest.raises(ProtocolError):
        TaskSpec.loads(text)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("gpus", True, "int is needed, not bool"),
        ("gpus", 1.0, "int is needed, not float"),
        ("gpus", "1", "int is needed, not str"),
        ("gpus", None, "int is needed, not NoneType"),
        ("has_port", 1, "bool is needed, not int"),
        ("task", 5, "str is needed"),
        ("env", {"A": 1}, r"TaskSpec.env.A: str is needed"),
        ("env", [["A", "1"]], "an object is needed"),
    ],
)
def test_types_are_checked_and_the_place_is_named(field, value, why):
    """True is no number, 1 is no truth, and text is no number."""
    with pytest.raises(ProtocolError, match=why):
        TaskSpec.from_json({"task": "ps:0", field: value})


def test_a_whole_number_is_a_float_and_a_huge_one_is_refused():
    """JSON writes 2.0 as 2; a number of 400 digits fits into no float."""
    assert isinstance(Progress.loads('{"time": 2, "global_step": 1}').time, float)
    with pytest.raises(ProtocolError, match=r"Progress\.time"):
        Progress.loads('{"time": 1' + "0" * 400 + ', "global_step": 1}')


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_does_not_have_are_refused(number):
    """They cannot be written out again: whoever passes one on would fall over there."""
    with pytest.raises(ProtocolError, match="not JSON"):
        load(f'{{"loss": {number}}}')
    with pytest.raises(ValueError, match="JSON compliant"):
        dump({"loss": float(number)})


@given(JSON)
def test_what_is_dumped_is_loaded(value):
    """Any JSON value, with any text in it, is one ASCII line."""
    line = dump(value)
    assert line.isascii()
    assert "\n" not in line
    assert load(line) == value


def test_a_line_has_a_limit():
    """A sender cannot fill the memory with one line."""
    with pytest.raises(ProtocolError, match="characters"):
        load('"' + "x" * MAX_LINE + '"')


def test_nested_messages_and_enums_are_read_back_as_what_they_are():
    """No dict is left where a message belongs, no text where a state does."""
    request = ReserveRequest.from_json(
        {"training": str(ID), "host": "a", "workdir": "/w", "tasks": [{"task": "ps:0"}], "ports": [1, 2]}
    )
    assert request.tasks == (TaskSpec(task="ps:0"),)
    assert request.ports == (1, 2)
    assert (
        Reservation.from_json({"training": "t", "host": "a", "state": "READY"}).state is TrainingState.READY
    )
    with pytest.raises(ProtocolError, match=r"Reservation\.state: unknown value 'BUSY'"):
        Reservation.from_json({"training": "t", "host": "a", "state": "BUSY"})
    with pytest.raises(ProtocolError, match=r"ReserveRequest\.tasks\[0\]: unknown key"):
        ReserveRequest.from_json(
            {"training": "t", "host": "a", "workdir": "w", "tasks": [{"task": "x", "gpu": 1}]}
        )


def test_a_refusal_carries_what_the_other_side_needs():
    """Code, text and whether trying again helps."""
    told = RefusedError("busy", "no port", transient=True).to_json()
    assert told == {"type": "error", "code": "busy", "message": "no port", "transient": True}


# --- names -------------------------------------------------------------------------------------------------------------


@given(st.from_regex(r"\A[a-z][a-z0-9_]{0,31}\Z"), st.integers(0, 999_999))
def test_a_task_reads_what_it_writes(role, index):
    """`role:index`, both ways."""
    assert Task.parse(str(Task(role, index))) == Task(role, index)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ps",
        "ps:",
        ":0",
        "ps:-1",
        "ps:01",
        "ps: 0",
        " ps:0",
        "ps:0 ",
        "ps:0\n",
        "Ps:0",
        "0ps:0",
        "p-s:0",
        "ps:0@a",
    ]
    + ["ps:1_0", "ps:٣", "ps:9999999", "p" * 33 + ":0", "../x:0", 5, None, ["ps:0"], b"ps:0"],
)
def test_what_is_no_task(text):
    """Its name becomes a directory: nothing but the plain form is taken."""
    with pytest.raises(ProtocolError, match="not a TF task"):
        Task.parse(text)


def test_tasks_sort_by_number():
    """worker:10 comes after worker:9."""
    names = ["worker:10", "ps:1", "worker:9", "ps:0"]
    assert [str(t) for t in sorted(map(Task.parse, names))] == ["ps:0", "ps:1", "worker:9", "worker:10"]
    assert Task("ps", 0).at("gpu-a") == "ps:0@gpu-a"


@given(st.text(st.characters(exclude_characters="\n#\0", codec="utf-8"), min_size=1, max_size=50))
def test_a_training_reads_what_it_writes(key):
    """Any key that Airflow can make."""
    assert TrainingId.parse(str(TrainingId(key, "0a1b2c3d"))) == TrainingId(key, "0a1b2c3d")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "key",
        "key#",
        "#0a1b2c3d",
        "key#0a1b2c3",
        "key#0A1B2C3D",
        "key#0a1b2c3d\n",
        "a\nb#0a1b2c3d",
        "a#b#0a1b2c3d",
    ]
    + ["k" * 1001 + "#0a1b2c3d", None, 5, {}, ["key#0a1b2c3d"]],
)
def test_what_is_no_training(text):
    """Refused as such, whatever type it is."""
    with pytest.raises(ProtocolError):
        TrainingId.parse(text)


def test_keys_differ_by_everything_that_tells_trainings_apart():
    """DAG, run, group and map index; a training outside of any group has a key as well."""
    keys = {
        training_key("d", "r", "g"),
        training_key("d2", "r", "g"),
        training_key("d", "r2", "g"),
        training_key("d", "r", "g2"),
        training_key("d", "r", "g", 0),
        training_key("d", "r", "g", 1),
        training_key("d", "r", ""),
    }
    assert len(keys) == 7


# --- places ---------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=200))
def test_a_slug_is_a_harmless_name(text):
    """Whatever a DAG is called: no slash, no leading dot, no dash in front, at most 40 characters."""
    name = slug(text)
    assert 1 <= len(name) <= 40
    assert name[0] not in ".-"
    assert all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    assert os.path.basename(name) == name


@given(st.text(max_size=20), st.text(max_size=20))
def test_different_keys_have_different_directories(one, other):
    """The digest tells apart what the slug makes equal."""
    assert (key_directory(one) == key_directory(other)) is (one == other)


def test_digests_do_not_confuse_their_parts():
    """Joining must not make ('ab', 'c') and ('a', 'bc') the same lock."""
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", "")}) == 4


def test_paths_of_two_trainings_and_two_hosts_never_meet():
    """Several hosts may share a home, and several named hosts a machine."""
    one = [
        Paths(workdir="/w", training=training, host=host, uid=1)
        for training in (ID, TrainingId(ID.key, "ffffffff"))
        for host in ("gpu-a", "gpu-b")
    ]
    for name in ("directory", "socket", "lock", "events", "spec", "acknowledged", "agent_log"):
        assert len({getattr(paths, name) for paths in one}) == 4


def test_every_path_lies_where_it_belongs():
    """Durable ones below the training's directory, locks and sockets in the user's own host-local one."""
    paths, task = Paths(workdir="/w", training=ID, host="gpu-a", uid=7), Task("ps", 0)
    assert paths.directory.startswith("/w/trainings/")
    for path in (paths.spec, paths.events, paths.acknowledged, paths.agent_log):
        assert os.path.dirname(path) == paths.directory
    for path in (paths.log(task), paths.progress(task), paths.result(task), paths.context(task)):
        assert os.path.dirname(path) == f"{paths.directory}/tasks/ps-0"
    assert os.path.dirname(paths.lock) == os.path.dirname(paths.socket) == "/var/tmp/tfps-7"
    assert len(paths.socket) < 100, "a Unix socket's path has 108 bytes"


# --- states -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "states"), [(TASK_TRANSITIONS, TaskState), (TRAINING_TRANSITIONS, TrainingState)]
)
def test_the_tables_know_every_state_and_reach_it(table, states):
    """No state without a row, and each can be reached from the first."""
    assert set(table) == set(states)
    reached, todo = set(), [next(iter(states))]
    while todo:
        state = todo.pop()
        if state not in reached:
            reached.add(state)
            todo.extend(table[state])
    assert reached == set(states)


def test_finished_tasks_stay_as_they_are():
    """The table allows nothing after a final state, and final states have no process."""
    for state in TaskState:
        assert state.is_final is (not TASK_TRANSITIONS[state])
        assert not (state.is_final and state.is_alive)
    for state in (TrainingState.STOPPED, TrainingState.EXPIRED):
        assert not TRAINING_TRANSITIONS[state]
    assert all(
        TRAINING_TRANSITIONS[s] == {TrainingState.STOPPING}
        for s in (TrainingState.SUCCEEDED, TrainingState.FAILED)
    )


def test_an_exit_says_how_it_was():
    """Code 0 and a signal read well."""
    assert (str(Exit(code=0)), str(Exit(signal=9))) == ("exit code 0", "killed by signal 9")
