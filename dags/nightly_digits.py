"""A model of handwritten digits, trained anew each night: prepare the data, train, judge, promote.

1. `prepare` writes scikit-learn's 1797 digits, split into a training and an evaluation part, to where every Airflow
   worker can read them. Any task may stand here: what it returns becomes an input of the training, and the edge
   between the two is drawn by Airflow.
2. `training` uploads both files to the hosts of the connection `gpu_lab` (those that have them already are left
   alone), starts the parameter server and the workers, and trains. No worker slot is held meanwhile.
3. `judge` takes the metrics on the evaluation part and the checkpoint, and fails the run if the model is too bad.
4. `evaluate` evaluates the checkpoint on the host where it lies, with a reservation of its own.
5. `promote` makes it the model that is served, `<model_dir>/current` on that host, if it is better than the one that is
   served now, on the same data. If not, the task is skipped and says why; nothing changes. The DAG `digits_rollback`
   goes back to the model before.

A retry or a clear of `training.train` continues from the last checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path

from airflow.sdk import Param, dag, task
from airflow.sdk.exceptions import AirflowFailException
from digits_files import write_digits

from airflow_tfps.group import TrainingTaskGroup
from airflow_tfps.models import EvaluateOperator, PromoteOperator

DATA = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")) / "data" / "digits"


@task
def prepare(data_dir: str) -> dict[str, str]:
    """Write `train.npz` and `eval.npz` into a directory that every Airflow worker can read."""
    return write_digits(data_dir)


@task
def judge(training: dict, params: dict | None = None) -> dict:
    """The model if it is good enough; a bad one fails the run, and no retry would make it better."""
    accuracy, least = training["metrics"]["accuracy"], params["min_accuracy"]
    if accuracy < least:
        raise AirflowFailException(f"accuracy {accuracy:.3f} on unseen digits, below {least}")
    return {"accuracy": accuracy, "checkpoint": training["checkpoint"], "host": training["host"]}


@dag(
    schedule="0 2 * * *",
    catchup=False,
    max_active_runs=1,
    params={
        "steps": Param(1000, type="integer", minimum=1, title="Global steps"),
        "learning_rate": Param(0.5, type="number", exclusiveMinimum=0, title="Learning rate"),
        "mode": Param(
            "sync",
            enum=["sync", "async"],
            title="Mode",
            description="sync: a step waits for the gradients of all workers; async: each is applied as it comes",
        ),
        "min_accuracy": Param(
            0.93, type="number", minimum=0, maximum=1, title="Accuracy below which the run fails"
        ),
        "min_gain": Param(0.0, type="number", minimum=0, title="Gain in accuracy that a promotion needs"),
        "model_dir": Param(
            "~/models/digits",
            type="string",
            title="Models",
            description="Directory of the served models, on the host of the chief",
        ),
        "data_dir": Param(
            str(DATA), type="string", title="Data", description="Directory that every Airflow worker can read"
        ),
    },
    doc_md=__doc__,
    tags=["tfps", "tutorial"],
)
def nightly_digits() -> None:
    data = prepare("{{ params.data_dir }}")
    training = TrainingTaskGroup(
        "training",
        job="jobs/digits.yaml",
        hosts="gpu_lab",
        inputs={"train": data["train"], "eval": data["eval"]},
        hparams={"learning_rate": "{{ params.learning_rate }}"},
        steps="{{ params.steps }}",
        mode="{{ params.mode }}",
    )
    judged = judge(training.output)
    evaluation = EvaluateOperator(task_id="evaluate", training=training)
    promotion = PromoteOperator(
        task_id="promote",
        evaluation=evaluation,
        metric="accuracy",
        min_gain="{{ params.min_gain }}",
        model_dir="{{ params.model_dir }}",
    )
    judged >> promotion


nightly_digits()
