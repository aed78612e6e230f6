"""Sensors and triggers for checkpoints: hosts over SSH and this machine, object storage, with Airflow's own classes.

No database: `defer` is caught, the event of the trigger is given to the operator as Airflow does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG, TaskGroup
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferred,
)
from airflow.serialization.encoders import encode_trigger
from tfps_runtime.checkpoint import complete_checkpoints, verify
from tfps_runtime.pins import pins, pins_dir
from tfps_runtime.protocol import digest

from airflow_tfps.asset_triggers import CheckpointEventTrigger
from airflow_tfps.hook import ClusterHook
from airflow_tfps.inventory import Inventory
from airflow_tfps.operators import TrainOperator
from airflow_tfps.sensors import CURSOR_KEY, CheckpointSensor
from airflow_tfps.storage import Storage
from airflow_tfps.triggers import CheckpointTrigger

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from bundles import TENSORS, delete, index, save, save_sharded, write_state  # beside the unit tests

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ"
"""A host key that nobody has."""


class Store(dict):
    """A task state store or an asset's: what Airflow keeps as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.is_kept = asyncio.Event()

    def set(self, key, value):
        self[key] = value

    def delete(self, key):
        self.pop(key, None)

    async def aget(self, key, default=None):
        return self.get(key, default)

    async def aset(self, key, value):
        self[key] = dict(value)
        self.is_kept.set()


class Task:
    """A sensor as Airflow runs it: execute, defer, trigger, resume, until it ends."""

    def __init__(self, sensor: CheckpointSensor, *, map_index: int = -1) -> None:
        self.sensor = sensor
        ti = SimpleNamespace(dag_id="d", run_id="r", map_index=map_index)
        self.context = {"ti": ti, "task_state_store": Store()}
        self.deferred: TaskDeferred | None = None
        self.where: SimpleNamespace | None = None

    def execute(self):
        return self._call(lambda: self.sensor.execute(self.context))

    def event(self, secs: float = 30.0):
        """What the trigger says, built again from its arguments."""
        name, arguments = self.deferred.trigger.serialize()
        encode_trigger(self.deferred.trigger)  # what Airflow stores
        assert name == "airflow_tfps.triggers.CheckpointTrigger"
        trigger = CheckpointTrigger(**arguments)
        if self.where is not None:
            trigger.task_instance = self.where
            trigger.TRAIN_POLL_SECS = 0.3
        return asyncio.run(first(trigger, secs))

    def resume(self, event):
        method = getattr(self.sensor, self.deferred.method_name)
        return self._call(lambda: method(self.context, event=event, **(self.deferred.kwargs or {})))

    def run(self):
        """To its end."""
        result = self.execute()
        while result is self:
            result = self.resume(self.event())
        return result

    def _call(self, what):
        try:
            return what()
        except TaskDeferred as deferred:
            self.deferred = deferred
            return self


async def first(trigger, secs: float = 30.0):
    async with asyncio.timeout(secs), contextlib.aclosing(trigger.run()) as events:
        return (await anext(events)).payload


@pytest.fixture(scope="session")
def hosts(demo_host):
    """Host of a sensor: over SSH, and this machine."""
    return {"ssh": "demo_a", "local": "local"}


@pytest.fixture(params=["ssh", "local"])
def host(request, hosts):
    return hosts[request.param]


@pytest.fixture
def ckpt(tmp_path):
    directory = tmp_path / "ckpt"
    directory.mkdir()
    yield directory
    shutil.rmtree(pins_dir(str(directory)), ignore_errors=True)  # ends whoever goes on pinning


def sensor(directory, **arguments) -> CheckpointSensor:
    return CheckpointSensor(task_id="watch", checkpoint_dir=str(directory), **{"timeout": 20, **arguments})


# --- the next one -------------------------------------------------------------------------------------------------


def test_the_newest_by_number(host, ckpt):
    """`ckpt-100` beside `ckpt-99`: what is told has the step, the host, the size, the time."""
    for step in (100, 99):
        save(ckpt, step)
    found = Task(sensor(ckpt, host=host, which="final")).run()
    assert found == {
        "checkpoint": str(ckpt / "model.ckpt-100"), "global_step": 100, "host": host,
        "size": complete_checkpoints(str(ckpt))[1].size, "time": complete_checkpoints(str(ckpt))[1].time,
    }  # fmt: skip


def half(directory: Path, kind: str) -> None:
    """A checkpoint 7 that is none."""
    prefix = save_sharded(directory, 7)
    match kind:
        case "half an index":
            table = Path(f"{prefix}.index")
            table.write_bytes(table.read_bytes()[:-30])
        case "a missing shard":
            Path(f"{prefix}.data-00001-of-00003").unlink()
        case "a short shard":
            os.truncate(f"{prefix}.data-00001-of-00003", 99)
        case "an index with its temporary name":
            Path(f"{prefix}.index").rename(f"{prefix}.index.tempstate1")
    write_state(directory, ["model.ckpt-7"])


@pytest.mark.parametrize(
    "kind", ["half an index", "a missing shard", "a short shard", "an index with its temporary name"]
)
def test_what_is_half_there_is_waited_for(ckpt, kind):
    """Whatever the state file says; what is complete afterwards is told."""
    half(ckpt, kind)
    task = Task(sensor(ckpt, timeout=1.0))
    task.execute()
    with pytest.raises(AirflowException, match="no complete checkpoint in .* in time"):
        task.resume(task.event())
    task = Task(sensor(ckpt))
    task.execute()
    writer = threading.Timer(0.3, save_sharded, (ckpt, 7))
    writer.start()
    assert task.resume(task.event())["global_step"] == 7
    writer.join()


def test_a_moved_directory_and_a_deleted_state_file(tmp_path, ckpt):
    """Paths in the state file are of another place; without it, the same is found."""
    prefix = save(ckpt, 3)
    write_state(ckpt, [str(prefix)])
    moved = ckpt.rename(tmp_path / "moved")
    assert Task(sensor(moved)).run()["checkpoint"] == str(moved / "model.ckpt-3")
    (moved / "checkpoint").unlink()
    assert Task(sensor(moved)).run()["checkpoint"] == str(moved / "model.ckpt-3")


def test_last_nights_leftovers_are_not_this_trainings(ckpt):
    """`newer_than` and `min_step`: older files and lower steps are passed over."""
    old = save(ckpt, 900)
    os.utime(f"{old}.index", (1000, 1000))
    save(ckpt, 5)
    assert Task(sensor(ckpt, newer_than=str(time.time() - 3600))).run()["global_step"] == 5
    assert Task(sensor(ckpt, min_step="6")).run()["global_step"] == 900


def test_in_time_or_not_at_all(ckpt):
    """A time-out fails without another try, as any sensor's, or with `soft_fail` skips."""
    for is_soft, error in ((False, AirflowSensorTimeout), (True, AirflowSkipException)):
        task = Task(sensor(ckpt, timeout=0.5, soft_fail=is_soft))
        task.execute()
        with pytest.raises(error, match="no complete checkpoint in .* in time"):
            task.resume(task.event())


def test_a_host_that_cannot_be_reached_is_named(monkeypatch, ckpt, caplog):
    """In the log, once, and in the reason when the time is over."""
    connection = {
        "conn_type": "ssh",
        "host": "127.0.0.1",
        "port": 9,
        "login": "x",
        "extra": {"host_key": KEY},
    }
    monkeypatch.setenv("AIRFLOW_CONN_GPU_Z", json.dumps(connection))
    task = Task(sensor(ckpt, host="gpu_z", timeout=15))
    task.execute()
    with pytest.raises(AirflowSensorTimeout, match=r"(?s)in time: gpu_z: "):
        task.resume(task.event())
    assert [record.levelname for record in caplog.records if record.name == "airflow_tfps.watch"] == [
        "WARNING"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"which": "all"}, "which: 'all' is none of latest, every, final"),
        ({"at_most": 21}, "at_most: from 1 to 20, is 21"),
        ({"min_step": "many"}, "min_step: an integer is needed, is 'many'"),
        ({"min_step": "1e3"}, "min_step: an integer is needed, is '1e3'"),
        ({"newer_than": "nan"}, "newer_than: a number of seconds is needed, is 'nan'"),
        ({"hosts": {"gpu_z": {"address": "127.0.0.9"}}}, "host: local is not in the inventory"),
        ({"checkpoint_dir": None}, "exactly one of training and checkpoint_dir is needed"),
    ],
)
def test_what_makes_no_sense_is_said_at_once(monkeypatch, tmp_path, arguments, message):
    """Before anything is asked; it is not retried."""
    monkeypatch.setenv("AIRFLOW_CONN_GPU_Z", '{"conn_type": "ssh", "host": "127.0.0.9"}')
    with pytest.raises(AirflowFailException, match=message):
        Task(CheckpointSensor(task_id="watch", **{"checkpoint_dir": str(tmp_path), **arguments})).execute()


# --- every one ----------------------------------------------------------------------------------------------------


def test_every_checkpoint_is_kept_over_deferrals_and_retries(host, ckpt):
    """Each is pinned when it is complete; what the trainer deletes while no trigger lives is there all the same."""
    task = Task(sensor(ckpt, host=host, which="every", at_most=4))
    task.execute()
    prefix = save(ckpt, 1)
    assert task.resume(task.event()) is task
    delete(prefix)
    for step in (2, 3):  # the worker has it: nobody follows
        prefix = save(ckpt, step)
        deadline = time.monotonic() + 10
        while len(pins(str(ckpt))) < step:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        delete(prefix)
    again = Task(task.sensor)  # another try: only the store is left
    again.context["task_state_store"] = task.context["task_state_store"]
    again.execute()
    event = again.event()
    assert [c["global_step"] for c in event["checkpoints"]] == [2, 3]
    assert again.resume(event) is again
    save(ckpt, 4)
    found = again.resume(again.event())
    assert [c["global_step"] for c in found] == [1, 2, 3, 4]
    for one in found:
        assert verify(one["checkpoint"]).size == 1000
        assert one["pin"] == {"directory": str(ckpt), "owner": "d/r/watch"}
        assert one["host"] == host
    assert CURSOR_KEY not in again.context["task_state_store"]
    with ClusterHook(inventory=Inventory.load([host])) as hook:
        for one in found:
            [gone] = hook.release_pins(host, **one["pin"], step=one["global_step"])
            assert gone["prefix"] == one["checkpoint"]
        hook.release_pins(host, str(ckpt), "d/r/watch")
    assert pins(str(ckpt)) == []


@pytest.mark.parametrize("arguments", [{"at_most": 2}, {"timeout": 3.0}])
def test_what_nobody_wants_any_more_is_not_pinned(host, ckpt, arguments):
    """A sensor that has what it wanted, or whose time is over, leaves no watcher that would go on pinning."""
    task = Task(sensor(ckpt, host=host, which="every", **arguments))
    for step in (1, 2):
        save(ckpt, step)
    assert [one["global_step"] for one in task.run()] == [1, 2]
    deadline = time.monotonic() + 10
    marker = Path(pins_dir(str(ckpt))) / f".{digest('d/r/watch')}"
    while marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for step in (3, 4):
        save(ckpt, step)
    assert [one.global_step for one in pins(str(ckpt))] == [1, 2]


def test_a_mapped_sensor_has_pins_of_its_own(ckpt):
    """So that its siblings do not release them."""
    save(ckpt, 1)
    [found] = Task(sensor(ckpt, which="every", at_most=1), map_index=3).run()
    assert found["pin"]["owner"] == "d/r/watch/3"


def test_what_was_found_is_returned_when_the_time_is_over(ckpt):
    """A list with something in it is no failure."""
    save(ckpt, 1)
    found = Task(sensor(ckpt, which="every", timeout=2.5)).run()
    assert [one["global_step"] for one in found] == [1]
    task = Task(sensor(ckpt, which="every", timeout=0.5, min_step=5))
    task.execute()
    with pytest.raises(AirflowException, match="in time"):
        task.resume(task.event())


# --- the end of the training --------------------------------------------------------------------------------------


@pytest.fixture
def training(monkeypatch):
    """Airflow's side of the trigger, as far as it is asked for the state of `train`."""
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import TaskStatesResult

    said = SimpleNamespace(state="running", asked=[], places=set())

    async def asend(message):
        said.asked += message.task_ids
        said.places |= {(message.dag_id, run) for run in message.run_ids}
        [run] = message.run_ids
        return TaskStatesResult(task_states={run: dict.fromkeys(message.task_ids, said.state)})

    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", SimpleNamespace(asend=asend), raising=False)
    monkeypatch.setenv(
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "-1"
    )  # a trigger waits for it before its event
    return said


def deferred(one: CheckpointSensor) -> Task:
    """A task in Airflow's eyes, waiting."""
    task = Task(one)
    task.where = SimpleNamespace(dag_id="d", run_id="r", task_id=one.task_id, map_index=-1)
    task.execute()
    return task


def in_group(directory, **arguments) -> CheckpointSensor:
    """A sensor in a group with a TrainOperator."""
    with DAG("d", schedule=None), TaskGroup("training"):
        TrainOperator(task_id="train", handle=None)
        return sensor(directory, **arguments)


@pytest.mark.parametrize("state", ["success", "failed", "upstream_failed", "skipped"])
def test_when_the_training_is_over_nothing_more_is_waited_for(training, ckpt, state):
    """Skipped, saying so; what is complete by then is still told."""
    task = deferred(in_group(ckpt))
    training.state = state
    with pytest.raises(AirflowSkipException, match="the training is over and left no such checkpoint in"):
        task.resume(task.event())
    assert set(training.asked) == {"training.train"}
    save(ckpt, 1)
    assert task.resume(task.event())["global_step"] == 1


def test_every_ends_with_the_training(training, ckpt):
    """All that were found, or skipped when none was."""
    save(ckpt, 1)
    task = deferred(in_group(ckpt, which="every"))
    assert task.resume(task.event()) is task
    save(ckpt, 2)
    training.state = "success"
    while (found := task.resume(task.event())) is task:
        pass
    assert [one["global_step"] for one in found] == [1, 2]
    task = deferred(in_group(ckpt, which="every", min_step=3))
    with pytest.raises(AirflowSkipException, match="left no such checkpoint"):
        task.resume(task.event())


def test_a_sensor_elsewhere_in_the_dag_knows_its_training(ckpt):
    """By the key in the handle or the result: DAG, run and group."""
    with DAG("d", schedule=None):
        with TaskGroup("training"):
            TrainOperator(task_id="train", handle=None)
        outside = sensor(ckpt)
    context = Task(outside).context
    place = {"dag_id": "d", "run_id": "r", "map_index": -1}
    for key, expected in (("training", "d/r/training#0a1b2c3d"), ("training_id", "d/r/training#0a1b2c3d")):
        outside.training = {key: expected}
        assert outside._train_task(context) == ("training.train", place)
    outside.training = {"training": "d/r/training/3#0a1b2c3d"}  # of a mapped group
    assert outside._train_task(context) == ("training.train", {**place, "map_index": 3})
    for other in ("d/r/other#0a1b2c3d", "nonsense", "d/r/training/x#0a1b2c3d"):
        outside.training = {"training": other}
        assert outside._train_task(context) == (None, None)


def handle(directory: Path, host: dict | None = None, **more) -> dict:
    """Of a training in run `q` of another DAG, of which the host knows nothing any more."""
    return {
        "version": 1, "training": "other/q/training#0a1b2c3d", "job": {"command": ["true"], "roles": {"worker": 1}},
        "inventory": {"hosts": {"local": {"ssh_conn_id": "local", "address": "127.0.0.1", "gpus": 0}}},
        "tasks": [["worker:0", "local", 20000, []]], "chief": "worker:0", "checkpoint_dir": str(directory), **more,
    }  # fmt: skip


def test_a_sensor_in_another_dag_ends_with_the_training(training, ckpt):
    """Its place is another DAG: the handle says which run it is about."""
    task = deferred(CheckpointSensor(task_id="watch", training=handle(ckpt), timeout=20))
    training.state = "success"
    with pytest.raises(AirflowSkipException, match="the training is over"):
        task.resume(task.event())
    assert set(training.asked) == {"training.train"}
    assert training.places == {("other", "q")}


def test_final_waits_for_the_next_try_of_a_training_that_failed(training, ckpt):
    """What a failed incarnation left is not what the training leaves."""
    save(ckpt, 1)
    task = deferred(CheckpointSensor(task_id="watch", training=handle(ckpt), which="final", timeout=20))
    with pytest.raises(TimeoutError):
        task.event(secs=2.0)
    save(ckpt, 2)
    training.state = "success"
    assert task.resume(task.event())["global_step"] == 2


def test_what_lay_in_a_fixed_directory_before_the_training_is_not_its(ckpt):
    """The handle says since when, by the host's clock; nobody need think of `newer_than`."""
    old = save(ckpt, 900)
    os.utime(f"{old}.index", (1000, 1000))
    task = Task(CheckpointSensor(task_id="watch", training=handle(ckpt, since=2000.0), timeout=20))
    task.execute()
    save(ckpt, 5)
    assert task.resume(task.event())["global_step"] == 5


# --- object storage -----------------------------------------------------------------------------------------------


def test_object_storage_is_polled(ckpt):
    """Through ObjectStoragePath: prefixes are URLs, halves are passed over, nothing blocks the event loop."""
    half(ckpt, "a missing shard")
    url = f"file://{ckpt}"
    task = Task(sensor(url, poll_secs=0.1))
    task.execute()
    writer = threading.Timer(0.5, save, (ckpt, 9))
    writer.start()
    found = task.resume(task.event())
    writer.join()
    assert (found["checkpoint"], found["global_step"], found["host"]) == (f"{url}/model.ckpt-9", 9, None)


def test_objects_of_a_bucket():
    """Keys without directories, times of the store's own kind; a bucket that is not there yet is empty."""
    from airflow.sdk.io import attach
    from fsspec.implementations.memory import MemoryFileSystem

    attach("memory", fs=MemoryFileSystem())
    storage, bucket = Storage("memory://bucket/ckpt/"), MemoryFileSystem()
    assert storage.complete() == []
    bucket.pipe("/bucket/ckpt/m-3.index", index(TENSORS))
    assert storage.complete() == []
    bucket.pipe("/bucket/ckpt/m-3.data-00000-of-00001", b"x" * 999)
    assert storage.complete() == []
    began = time.time()
    bucket.pipe("/bucket/ckpt/m-3.data-00000-of-00001", b"x" * 1000)
    [found] = storage.complete()
    assert (found.prefix, found.global_step) == ("memory://bucket/ckpt/m-3", 3)
    assert abs(found.time - began) < 60
    bucket.pipe("/bucket/ckpt/m-3.index", index(TENSORS)[:-1])
    assert storage.complete() == []


def test_every_in_object_storage_is_told_unpinned(ckpt):
    """There is nothing to link; the cursor is kept."""
    save(ckpt, 1)
    task = Task(sensor(f"file://{ckpt}", which="every", at_most=2, poll_secs=0.1))
    task.execute()
    assert task.resume(task.event()) is task
    save(ckpt, 2)
    found = task.resume(task.event())
    assert [(one["global_step"], one.get("pin")) for one in found] == [(1, None), (2, None)]


def test_object_storage_that_does_not_exist():
    """An unknown scheme is an error that names it, not a wait."""
    task = Task(sensor("nosuch://bucket/ckpt"))
    task.execute()
    with pytest.raises(AirflowFailException, match="object storage that cannot be used"):
        task.resume(task.event())


# --- assets -------------------------------------------------------------------------------------------------------


class Events:
    """A CheckpointEventTrigger as the triggerer runs it, with an asset's state store."""

    def __init__(self, store: Store, **arguments) -> None:
        name, kwargs = CheckpointEventTrigger(**arguments).serialize()
        assert name == "airflow_tfps.asset_triggers.CheckpointEventTrigger"
        self.trigger = CheckpointEventTrigger(**kwargs)
        self.trigger.asset_state_store = store

    async def take(self, count: int, writer) -> list[dict]:
        """The next events, while `writer` writes once the trigger watches."""
        found = []
        async with asyncio.timeout(30), contextlib.aclosing(self.trigger.run()) as events:
            writing = asyncio.create_task(writer())
            while len(found) < count:
                found.append((await anext(events)).payload)
            await writing
        return found


def test_an_asset_has_one_event_for_each_new_checkpoint(monkeypatch, host, ckpt):
    """What lies there is no news; after a restart none is told again, and none is missed."""
    monkeypatch.setattr("airflow_tfps.asset_triggers.SETTLED_SECS", 0.0)
    old = save(ckpt, 1)
    os.utime(f"{old}.index", (1000, 1000))
    store = Store()

    def writes(*steps):
        async def write():
            await store.is_kept.wait()
            for step in steps:
                save(ckpt, step)
                await asyncio.sleep(0)

        return write

    arguments = {"host": host, "directory": str(ckpt)}
    told = asyncio.run(Events(store, **arguments).take(2, writes(2, 3)))
    assert [(one["global_step"], one["host"]) for one in told] == [(2, host), (3, host)]
    assert told[0]["checkpoint"] == str(ckpt / "model.ckpt-2")
    save(ckpt, 4)
    # The event of 3 may be told again: its state is kept after it.
    told = [one["global_step"] for one in asyncio.run(Events(store, **arguments).take(2, writes(5)))]
    assert told in ([4, 5], [3, 4])


def test_a_host_whose_clock_is_behind_is_heard_at_once(tmp_path, ckpt):
    """What is new is told by what lay there at the first look, not by the triggerer's clock."""
    store = Store()
    old = save(ckpt, 1)
    os.utime(f"{old}.index", (1000, 1000))

    async def write() -> None:
        await store.is_kept.wait()
        aside = save(tmp_path / "aside", 2)
        os.utime(f"{aside}.index", (2000, 2000))
        for suffix in (".data-00000-of-00001", ".index"):
            os.rename(f"{aside}{suffix}", f"{ckpt / aside.name}{suffix}")

    told = asyncio.run(Events(store, directory=str(ckpt)).take(1, write))
    assert [one["global_step"] for one in told] == [2]


def test_after_several_the_last_is_told_again(monkeypatch, ckpt):
    """Airflow may have made no run for it; a single one is told once."""
    monkeypatch.setattr("airflow_tfps.asset_triggers.AGAIN_SECS", 1.0)
    for step in (1, 2, 3):
        save(ckpt, step)

    async def nothing():
        pass

    async def another():
        await asyncio.sleep(2.5)  # longer than it would take to be told again
        save(ckpt, 4)

    told = asyncio.run(Events(Store(), directory=str(ckpt), existing=True).take(4, nothing))
    assert [(one["global_step"], one["again"]) for one in told] == [
        (1, False),
        (2, False),
        (3, False),
        (3, True),
    ]
    for step in (1, 2):
        delete(ckpt / f"model.ckpt-{step}")
    told = asyncio.run(Events(Store(), directory=str(ckpt), existing=True).take(2, another))
    assert [(one["global_step"], one["again"]) for one in told] == [(3, False), (4, False)]


def test_what_was_told_at_the_very_end_is_told_again(ckpt):
    """Airflow forgets a trigger a moment before it ends it, and takes none of its events then."""
    store = Store()
    save(ckpt, 1)

    async def another():
        save(ckpt, 2)

    for _ in range(2):
        told = asyncio.run(Events(store, directory=str(ckpt), existing=True).take(2, another))
        assert [one["global_step"] for one in told] == [1, 2]


def test_a_training_that_begins_again_is_news(ckpt):
    """Lower steps, younger files, the same directory."""
    store = Store()
    save(ckpt, 100)
    arguments = {"directory": str(ckpt), "existing": True}

    async def nothing():
        pass

    assert [c["global_step"] for c in asyncio.run(Events(store, **arguments).take(1, nothing))] == [100]
    store[next(iter(store))].update(global_step=100, time=complete_checkpoints(str(ckpt))[0].time)
    delete(ckpt / "model.ckpt-100")
    save(ckpt, 10)
    assert [c["global_step"] for c in asyncio.run(Events(store, **arguments).take(1, nothing))] == [10]


def test_an_asset_may_pin(ckpt):
    """For whoever is started by the event, who releases it."""
    store = Store()
    save(ckpt, 1)

    async def nothing():
        pass

    arguments = {"directory": str(ckpt), "existing": True, "pin": True}
    [one] = asyncio.run(Events(store, **arguments).take(1, nothing))
    delete(ckpt / "model.ckpt-1")
    assert verify(one["checkpoint"]).tensors == 4
    with ClusterHook(inventory=Inventory.load(["local"])) as hook:
        assert [p["owner"] for p in hook.pins("local", str(ckpt))] == [one["pin"]["owner"]]
        hook.release_pins("local", **one["pin"])
        save(ckpt, 2)
        kept = hook.pin("local", str(ckpt), "me")
        assert kept["global_step"] == 2
        hook.release_pins("local", str(ckpt), "me", step=2)
        assert hook.pins("local", str(ckpt)) == []


def test_an_asset_trigger_outlives_errors(monkeypatch, ckpt, caplog):
    """A host that is not in the inventory, say: said once, tried again, and never ended, or Airflow would spin."""
    from airflow_tfps import asset_triggers

    monkeypatch.setattr(asset_triggers, "RETRY_SECS", (0.01,))
    events = Events(Store(), directory=str(ckpt), host="nowhere", hosts=["local"])

    async def nothing():
        pass

    async def run():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), contextlib.aclosing(events.trigger.run()) as found:
                await anext(found)

    asyncio.run(run())
    assert caplog.text.count("host: nowhere is not in the inventory") == 1
