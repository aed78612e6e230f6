"""The example DAGs: what they look like to Airflow, and all trained in one process by `dag.test()`.

Airflow runs in processes of their own (this file is their program), since `dag.test()` cannot be interrupted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DAGS = ROOT / "dags"
HEAVY = ("asyncssh", "numpy", "paramiko", "rich", "sklearn", "tensorflow")
RUNS = (
    ("linear_regression", {"mode": "async"}),
    ("linear_regression", {"mode": "sync", "steps": 300}),
    ("nightly_digits", {}),
    ("own_script", {"steps": 400}),
)


TRAINING = (
    "linear_regression", "nightly_digits", "own_script", "wide_deep", "digits_training", "digits_watched",
)  # fmt: skip
"""Those with a form for a training."""
CHAINED = ("digits_data", "digits_consumer", "digits_evaluation", "digits_checkpoints")


# --- in Airflow's processes -------------------------------------------------------------------------------------------


def parse() -> dict[str, object]:
    """How Airflow sees the DAG files."""
    from airflow.dag_processing.dagbag import DagBag
    from airflow.serialization.serialized_objects import DagSerialization

    before = set(sys.modules)
    bag = DagBag(str(DAGS))
    brought = {name.partition(".")[0] for name in set(sys.modules) - before}
    return {
        "errors": bag.import_errors,
        "heavy": sorted(brought & set(HEAVY)),
        "dags": {
            dag_id: {
                "schedule": dag.schedule if isinstance(dag.schedule, str) else None,
                "catchup": dag.catchup,
                "max_active_runs": dag.max_active_runs,
                "assets": [
                    sorted(asset.uri for asset in dag.timetable.asset_condition.objects)
                    if getattr(dag.timetable, "asset_condition", None) is not None
                    else [],
                    sorted(outlet.uri for task in dag.tasks for outlet in task.outlets),
                ],
                "doc": dag.doc_md,
                "form": {name: dag.params.get_param(name).schema for name in dag.params},
                "edges": sorted(
                    [task.task_id, after] for task in dag.tasks for after in task.downstream_task_ids
                ),
                "is_same_serialized": DagSerialization.deserialize_dag(
                    DagSerialization.serialize_dag(dag)
                ).task_dict.keys()
                == dag.task_dict.keys(),
            }
            for dag_id, dag in bag.dags.items()
        },
    }


def train() -> list[dict[str, object]]:
    """The state and the XComs of one run after another."""
    from airflow.dag_processing.dagbag import DagBag
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    bag, found = DagBag(str(DAGS)), []
    for dag_id, conf in RUNS:
        run = bag.dags[dag_id].test(run_conf=conf)
        with create_session() as session:
            rows = session.scalars(
                XComModel.get_many(run_id=run.run_id, key="return_value", dag_ids=[dag_id])
            )
            xcoms = {row.task_id: XComModel.deserialize_value(row) for row in rows}
        found.append({"state": str(run.state), "xcoms": xcoms})
    return found


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def airflow(tmp_path_factory):
    """Run one of the functions above in a process with a new Airflow home; returns its answer."""
    home = tmp_path_factory.mktemp("airflow")
    env = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW_")}
    env.update(
        AIRFLOW_HOME=str(home),
        AIRFLOW__CORE__DAGS_FOLDER=str(DAGS),
        AIRFLOW__CORE__LOAD_EXAMPLES="False",
        AIRFLOW__CORE__UNIT_TEST_MODE="False",
        PYTHONPATH=str(DAGS),  # as Airflow's own processes have it
    )
    subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"], env=env, check=True, capture_output=True
    )

    def run(function: str, secs: float, **connections: str) -> object:
        answer, log = home / f"{function}.json", home / f"{function}.log"
        with log.open("w") as output:
            code = subprocess.run(
                [sys.executable, __file__, function, str(answer)],
                env={**env, **connections},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=secs,
                check=False,
            ).returncode
        assert code == 0, "\n".join(log.read_text("utf-8", "replace").splitlines()[-60:])
        return json.loads(answer.read_text("utf-8"))

    return run


@pytest.fixture(scope="module")
def parsed(airflow):
    return airflow("parse", 60)


def test_dag_files_are_read_without_faults(parsed):
    """Every example is read without an error, imports nothing heavy, and survives Airflow's serialization."""
    assert parsed["errors"] == {}
    assert parsed["heavy"] == []
    assert sorted(parsed["dags"]) == sorted([*TRAINING, *CHAINED, "digits_rollback"])
    for dag in parsed["dags"].values():
        assert dag["is_same_serialized"]
        assert len(dag["doc"]) > 100


def test_nightly_digits_is_a_nightly_pipeline(parsed):
    """`nightly_digits` runs at night, one run at a time, without catching up, from prepare to judge."""
    dag = parsed["dags"]["nightly_digits"]
    assert (dag["schedule"], dag["catchup"], dag["max_active_runs"]) == ("0 2 * * *", False, 1)
    for edge in (
        ["prepare", "training.provision"],
        ["training.provision", "training.ready"],
        ["training.ready", "training.train"],
        ["training.train", "judge"],
        ["training.train", "evaluate"],
        ["evaluate", "promote"],
        ["judge", "promote"],
        ["training.train", "training.teardown"],
        ["training.provision", "training.teardown"],
    ):
        assert edge in dag["edges"], edge


def test_assets_chain_the_dags(parsed):
    """Data start a training, a training its evaluation, a promoted model its consumer; names are known at parse time."""
    assert {name: dag["assets"] for name, dag in parsed["dags"].items() if dag["assets"][0]} == {
        "digits_training": [
            ["digits-data"],
            ["tfps://model/digits-chained", "tfps://training/digits-chained"],
        ],
        "digits_consumer": [["tfps://model/digits-chained"], []],
        "digits_evaluation": [["tfps://training/digits-chained"], ["tfps://evaluation/digits-chained"]],
        "digits_checkpoints": [["digits-checkpoints"], ["tfps://evaluation/digits-watched"]],
    }
    assert parsed["dags"]["nightly_digits"]["assets"] == [
        [],
        ["tfps://evaluation/digits", "tfps://model/digits", "tfps://training/digits"],
    ]


def test_trigger_forms_check_what_is_typed(parsed):
    """The forms know types and limits: an integer of steps, one of two modes, a positive learning rate."""
    for dag in (parsed["dags"][name] for name in TRAINING):
        assert dag["form"]["steps"]["type"] == "integer"
        assert dag["form"]["steps"]["minimum"] == 1
    for dag in ("linear_regression", "nightly_digits"):
        assert sorted(parsed["dags"][dag]["form"]["mode"]["enum"]) == ["async", "sync"]
    assert parsed["dags"]["nightly_digits"]["form"]["learning_rate"]["exclusiveMinimum"] == 0


@pytest.mark.tensorflow
def test_all_dags_train_in_one_process(airflow, embedded_hosts, wait_until):
    """Under `dag.test()` all DAGs train over SSH to the right numbers, and leave nothing on the hosts."""
    from airflow_tfps.demo.processes import processes

    hosts = embedded_hosts("dag-a", "dag-b")
    inventory = {
        name: {"ssh_conn_id": name.replace("-", "_"), "gpus": 0, "python": sys.executable} for name in hosts
    }
    connection = {"conn_type": "tfps", "extra": {"hosts": inventory}}
    ssh = {name: os.environ[name] for name in ("AIRFLOW_CONN_DAG_A", "AIRFLOW_CONN_DAG_B")}
    runs = airflow("train", 480, AIRFLOW_CONN_GPU_LAB=json.dumps(connection), **ssh)

    assert [run["state"] for run in runs] == ["success"] * len(RUNS)
    for run, steps in zip(runs[:2], (400, 300), strict=True):
        result = run["xcoms"]["training.train"]
        assert result["finished"] is True
        assert result["global_step"] >= steps
        assert abs(result["metrics"]["weight"] - 2) < 0.1
        assert abs(result["metrics"]["bias"] - 10) < 0.2
    trained, judged = (runs[2]["xcoms"][task] for task in ("training.train", "judge"))
    assert judged["accuracy"] >= 0.93
    assert judged["checkpoint"] == trained["checkpoint"]
    evaluated, promoted = (runs[2]["xcoms"][task] for task in ("evaluate", "promote"))
    assert evaluated["metrics"]["accuracy"] == pytest.approx(judged["accuracy"])
    assert promoted["version"] == 1
    assert Path(promoted["path"], "saved_model.pb").is_file()
    assert trained["global_step"] == 1000
    assert trained["host"] in hosts
    assert Path(f"{trained['checkpoint']}.index").is_file(), "the hosts are on this machine"

    trained, judged = (runs[3]["xcoms"][task] for task in ("training.train", "judge"))
    assert trained["metrics"]["accuracy"] == judged > 0.85
    assert 400 <= trained["global_step"] <= 410
    assert Path(f"{trained['checkpoint']}.index").is_file()

    for host in hosts.values():
        wait_until(lambda home=host.home: not processes(f"HOME={home}\0"), "nothing runs on the host")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps({"parse": parse, "train": train}[sys.argv[1]]()))
