"""The bundled click-through model: near the best that is possible, with its tables spread evenly."""

from __future__ import annotations

import re

import pytest
from clusters import CHIEF, DAGS

from airflow_tfps.spec import JobSpec


def test_the_job_is_valid():
    """The job file is read, finds its program and asks for two ps."""
    job = JobSpec.from_file(DAGS / "jobs" / "wide_deep.yaml")
    job.check_runnable()
    assert job.roles["ps"].count == 2


@pytest.mark.tensorflow
def test_it_is_near_the_optimum_and_its_tables_are_balanced(train):
    """Within 0.01 AUC of the generator's own probabilities on held-out clicks; bytes per ps differ by < 10 %."""
    job = JobSpec.from_file(DAGS / "jobs" / "wide_deep.yaml")
    training = train(
        job.local_path(job.program), ps=2, mode=job.mode, steps=job.steps, hparams=dict(job.hparams)
    )
    training.start_all()
    assert training.tasks[CHIEF].wait(120) == 0, training.logs
    metrics = training.result.metrics
    assert metrics["optimum_auc"] > 0.75
    assert metrics["optimum_auc"] - metrics["auc"] < 0.01
    (report,) = re.findall(r"bytes of variables: (.*)", training.tasks[CHIEF].log)
    sizes = [float(size) for size in re.findall(r"ps:\d ([\d.]+) MB", report)]
    assert len(sizes) == 2
    assert max(sizes) < 1.1 * min(sizes)
