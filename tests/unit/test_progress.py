"""The board that people see: always a bounded JSON value, whatever the size of the cluster or the training."""

from __future__ import annotations

import json

import pytest
from tfps_runtime.protocol import Task, TrainingId, dump

from airflow_tfps.handle import Handle, PlacedTask
from airflow_tfps.inventory import Inventory
from airflow_tfps.progress import MAX_BYTES, MAX_POINTS, Board
from airflow_tfps.spec import JobSpec


def make_handle(hosts: int = 2, workers: int = 2, name: str = "gpu") -> Handle:
    names = [f"{name}-{i}" for i in range(hosts)]
    tasks = [Task("ps", 0), *(Task("worker", i) for i in range(workers))]
    return Handle(
        training=TrainingId("dag/run/group", "0a1b2c3d"),
        job=JobSpec.from_dict({"program": "x.py", "steps": 100, "roles": {"ps": 1, "worker": workers}}),
        inventory=Inventory.from_dict(
            {"hosts": {host: {"address": f"10.0.{i // 250}.{i % 250}"} for i, host in enumerate(names)}}
        ),
        tasks=tuple(
            PlacedTask(task=t, host=names[i % hosts], port=20000, gpus=(0,)) for i, t in enumerate(tasks)
        ),
        chief=Task("worker", 0),
        checkpoint_dir="/ckpt",
    )


def task(name: str, state: str, **more) -> dict:
    return {"type": "task", "task": name, "state": state, "attempt": 1, "host": "gpu-0", **more}


def progress(step: int, name: str = "worker:0", **more) -> dict:
    record = {
        "time": 1000.0 + step,
        "global_step": step,
        "loss": 1.0 / (step + 1),
        "steps_per_sec": 2.5,
        **more,
    }
    return {"type": "progress", "task": name, "host": "gpu-1", "progress": record}


def see(board: Board, *messages: dict) -> list[str]:
    return [line for message in messages for line in board.see(message)]


def row(board: Board, name: str) -> dict:
    return next(r for r in board.to_json()["tasks"] if r["task"] == name)


def test_a_board_begins_with_every_task_pending():
    """People see the placement before anything has been heard."""
    value = Board(make_handle()).to_json()
    assert [(r["task"], r["host"], r["state"], r["gpus"]) for r in value["tasks"]] == [
        ("ps:0", "gpu-0", "PENDING", [0]),
        ("worker:0", "gpu-1", "PENDING", [0]),
        ("worker:1", "gpu-0", "PENDING", [0]),
    ]
    assert (value["training"], value["steps"], value["curve"]) == ("dag/run/group#0a1b2c3d", 100, [])
    assert (value["outcome"], value["tasks_left_out"]) == (None, 0)


def test_one_line_per_transition_and_none_per_repetition():
    """The task log says what changed, where and why."""
    board = Board(make_handle())
    lines = see(
        board,
        task("ps:0", "STARTING"),
        task("ps:0", "STARTING"),
        task("ps:0", "BACKOFF", reason="killed by signal 9", exit={"code": None, "signal": 9}),
        task("ps:0", "STARTING", attempt=3),
        {"type": "gone", "host": "gpu-0", "state": "LOST"},
    )
    assert lines == [
        "ps:0@gpu-0 STARTING",
        "ps:0@gpu-0 BACKOFF (killed by signal 9)",
        "ps:0@gpu-0 STARTING",
        "gpu-0: the agent is gone",
    ]
    assert row(board, "ps:0")["restarts"] == 2
    assert row(board, "ps:0")["exit"] == {"code": None, "signal": 9}


@pytest.mark.parametrize(
    "message",
    [
        task("ps:9", "RUNNING"),
        progress(1, "ps:9"),
        {"type": "beat", "host": "gpu-0"},
        {"type": "caught_up", "host": "gpu-0"},
        {"type": "unreachable", "host": "gpu-0", "secs": 3.0},
        {"type": "log", "host": "gpu-0", "task": "ps:0", "offset": 3, "lines": ["x"]},
        {"type": "weather"},
    ],
)
def test_what_does_not_concern_the_board_changes_nothing(message):
    """Beats, logs and tasks that are not this training's."""
    board, before = Board(make_handle()), Board(make_handle()).to_json()
    assert see(board, message) == []
    assert board.to_json() == before


def test_the_curve_is_the_chiefs():
    """A worker's own rate is in its row; the curve and the numbers above it come from the chief."""
    board = Board(make_handle())
    see(board, progress(5), progress(9, "worker:1", local_step=4, examples_per_sec=12.5))
    value = board.to_json("succeeded")
    assert value["curve"] == [[1005.0, 5, pytest.approx(1 / 6), 2.5]]
    assert (value["global_step"], value["outcome"]) == (5, "succeeded")
    assert row(board, "worker:1")["examples_per_sec"] == 12.5
    assert row(board, "worker:1")["local_step"] == 4


def test_a_long_training_keeps_its_beginning_and_its_end():
    """Points get sparse, never more than the limit, evenly, and the newest numbers are exact."""
    board = Board(make_handle())
    for step in range(100_000):
        for _ in board.see(progress(step)):
            pass
    value = board.to_json()
    steps = [point[1] for point in value["curve"]]
    assert 100 <= len(steps) <= MAX_POINTS
    assert steps[0] == 0
    assert len({b - a for a, b in zip(steps, steps[1:], strict=False)}) == 1
    assert steps[-1] > 99_000
    assert value["global_step"] == 99_999


def test_a_step_back_to_a_checkpoint_is_shown():
    """After a restart the global step is lower; that is no reason to hide it."""
    board = Board(make_handle())
    see(board, progress(50), progress(20))
    assert [point[1] for point in board.to_json()["curve"]] == [50, 20]


@pytest.mark.parametrize(("hosts", "workers"), [(2, 2), (100, 149), (1200, 1199)])
def test_a_board_is_bounded_for_any_cluster(hosts, workers):
    """32 KiB, in good time: what does not fit is left out and counted."""
    handle = make_handle(hosts, workers, name="gpu-node.with-a-long-name.cluster.example.com")
    board = Board(handle)
    for placed in handle.tasks:
        see(
            board, {**task(str(placed.task), "FAILED", exit={"code": 1, "signal": None}), "host": placed.host}
        )
        see(board, progress(1, str(placed.task), local_step=10**9, examples_per_sec=12345.678))
    for host in handle.hosts:
        see(board, {"type": "training", "state": "RUNNING", "host": host})
    for step in range(2000):
        see(board, progress(step))
    value = board.to_json("failed")
    assert len(dump(value)) <= MAX_BYTES
    assert value["tasks_left_out"] == len(handle.tasks) - len(value["tasks"])
    assert value["global_step"] == 1999
    assert json.loads(json.dumps(value)) == value


def test_records_without_numbers_are_shown_as_such():
    """A script's log may tell the step and nothing else; a loss that is NaN arrives as none."""
    board = Board(make_handle())
    see(
        board,
        {
            "type": "progress",
            "task": "worker:0",
            "host": "gpu-1",
            "progress": {"time": 1.0, "global_step": 0},
        },
    )
    value = board.to_json()
    assert value["curve"] == [[1.0, 0, None, None]]
    assert (value["global_step"], value["loss"]) == (0, None)
