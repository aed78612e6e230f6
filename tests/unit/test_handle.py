"""The handle: what goes through XCom between the tasks of a group."""

from __future__ import annotations

import json

import pytest
from tfps_runtime.protocol import VERSION, Task, TrainingId

from airflow_tfps.errors import SpecError
from airflow_tfps.handle import Handle, PlacedTask
from airflow_tfps.inventory import Inventory
from airflow_tfps.spec import JobSpec

ID = TrainingId("nightly_ctr/scheduled__2026-01-01T02:00:00+00:00/training", "0a1b2c3d")


def make(hosts: int = 2, workers: int = 3, ps: int = 1, **job) -> Handle:
    names = [f"gpu-{i:03}.cluster.example.com" for i in range(hosts)]
    inventory = Inventory.from_dict(
        {
            "hosts": {
                name: {"ssh_conn_id": f"ssh_{i:03}", "address": f"10.11.{i // 250}.{i % 250}", "gpus": 8}
                for i, name in enumerate(names)
            }
        }
    )
    spec = JobSpec.from_dict(
        {"program": "ctr.py", "roles": {"ps": {"count": ps}, "worker": {"count": workers, "gpus": 2}}, **job}
    )
    everyone = [*(Task("ps", i) for i in range(ps)), *(Task("worker", i) for i in range(workers))]
    tasks = tuple(
        PlacedTask(
            task=task,
            host=names[i % hosts],
            port=20000 + (i * 7919) % 10000,
            gpus=() if task.role == "ps" else (2 * (i % 4), 2 * (i % 4) + 1),
        )
        for i, task in enumerate(everyone)
    )
    return Handle(
        training=ID,
        job=spec,
        inventory=inventory,
        tasks=tasks,
        chief=Task("worker", 0),
        checkpoint_dir="/data/ckpt/nightly/x-0123456789ab",
        blobs={"program": ("0123456789abcdef", "ctr.py"), "inputs.train": ("fedcba9876543210", "train")},
    )


def test_a_handle_survives_an_xcom():
    """What `provision` returns is what `train` gets, equal in everything, through text."""
    handle = make(
        hparams={"learning_rate": 0.1, "layers": [1, 2]}, secrets={"KEY": "conn:minio#password"}, seed=3
    )
    assert Handle.from_json(json.loads(json.dumps(handle.to_json()))) == handle


def test_a_handle_of_a_large_cluster_is_small():
    """100 hosts and 150 TF tasks stay below 20 KB, in the form in which Airflow stores it."""
    handle = make(hosts=100, workers=130, ps=20)
    assert len(handle.tasks) == 150
    assert len(json.dumps(handle.to_json())) <= 20_000
    assert Handle.from_json(handle.to_json()) == handle


def test_a_handle_holds_no_secret_only_where_it_is(monkeypatch):
    """The reference travels; the value is looked up when it is needed."""
    text = json.dumps(make(secrets={"KEY": "conn:minio#password"}).to_json())
    assert "conn:minio#password" in text
    assert "KEY" in text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "got nothing"),
        ("x", "got str"),
        ([], "got list"),
        ({}, "version None is not understood"),
        ({"version": VERSION + 1}, "not understood; clear the provision task"),
    ],
)
def test_what_is_no_handle_is_refused(data, why):
    """XComs are empty after a clear, or come from another version: the message says what to do."""
    with pytest.raises(SpecError, match=why):
        Handle.from_json(data)


@pytest.mark.parametrize("key", sorted(set(make().to_json()) - {"version", "base_dir", "blobs"}))
@pytest.mark.parametrize("value", [None, 5, "x", ["x"], {"x": 1}, "missing"])
def test_a_damaged_handle_is_refused_and_nothing_else_happens(key, value):
    """Whatever is in place of a value: a SpecError, never another exception."""
    data = make().to_json()
    data[key] = value
    if value == "missing":
        del data[key]
    if key == "checkpoint_dir" and isinstance(value, str) and value != "missing":
        return  # any text may be a path
    with pytest.raises(SpecError):
        Handle.from_json(data)


@pytest.mark.parametrize(
    "row",
    [["ps:0"], ["ps", "gpu-000.cluster.example.com", 1, []], ["ps:0", "nowhere", 1, []], ["ps:0", 5, 1, []]]
    + [
        ["ps:0", "gpu-000.cluster.example.com", "1", []],
        ["ps:0", "gpu-000.cluster.example.com", 1, ["a"]],
        "ps:0",
        7,
    ],
)
def test_a_damaged_row_of_the_placement_is_refused(row):
    """A TF task without a host of the inventory cannot be looked after."""
    data = make().to_json()
    data["tasks"][0] = row
    with pytest.raises(SpecError):
        Handle.from_json(data)


def test_a_chief_that_has_no_place_is_refused():
    """Every use of a handle begins at the chief's host."""
    data = make().to_json()
    with pytest.raises(SpecError):
        Handle.from_json({**data, "chief": "chief:0"})


def test_the_cluster_is_in_the_order_of_the_indices():
    """worker:10 comes after worker:9, and an evaluator is not in it."""
    handle = make(workers=12)
    evaluator = PlacedTask(task=Task("evaluator", 0), host=handle.hosts[0], port=None)
    shuffled = Handle(**{**vars(handle), "tasks": (evaluator, *reversed(handle.tasks))})
    assert shuffled.cluster == handle.cluster
    assert set(handle.cluster) == {"ps", "worker"}
    for placed in handle.tasks:
        assert handle.address(placed) == f"{handle.spec(placed.host).address}:{placed.port}"


def test_questions_about_places():
    """Hosts, tasks of a host, labels, and what every command begins with."""
    handle = make()
    first, second = handle.hosts
    assert handle.chief_host == handle.of(Task("worker", 0)).host == second
    assert [p.label for p in handle.on(first)] == [f"ps:0@{first}", f"worker:1@{first}"]
    assert handle.request(first) == {"training": str(ID), "host": first, "workdir": "~/.tfps"}
    assert handle.paths(first).host == first
