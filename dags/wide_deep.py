"""Click-through rate with parameter servers: large tables of hashed features, spread over two of them.

The program draws its clicks from a generator, so there is nothing to prepare. `judge` compares the model with the best
that is possible on these clicks, which the generator knows, and fails the run if it falls short.
"""

from __future__ import annotations

from airflow.sdk import Param, dag, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_tfps.group import TrainingTaskGroup


@task
def judge(training: dict, params: dict | None = None) -> dict:
    """The model if it is near the optimum."""
    auc, optimum = training["metrics"]["auc"], training["metrics"]["optimum_auc"]
    if optimum - auc > params["max_regret"]:
        raise AirflowFailException(f"AUC {auc:.4f} on unseen clicks; {optimum:.4f} is possible")
    return {"auc": auc, "optimum_auc": optimum, "checkpoint": training["checkpoint"]}


@dag(
    schedule=None,
    params={
        "steps": Param(4000, type="integer", minimum=1, title="Global steps"),
        "mode": Param("async", enum=["async", "sync"], title="Mode"),
        "max_regret": Param(
            0.01,
            type="number",
            minimum=0,
            title="AUC",
            description="How much below the optimum is good enough",
        ),
    },
    doc_md=__doc__,
    tags=["tfps", "tutorial"],
)
def wide_deep() -> None:
    training = TrainingTaskGroup(
        "training",
        job="jobs/wide_deep.yaml",
        hosts="gpu_lab",
        steps="{{ params.steps }}",
        mode="{{ params.mode }}",
    )
    judge(training.output)


wide_deep()
