"""Whatever people write, only our own errors come out, and soon: jobs, inventories, YAML."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fuzzing import ANYTHING, FUZZ, HOSTS, JOB, PYTHON_BOMBS, TEXT, check_size, damaged, mutated
from hypothesis import example, given, strategies as st

from airflow_tfps.errors import SpecError
from airflow_tfps.inventory import Inventory
from airflow_tfps.spec import JobSpec
from airflow_tfps.yaml_text import YamlError, parse_yaml, plain_scalar


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
