"""A training script of one's own, as it was written for TensorFlow 1, on a schedule.

The script (`programs/dist_digits.py`) makes its own server and `Supervisor` and takes its place in the cluster by
flags; nothing in it is ours. `jobs/own_script.yaml` fills the flags, uploads the module that it imports, and finds its
progress in its log.

1. `prepare` writes scikit-learn's digits into a folder, scaled to the 0..255 that `read_data_sets` expects.
2. `training` uploads the folder and trains. A worker that crashes because a parameter server was lost is started again
   and goes on from the last checkpoint; a retry of the task does the same.
3. `judge` reads the result that the script left as `result.json`.
"""

from __future__ import annotations

import os
from pathlib import Path

from airflow.sdk import Param, dag, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_tfps.group import TrainingTaskGroup

DATA = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")) / "data" / "own_script"


@task
def prepare(data_dir: str) -> str:
    """Write `train.npz` and `test.npz`; the same bytes every time, so they are uploaded once."""
    import numpy as np
    from sklearn.datasets import load_digits

    folder = Path(data_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    images, digits = load_digits(return_X_y=True)
    pixels = (images * (255 / 16)).astype("uint8")
    order = np.random.default_rng(seed=0).permutation(len(digits))
    for name, rows in {"train": order[:1437], "test": order[1437:]}.items():
        partial = folder.parent / f"{folder.name}-{name}.partial.npz"
        np.savez(partial, x=pixels[rows], y=digits[rows].astype("uint8"))
        partial.replace(folder / f"{name}.npz")
    return str(folder)


@task
def judge(training: dict, params: dict | None = None) -> float:
    """The accuracy if it is good enough; a bad model fails the run, and no retry would make it better."""
    accuracy, least = training["metrics"]["accuracy"], params["min_accuracy"]
    if accuracy < least:
        raise AirflowFailException(f"accuracy {accuracy:.3f} on unseen digits, below {least}")
    return accuracy


@dag(
    schedule=None,
    max_active_runs=1,
    params={
        "steps": Param(1000, type="integer", minimum=1, title="Global steps"),
        "min_accuracy": Param(
            0.85, type="number", minimum=0, maximum=1, title="Accuracy below which the run fails"
        ),
        "data_dir": Param(
            str(DATA), type="string", title="Data", description="Directory that every Airflow worker can read"
        ),
    },
    doc_md=__doc__,
    tags=["tfps", "tutorial"],
)
def own_script() -> None:
    training = TrainingTaskGroup(
        "training",
        job="jobs/own_script.yaml",
        hosts="gpu_lab",
        inputs={"digits": prepare("{{ params.data_dir }}")},
        steps="{{ params.steps }}",
    )
    judge(training.output)


own_script()
