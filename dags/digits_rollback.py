"""Go back to the model of digits that was served before, if the newest one proves bad: triggered by hand.

`<model_dir>/current` is switched by one rename, so whoever reads it has one whole model or the other. Both stay where
they are, and the history of the directory says who went back, and why. A second run goes back further.
"""

from __future__ import annotations

from airflow.sdk import Param, dag

from airflow_tfps.models import RollbackOperator


@dag(
    schedule=None,
    catchup=False,
    params={
        "host": Param("gpu-a", type="string", title="Host", description="Where the models are"),
        "model_dir": Param("~/models/digits", type="string", title="Models"),
        "reason": Param("", type="string", title="Reason", description="Goes into the history"),
    },
    doc_md=__doc__,
    tags=["tfps", "tutorial"],
)
def digits_rollback() -> None:
    RollbackOperator(
        task_id="rollback",
        hosts="gpu_lab",
        host="{{ params.host }}",
        model_dir="{{ params.model_dir }}",
        reason="{{ params.reason }}",
    )


digits_rollback()
