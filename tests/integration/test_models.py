"""From a checkpoint to a served model: real processes, real kills, and TensorFlow where it matters.

Operators run as Airflow runs them, each trigger in an event loop, on this machine as the only host.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    TaskDeferred,
)
from tfps_runtime.models import Compared, ModelDirectory, PromoteRequest, RollbackRequest, promote, rollback
from tfps_runtime.protocol import Paths, RefusedError, TrainingId
from tfps_runtime.reserve import is_held

from airflow_tfps.handle import Handle
from airflow_tfps.models import EvaluateOperator, PromoteOperator, RollbackOperator

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "dags" / "programs" / "digits.py"
RUNTIME = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
NUMBERS = itertools.count()


# --- a directory that many want ---------------------------------------------------------------------------------------


def begin(command: str, request: dict) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-m", "tfps_runtime", command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=RUNTIME,
    )  # fmt: skip
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.close()
    return process


def answer(process: subprocess.Popen[str]) -> dict:
    found = json.loads(process.stdout.read().splitlines()[-1])
    process.wait()
    return found


def export(directory: ModelDirectory, id_: str, compared: Compared | None = None) -> None:
    """A model as an export leaves it: its two files must always agree."""
    staging = Path(directory.staging(id_))
    (staging / "model").mkdir(parents=True)
    for name in ("saved_model.pb", "variables"):
        (staging / "model" / name).write_text(id_)
    (staging / "compared.json").write_text((compared or Compared()).dumps())


def promotion(directory: ModelDirectory, id_: str, auc: float, **more) -> dict:
    rule = {"metric": "auc", "compare": "absolute", "threshold": 0.0}
    return {"model_dir": directory.path, "id": id_, "rule": rule, "metrics": {"auc": auc}, **more}


def read_at(folder: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY, dir_fd=folder)
    with open(fd) as file:
        return file.read()


class Reader:
    """Reads `current` in a tight loop; notes every fault and everything it has seen."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._path = Path(directory.path) / "current"
        self._is_over = threading.Event()
        self.faults: list[str] = []
        self.seen: list[str] = []
        self.count = 0
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        while not self._is_over.is_set():
            self.count += 1
            try:
                version = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    texts = {read_at(version, name) for name in ("saved_model.pb", "variables")}
                finally:
                    os.close(version)
            except OSError as error:
                self.faults.append(str(error))
                continue
            if len(texts) != 1:
                self.faults.append(str(texts))
            elif self.seen[-1:] != [found := texts.pop()]:
                self.seen.append(found)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()


def test_a_reader_never_misses_current(tmp_path):
    """While promotions and rollbacks switch `current`, a reader in a tight loop sees one whole model or another."""
    directory = ModelDirectory(str(tmp_path / "m"))
    for number, id_ in enumerate("ab"):
        export(directory, id_, Compared(number or None))
        assert answer(begin("promote", promotion(directory, id_, 0.5)))["promoted"]
    with Reader(directory) as reader:
        for turn in range(4):
            found = answer(begin("rollback", {"model_dir": directory.path, "id": f"back {turn}"}))
            assert (found["version"], found["former"]) == (1, 2)
            request = {"model_dir": directory.path, "id": f"forth {turn}", "to": 2}
            assert answer(begin("rollback", request))["version"] == 2
    assert reader.faults == []
    assert reader.count > 100
    assert set(reader.seen) == {"a", "b"}


def test_promotions_at_once_do_not_interleave(tmp_path):
    """Of eight promotions at once, each compared with no model, one comes first; the others are told to compare anew."""
    directory = ModelDirectory(str(tmp_path / "m"))
    names = [f"model {number}" for number in range(8)]
    for name in names:
        export(directory, name)
    processes = [begin("promote", promotion(directory, name, 0.5)) for name in names]
    answers = [answer(process) for process in processes]
    assert [a["type"] for a in answers].count("promotion") == 1
    refused = [a for a in answers if a["type"] == "error"]
    assert {(a["code"], a["transient"]) for a in refused} == {("model_changed", True)}
    assert directory.versions == [1]
    assert len(directory.history) == 1
    # What has already been exported can be compared anew.
    left = [name for name, a in zip(names, answers, strict=True) if a["type"] == "error"]
    for number, name in enumerate(left, 1):
        Path(directory.staging(name), "compared.json").write_text(Compared(number).dumps())
        assert answer(begin("promote", promotion(directory, name, 0.5, keep=99)))["version"] == number + 1
    assert [e["former"] for e in directory.history] == [None, *range(1, 8)]


KILLED = """
import os, signal, sys
from tfps_runtime.message import load
from tfps_runtime.models import promote_command

CHANGES = {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
left = 0


def note(event, arguments):
    global left
    if event in CHANGES or event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1


for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        sys.addaudithook(note)
        promote_command(load(line))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    left += 1
"""
"""Promotes in processes that are killed just before they change the file system for the first, second, … time."""


def test_killed_before_any_of_its_changes_it_leaves_the_former_or_the_new_model(tmp_path):
    """`current` is whole throughout, whoever comes next clears what was left, and a retry has the same outcome."""
    directory = ModelDirectory(str(tmp_path / "m"))
    for number in range(2):
        export(directory, str(number), Compared(number or None))
        promote(PromoteRequest.from_json(promotion(directory, str(number), 0.5)))
    was_killed, last, leftovers = True, 1, set()
    mortals = subprocess.Popen(
        [sys.executable, "-S", "-c", KILLED],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=RUNTIME,
    )  # fmt: skip
    with mortals, Reader(directory) as reader:
        while was_killed:
            last += 1
            export(directory, str(last), Compared(last))
            request = promotion(directory, str(last), 0.5, keep=2)
            mortals.stdin.write(json.dumps(request) + "\n")
            mortals.stdin.flush()
            code = int(mortals.stdout.readline())
            assert code in (0, -signal.SIGKILL)
            was_killed = code != 0
            leftovers |= left_in(directory)
            with pytest.raises(RefusedError, match="not a version 999"):  # an operation that changes nothing
                rollback(RollbackRequest(directory.path, "another", to=999))
            assert {name for name in left_in(directory) if not name.startswith(".staging-")} == set()
            found = promote(PromoteRequest.from_json(request))
            assert (found["promoted"], found["version"]) == (True, last + 1), found
            assert left_in(directory) == set()
            assert list(Path(directory.path).rglob("*.tmp")) == []
            assert directory.versions == [last, last + 1]
    for kind in ("pending.json", "pending.json.[0-9a-f]{8}.tmp", "current.tmp", "staging-.*", "removed-.*"):
        assert any(re.fullmatch(rf"\.{kind}", name) for name in leftovers), (kind, leftovers)
    assert reader.faults == []
    assert reader.seen == sorted(reader.seen, key=int)
    assert len(reader.seen) > 1
    assert [e["version"] for e in directory.history] == list(range(1, last + 2))


def left_in(directory: ModelDirectory) -> set[str]:
    """Names in a model directory beside what belongs there."""
    belongs = {".lock", "current", "history.jsonl", *map(str, directory.versions)}
    return set(os.listdir(directory.path)) - belongs


# --- operators ----------------------------------------------------------------------------------------------------


class Airflow:
    """What operators find in their context, and a triggerer of one trigger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handles: list[Handle] = []

    def context(self, task_id: str, run_id: str = "night 1") -> dict:
        kept: dict = {}
        store = SimpleNamespace(get=lambda key, default=None: kept.get(key, default), set=kept.__setitem__)
        ti = SimpleNamespace(
            dag_id=f"dag{next(NUMBERS)}", run_id=run_id, task_id=task_id, map_index=-1,
            xcom_push=lambda *_: None,
        )  # fmt: skip
        return {
            "ti": ti,
            "task_state_store": store,
            "logical_date": None,
            "outlet_events": defaultdict(SimpleNamespace),
        }

    def run(self, operator, context: dict | None = None) -> dict:
        context = context or self.context(operator.task_id)
        step = lambda: operator.execute(context)  # noqa: E731
        while True:
            try:
                return step()
            except TaskDeferred as deferred:
                if hasattr(deferred.trigger, "handle"):
                    self.handles.append(Handle.from_json(deferred.trigger.handle))
                event = asyncio.run(self._first(deferred.trigger))
                method, kwargs = getattr(operator, deferred.method_name), deferred.kwargs or {}
                step = lambda m=method, e=event, k=kwargs: m(context, event=e, **k)  # noqa: E731

    async def _first(self, trigger):
        async for event in trigger.run():
            return event.payload
        raise AssertionError("a trigger ended without an event")

    def living(self) -> list[str]:
        places = [(h.training, host, h.spec(host).workdir) for h in self.handles for host in h.hosts]
        return [str(t) for t, host, workdir in places if is_held(Paths(workdir, t, host).lock)]


@pytest.fixture
def airflow(tmp_path):
    one = Airflow(tmp_path)
    yield one
    assert one.living() == []


def a_checkpoint(folder: Path, step: int = 7) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / f"model.ckpt-{step}"
    for suffix in (".index", ".data-00000-of-00001"):
        Path(f"{prefix}{suffix}").write_text(suffix)
    return str(prefix)


OWN = textwrap.dedent(
    """
    import json, os, sys, time
    flags = dict(flag.partition("=")[::2] for flag in sys.argv[1:])
    assert os.path.exists(flags["--checkpoint"] + ".index")
    assert json.loads(os.environ["TF_CONFIG"])["cluster"] == {}
    print("looking at", flags["--data"])
    if "--fail" in flags:
        sys.exit("no good")
    auc = float(open(flags["--data"]).read())
    json.dump({"global_step": 7, "metrics": {"auc": auc}}, open("result.json", "w"))
    """
)


@pytest.fixture
def own(tmp_path, here):
    """Keyword arguments of an evaluation by a script of one's own."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "data").write_text("0.75")
    return {
        "checkpoint": a_checkpoint(tmp_path / "ckpt"),
        "hosts": here.to_dict(),
        "base_dir": str(tmp_path),
        "script": "own.py",
        "inputs": {"eval": "data"},
        "args": ["--checkpoint={inputs.checkpoint}", "--data={inputs.eval}"],
    }


def test_a_script_of_ones_own_evaluates(airflow, own):
    """A script finds the checkpoint and an uploaded input, no cluster; its metrics are returned and noted on the host."""
    found = airflow.run(EvaluateOperator(task_id="evaluate", job_name="ctr", **own))
    assert found["metrics"] == {"auc": 0.75}
    assert (found["global_step"], found["checkpoint"]) == (7, own["checkpoint"])
    (handle,) = airflow.handles
    assert [t.label for t in handle.tasks] == ["evaluator:0@here"]
    assert handle.cluster == {}
    noted = json.loads(Path(found["metrics_path"]).read_text())
    assert found["metrics_path"] == f"{own['checkpoint']}.metrics.json"
    assert noted["metrics"] == {"auc": 0.75}
    assert len(json.dumps(found)) < 4000


def test_an_evaluation_that_fails_shows_its_log(airflow, own):
    """The end of its log is in the error; without metrics there is an error that says what to write."""
    own["args"] = [*own["args"], "--fail"]
    with pytest.raises(AirflowException, match=r"(?s)evaluator:0@here.*no good"):
        airflow.run(EvaluateOperator(task_id="evaluate", **own))
    del own["script"], own["args"]
    with pytest.raises(AirflowFailException, match="left no metrics"):
        airflow.run(EvaluateOperator(task_id="evaluate", command=["true"], **own))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoint": None}, "there is none: pass the result of a training"),
        ({"hosts": None}, "nothing says where the checkpoint lies"),
        ({"script": None}, "the training is no harness program"),
        ({"program": "own.py"}, "script: not beside program"),
        ({"host": "gpu-z"}, "gpu-z is named, and the inventory has here"),
        ({"training": "x"}, "a training's handle or result is needed, got str"),
    ],
)
def test_what_is_missing_is_said(airflow, own, change, words):
    """A wrong use of EvaluateOperator fails at once with what to do."""
    with pytest.raises(AirflowFailException, match=words):
        airflow.run(EvaluateOperator(task_id="evaluate", **{**own, **change}))


def test_a_command_of_ones_own_exports(airflow, own, here, tmp_path):
    """Any command that writes a model can be promoted; the former's metrics are those of its promotion."""
    evaluation = airflow.run(EvaluateOperator(task_id="evaluate", **own))
    assert "job" not in evaluation["origin"]
    export_it = [
        "sh", "-c", 'mkdir -p "$1" && cp "$0.index" "$1/saved_model.pb"',
        "{inputs.checkpoint}", "{inputs.export_dir}",
    ]  # fmt: skip
    told: list[dict] = []

    def promote(auc: float) -> dict:
        return airflow.run(
            PromoteOperator(
                task_id="promote",
                evaluation={**evaluation, "metrics": {"auc": auc}},
                metric="auc",
                model_dir=str(tmp_path / "models"),
                command=export_it,
                on_promotion=told.append,
                min_gain="0.01",
            )
        )

    first = promote(0.75)
    assert (first["version"], first["path"]) == (1, str(tmp_path / "models" / "1"))
    assert told == [first]
    with pytest.raises(AirflowSkipException, match=r"not promoted: auc 0.755 is better .* by 0.005 only"):
        promote(0.755)
    second = promote(0.8)
    assert (second["version"], second["former"], second["former_value"]) == (2, 1, 0.75)
    assert second["reason"].endswith("(the current model's as of its promotion)")
    assert len(told) == 2
    back = airflow.run(
        RollbackOperator(task_id="back", model_dir=str(tmp_path / "models"), hosts=here.to_dict())
    )
    assert (back["version"], back["former"]) == (1, 2)
    history = ModelDirectory(str(tmp_path / "models")).history
    assert [e["action"] for e in history] == ["promoted", "refused", "promoted", "rolled_back"]
    assert history[0]["provenance"]["checkpoint"] == own["checkpoint"]


def test_wrong_rules_fail_before_anything_runs(airflow, own):
    """A metric that is not there, a model_dir that is no path: one error with every fault."""
    evaluation = airflow.run(EvaluateOperator(task_id="evaluate", **own))
    with pytest.raises(AirflowFailException, match=r"(?s)min_gain: must be.*'f1'; there are: auc.*model_dir"):
        airflow.run(
            PromoteOperator(
                task_id="p", evaluation=evaluation, metric="f1", model_dir="models", min_gain="much"
            )
        )


# --- TensorFlow -----------------------------------------------------------------------------------------------------

ASK = """
import json, sys
import numpy as np, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
data = np.load(sys.argv[2])
answer = model.signatures["serving_default"](tf.constant(data["x"][:200].astype("float32") / 16))
print(json.dumps(float(np.mean(answer["digit"].numpy() == data["y"][:200]))))
"""


@pytest.mark.tensorflow
def test_from_training_to_a_served_model(airflow, here, digits, tmp_path):
    """A night is promoted, a bad one skipped, a better one promoted, rolled back; what is served answers by itself.

    The export is killed once on the way; nothing of it is left and the retry works.
    """
    inputs = {name: f"host:{path}" for name, path in digits.items()}
    hparams = {"hidden_units": 64}

    def train(name: str, steps: int, rate: float) -> dict:
        command = [
            sys.executable, "-m", "tfps_runtime", "run", str(DIGITS), "--local", f"--steps={steps}",
            f"--checkpoint-dir={tmp_path / name}", "--hparam=hidden_units=64", f"--hparam=learning_rate={rate}",
            *(f"--input={key}={path}" for key, path in digits.items()),
        ]  # fmt: skip
        done = subprocess.run(command, env=RUNTIME, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        result = json.loads(done.stdout[done.stdout.rindex("\n{") :])
        job = {
            "program": str(DIGITS), "roles": {"ps": 1, "worker": 1}, "inputs": inputs,
            "hparams": {**hparams, "learning_rate": rate}, "name": "digits", "env": {"OMP_NUM_THREADS": "1"},
        }  # fmt: skip
        origin = {"job": job, "base_dir": str(tmp_path), "hosts": here.to_dict(), "blobs": {}}
        return {**result, "host": "here", "training_id": f"{name}#00000000", "origin": origin}

    def promote(evaluation: dict) -> dict:
        operator = PromoteOperator(
            task_id="promote", evaluation=evaluation, metric="accuracy", model_dir=str(tmp_path / "srv")
        )
        assert operator.name == "srv"
        return airflow.run(operator)

    def served() -> float:
        data = Path(digits["eval"]) / "digits.npz"
        done = subprocess.run(
            [sys.executable, "-c", ASK, str(tmp_path / "srv" / "current"), str(data)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    first = airflow.run(EvaluateOperator(task_id="evaluate", training=train("monday", 60, 0.5)))
    assert 0.5 < first["metrics"]["accuracy"] < 1
    assert first["checkpoint"] == str(tmp_path / "monday" / "model.ckpt-60")
    promoted = promote(first)
    assert (promoted["version"], promoted["former"]) == (1, None)
    record = ModelDirectory(str(tmp_path / "srv")).record(1)
    assert record["provenance"]["job"] == "digits"
    assert len(record["provenance"]["code"]) == 16
    assert record["provenance"]["inputs"] == inputs

    bad = airflow.run(EvaluateOperator(task_id="evaluate", training=train("tuesday", 2, 1e-6)))
    with pytest.raises(
        AirflowSkipException, match=r"not promoted: accuracy .* is not better than the current"
    ):
        promote(bad)
    assert os.readlink(tmp_path / "srv" / "current") == "1"

    for path in (
        tmp_path / "monday"
    ).iterdir():  # the trainer's clean-up: version 1 is evaluated all the same
        if path.is_file():
            path.unlink()
    better = airflow.run(EvaluateOperator(task_id="evaluate", training=train("wednesday", 400, 0.5)))
    promoted = promote(better)
    assert (promoted["version"], promoted["former"]) == (2, 1)
    assert promoted["former_value"] == pytest.approx(first["metrics"]["accuracy"])
    assert "as of its promotion" not in promoted["reason"]
    good = served()
    assert good > 0.9
    airflow.run(RollbackOperator(task_id="back", model_dir=str(tmp_path / "srv"), hosts=here.to_dict()))
    assert served() < good
    actions = [e["action"] for e in ModelDirectory(str(tmp_path / "srv")).history]
    assert actions == ["promoted", "refused", "promoted", "rolled_back"]


@pytest.mark.tensorflow
def test_an_export_that_is_killed_leaves_nothing_served(airflow, here, tmp_path, wait_until):
    """`kill -9` in the middle of an export: the task fails, nothing appears, and the next try promotes."""
    program = tmp_path / "slow.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, time
            import tensorflow.compat.v1 as tf
            from tfps_runtime.training import EVAL, Model

            def input_fn(mode, params, shard):
                x = tf.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [2.0, 4.0])).batch(2)
                return x if mode == EVAL else x.repeat()

            def model_fn(features, labels, mode, params):
                w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
                y = features[:, 0] * w
                flag = params.get("flag", "")
                if labels is None:
                    if flag and not os.path.exists(flag):
                        open(flag, "w").write(str(os.getpid()))
                        time.sleep(60)
                    return Model(predictions={"y": y})
                loss = tf.reduce_mean(tf.square(y - labels))
                return Model(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.1))
            """
        )
    )
    command = [
        sys.executable, "-m", "tfps_runtime", "run", str(program), "--local", "--steps=3",
        f"--checkpoint-dir={tmp_path / 'ckpt'}",
    ]  # fmt: skip
    done = subprocess.run(command, env=RUNTIME, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    flag = tmp_path / "flag"
    job = {"program": str(program), "roles": {"ps": 1, "worker": 1}, "hparams": {"flag": str(flag)}}
    trained = {
        "checkpoint": str(tmp_path / "ckpt" / "model.ckpt-3"),
        "host": "here",
        "metrics": {"loss": 0.5},
        "origin": {"job": job, "base_dir": str(tmp_path), "hosts": here.to_dict(), "blobs": {}},
    }
    operator = PromoteOperator(
        task_id="promote", evaluation=trained, metric="loss", higher_is_better=False,
        model_dir=str(tmp_path / "srv"),
    )  # fmt: skip

    def kill() -> None:
        wait_until(lambda: flag.exists() and flag.read_text(), "the export is under way", 60.0)
        os.kill(int(flag.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    context = airflow.context("promote")
    with pytest.raises(AirflowException, match="killed by signal 9"):
        airflow.run(operator, context)
    killer.join()
    directory = ModelDirectory(str(tmp_path / "srv"))
    assert (directory.current, directory.versions, directory.history) == (None, [], [])
    assert airflow.run(operator, context)["version"] == 1
    assert TrainingId.parse(str(airflow.handles[-1].training)).key == airflow.handles[0].training.key
    assert (tmp_path / "srv" / "current" / "saved_model.pb").is_file()
