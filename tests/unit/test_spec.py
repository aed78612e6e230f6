"""Jobs: what is read, what is refused and how it is said, and how templates become values."""

from __future__ import annotations

import importlib.util
import json
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from airflow_tfps.errors import SpecError
from airflow_tfps.spec import JobSpec, RoleSpec, SecretRef
from airflow_tfps.templates import Rendered

SMALLEST = {"program": "ctr.py", "roles": {"ps": 1, "worker": 2}}
SCRIPT = {"script": "dist_mnist.py", "roles": {"ps": 1, "worker": 2}}
COMMAND = {"command": ["./train", "--x=1"], "roles": {"ps": 1, "worker": 2}}

SPELLED_OUT = r"""
name: digits
program: digits.py
hparams: {learning_rate: 0.8}
inputs: {train: /mnt/data/train}
mode: sync
replication: between_graph
replicas_to_aggregate: 3
steps: 10000
roles:
  ps:     {count: 2, restarts: 3}
  worker: {count: 4, gpus: 1, restarts: 3, hosts: [gpu-a, gpu-b]}
session: {allow_soft_placement: true, gpu_options: {allow_growth: true}}
checkpoint: {base_dir: /data/ckpt/digits, save_checkpoint_secs: 60, save_summaries_secs: 60, max_to_keep: 5,
             sharded: false, shared: false}
start_from: none
launch: warm
preload: [tensorflow, numpy]
success_policy: chief
timeouts: {ready_secs: 300, stall_secs: 600, grace_secs: 30, lease_secs: 3600, unreachable_secs: 300,
           queue_secs: 3600}
env: {NCCL_DEBUG: WARN}
secrets: {S3_KEY: "conn:minio#password"}
seed: 7
"""

SCRIPT_SPELLED_OUT = r"""
script: dist_mnist.py
args: ["--job_name={job_name}", "--task_id={task_index}", "--ps_hosts={ps_hosts}", --steps, 10000]
roles: {ps: 1, worker: 2}
compat: tf1
progress: 'After \d+ training steps \((?P<step>\d+) global steps\), loss .* is (?P<loss>[\d.]+)'
checkpoint: {dir: ~/logdir}
steps: +1000
"""


def faults(data, **keywords):
    with pytest.raises(SpecError) as caught:
        JobSpec.from_dict(data, **keywords)
    return list(caught.value.faults)


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# --- what is read -------------------------------------------------------------------------------------------


def test_the_smallest_job_gets_the_documented_defaults():
    """Two keys make a job: asynchronous, between-graph, warm, named after its program."""
    job = JobSpec.from_dict(SMALLEST)
    assert (job.name, job.mode, job.replication, job.launch) == ("ctr", "async", "between_graph", "warm")
    assert job.roles == {"ps": RoleSpec(count=1), "worker": RoleSpec(count=2)}
    assert job.preload == ("tensorflow", "numpy")
    assert job.timeouts.lease_secs == 3600
    assert (job.checkpoint.base_dir, job.checkpoint.max_to_keep) == (None, 5)


def test_the_spelled_out_job_is_read_key_by_key(tmp_path):
    """Every key of the documented example arrives with its type."""
    job = JobSpec.from_file(write(tmp_path, SPELLED_OUT))
    assert job.roles["worker"] == RoleSpec(count=4, gpus=1, restarts=3, hosts=("gpu-a", "gpu-b"))
    assert job.session == {"allow_soft_placement": True, "gpu_options": {"allow_growth": True}}
    assert (job.replicas_to_aggregate, job.steps, job.seed) == (3, 10000, 7)
    assert job.checkpoint.base_dir == "/data/ckpt/digits"
    assert job.base_dir == tmp_path


def test_a_script_is_read_with_its_arguments_and_relative_steps(tmp_path):
    """Numbers among args become text, and `+1000` keeps its sign although YAML reads it as a number."""
    job = JobSpec.load("job.yaml", base_dir=write(tmp_path, SCRIPT_SPELLED_OUT).parent)
    assert job.args[-2:] == ("--steps", "10000")
    assert job.steps == "+1000"
    assert job.name == "dist_mnist"


def test_a_command_preloads_nothing():
    """Nothing is imported for a command, which is always started afresh."""
    job = JobSpec.from_dict(COMMAND)
    assert job.preload == ()
    assert job.name == "train"


@pytest.mark.parametrize("text", [SPELLED_OUT, SCRIPT_SPELLED_OUT, yaml.dump(SMALLEST), yaml.dump(COMMAND)])
def test_a_job_survives_json(tmp_path, text):
    """What `to_dict` writes is JSON without defaults, and reads back as the same job."""
    job = JobSpec.from_file(write(tmp_path, text))
    data = json.loads(json.dumps(job.to_dict()))
    assert JobSpec.from_dict(data, base_dir=tmp_path) == job
    assert "timeouts" not in data
    assert "preload" not in data


def test_numbers_are_what_json_means_by_them(tmp_path):
    """`1e-3` is a number, though PyYAML alone reads it as text; in quotes it stays text."""
    text = yaml.dump(SMALLEST) + "hparams: {rate: 1e-3, decay: .5, id: '1e-3', n: 3}\n"
    job = JobSpec.from_file(write(tmp_path, text))
    assert job.hparams == {"rate": 0.001, "decay": 0.5, "id": "1e-3", "n": 3}


def test_a_job_made_by_hand_is_checked_when_it_is_loaded():
    """A JobSpec from Python goes through the same rules as a file, and gets its derived name."""
    by_hand = JobSpec(program="ctr.py", roles={"ps": RoleSpec(), "worker": RoleSpec(count=2)})
    assert JobSpec.load(by_hand) == JobSpec.from_dict(SMALLEST)
    with pytest.raises(SpecError, match=r"roles\.worker\.count: must be >= 1, is 0"):
        JobSpec.load(JobSpec(program="ctr.py", roles={"ps": RoleSpec(), "worker": RoleSpec(count=0)}))


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"roles": {"ps": 1, "worker": {"cuont": 2}}},
            "roles.worker.cuont: unknown key; did you mean count?",
        ),
        ({"roles": {"ps": 1, "worker": 0}}, "roles.worker.count: must be >= 1, is 0"),
        ({"roles": {"ps": 1, "worker": True}}, "roles.worker.count: must be an integer, is true"),
        ({"roles": {"ps": 1, "worker": {"count": 2, "gpus": -1}}}, "roles.worker.gpus: must be >= 0, is -1"),
        ({"roles": {"ps": {"gpus": 1}, "worker": 1}}, "roles.ps.gpus: must be 0, is 1: a ps sees no GPU"),
        ({"roles": {"ps": 1, "chief": 2, "worker": 1}}, "roles.chief.count: must be 1, is 2"),
        ({"roles": {"ps": 1, "worker": 1, "evaluator": 2}}, "roles.evaluator.count: must be 1, is 2"),
        ({"roles": {"worker": 2}}, "roles.ps: between-graph replication needs a ps, which holds"),
        ({"roles": {"ps": 2}}, "roles: a role beside ps and evaluator is needed, or nobody trains"),
        ({"roles": {"ps": 1, "wroker": 2}}, "roles.wroker: unknown role; did you mean worker?"),
        ({"roles": {}}, "roles: must not be empty"),
        ({"roles": None}, "roles: is missing"),
        ({"roles": {"PS": 1, "worker": 1}}, "roles.PS: the key must be a TensorFlow job name in lower case"),
        (
            {"roles": {"ps": 1, "worker": {"hosts": ["gpu a"]}}},
            "roles.worker.hosts[0]: must be letters, digits",
        ),
        ({"roles": {"ps": 1, "worker": [2]}}, "roles.worker: must be a mapping, is a list"),
        ({"mode": "snyc"}, "mode: must be async or sync, is 'snyc'; did you mean sync?"),
        ({"hparam": {}}, "hparam: unknown key; did you mean hparams?"),
        ({"zzzzzz": 1}, "zzzzzz: unknown key; known are name, program"),
        ({"replicas_to_aggregate": 2}, "replicas_to_aggregate: goes with mode: sync only"),
        (
            {"mode": "sync", "replicas_to_aggregate": 3},
            "replicas_to_aggregate: must be <= 2, the number of workers and chief, is 3: every step",
        ),
        (
            {"mode": "sync", "replicas_to_aggregate": 1, "replication": "in_graph"},
            "replicas_to_aggregate: goes with between-graph replication only",
        ),
        ({"mode": "async", "replication": "in_graph"}, "mode: in-graph steps are synchronous"),
        (
            {"success_policy": "all_workers", "replication": "in_graph"},
            "success_policy: in-graph workers only serve and never end",
        ),
        ({"program": None}, "program: exactly one of program, script and command is needed; none is there"),
        (
            {"script": "x.py"},
            "program: exactly one of program, script and command is needed; not both program",
        ),
        ({"program": "ctr"}, "program: must be a Python file (.py), is 'ctr'"),
        ({"args": ["--x"]}, "args: goes with script or command only"),
        ({"progress": "(?P<step>x)"}, "progress: goes with script or command only"),
        ({"compat": "tf1"}, "compat: goes with script only"),
        ({"files": ["ctr.py"]}, "files[0]: must have a name of its own, for all of them go into one folder"),
        ({"files": ["a/x.py", "b/x.py"]}, "files[1]: must have a name of its own"),
        (
            {"files": [".."]},
            "files[0]: must have a name of its own, for all of them go into one folder; is '..'",
        ),
        ({"steps": 0}, "steps: must be >= 1, is 0"),
        ({"steps": "soon"}, "steps: must be an integer"),
        ({"steps": "+100"}, "steps: +100 needs a fixed checkpoint.dir"),
        ({"checkpoint": {"dir": "/a", "base_dir": "/b"}}, "checkpoint.dir: not beside base_dir"),
        ({"checkpoint": {"dir": "logs"}}, "checkpoint.dir: must be an absolute path on the host"),
        ({"checkpoint": {"save_checkpoint_secs": 0}}, "checkpoint.save_checkpoint_secs: must be > 0, is 0"),
        ({"timeouts": {"lease_secs": 5}}, "timeouts.lease_secs: must be >= 60, is 5"),
        ({"timeouts": 5}, "timeouts: must be a mapping, is 5"),
        ({"env": {"HTTPS_PROXY": "x"}}, "env.HTTPS_PROXY: proxy variables are removed"),
        ({"env": {"TF_CONFIG": "{}"}}, "env.TF_CONFIG: is set on the host"),
        (
            {"env": {"CUDA_VISIBLE_DEVICES": 0}},
            "env.CUDA_VISIBLE_DEVICES: is set on the host: say how many GPUs",
        ),
        ({"env": {"A": True}}, "env.A: must be text; put true into quotes"),
        ({"env": {"A B": "x"}}, "env.'A B': the key must be a name of an environment variable"),
        ({"env": {1: "x"}}, "env.1: the key must be text, is 1"),
        ({"env": {"A": "1"}, "secrets": {"A": "var:a"}}, "env.A: is among the secrets too"),
        ({"inputs": {"train": "host:data"}}, "inputs.train: must be host:/path"),
        ({"inputs": {"train-set": "/data"}}, "inputs.train-set: the key must be letters, digits and '_'"),
        ({"start_from": "yesterday"}, "start_from: must be none, previous, or an absolute path"),
        ({"seed": -1}, "seed: must be >= 0, is -1"),
        ({"name": "a/b"}, "name: must be letters, digits"),
        ({"hparams": {"x": float("nan")}}, "hparams.x: must be a finite number"),
        (
            {"hparams": {"x": yaml.safe_load("2024-01-01")}},
            "hparams.x: must be what JSON can hold, is a date",
        ),
        ({"hparams": {"x": "a\0b"}}, "hparams.x: must not hold a NUL character"),
        ({"session": {"x": 2**70}}, "session.x: is a number of more than 64 bits"),
    ],
)
def test_a_fault_names_its_place_and_the_way_out(change, fault):
    """Each fault of a harness job is found, alone, under its path."""
    (found,) = faults({**SMALLEST, **change})
    assert found.startswith(fault)


@pytest.mark.parametrize(
    "change",
    [
        {"hparams": {"x": 1}},
        {"replication": "between_graph"},
        {"mode": "sync", "replicas_to_aggregate": 1},
        {"session": {"allow_soft_placement": True}},
        {"start_from": "previous"},
        {"checkpoint": {"save_checkpoint_secs": 60}},
        {"checkpoint": {"sharded": False}},
    ],
)
@pytest.mark.parametrize("base", [SCRIPT, COMMAND])
def test_what_only_the_harness_reads_is_refused_beside_a_script_or_command(base, change):
    """A key that nothing would read is a fault even if it holds its default."""
    (found,) = faults({**base, **change})
    assert "only a harness program uses it" in found


@pytest.mark.parametrize("change", [{"mode": "sync"}, {"inputs": {"train": "/x"}}, {"seed": 3}, {"steps": 9}])
def test_a_script_may_say_what_the_rest_of_the_system_reads(change):
    """Mode, inputs, seed and steps matter beside the harness too."""
    assert JobSpec.from_dict({**SCRIPT, **change}).to_dict() == {**SCRIPT, **change}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"compat": "tf1"}, "compat: goes with script only"),
        ({"seed": 3}, "seed: goes with program or script only"),
        ({"preload": ["numpy"]}, "preload: goes with program or script only"),
        ({"launch": "warm"}, "launch: a command is always started afresh"),
        ({"command": []}, "command: must not be empty"),
        ({"command": "./train"}, "command: must be a list, is './train'"),
        ({"progress": "(("}, "progress: must be a regular expression"),
        ({"progress": "loss (.*)"}, "progress: needs a group named step"),
        ({"roles": {"ps": 1, "evaluator": 1}}, "roles: a role beside ps and evaluator is needed"),
    ],
)
def test_faults_of_a_command(change, fault):
    """What makes no sense for a command is refused with the reason."""
    (found,) = faults({**COMMAND, **change})
    assert found.startswith(fault)


def test_a_script_and_an_in_graph_program_may_name_their_roles():
    """Job names of their own are allowed where no harness assigns the roles a meaning."""
    for job in ({"script": "a.py"}, {"program": "a.py", "replication": "in_graph"}):
        assert JobSpec.from_dict({**job, "roles": {"local": 2}}).roles["local"].count == 2


def test_all_faults_are_reported_at_once():
    """One reading tells everything, rules over several keys included, in one error."""
    found = faults(
        {
            "program": "ctr.py",
            "nmae": "x",
            "mode": "sync",
            "replicas_to_aggregate": 9,
            "roles": {"ps": {"gpus": 2}, "worker": {"count": 2, "restarts": "many"}},
            "timeouts": {"ready_secs": 0},
        }
    )
    assert [fault.split(":")[0] for fault in found] == [
        "nmae",
        "roles.worker.restarts",
        "timeouts.ready_secs",
        "roles.ps.gpus",
        "replicas_to_aggregate",
    ]


@pytest.mark.parametrize(
    "value",
    ["hunter2", "conn:minio", "conn:minio#secret_key", "conn:#password", "token", "{{ var.value.x }}", 1234],
)
def test_a_secret_is_a_reference_and_a_fault_never_shows_what_was_written(value):
    """A password written in place of its reference does not reach the log; templates are refused."""
    for templated in (False, True):
        (found,) = faults({**SMALLEST, "secrets": {"KEY": value}}, templated=templated)
        assert found.startswith("secrets.KEY: must be conn:ID#password")
        assert str(value) not in found


def test_a_secret_reference_is_taken_apart():
    """Connection attributes, extras and variables are the three sources."""
    assert SecretRef.parse("conn:minio#extra.key.id") == SecretRef("conn", "minio", "extra.key.id")
    assert SecretRef.parse("var:token") == SecretRef("var", "token")
    with pytest.raises(ValueError, match="must be conn:ID#password"):
        SecretRef.parse("token")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("program: [", "line 1, column 11: "),
        ("program: a.py\nroles: {ps: 1, worker: 2, ps: 2}", "line 2, column 27: ps is written twice"),
        ("- program", "must be a mapping, is a list"),
        ("", "must be a mapping, is empty"),
        ("program: 2024-13-45", "not YAML: "),
        ("a: !!python/object:x {}", "line 1, column 4: could not determine a constructor"),
    ],
)
def test_a_broken_file_is_a_fault_with_its_place(tmp_path, text, fault):
    """What is no job at all is a SpecError that names the file, never a YAML traceback."""
    path = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        JobSpec.load(path)
    assert caught.value.faults[0].startswith(fault)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_a_fault(tmp_path):
    """A job file that is not there is named."""
    with pytest.raises(SpecError, match=r"no\.yaml is not valid:\n  - the file cannot be read: No such file"):
        JobSpec.load("no.yaml", base_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hparams: &a {x: *a}", "is nested more than 16 deep"),
        ("hparams: {x: &a [[1], *a, *a, *a]}", "holds more than 10000 values"),
    ],
)
def test_an_alias_that_holds_itself_is_a_fault(tmp_path, text, fault):
    """Free-form values end at a depth and at a number of values."""
    with pytest.raises(SpecError, match=fault):
        JobSpec.load(write(tmp_path, yaml.dump(SMALLEST) + text))


# --- what it needs on this machine --------------------------------------------------------------------------


def test_missing_files_are_named_before_any_host_is_touched(tmp_path):
    """Program, files and local inputs are looked for beside the job file; host paths and URLs are not."""
    inputs = {"here": "data/train", "gone": "data/eval", "there": "host:/data", "far": "s3://bucket/x"}
    job = JobSpec.from_dict({**SMALLEST, "files": ["lib"], "inputs": inputs}, base_dir=tmp_path)
    (tmp_path / "data" / "train").mkdir(parents=True)
    program, file, data = job.missing_files()
    assert file == f"files[0]: there is no file or folder {tmp_path}/lib on this machine"
    assert program == f"program: there is no file {tmp_path}/ctr.py on this machine"
    assert data.startswith(f"inputs.gone: no file {tmp_path}/data/eval on this machine; a path on the hosts")
    with pytest.raises(SpecError, match=r"ctr\.py on this machine"):
        job.check_runnable()
    (tmp_path / "ctr.py").touch()
    (tmp_path / "data" / "eval").touch()
    (tmp_path / "lib").mkdir()
    job.check_runnable()


def test_a_placeholder_that_nothing_fills_is_found_before_it_runs(tmp_path):
    """`{inputs.x}` and `{steps}` without a value are faults at run time; a likely typo is a hint only."""
    (tmp_path / "dist_mnist.py").touch()
    args = [
        "--data={inputs.trian}",
        "--steps={steps}",
        "--dir={checkpoint_dri}",
        '{"a": {task_index}}',
        "{name}",
    ]
    job = JobSpec.from_dict({**SCRIPT, "args": args, "inputs": {"train": "host:/x"}}, base_dir=tmp_path)
    with pytest.raises(SpecError) as caught:
        job.check_runnable()
    assert caught.value.faults == (
        "args[0]: {inputs.trian}: there is no input trian; did you mean train?",
        "args[1]: {steps}: the job has no steps",
    )
    assert job.hints() == ("args[2]: {checkpoint_dri} is left as it is; did you mean {checkpoint_dir}?",)


def test_a_templated_job_does_not_run(tmp_path):
    """A job that nobody rendered is refused rather than sent to the hosts."""
    (tmp_path / "ctr.py").touch()
    job = JobSpec.from_dict({**SMALLEST, "steps": "{{ x }}"}, base_dir=tmp_path, templated=True)
    with pytest.raises(SpecError, match="some values are still templates"):
        job.check_runnable()


# --- documentation ------------------------------------------------------------------------------------------


def test_the_page_of_keys_is_up_to_date():
    """docs/keys.md says what the dataclasses say, and every key has its line."""
    path = Path(__file__).parents[2] / "docs" / "make_keys.py"
    spec = importlib.util.spec_from_file_location("make_keys", path)
    make_keys = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_keys)
    page = make_keys.page()
    assert page == make_keys.PAGE.read_text("utf-8"), "run python docs/make_keys.py"
    assert page.count("| `") > 50


# --- any input ----------------------------------------------------------------------------------------------

TEXT = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["{{ x }}", "+5", "ps", "worker", "sync", "host:/x", "a.py", "/d", "(?P<step>x)", "1e9"]),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-1, 3),
    st.floats(),
    TEXT,
    TEXT.map(Rendered),
    st.dates(),
)
KEYS = st.one_of(
    st.sampled_from(["ps", "worker", "chief", "evaluator", "count", "gpus", "hosts", "env", "dir", "x"]),
    st.text(string.ascii_letters, max_size=4),
    st.integers(),
)
VALUES_OF_ANY_KIND = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)
JOBS = st.fixed_dictionaries(
    {"roles": st.one_of(st.just({"ps": 1, "worker": 2}), VALUES_OF_ANY_KIND)},
    optional={key: VALUES_OF_ANY_KIND for key in JobSpec.__dataclass_fields__ if key != "roles"},
)


@given(data=st.one_of(JOBS, VALUES_OF_ANY_KIND), templated=st.booleans())
@settings(max_examples=100, deadline=None)
def test_anything_is_either_a_job_or_a_spec_error(data, templated):
    """Whatever YAML may hold, reading ends in faults with words, or in a job that survives JSON."""
    try:
        job = JobSpec.from_dict(data, templated=templated)
    except SpecError:
        return
    again = json.loads(json.dumps(job.to_dict(), allow_nan=False))
    assert JobSpec.from_dict(again, templated=templated) == job
