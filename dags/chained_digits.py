"""DAGs that start each other: new data, a training of it, and what is done with the model.

1. `digits_data` writes the data and says so by an event of the asset `digits-data`. It stands for whoever makes data.
2. `digits_training` is scheduled on that asset. It starts from the weights of its last training
   (`start_from: previous`), trains, and promotes the model if it is not worse than the one that is served.
3. `digits_consumer` is scheduled on the asset `tfps://model/digits-chained`, of which each promotion is an event. It
   finds version, path, host and metrics in there. A promotion that was refused is no event.

Beside them `digits_evaluation` is scheduled on `tfps://training/digits-chained`: it evaluates each finished training
with nothing but what the event says, and needs no job file.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from airflow.sdk import Asset, Param, dag, task
from digits_files import write_digits

from airflow_tfps.assets import model_asset, training_asset
from airflow_tfps.group import TrainingTaskGroup
from airflow_tfps.models import EvaluateOperator, PromoteOperator

DATA = Asset("digits-data")
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")) / "data" / "chained-digits"
NAME = "digits-chained"


def newest(events: dict) -> dict:
    """What the newest of the events that started this run says."""
    found = [event for of_asset in events.values() for event in of_asset]
    return max(found, key=lambda event: event.timestamp).extra


@dag(schedule=None, catchup=False, doc_md=__doc__, tags=["tfps", "tutorial"])
def digits_data() -> None:
    @task(outlets=[DATA])
    def write(*, outlet_events: dict | None = None) -> None:
        """Write `train.npz` and `eval.npz`, and tell where they are."""
        outlet_events[DATA].extra = write_digits(FOLDER)

    write()


@dag(
    schedule=[DATA],
    catchup=False,
    max_active_runs=1,
    params={
        "steps": Param(300, type="integer", minimum=1, title="Global steps"),
        "model_dir": Param("~/models/digits-chained", type="string", title="Models"),
    },
    doc_md=__doc__,
    tags=["tfps", "tutorial"],
)
def digits_training() -> None:
    @task
    def data(*, triggering_asset_events: dict | None = None) -> dict[str, str]:
        """Where the data lies."""
        return newest(triggering_asset_events)

    paths = data()
    training = TrainingTaskGroup(
        "training",
        job="jobs/chained_digits.yaml",
        hosts="gpu_lab",
        inputs={"train": paths["train"], "eval": paths["eval"]},
        steps="{{ params.steps }}",
    )
    PromoteOperator(
        task_id="promote",
        evaluation=training,  # the chief has evaluated after the last step
        metric="accuracy",
        compare="not_worse",
        tolerance=0.01,
        model_dir="{{ params.model_dir }}",
    )


@dag(schedule=[model_asset(NAME)], catchup=False, doc_md=__doc__, tags=["tfps", "tutorial"])
def digits_consumer() -> None:
    @task
    def use(*, triggering_asset_events: dict | None = None) -> str:
        """Here a server would be told; the path is on the host."""
        model = newest(triggering_asset_events)
        log = logging.getLogger("airflow.task")
        log.info("version %s on %s: %s", model["version"], model["host"], model["metrics"])
        return model["path"]

    use()


@dag(schedule=[training_asset(NAME)], catchup=False, doc_md=__doc__, tags=["tfps", "tutorial"])
def digits_evaluation() -> None:
    @task
    def trained(*, triggering_asset_events: dict | None = None) -> dict:
        """The training that has ended: checkpoint, host, and what evaluates it."""
        return newest(triggering_asset_events)

    EvaluateOperator(task_id="evaluate", training=trained(), job_name=NAME)


digits_data()
digits_training()
digits_consumer()
digits_evaluation()
