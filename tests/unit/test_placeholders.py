"""Placeholders: which braces are ours."""

from __future__ import annotations

import pytest
from tfps_runtime.placeholders import NAMES, fill, names_in, values_for
from tfps_runtime.protocol import Task

CLUSTER = {"ps": ["h1:1"], "worker": ["h1:2", "h2:3"]}
VALUES = values_for(
    Task("worker", 1), host="gpu-a", cluster=CLUSTER, checkpoint_dir="/ck", steps=9, inputs={"train": "/d"}
)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("--task_id={task_index}", "--task_id=1"),
        ("{job_name}/{task}@{host}", "worker/worker:1@gpu-a"),
        ("--ps={ps_hosts} --w={worker_hosts}", "--ps=h1:1 --w=h1:2,h2:3"),
        ("{checkpoint_dir} {steps} {inputs.train}", "/ck 9 /d"),
        ('{"index": {task_index}}', '{"index": 1}'),
        ("{unknown} {} {0} {task!r} {inputs.x} { task }", "{unknown} {} {0} {task!r} {inputs.x} { task }"),
        ("${task} {{task}}", "${task} {{task}}"),
    ],
)
def test_only_known_placeholders_are_replaced(text, filled):
    """Shell variables, templates, JSON and anything unknown keep their braces."""
    assert fill(text, VALUES) == filled


def test_a_value_is_not_filled_again():
    """A path with braces in it stays that path."""
    assert fill("{checkpoint_dir}", {"checkpoint_dir": "/x/{task}", "task": "ps:0"}) == "/x/{task}"


def test_every_documented_name_has_a_value_even_without_a_ps():
    """A job without that role gets an empty list of hosts, as its flags expect."""
    values = values_for(Task("local", 0), host="a", cluster={"local": ["h:1"]}, checkpoint_dir="/c", steps=0)
    assert set(values) >= NAMES
    assert (values["ps_hosts"], values["local_hosts"], values["steps"]) == ("", "h:1", "0")


def test_without_steps_the_placeholder_stays():
    """There is no number to put there, and an empty flag would hide that."""
    assert fill("{steps}", values_for(Task("ps", 0), host="a", cluster={}, checkpoint_dir="/")) == "{steps}"


def test_names_are_found_in_order():
    """What looks like a placeholder is listed, known or not."""
    assert names_in("{a} {{b}} {inputs.c}{worker_hosts}") == ["a", "inputs.c", "worker_hosts"]
