"""A training on hosts whose connection was made by a test, with a secret that the test looks for."""

from __future__ import annotations

from airflow.sdk import DAG, Param

from airflow_tfps.group import TrainingTaskGroup

JOB = {
    "name": "planted",
    "script": "../programs/stand_in.py",
    "args": ["--control={{ params.control }}", "--checkpoint-dir={checkpoint_dir}"],
    "roles": {"ps": 1, "worker": 2},
    "launch": "spawn",
    "env": {"LIVE_CONTROL": "{{ params.control }}"},
    "secrets": {"PLANTED": "conn:planted_store#password"},
    "checkpoint": {"base_dir": "{{ params.control }}/checkpoints"},
    "timeouts": {"grace_secs": 3, "ready_secs": 120},
    "progress": r"step (?P<step>\d+) loss (?P<loss>[\d.]+)",
}
PARAMS = {"control": Param("", type="string"), "ports": Param("20000-29999", type="string")}

with DAG("live_planted", schedule=None, params=PARAMS):
    hosts = {"hosts": {"planted_host": {}}, "defaults": {"gpus": 0, "ports": "{{ params.ports }}"}}
    TrainingTaskGroup("training", job=JOB, hosts=hosts)
