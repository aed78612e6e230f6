"""Templates and overrides: how a job's text becomes values between the parsing of a DAG and a task."""

from __future__ import annotations

import pytest

from airflow_tfps.errors import SpecError
from airflow_tfps.spec import JobSpec
from airflow_tfps.templates import Rendered, Template, mark_rendered

SMALLEST = {"program": "ctr.py", "roles": {"ps": 1, "worker": 2}}
SCRIPT = {"script": "dist_mnist.py", "roles": {"ps": 1, "worker": 2}}


def faults(data, **keywords):
    with pytest.raises(SpecError) as caught:
        JobSpec.from_dict(data, **keywords)
    return list(caught.value.faults)


# --- templates ----------------------------------------------------------------------------------------------

TEMPLATED = {
    "program": "ctr.py",
    "mode": "{{ params.mode }}",
    "replicas_to_aggregate": "{{ params.replicas }}",
    "steps": "{{ params.steps }}",
    "roles": {
        "ps": 1,
        "worker": {"count": "{{ params.workers }}", "hosts": ["{{ params.host }}"]},
        "chief": "{{ 1 }}",
    },
    "hparams": {"rate": "{{ params.rate }}", "id": "007", "layers": "{{ params.layers }}", "tag": "{{ ds }}"},
    "inputs": {"train": "host:/data/{{ ds }}"},
    "checkpoint": {"shared": "{{ params.shared }}", "save_checkpoint_secs": "{% if x %}60{% endif %}"},
    "seed": "{{ params.seed }}",
    "env": {"DAY": "{{ ds_nodash }}"},
}
VALUES = {
    "{{ params.mode }}": "sync",
    "{{ params.replicas }}": "3",
    "{{ params.steps }}": "10000",
    "{{ params.workers }}": "4",
    "{{ params.host }}": "gpu-a",
    "{{ 1 }}": "1",
    "{{ params.rate }}": "0.8",
    "{{ params.layers }}": "[64, 32]",
    "{{ ds }}": "2024-01-01",
    "host:/data/{{ ds }}": "host:/data/2024-01-01",
    "{{ params.shared }}": "True",
    "{% if x %}60{% endif %}": "60",
    "{{ params.seed }}": "None",
    "{{ ds_nodash }}": "20240101",
}
EXPECTED = {
    "program": "ctr.py",
    "mode": "sync",
    "replicas_to_aggregate": 3,
    "steps": 10000,
    "roles": {"ps": 1, "worker": {"count": 4, "hosts": ["gpu-a"]}, "chief": 1},
    "hparams": {"rate": 0.8, "id": "007", "layers": [64, 32], "tag": "2024-01-01"},
    "inputs": {"train": "host:/data/2024-01-01"},
    "checkpoint": {"shared": True},
    "env": {"DAY": "20240101"},
}


def render_all(data):
    """Stands for Airflow, which renders every string, and whose Jinja drops a final newline."""
    if isinstance(data, dict):
        return {key: render_all(value) for key, value in data.items()}
    if isinstance(data, list):
        return [render_all(value) for value in data]
    return VALUES.get(data, data.removesuffix("\n")) if isinstance(data, str) else data


def test_templates_stand_in_place_of_any_scalar_while_a_dag_is_parsed():
    """A templated job is read, kept as it is, and written out again for Airflow to render."""
    job = JobSpec.from_dict(TEMPLATED, templated=True)
    assert job.is_templated
    assert isinstance(job.steps, Template)
    assert job.to_dict() == TEMPLATED


def test_templates_hide_no_other_fault():
    """Rules over several keys pass over templates and still apply to the rest."""
    assert faults(
        {**TEMPLATED, "roles": {"ps": {"gpus": 1}, "worker": "{{ n }}"}, "nmae": 1}, templated=True
    ) == [
        "nmae: unknown key; did you mean name?",
        "roles.ps.gpus: must be 0, is 1: a ps sees no GPU, it only holds variables",
    ]


def test_templates_are_refused_where_nothing_will_render_them():
    """At run time text with braces is no number."""
    (found,) = faults({**SMALLEST, "seed": "{{ x }}"})
    assert found == "seed: must be an integer, is '{{ x }}'"


def test_rendered_values_become_what_their_keys_need():
    """Only what was a template is converted: 0.8 becomes a number, the text 007 stays text."""
    template = JobSpec.from_dict(TEMPLATED, templated=True).to_dict()
    job = JobSpec.from_dict(render_all(template), template=template)
    assert job.to_dict() == EXPECTED
    assert not job.is_templated
    assert job.seed is None


def test_render_is_the_same_in_one_step():
    """A caller that renders leaf by leaf gets the same job, and is asked about templates only."""
    job = JobSpec.from_dict(TEMPLATED, templated=True)
    assert job.render(lambda text: VALUES[text]).to_dict() == EXPECTED


def test_native_values_are_taken_as_they_are():
    """With `render_template_as_native_obj` a template becomes a number; keys that need text get text."""
    native = {"{{ params.steps }}": 10000, "{{ ds_nodash }}": 20240101, "{{ params.layers }}": [64, 32]}
    job = JobSpec.from_dict(TEMPLATED, templated=True).render(lambda text: native.get(text, VALUES[text]))
    assert job.to_dict() == EXPECTED


def test_text_without_a_template_is_not_taken_from_jinja():
    """What Jinja does to plain text, such as dropping the last newline, does not reach the job."""
    template = {**SCRIPT, "args": ["a\n", "{{ x }}"]}
    job = JobSpec.from_dict({**SCRIPT, "args": ["a", "b"]}, template=template)
    assert job.args == ("a\n", "b")


@pytest.mark.parametrize(
    ("rendered", "value"),
    [
        ("0.8", 0.8),
        ("1e-3", 0.001),
        ("7", 7),
        ("true", True),
        ("False", False),
        ("None", None),
        ("", ""),
        ("# 3", "# 3"),
        ("a: b", "a: b"),
        ("*x", "*x"),
        ("{'a': 1}", {"a": 1}),
        ("[1, ", "[1, "),
        ("2024-01-01", "2024-01-01"),
        ("007", 7),
        (0.5, 0.5),
    ],
)
def test_a_rendered_hparam_is_a_yaml_scalar(rendered, value):
    """Numbers, booleans, null and bracketed values are read; every other text stays text."""
    job = JobSpec.from_dict({**SMALLEST, "hparams": {"x": Rendered(rendered)}})
    assert job.hparams["x"] == value
    assert type(job.hparams["x"]) is type(value)


def test_a_rendered_value_that_does_not_fit_is_a_fault():
    """What a template came to is checked like anything else."""
    with pytest.raises(SpecError) as caught:
        JobSpec.from_dict({**SMALLEST, "steps": "{{ a }}", "seed": "{{ b }}"}, templated=True).render(
            lambda _: "soon"
        )
    assert caught.value.faults == (
        "steps: must be an integer, or '+N' for N more than the directory holds, is 'soon'",
        "seed: must be an integer, is 'soon'",
    )


# --- overrides ----------------------------------------------------------------------------------------------


def test_an_override_merges_hparams_and_inputs_and_replaces_the_rest(tmp_path):
    """Names not mentioned keep their values; the original job is unchanged."""
    job = JobSpec.from_dict({**SMALLEST, "hparams": {"a": 1, "b": 2}, "steps": 5}, base_dir=tmp_path)
    other = job.override(hparams={"b": 3}, inputs={"train": "host:/x"}, steps="20", mode="sync")
    assert (other.hparams, other.inputs, other.steps, other.mode) == (
        {"a": 1, "b": 3},
        {"train": "host:/x"},
        20,
        "sync",
    )
    assert other.base_dir == tmp_path
    assert job.hparams == {"a": 1, "b": 2}
    assert job.override() == job


def test_an_override_is_checked():
    """Overriding into a contradiction is a SpecError like any other."""
    job = JobSpec.from_dict({**SMALLEST, "mode": "sync", "replicas_to_aggregate": 1})
    with pytest.raises(SpecError, match="replicas_to_aggregate: goes with mode: sync only"):
        job.override(mode="async")
    with pytest.raises(SpecError, match=r"steps: \+5 needs a fixed checkpoint\.dir"):
        job.override(steps="+5")
    with pytest.raises(SpecError, match="hparams: must be a mapping, is 'x'"):
        job.override(hparams="x")


def test_an_override_converts_only_what_was_a_template():
    """The operator marks its rendered arguments; text that was written as text stays text."""
    written = {"rate": "{{ params.rate }}", "id": "007"}
    marked = mark_rendered(written, {"rate": "0.1", "id": "007"})
    assert JobSpec.from_dict(SMALLEST).override(hparams=marked).hparams == {"rate": 0.1, "id": "007"}


def test_an_override_by_a_template_that_came_to_nothing_changes_nothing():
    """A DAG parameter left empty keeps what the job says; one template may hold all hparams."""
    job = JobSpec.from_dict({**SMALLEST, "steps": 5, "hparams": {"a": 1}})
    assert job.override(steps=Rendered("None"), mode=Rendered(""), inputs=Rendered(None)) == job
    assert job.override(mode=Rendered("sync")).mode == "sync"
    for rendered in ("{'b': 0.5}", {"b": 0.5}):
        assert job.override(hparams=Rendered(rendered)).hparams == {"a": 1, "b": 0.5}


def test_a_templated_job_stays_templated_when_overridden():
    """Overrides at parse time leave the templates of the file alone."""
    job = JobSpec.from_dict(TEMPLATED, templated=True).override(hparams={"rate": 1.0})
    assert job.to_dict() == {**TEMPLATED, "hparams": {**TEMPLATED["hparams"], "rate": 1.0}}
