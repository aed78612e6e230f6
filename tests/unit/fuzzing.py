"""What fuzz tests are made of: values, copies of good input with damage, bytes with damage.

1,000 examples of each test; 10,000 by `make fuzz`. What once broke something stands beside its test as an explicit example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from tfps_runtime.protocol import Task, TrainingId

from airflow_tfps.handle import Handle, PlacedTask
from airflow_tfps.inventory import Inventory
from airflow_tfps.spec import JobSpec

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


# --- good input ---------------------------------------------------------------------------------------------------------

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
