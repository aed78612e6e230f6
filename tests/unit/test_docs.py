"""The documentation says what the code does: its examples are read, its tables compared, its links followed.

A fenced block says in its first line what it is: ```yaml job, ```yaml hosts, ```json connection, ```python program,
```python dag. With `=PATH` it is also written to a file of that name, so that a DAG on the same page finds its job.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bundles import save
from tfps_runtime import commands, models, protocol, uploads
from tfps_runtime.agent import Agent

from airflow_tfps import errors
from airflow_tfps.inventory import Inventory
from airflow_tfps.plan import make_plan
from airflow_tfps.spec import JobSpec, Timeouts
from airflow_tfps.yaml_text import parse_yaml

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (
    ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))
)}  # fmt: skip
PROTOCOL, STATES = PAGES["docs/protocol.md"], PAGES["docs/states.md"]
TROUBLES, JOBS = PAGES["docs/troubleshooting.md"], PAGES["docs/jobs.md"]

KINDS = {
    "yaml job",
    "yaml hosts",
    "json connection",
    "python program",
    "python dag",
    "sh",
    "mermaid",
    "",
    "python reader",
}
INVENTORY = Inventory.from_dict(
    {"hosts": {"gpu-a": {"address": "10.0.0.1", "gpus": 4}, "gpu-b": {"address": "10.0.0.2", "gpus": 4}}}
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    kind: str
    file: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    found = []
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL):
        kind, _, file = match[1].strip().partition("=")
        line = PAGES[page].count("\n", 0, match.start()) + 1
        found.append(Block(page, line, kind, file, match[2]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(kind: str) -> Any:
    """Parametrise a test over all blocks of a kind; there must be some."""
    chosen = [block for block in BLOCKS if block.kind == kind]
    assert chosen, kind
    return pytest.mark.parametrize("block", chosen, ids=str)


def write_files(page: str, folder: Path) -> None:
    for block in blocks_of(page):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, "utf-8")


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next of the same or a higher level."""
    level = heading.partition(" ")[0]
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, heading
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def codes(text: str) -> set[str]:
    """Everything in backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def first_cells(text: str) -> list[str]:
    """What the first cells of all table rows hold in backticks."""
    return [match for row in re.findall(r"^\|([^|]*)\|", text, re.MULTILINE) for match in codes(row)]


# --- examples -----------------------------------------------------------------------------------------------


def test_every_block_says_what_it_is():
    """No example passes unchecked because nobody knows its kind."""
    assert {block.kind for block in BLOCKS} <= KINDS


@blocks("yaml job")
def test_jobs_are_valid(block, tmp_path):
    """Every job in the documentation is read, has no misspelt placeholder, and fits two hosts with four GPUs."""
    job = JobSpec.from_dict(parse_yaml(block.text, as_text=("steps",)), templated=True)
    assert not job.hints()
    if not job.is_templated:
        assert make_plan(job, INVENTORY).tasks
    if block.file:
        write_files(block.page, tmp_path)
        JobSpec.load(block.file, base_dir=tmp_path).check_runnable()


@dataclass(frozen=True)
class SshConnection:
    conn_type: str = "ssh"
    host: str = "10.0.0.1"
    extra: str | None = None


def looked_up(conn_id: str) -> SshConnection:
    return SshConnection(host=f"{conn_id.replace('_', '-')}.example")


@blocks("yaml hosts")
def test_inventories_are_valid(block):
    """Every inventory in the documentation is read."""
    assert len(Inventory.load(parse_yaml(block.text), get_connection=looked_up)) >= 2


@blocks("json connection")
def test_connections_are_valid(block):
    """The extra of a connection in the documentation gives an inventory."""
    lab = SshConnection("tfps", "", block.text)
    loaded = Inventory.load("lab", get_connection=lambda name: lab if name == "lab" else looked_up(name))
    assert len(loaded) == len(json.loads(block.text)["hosts"])


@blocks("python program")
def test_programs_have_their_two_functions(block):
    """Every program in the documentation is Python and has both functions with the harness's arguments."""
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.parse(block.text).body
        if isinstance(node, ast.FunctionDef)
    }
    assert functions["input_fn"] == ["mode", "params", "shard"]
    assert functions["model_fn"] == ["features", "labels", "mode", "params"]


@blocks("python reader")
def test_the_reader_reads(block, tmp_path, capsys):
    """The example of reading a checkpoint is run on one."""
    prefix = save(tmp_path, 7)
    assert "/data/ckpt/digits" in block.text
    exec(block.text.replace("/data/ckpt/digits", str(tmp_path)), {})
    said = capsys.readouterr().out
    assert f"{prefix} 7 " in said
    assert "w/Adagrad uint8 (92,) 0 208 92 0" in said


IMPORT_DAGS = """
import gc, importlib.util, json, sys
from airflow.sdk import DAG
gc.disable()  # nothing but their cycles keeps them
for number, path in enumerate(sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(f"page_{number}", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
dags = [found for found in gc.get_objects() if isinstance(found, DAG)]
print(json.dumps({dag.dag_id: sorted(dag.task_ids) for dag in dags}))
"""


def test_dags_are_imported(tmp_path):
    """Every DAG in the documentation is imported by Airflow, with the jobs of its page beside it."""
    files = []
    for page in PAGES:
        folder = tmp_path / page.replace("/", "-")
        write_files(page, folder)
        files += [str(folder / block.file) for block in blocks_of(page) if block.kind == "python dag"]
    assert len(files) >= 4
    env = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_DAGS, *files],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dags = json.loads(done.stdout.splitlines()[-1])
    assert len(dags) == len(files)
    group = {f"training.{name}" for name in ("provision", "ready", "train", "done", "teardown")}
    assert group < set(dags["line"])
    assert group < set(dags["nightly"])
    assert {f"one.{name}" for name in group} == set(dags["search"])


@blocks("sh")
def test_shell_is_shell(block):
    """What is to be typed into a shell can at least be parsed by one."""
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- links --------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Every link between the pages leads to a file that exists and a heading that it has."""
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text("utf-8")), target


def test_readme_leads_to_every_page():
    """No page is hidden."""
    for page in PAGES:
        assert page == "README.md" or f"({page})" in PAGES["README.md"], page


# --- states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "table"),
    [("## TF task", protocol.TASK_TRANSITIONS), ("## Training", protocol.TRAINING_TRANSITIONS)],
)
def test_state_graphs_are_the_tables(heading, table):
    """The state graphs have exactly the arrows that the code allows."""
    drawn = set(re.findall(r"^ +([A-Z]+) --> ([A-Z]+)", section(STATES, heading), re.MULTILINE))
    assert drawn == {(a.value, b.value) for a, following in table.items() for b in following}


def test_state_tables_are_complete():
    """The tables of states name every state, and say rightly which is final and which has a process."""
    rows = re.findall(
        r"^\| `([A-Z]+)` \| .* \| (yes|no) \| (yes|no) \|$", section(STATES, "## TF task"), re.MULTILINE
    )
    assert rows == [
        (s.value, "yes" if s.is_alive else "no", "yes" if s.is_final else "no") for s in protocol.TaskState
    ]
    rows = re.findall(r"^\| `([A-Z]+)` \| .* \| (yes|no) \|$", section(STATES, "## Training"), re.MULTILINE)
    assert rows == [(s.value, "yes" if s.is_final else "no") for s in protocol.TrainingState]


# --- protocol -----------------------------------------------------------------------------------------------

HANDLERS = {**commands.COMMANDS, **models.COMMANDS, "put": uploads.put}
THE_TRAINING = {"training", "host", "workdir"}


def documented(command: str) -> set[str]:
    """The keys that a command's section names."""
    text = section(PROTOCOL, f"### `{command}`")
    return codes(text) | (THE_TRAINING if "Request: the training" in text else set())


def test_every_command_is_documented():
    """The protocol page has a section for each command, and for nothing else."""
    headings = re.findall(r"^### `(\w+)`$", PROTOCOL, re.MULTILINE)
    assert sorted(headings) == sorted(HANDLERS)


@pytest.mark.parametrize("command", HANDLERS)
def test_requests_are_documented(command):
    """Every key that a command reads from its request stands in its section."""
    sources = [inspect.getsource(HANDLERS[command])]
    if command in ("stop", "release"):
        sources.append(inspect.getsource(commands._stop))
    read: set[str] = set()
    for source in sources:
        read |= set(re.findall(r"request(?:\.get\(|\[)\"(\w+)\"", source))
        for names in re.findall(r"_only\(request, ([^)]*)\)", source):
            read |= set(re.findall(r'"(\w+)"', names))
        if "paths_of(request)" in source:
            read |= THE_TRAINING
    types = {
        "reserve": (protocol.ReserveRequest, protocol.TaskSpec),
        "promote": (models.PromoteRequest, models.Rule),
        "rollback": (models.RollbackRequest,),
        "start": (protocol.StartRequest, protocol.Program, protocol.CheckpointOptions),
        "sweep": (protocol.SweepRequest,),
    }
    for kind in types.get(command, ()):
        read |= {field.name for field in dataclasses.fields(kind)}
    assert read
    assert read <= documented(command)


def ask(command: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tfps_runtime", command],
        input=json.dumps(request) + "\n",
        env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("command", "request_"),
    [
        ("preflight", {"preload": ["no_such_module"]}),
        ("put", {"name": "x.py", "sha256": "0" * 16, "size": 0, "only_ask": True}),
        ("probe", {"addresses": {}}),
        ("status", {}),
        ("logs", {"task": "ps:0"}),
        ("trainings", {}),
        ("stop", {}),
        ("sweep", {"training": None}),
        ("pin", {"directory": "/nowhere/ckpt"}),
        ("models", {"model_dir": "/none"}),
    ],
)
def test_answers_are_documented(command, request_, tmp_path):
    """Every key that a command answers with, when it is really run, stands in its section."""
    training = {"training": "a/b/c#00000000", "host": "gpu-a", "workdir": str(tmp_path)}
    given = {k: v for k, v in {**training, **request_}.items() if v is not None}
    (answer,) = ask(command, given)
    assert answer["type"] in documented(command)
    assert set(answer) <= documented(command)


def test_agents_answers_are_documented():
    """So do the keys of a living agent's status and of a reservation."""
    source = ast.parse(inspect.cleandoc("\n" + inspect.getsource(Agent.status)))
    keys = {
        key.value
        for node in ast.walk(source)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    assert {"nursery_secs", "attempt"} <= keys
    assert keys <= documented("status")
    assert {field.name for field in dataclasses.fields(protocol.Reservation)} <= documented("reserve")


def test_messages_are_documented(tmp_path):
    """The table of messages has every kind, with the keys of progress and result, and of what `follow` really says."""
    text = section(PROTOCOL, "## Messages")
    rows = {match[1]: codes(match[2]) for match in re.finditer(r"^\| `(\w+)` \| (.*)\|$", text, re.MULTILINE)}
    rows.pop("type", None)
    assert set(rows) == {value for name, value in vars(protocol.Kind).items() if name.isupper()}
    assert {field.name for field in dataclasses.fields(protocol.Progress)} <= rows["progress"]
    assert {field.name for field in dataclasses.fields(protocol.Result)} <= rows["result"]
    assert set(protocol.error_message("code", "message")) <= rows["error"] | {"type"}
    said = ask("follow", {"training": "a/b/c#00000000", "host": "gpu-a", "workdir": str(tmp_path)})
    assert [message["type"] for message in said] == ["caught_up", "gone"]
    for message in said:
        assert set(message) <= rows[message["type"]] | {"type"}


def test_checkpoint_messages_are_documented(tmp_path):
    """So do the keys of a complete checkpoint and of its pin."""
    save(tmp_path / "ckpt", 3)
    first, _ = ask("checkpoints", {"directory": str(tmp_path / "ckpt"), "pin": "me"})
    assert set(first) | set(first["checkpoint"]) <= documented("checkpoints")
    assert set(first["pin"]) <= documented("pin")


def test_refusals_are_documented():
    """The table of refusals has exactly the codes that the runtime refuses with."""
    used = set()
    for path in (ROOT / "runtime" / "tfps_runtime").rglob("*.py"):
        used |= set(re.findall(r"RefusedError\(\s*\"(\w+)\"", path.read_text("utf-8")))
    table = section(PROTOCOL, "## Refusals")
    assert set(first_cells(table)) - {"code"} == used


def test_paths_are_documented():
    """The page names every path of a training on a host, as `Paths` makes it."""
    training = protocol.TrainingId("dag/run/group", "0a1b2c3d")
    paths = protocol.Paths("/w", training, "gpu-a", uid=1000)
    task = protocol.Task("ps", 0)
    made = [
        paths.spec, paths.events, paths.acknowledged, paths.agent_log, paths.log(task), paths.progress(task),
        paths.result(task), paths.context(task), paths.socket, paths.lock,
        protocol.blob_path("/w", "abc", "x.py"), protocol.runtime_path("/w", "abc"),
    ]  # fmt: skip
    written = " ".join(codes(section(PROTOCOL, "## Places on a host")))
    for path in made:
        name = path.replace(paths.directory + "/", "").replace("/w/", "")
        name = name.replace("/var/tmp/tfps-1000/", "/var/tmp/tfps-<uid>/")
        name = re.sub(r"\b[0-9a-f]{12}\b", "<digest>", name).replace("ps-0", "<role>-<index>")
        assert name.replace("abc", "<hash>").replace("x.py", "<name>") in written
    assert protocol.OWNER_FILE in written
    assert protocol.CONTEXT_VARIABLE in first_cells(section(PROTOCOL, "## What a TF task finds"))


def test_versions_and_codes_are_documented():
    """The wire's version and the exit code for "try again" are those of the code."""
    assert f"carry `version`, now {protocol.VERSION}." in PROTOCOL
    assert f"| {protocol.EXIT_TRY_AGAIN} | try again" in section(PROTOCOL, "## Exit codes")


# --- errors -------------------------------------------------------------------------------------------------


def literals() -> list[str]:
    """Every text in the code, with a mark where a value is put in."""
    found = []
    for folder in (ROOT / "airflow_tfps", ROOT / "runtime" / "tfps_runtime"):
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                    found.append("".join(map(str, parts)))
    return found


def test_every_error_is_explained():
    """The troubleshooting page has each class, says rightly whether it is transient, and a section for each leaf."""
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.TfpsError)
    }
    table = {
        name: words.strip()
        for row in re.findall(r"^\| .*Error.*$", TROUBLES, re.MULTILINE)
        for name in re.findall(r"`(\w+Error)`", row.split("|")[1])
        for words in [row.split("|")[2]]
    }
    assert set(table) == set(classes)
    for name, kind in classes.items():
        is_given = "transient" in inspect.signature(kind.__init__).parameters
        if not kind.__subclasses__():
            assert section(TROUBLES, f"## {name}")
            assert table[name] == ("depends" if is_given else "yes" if kind.transient else "no"), name


def test_every_quoted_message_exists():
    """Each message on the troubleshooting page is one that the code can say."""
    texts = literals()
    quoted = re.findall(r"^\| `([^`]+)` \| [^|]+ \|$", TROUBLES, re.MULTILINE)
    assert len(quoted) > 60
    for message in quoted:
        pattern = re.compile(".*?".join(map(re.escape, message.split("…"))), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message


# --- what people call ---------------------------------------------------------------------------------------


def public_classes(module: str) -> dict[str, str]:
    """Public classes of a module that a DAG uses, with their docstrings."""
    tree = ast.parse((ROOT / "airflow_tfps" / module).read_text("utf-8"))
    return {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.ClassDef) and re.search(r"(Operator|Sensor|TaskGroup)$", node.name)
    }


def test_readme_has_every_operator():
    """The README's table has every operator and sensor, with the keys of what it returns."""
    table = section(PAGES["README.md"], "## Operators and sensors")
    found = {
        **public_classes("operators.py"),
        **public_classes("models.py"),
        **public_classes("sensors.py"),
        **public_classes("group.py"),
    }
    assert set(found) == {name for name in first_cells(table) if name[0].isupper()}
    for name, docstring in found.items():
        (row,) = re.findall(rf"^\| `{name}` .*$", table, re.MULTILINE)
        for keys in re.findall(r"[Rr]eturns\s+`\{(.+?)\}`", docstring):
            assert set(re.findall(r'"(\w+)"', keys)) <= codes(row)


def test_jobs_page_has_every_field_of_a_model():
    """The table of what `model_fn` returns is complete."""
    tree = ast.parse((ROOT / "runtime/tfps_runtime/training/model.py").read_text("utf-8"))
    (model,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"]
    fields = [
        n.target.id for n in model.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    assert first_cells(section(JOBS, "## A program for the harness")) == fields


def test_jobs_page_has_every_timeout():
    """So is the table of time-outs."""
    assert set(first_cells(section(JOBS, "## Time"))) == {
        field.name for field in dataclasses.fields(Timeouts)
    }


def test_cli_page_has_every_command_and_option():
    """The page of the command line names each command in its table, and each option that is not Airflow's own."""
    from airflow_tfps.cli.definition import COMMANDS

    page = PAGES["docs/cli.md"]
    named = {cell.partition(" ")[0] for cell in first_cells(page.partition("## Which")[0])}
    assert named == {command.name for command in COMMANDS}
    words = set(re.findall(r"--?[a-z][a-z-]*", page))
    options = {flag for c in COMMANDS for a in c.args for flag in a.flags if flag.startswith("--")}
    assert options - {"--out", "--dags", "--home", "--exit", "--verbose"} <= words  # the demo's own


def test_changelog_has_the_version():
    """The version that is built has an entry."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"\n## {version}\n" in PAGES["CHANGELOG.md"]
