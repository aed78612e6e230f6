"""The command line: what Airflow's parser makes of it, which trainings are meant, what is printed. No host is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace

import pytest
import yaml
from tfps_runtime.protocol import Task, TrainingId

from airflow_tfps.cli import starter, terminal
from airflow_tfps.cli.definition import COMMANDS, get_cli_commands
from airflow_tfps.cli.trainings import Found, Selection, each, reading, status_of, the_one
from airflow_tfps.errors import CommandError, HostUnreachableError, SpecError
from airflow_tfps.inventory import Inventory
from airflow_tfps.plan import make_plan
from airflow_tfps.spec import JobSpec

ONE = TrainingId("dag/run/group", "0a1b2c3d")
MAPPED = TrainingId("dag/run/group/3", "0a1b2c3e")


@pytest.fixture(autouse=True)
def _context(monkeypatch):
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "")


def parse(*words: str) -> Namespace:
    """As Airflow does."""
    import argparse

    parser = argparse.ArgumentParser()
    groups = parser.add_subparsers(required=True)
    [group] = get_cli_commands()
    commands = groups.add_parser(group.name).add_subparsers(required=True)
    for command in group.subcommands:
        one = commands.add_parser(command.name)
        for argument in command.args:
            argument.add_to_parser(one)
        one.set_defaults(func=command.func)
    return parser.parse_args(["tfps", *words])


def run(*words: str) -> int:
    args = parse(*words)
    with pytest.raises(SystemExit) as caught:
        args.func(args)
    return caught.value.code


# --- the parser --------------------------------------------------------------------------------------------------


def test_help_is_light(tmp_path):
    """`airflow --help` reads our definitions, as every command does, and imports nothing heavy for that."""
    code = (
        "import sys; from airflow_tfps.cli.definition import get_cli_commands; get_cli_commands();"
        "print([m for m in ('asyncssh', 'paramiko', 'tensorflow', 'numpy', 'airflow_tfps.hook', 'airflow_tfps.ssh',"
        " 'airflow_tfps.cli.commands') if m in sys.modules])"
    )
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_exists_and_explains_itself(command):
    """What the definition names can be called, and each argument has a help text."""
    from airflow_tfps.cli import commands

    assert callable(getattr(commands, command.name))
    assert command.help
    assert command.description.endswith(".")
    own = [argument for argument in command.args if argument.flags[0] not in ("--mode", "--exit")]
    assert all(argument.kwargs.get("help") for argument in own)


@pytest.mark.parametrize(
    "words",
    [("logs", "worker:0", "-n", "-1"), ("sweep", "--training-days", "nan"), ("sweep", "--unused-days", "-3"),
     ("status", "--map-index", "x"), ("plan",), ("status", "--output", "xml"), ("checkpoints",)],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_the_parser(words, capsys):
    """With exit code 2, before anything is imported or asked."""
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2


# --- which trainings are meant ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {ONE, MAPPED}),
        ({"dag_id": "dag"}, {ONE, MAPPED}),
        ({"dag_id": "da"}, set()),
        ({"dag_id": "dag", "run_id": "run"}, {ONE, MAPPED}),
        ({"run_id": "other"}, set()),
        ({"group_id": "group", "map_index": 3}, {MAPPED}),
        ({"map_index": 0}, set()),
        ({"training": str(ONE)}, {ONE}),
        ({"training": ONE.key}, {ONE}),
        ({"training": MAPPED.key, "dag_id": "other"}, set()),
        ({"training": "dag/run/group#ffffffff"}, set()),
    ],
)
def test_a_selection(given, meant):
    """What is not said is not asked about; an id is exact, a key means all its incarnations."""
    selection = Selection(**given)
    assert {one for one in (ONE, MAPPED) if selection.matches(one)} == meant
    assert selection.is_all == (not given)


def found(training: TrainingId, host: str = "gpu-a", *, alive: bool = True, changed: float = 1.0) -> Found:
    tasks = [{"task": "worker:0", "state": "RUNNING"}, {"task": "ps:0", "state": "RUNNING"}]
    said = {"state": "RUNNING", "is_alive": alive, "changed": changed, "tasks": tasks}
    return Found(training=training, hosts={host: status_of(said)})


def test_whose_log_is_meant():
    """The only living training's, else the newest's; several living ones must be told apart."""
    task = Task.parse("worker:0")
    dead, living = found(ONE, alive=False), found(MAPPED, "gpu-b")
    assert the_one([living, dead], task, None) == (living, "gpu-b")
    assert the_one([dead], task, None) == (dead, "gpu-a")
    assert the_one([living, dead], task, "gpu-a") == (dead, "gpu-a")
    with pytest.raises(SpecError, match="several trainings have a worker:0.*--training: dag/run/group#"):
        the_one([found(ONE), living], task, None)
    for wrong, host in (("worker:1", None), ("worker:0", "gpu-z")):
        with pytest.raises(SpecError, match="no training with a TF task"):
            the_one([dead], Task.parse(wrong), host)


def test_a_silent_host_does_not_hide_the_others():
    """Every host is asked; those that answered are shown beside the errors of the rest."""

    def do(host: str) -> str:
        if host == "b":
            raise HostUnreachableError(host, "no route")
        return host.upper()

    answers, errors = each(["a", "b", "c"], do)
    assert answers == {"a": "A", "c": "C"}
    assert [str(error) for error in errors] == ["b: no route"]
    assert each([], do) == ({}, [])


@pytest.mark.parametrize(
    "said",
    [None, [], {}, {"tasks": 3}, {"tasks": [{}], "state": "x", "is_alive": True},
     {"tasks": [{"task": "../x", "state": "x"}], "state": "x", "is_alive": True},
     {"tasks": [{"task": "ps:0", "state": "x", "attempt": "many"}], "state": "x", "is_alive": True},
     {"tasks": [{"task": "ps:0", "state": "x", "progress": "x"}], "state": "x", "is_alive": True},
     {"tasks": [], "state": "x", "is_alive": True, "changed": "x"}],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_the_hosts_fault(said):
    """It is named; no traceback of ours."""
    with pytest.raises(CommandError, match="^gpu-a: answered with what makes no sense") as caught:
        reading("gpu-a", lambda: status_of(said))
    assert caught.value.code == "protocol"


# --- what is printed -----------------------------------------------------------------------------------------------------

ROWS = [
    {"host": "gpu-a", "free": 3, "note": "[red]x[/red] \x1b[2J"},
    {"host": "gpu-b", "free": None, "note": "[/nope]"},
]


@pytest.mark.parametrize("output", ["table", "plain", "json", "yaml"])
def test_rows(output, capsys):
    """Each form shows everything; nothing that a host says steers the terminal, and no mark-up is obeyed."""
    terminal.show(ROWS, output)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    if output == "json":
        assert json.loads(text) == ROWS
    elif output == "yaml":
        assert yaml.safe_load(text) == ROWS
    else:
        assert r"[red]x[/red] \x1b[2J" in text
        assert "[/nope]" in text
        assert "None" not in text


def test_no_rows(capsys):
    """For a program an empty list, for people a sentence beside the empty output."""
    terminal.show([], "json", nothing="nothing there")
    terminal.show([], "table", nothing="nothing there")
    assert capsys.readouterr() == ("[]\n", "nothing there\n")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**40, "3.0 TiB")],
)
def test_sizes(number, text):
    """Bytes as people read them."""
    assert terminal.size(number) == text


def test_errors_of_ours_are_lines_and_others_are_not_hidden(capsys):
    """Exit code 1 without a traceback; a mistake of ours keeps its own."""

    @terminal.command
    def ours(args):
        raise HostUnreachableError("gpu-a", "no\x1b[2J route")

    @terminal.command
    def a_mistake(args):
        raise ZeroDivisionError

    @terminal.command
    def interrupted(args):
        raise KeyboardInterrupt

    for command, code in ((ours, 1), (interrupted, 130)):
        with pytest.raises(SystemExit) as caught:
            command(Namespace(verbose=False))
        assert caught.value.code == code
    assert capsys.readouterr().err == "gpu-a: no\\x1b[2J route\n"
    with pytest.raises(ZeroDivisionError):
        a_mistake(Namespace(verbose=False))


# --- plan and init ----------------------------------------------------------------------------------------------------------

HOSTS = "hosts: {gpu-a: {address: 10.0.0.1, ssh_conn_id: local, gpus: 4}}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.yaml").write_text(HOSTS)
    (tmp_path / "job.yaml").write_text("script: x.py\nroles: {ps: 1, worker: {count: 2, gpus: 1}}\n")
    (tmp_path / "x.py").write_text("")
    return tmp_path


def test_plan(folder, capsys):
    """The table is the plan's own; other forms have one row for each TF task."""
    assert run("plan", "job.yaml", "--hosts", "hosts.yaml") == 0
    job = JobSpec.load("job.yaml", base_dir=folder)
    plan = make_plan(job, Inventory.load("hosts.yaml", base_dir=folder))
    assert capsys.readouterr().out == f"{plan}\n"
    assert run("plan", "job.yaml", "--hosts", "hosts.yaml", "--output", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["task"], row["host"], row["gpus"], row["is_chief"]) for row in rows] == [
        ("ps:0", "gpu-a", 0, False), ("worker:0", "gpu-a", 1, True), ("worker:1", "gpu-a", 1, False)
    ]  # fmt: skip


def test_a_plan_tells_every_fault_at_once(folder, capsys):
    """A job that is wrong, hosts that are too small, a file that is missing: exit code 1, or a warning."""
    (folder / "bad.yaml").write_text("script: x.py\nroles: {ps: 1, worker: {cout: 2}}\ncolour: red\n")
    assert run("plan", "bad.yaml", "--hosts", "hosts.yaml") == 1
    error = capsys.readouterr().err
    assert "roles.worker.cout" in error
    assert "colour" in error
    assert run("plan", "job.yaml", "--hosts", "nowhere.yaml") == 1
    assert "the file cannot be read" in capsys.readouterr().err
    (folder / "x.py").unlink()
    assert run("plan", "job.yaml", "--hosts", "hosts.yaml", "--mode", "sync", "--steps", "10") == 0
    assert "warning: script: there is no file" in capsys.readouterr().err


def test_init_writes_what_can_be_planned(folder, capsys):
    """The job is valid, the program has its two functions, the DAG names the hosts; nothing is overwritten."""
    assert run("init", "dags", "--hosts", "gpu_a", "gpu_b") == 0
    written = capsys.readouterr().out.split()
    assert written == [
        "dags/first_training.py",
        "dags/jobs/first_training.yaml",
        "dags/jobs/first_training.py",
    ]
    assert 'hosts=["gpu_a", "gpu_b"],' in (folder / "dags/first_training.py").read_text()
    for path in written:
        if path.endswith(".py"):
            compile((folder / path).read_text(), path, "exec")
    assert run("plan", "dags/jobs/first_training.yaml", "--hosts", "hosts.yaml") == 0
    assert "first_training: 3 TF tasks on 1 host" in capsys.readouterr().out
    (folder / "dags/first_training.py").unlink()
    (folder / "dags/jobs/first_training.py").write_text("mine")
    assert run("init", "dags") == 1
    assert "dags/jobs/first_training.py is there already; nothing was written" in capsys.readouterr().err
    assert (folder / "dags/jobs/first_training.py").read_text() == "mine"
    assert not (folder / "dags/first_training.py").exists()


def test_init_into_what_is_no_folder(folder, capsys):
    """What was written before the fault is taken back."""
    (folder / "jobs").write_text("a file")
    assert run("init", ".") == 1
    assert "init is not valid" in capsys.readouterr().err
    assert not (folder / "first_training.py").exists()


def test_the_starters_dag_keeps_its_template():
    """Airflow renders `steps`, not we."""
    text = starter.files("gpu_lab")["first_training.py"]
    assert 'steps="{{ params.steps }}"' in text
    assert 'hosts="gpu_lab"' in text


# --- what must be said ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stop",), "say which trainings, or --all"),
        (("stop", "--all", "--dag-id", "x"), "contradict"),
        (("logs", "worker"), "not a TF task"),
        (("checkpoints", "/x", "--host", "gpu-z"), "gpu-z is not one of gpu-a"),
        (("demo", "--dags", "nowhere"), "leave --dags away for the example DAGs"),
    ],
)
def test_what_is_not_enough(folder, words, said, capsys):
    """One line says what is missing; no host is asked."""
    more = () if words[0] == "demo" else ("--hosts", "hosts.yaml")
    assert run(*words, *more) == 1
    assert said in capsys.readouterr().err


def test_which_host_must_be_said_if_there_are_several(folder, capsys):
    """A directory is on one of them."""
    (folder / "two.yaml").write_text(
        "hosts: {a: {address: 10.0.0.1, ssh_conn_id: local}, b: {address: 10.0.0.2, ssh_conn_id: local}}"
    )
    assert run("checkpoints", "/x", "--hosts", "two.yaml") == 1
    assert "say which of a, b" in capsys.readouterr().err
