"""Evaluations of pinned checkpoints: who releases a pin, when it stays, and what ends an evaluation that is killed.

Operators run as Airflow runs them, each trigger in an event loop, on this machine as the only host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import textwrap
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, TaskGroup
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException, TaskDeferred
from tfps_runtime.pins import pins, pins_dir
from tfps_runtime.protocol import Paths
from tfps_runtime.reserve import is_held

from airflow_tfps.handle import Handle
from airflow_tfps.hook import ClusterHook
from airflow_tfps.inventory import Inventory
from airflow_tfps.models import EvaluateOperator, PromoteOperator
from airflow_tfps.operators import UNHEARD_LEASE_SECS, TeardownClusterOperator, TrainOperator

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from bundles import delete, save  # beside the unit tests

PROGRAM = textwrap.dedent(
    """
    import json, os, sys
    from tfps_runtime.checkpoint import latest_checkpoint, verify
    prefix = sys.argv[1]
    verify(prefix)
    if os.path.exists(sys.argv[2]):
        sys.exit("no good")
    step = int(prefix.rpartition("-")[2])
    json.dump({"global_step": step, "metrics": {"auc": step / 100}}, open("result.json", "w"))
    """
)
EXPORT = [
    "sh",
    "-c",
    'mkdir -p "$1" && cp "$0.index" "$1/saved_model.pb"',
    "{inputs.checkpoint}",
    "{inputs.export_dir}",
]
OWNER = "d/r/watch"


class Tasks:
    """A run of a DAG: operators, what Airflow keeps for each, a triggerer of one trigger."""

    def __init__(self) -> None:
        self.kept: dict[str, dict] = defaultdict(dict)
        self.outlets: dict = defaultdict(SimpleNamespace)
        self.handles: list[Handle] = []

    def context(self, operator, map_index: int = -1) -> dict:
        kept = self.kept[f"{operator.task_id}/{map_index}"]
        ti = SimpleNamespace(
            dag_id="d", run_id="r", task_id=operator.task_id, map_index=map_index, xcom_push=lambda *_: None
        )

        def keep(key: str, value: object) -> None:
            assert value is not None, "Airflow keeps no null"
            kept[key] = json.loads(json.dumps(value))

        store = SimpleNamespace(get=lambda key, default=None: kept.get(key, default), set=keep)
        return {"ti": ti, "task_state_store": store, "logical_date": None, "outlet_events": self.outlets}

    def begin(self, operator, map_index: int = -1) -> TaskDeferred:
        """Execute, up to the deferral."""
        with pytest.raises(TaskDeferred) as deferred:
            operator.execute(self.context(operator, map_index))
        self.handles.append(Handle.from_json(deferred.value.trigger.handle))
        return deferred.value

    def resume(self, operator, deferred: TaskDeferred, map_index: int = -1):
        event = asyncio.run(first(deferred.trigger))
        method = getattr(operator, deferred.method_name)
        return method(self.context(operator, map_index), event=event, **(deferred.kwargs or {}))

    def run(self, operator, map_index: int = -1):
        return self.resume(operator, self.begin(operator, map_index), map_index)

    def living(self) -> list[str]:
        places = [(h.training, host, h.spec(host).workdir) for h in self.handles for host in h.hosts]
        return [str(t) for t, host, workdir in places if is_held(Paths(workdir, t, host).lock)]


async def first(trigger):
    async for event in trigger.run():
        return event.payload
    raise AssertionError("a trigger ended without an event")


@pytest.fixture
def tasks():
    one = Tasks()
    yield one
    assert one.living() == []


@pytest.fixture
def ckpt(tmp_path):
    directory = tmp_path / "ckpt"
    directory.mkdir()
    return directory


@pytest.fixture
def hook(here):
    with ClusterHook(inventory=here) as one:
        yield one


@pytest.fixture
def found(hook, ckpt):
    """Save a checkpoint, pin it, let its trainer delete it; what a sensor would tell."""

    def find(step: int) -> dict:
        prefix = save(ckpt, step)
        kept = hook.pin("here", str(ckpt), OWNER, step=step)
        delete(prefix)
        pin = {"directory": str(ckpt), "owner": OWNER}
        return {
            "checkpoint": kept["prefix"],
            "global_step": step,
            "host": "here",
            "size": 1,
            "time": 1.0,
            "pin": pin,
        }

    return find


@pytest.fixture
def evaluate(tmp_path, here):
    """Make an evaluation of a checkpoint by a command that reads all of it."""
    (tmp_path / "own.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "own.py"), "{inputs.checkpoint}", str(tmp_path / "fail")]

    def make(checkpoint, task_id: str = "evaluate", **arguments) -> EvaluateOperator:
        given = {"command": command, "hosts": here.to_dict(), "base_dir": str(tmp_path), **arguments}
        return EvaluateOperator(task_id=task_id, checkpoint=checkpoint, **given)

    return make


def test_a_pin_is_released_by_a_successful_evaluation(tasks, ckpt, found, evaluate):
    """Only its own; the metrics outlive it, beside the trainer's checkpoint."""
    for step in (10, 20):
        checkpoint = found(step)
    answer = tasks.run(evaluate(checkpoint))
    assert (answer["metrics"], answer["pin"]) == ({"auc": 0.2}, None)
    assert answer["metrics_path"] == str(ckpt / "model.ckpt-20.metrics.json")
    assert json.loads(Path(answer["metrics_path"]).read_text())["checkpoint"] == checkpoint["checkpoint"]
    assert [one.global_step for one in pins(str(ckpt))] == [10]


def test_the_last_pin_takes_the_directory_of_pins_along(tasks, ckpt, found, evaluate):
    """Nothing is left beside the checkpoints."""
    tasks.run(evaluate(found(1)))
    assert not Path(pins_dir(str(ckpt))).exists()


def test_a_pin_stays_after_a_failure_for_the_next_try(tasks, ckpt, tmp_path, found, evaluate):
    """And is released by the try that succeeds."""
    operator = evaluate(found(3))
    (tmp_path / "fail").touch()
    with pytest.raises(AirflowException, match="no good"):
        tasks.run(operator)
    assert [one.global_step for one in pins(str(ckpt))] == [3]
    (tmp_path / "fail").unlink()
    assert tasks.run(operator)["metrics"] == {"auc": 0.03}
    assert pins(str(ckpt)) == []


def test_a_try_whose_end_was_lost_is_not_made_again(tasks, ckpt, found, evaluate):
    """The pin is gone, the result is kept: a retry, or a clear, returns that, events and all."""
    operator = evaluate(found(3), job_name="ctr")
    answer = tasks.run(operator)
    tasks.outlets.clear()
    assert operator.execute(tasks.context(operator)) == answer
    [told] = tasks.outlets.values()
    assert told.extra["metrics"] == {"auc": 0.03}


def test_a_checkpoint_that_its_trainer_still_has_is_pinned_again(tasks, ckpt, hook, evaluate, found):
    """Cleared, an evaluation evaluates again if it can; the pin it was given is renewed at each begin."""
    checkpoint = found(5)
    until = pins(str(ckpt))[0].until
    tasks.run(evaluate(checkpoint, release_pin=False))
    assert pins(str(ckpt))[0].until > until
    hook.release_pins("here", str(ckpt), OWNER)
    save(ckpt, 5)
    assert tasks.run(evaluate(checkpoint))["metrics"] == {"auc": 0.05}
    assert pins(str(ckpt)) == []


def test_what_was_told_twice_is_evaluated_once(tasks, found, evaluate):
    """Another task finds its pin released, and is skipped with the reason; without a pin it would be an error."""
    checkpoint = found(4)
    tasks.run(evaluate(checkpoint))
    twin = evaluate(checkpoint, task_id="twin")
    with pytest.raises(AirflowSkipException, match="is not pinned any more"):
        twin.execute(tasks.context(twin))


def test_a_pin_is_kept_for_whoever_comes_after(tasks, ckpt, here, tmp_path, found, evaluate):
    """An evaluation leaves it to the promotion after it, which releases it once it has decided, also when it refuses."""
    for step, version in ((10, 1), (5, None)):
        with DAG("d", schedule=None):
            evaluation = evaluate(found(step), task_id=f"evaluate_{step}")
            promotion = PromoteOperator(
                task_id=f"promote_{step}", evaluation=evaluation, metric="auc", model_dir=str(tmp_path / "srv"), command=EXPORT
            )  # fmt: skip
        answer = tasks.run(evaluation)
        assert answer["pin"] == {"directory": str(ckpt), "owner": OWNER}
        assert answer["metrics_path"] == f"{answer['checkpoint']}.metrics.json"
        assert [one.global_step for one in pins(str(ckpt))] == [step]
        promotion.evaluation = answer
        if version is None:
            with pytest.raises(AirflowSkipException, match=r"not promoted: auc 0\.05"):
                tasks.run(promotion)
            with pytest.raises(
                AirflowSkipException, match=r"not promoted: auc 0\.05"
            ):  # a retry after a crash
                promotion.execute(tasks.context(promotion))
        else:
            assert tasks.run(promotion)["version"] == version
        assert pins(str(ckpt)) == []


def test_two_evaluations_side_by_side_release_nothing(tasks, ckpt, found, evaluate):
    """Neither knows which is the last; `release_pin` says it."""
    checkpoint = found(8)
    with DAG("d", schedule=None):
        watch = evaluate("/x", task_id="watch")
        one, two = (evaluate(checkpoint, task_id=name) for name in ("one", "two"))
        watch >> [one, two]
    assert tasks.run(one)["pin"] is not None
    assert tasks.run(two)["pin"] is not None
    assert len(pins(str(ckpt))) == 1
    two.release_pin = True
    assert tasks.run(two)["pin"] is None
    assert pins(str(ckpt)) == []


def test_who_else_may_need_a_pin():
    """What evaluates or promotes after a task; or beside it, or beside what it has the pin from. Mapped or not."""
    with DAG("d", schedule=None) as dag:
        watch = EmptyOperator(task_id="watch")
        one = EvaluateOperator(task_id="one", checkpoint="/x")
        two = EvaluateOperator.partial(task_id="two").expand(checkpoint=["/x"])
        promotion = PromoteOperator(task_id="promote", evaluation=one, metric="auc", model_dir="/srv")
        watch >> [one, two]
        alone = EvaluateOperator(task_id="alone", checkpoint="/x")
    assert one._others() == ["promote", "two"]
    assert promotion._others() == ["two"]
    assert alone._others() == []
    assert {task.task_id for task in dag.tasks} == {"watch", "one", "two", "promote", "alone"}


@pytest.mark.parametrize("pin", [{"directory": "/x"}, "x", {"directory": 1, "owner": "o"}])
def test_a_damaged_pin_is_said(tasks, found, evaluate, pin):
    """What is no pin is no checkpoint to evaluate."""
    operator = evaluate({**found(1), "pin": pin})
    with pytest.raises(AirflowFailException, match="pin is not valid:\\n  - directory and owner are needed"):
        operator.execute(tasks.context(operator))


# --- killed ---------------------------------------------------------------------------------------------------------


def test_killed_between_worker_and_trigger_it_ends_by_a_short_lease(tasks, hook, found, evaluate):
    """Nobody is told of that: the lease is what ends it, and it is short."""
    operator = evaluate(found(6), command=["sleep", "614"])
    tasks.begin(operator)
    [handle] = tasks.handles
    left = hook.status(handle)["here"]["lease_secs"]
    assert 0 < left <= UNHEARD_LEASE_SECS <= 60
    hook.renew(handle, 0.1)
    deadline = time.monotonic() + 20
    while tasks.living():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_killed_at_any_moment_on_its_worker_it_leaves_nothing(tasks, demo_host, ckpt, evaluate):
    """`on_kill` comes in a signal's handler, in the midst of a reservation, say, and the task goes on after it.

    Once it is deferred there is no process to kill: its trigger ends what it has begun.
    """
    operator = evaluate(str(save(ckpt, 1)), command=["sleep", "615"], hosts=["demo_a"])
    context = tasks.context(operator)
    key = operator._key(context)

    def execute() -> float:
        began = time.monotonic()
        with contextlib.suppress(AirflowException, TaskDeferred):
            operator.execute(context)
        return time.monotonic() - began

    execute()  # brings the runtime to the host
    secs = execute()
    killed = 0
    before = signal.signal(signal.SIGALRM, lambda *_: operator.on_kill())
    try:
        with ClusterHook(inventory=Inventory.load(["demo_a"])) as hook:
            for part in (0.02, 0.2, 0.4, 0.6, 0.8):
                operator._is_killed = False
                signal.setitimer(signal.ITIMER_REAL, secs * part)
                execute()
                signal.setitimer(signal.ITIMER_REAL, 0)
                if not operator._is_killed:  # it was faster this time
                    continue
                killed += 1
                deadline = time.monotonic() + 10
                while hook.call("demo_a", "trainings", {"host": "demo_a", "key": key})["trainings"]:
                    assert time.monotonic() < deadline, f"killed after {part} of {secs:.1f} s"
                    time.sleep(0.1)
            hook.stop_key(key, "the test is over", grace_secs=0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert killed > 2


def test_a_train_that_no_teardown_follows_is_alone():
    """And gets a short lease until its trigger is heard, as one has whose teardown is over."""
    with DAG("d", schedule=None):
        with TaskGroup("bare"):
            bare = TrainOperator(task_id="train", handle=None)
        with TaskGroup("whole"):
            whole = TrainOperator(task_id="train", handle=None)
            whole >> TeardownClusterOperator(task_id="teardown", hosts=["local"])

    def context(state: str | None) -> dict:
        states = {"r": {"whole.teardown": state}}
        return {
            "ti": SimpleNamespace(dag_id="d", run_id="r", map_index=-1, get_task_states=lambda **_: states)
        }

    assert bare._is_alone(context(None))
    assert [whole._is_alone(context(state)) for state in (None, "scheduled", "success")] == [
        False,
        False,
        True,
    ]


# --- what is tried again --------------------------------------------------------------------------------------------

FAULTY = textwrap.dedent(
    """
    import tensorflow.compat.v1 as tf

    def input_fn(mode, params, shard):
        raise {error}

    def model_fn(features, labels, mode, params):
        raise AssertionError("not reached")
    """
)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("error", "is_final", "said"),
    [
        ("KeyError(params['rate'])", True, r"(?s)exit code 1\n.*KeyError: 0\.25"),
        ("tf.errors.UnavailableError(None, None, 'away')", False, r"(?s)exit code 75\n.*tried again: away"),
    ],
)
def test_a_bug_in_a_program_is_not_tried_again(tasks, ckpt, tmp_path, evaluate, error, is_final, said):
    """As in training: an error of the program is final, one that TensorFlow calls passing is not.

    Program and hparams are of a job file, as in a DAG that knows a directory and no training.
    """
    (tmp_path / "faulty.py").write_text(FAULTY.format(error=error))
    job = {"program": "faulty.py", "roles": {"ps": 1, "worker": 1}, "hparams": {"rate": 0.25}}
    operator = evaluate(str(save(ckpt, 1)), command=None, job=job)
    with pytest.raises(AirflowException, match=said) as raised:
        tasks.run(operator)
    assert isinstance(raised.value, AirflowFailException) is is_final
