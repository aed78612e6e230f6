"""What must not leak, what must not get in: secrets, other users, odd values, uploads. On real hosts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
from labs import Watcher
from tfps_runtime.protocol import Paths, ProtocolError, Task, TrainingId, run_dir

from airflow_tfps import remote
from airflow_tfps.errors import HostNotReadyError, SpecError, TfpsError
from airflow_tfps.hook import ClusterHook
from airflow_tfps.inventory import Inventory
from airflow_tfps.spec import JobSpec
from airflow_tfps.ssh.wire import quote

RUNTIME = Path(__file__).parents[3] / "runtime"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
STRANGER = 54321

HOSTILE = [
    " ",
    "a b",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME ${PATH} $$",
    "a; exit 3",
    "a && b || c | d > e < f &",
    "*",
    "[x]?{a,b}",
    "~",
    "-rf",
    "--",
    "line\nbreak\n",
    "tab\tcr\r",
    "back\\slash\\'",
    "!history #comment =ls",
    "%h %p %%",
    "naïve ☃ 日本語",
    "x" * 4096,
]
"""No program may see anything but these, byte for byte."""


def until(condition, what: str, secs: float = 30.0):
    deadline = time.monotonic() + secs
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {secs:g} s: {what}"
        time.sleep(0.05)
    return found


# --- secrets --------------------------------------------------------------------------------------------------------


def holders(needles: list[bytes]) -> tuple[set[int], set[int]]:
    """Processes that have one of the needles in their environment, and in their arguments."""
    found: tuple[set[int], set[int]] = (set(), set())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for pids, name in zip(found, ("environ", "cmdline"), strict=True):
            with contextlib.suppress(OSError):
                content = Path(f"/proc/{pid}/{name}").read_bytes()
                if int(pid) != os.getpid() and any(needle in content for needle in needles):
                    pids.add(int(pid))
    return found


def files_with(needles: list[bytes], *places: Path) -> list[Path]:
    return [
        path
        for place in places
        for path in place.rglob("*")
        if path.is_file() and not path.is_symlink() and any(n in path.read_bytes() for n in needles)
    ]


@pytest.mark.parametrize("launch", ["warm", "spawn"])
def test_planted_secrets_are_nowhere(lab, define, tmp_path, monkeypatch, caplog, launch):
    """A connection's password, passphrase and key, and a job's secret: not in arguments, other processes, files, logs.

    A spawned TF task has the job's secret in its environment, as long as it lives; nothing else has any.
    """
    value, word, phrase = (f"planted{uuid.uuid4().hex}" for _ in range(3))
    locked = tmp_path / "locked"
    name, host = next(iter(lab.hosts.items()))
    shutil.copy(host.key_file, locked)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", phrase, "-f", str(locked)], check=True)
    key = locked.read_text()
    locked.unlink()
    define(host, name.replace("-", "_"), private_key=key, private_key_passphrase=phrase, password=word)
    monkeypatch.setenv("AIRFLOW_CONN_MINIO", json.dumps({"conn_type": "http", "password": value}))
    needles = [n.encode() for n in (value, word, phrase, *key.splitlines()[2:6])]
    script = "import hashlib, os, time\nprint(hashlib.sha256(os.environ['S3_KEY'].encode()).hexdigest(), flush=True)\ntime.sleep(600)"
    (lab.folder / "hashes.py").write_text(script)
    job = lab.job(script="hashes.py", launch=launch, secrets={"S3_KEY": "conn:minio#password"}, progress=None)

    def look(tasks: set[int]) -> None:
        in_environment, in_arguments = holders(needles)
        assert in_arguments == set()
        assert in_environment <= tasks
        assert (
            files_with(needles, lab.folder, *(Path(h.home) for h in lab.hosts.values()), Path(run_dir()))
            == []
        )
        assert not [n for n in needles if n.decode() in caplog.text]

    with caplog.at_level(logging.DEBUG), ClusterHook(inventory=lab.inventory()) as hook:
        handle = hook.ensure(job, lab.training(), wait=False)
        digest = hashlib.sha256(value.encode()).hexdigest()
        until(lambda: hook.log_tail(handle, Task("worker", 1)) == [digest], "it has the secret")
        statuses = hook.status(handle)
        tasks = {t["pid"] for s in statuses.values() for t in s["tasks"] if t.get("pid")}
        assert (holders(needles[:1])[0] != set()) == (launch == "spawn")  # else the look would prove nothing
        look(tasks)
        watcher = Watcher(handle)
        hook.launch(handle)
        asyncio.run(watcher.run(at=lambda m: m["type"] == "log"))
        look(tasks | {t["pid"] for s in hook.status(handle).values() for t in s["tasks"] if t.get("pid")})
        for said in (handle.to_json(), statuses, watcher.messages):
            assert not [n for n in needles if n.decode() in json.dumps(said)]
        hook.stop(handle, "seen", grace_secs=0)
        look(set())
        with pytest.raises(TfpsError) as caught:  # an error on the way tells nothing either
            hook.ensure(
                lab.job(script="hashes.py", secrets={"A": "conn:minio#password", "B": "conn:minio#login"}),
                lab.training(),
            )
        assert value not in str(caught.value)


# --- other users ----------------------------------------------------------------------------------------------------

INTRUDER = textwrap.dedent(
    """
    import json, os, socket, sys
    os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
    sock, lock, *files = sys.argv[2:]
    def attempt(do):
        try:
            do()
        except OSError as error:
            return type(error).__name__
        return "got in"
    folder = os.path.dirname(sock)
    found = [attempt(lambda: socket.socket(socket.AF_UNIX).connect(sock)), attempt(lambda: open(lock)),
             attempt(lambda: os.listdir(folder)), attempt(lambda: open(folder + "/planted", "w")),
             attempt(lambda: os.unlink(sock))]
    print(json.dumps(found + [attempt(lambda: open(file)) for file in files]))
    """
)


def modes_of(*places: Path) -> dict[str, set[str]]:
    """Kind of thing (directory, file, socket) -> the modes that are found."""
    found: dict[str, set[str]] = {}
    for place in places:
        for path in [place, *place.rglob("*")]:
            mode = path.lstat().st_mode
            kind = {stat.S_IFDIR: "directory", stat.S_IFSOCK: "socket", stat.S_IFREG: "file"}[
                stat.S_IFMT(mode)
            ]
            found.setdefault(kind, set()).add(oct(stat.S_IMODE(mode)))
    return found


def test_everything_of_a_training_is_its_users(lab, hook, monkeypatch):
    """Directories 0700, files 0600, whatever the umask of the login: the workdir with all in it, lock and socket."""
    (lab.folder / "more").mkdir()
    (lab.folder / "more" / "data.txt").write_text("x")
    job = lab.job(inputs={"train": "more", "one": "more/data.txt"})
    handle = hook.ensure(job, lab.training())
    hook.launch(handle)
    until(lambda: "step 3" in hook.log_tail(handle, Task("worker", 0)), "it trains")
    for name, host in lab.hosts.items():
        assert modes_of(Path(host.home) / ".tfps") == {"directory": {"0o700"}, "file": {"0o600"}}
        paths = lab.paths(handle.training, name)
        assert oct(stat.S_IMODE(os.lstat(paths.lock).st_mode)) == "0o600"
        assert oct(stat.S_IMODE(os.lstat(paths.socket).st_mode)) == "0o600"
    assert oct(stat.S_IMODE(os.lstat(run_dir()).st_mode)) == "0o700"


@pytest.mark.parametrize("launch", ["warm", "spawn"])
def test_a_task_has_the_umask_of_the_login(lab, hook, launch):
    """What a program writes outside, an exported model say, may be for others: that is not for us to say."""
    (lab.folder / "mask.py").write_text(
        "import os, time; print(oct(os.umask(0)), flush=True); time.sleep(600)"
    )
    handle = hook.ensure(lab.job(script="mask.py", launch=launch, progress=None), lab.training(), wait=False)
    own = os.umask(0)
    os.umask(own)
    until(lambda: hook.log_tail(handle, Task("worker", 1)) == [oct(own)], "its umask")


@needs_root
def test_another_user_gets_nowhere(lab, hook):
    """Neither to the agent's socket nor to locks, logs or the folder they are in."""
    handle = hook.ensure(lab.job(), lab.training())
    name = next(iter(lab.hosts))
    paths = lab.paths(handle.training, name)
    files = [paths.spec, paths.events, paths.log(Task("ps", 0))]
    argv = [sys.executable, "-c", INTRUDER, str(STRANGER), paths.socket, paths.lock, *files]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["PermissionError"] * 8
    assert hook.status(handle)[name]["is_alive"]


@needs_root
@pytest.mark.parametrize("kind", ["another's directory", "a link"])
@pytest.mark.parametrize("command", ["start", "status", "stop", "follow", "reserve", "preflight", "put"])
def test_a_run_directory_that_another_user_prepared_is_not_believed(tmp_path, kind, command):
    """A socket in it would be sent the job's secrets: every command refuses, with one error, before it connects."""
    place = Path(f"/var/tmp/tfps-{STRANGER}")
    workdir = tmp_path / "w"
    workdir.mkdir()
    os.chown(workdir, STRANGER, STRANGER)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o011)
    training = TrainingId("k", "0a1b2c3d")
    heard: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX)
    assert not os.path.lexists(place)
    real = place if kind == "another's directory" else tmp_path / "elsewhere"
    try:
        real.mkdir(mode=0o777)
        real.chmod(0o777)
        if real is not place:
            place.symlink_to(real)
            os.chown(real, STRANGER, STRANGER)
        trap = real / Path(Paths(str(workdir), training, "gpu-a", STRANGER).socket).name
        listener.bind(str(trap))
        trap.chmod(0o777)
        listener.listen()
        listener.settimeout(0.2)
        request = {"training": str(training), "host": "gpu-a", "workdir": str(workdir), "lease_secs": 5,
                   "name": "x", "sha256": "0" * 16, "size": 0, "kind": "file", "request": {"secrets": {"K": "planted"}}}  # fmt: skip
        if command == "reserve":
            request = {"training": str(training), "host": "gpu-a", "workdir": str(workdir), "tasks": []}
        code = f"import os, sys; from tfps_runtime.commands import main; os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER}); sys.exit(main({command!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(request).encode() + b"\n",
            env={"PYTHONPATH": str(RUNTIME), "PATH": os.environ["PATH"]},
            capture_output=True,
            check=False,
            timeout=60,
        )
        with contextlib.suppress(TimeoutError):
            heard.append(listener.accept()[0].recv(100))
        assert done.stdout, done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])
        assert command != "preflight" or "faults" in answer, (answer, done.stderr)
        said = "; ".join(answer["faults"]) if command == "preflight" else answer["message"]
        assert f"{place} is not a directory of this user; remove it and try again" in said
        assert command == "preflight" or (done.returncode, answer["code"]) == (1, "workdir")
        assert heard == []
        assert not (workdir / "blobs").exists()
    finally:
        listener.close()
        if place.is_symlink():
            place.unlink()
        else:
            shutil.rmtree(place, ignore_errors=True)


@needs_root
@pytest.mark.parametrize(
    ("owner", "mode", "said"), [(STRANGER, 0o755, "another user"), (0, 0o777, "by everybody")]
)
def test_a_workdir_in_which_others_could_change_programs_is_refused(lab, tmp_path, owner, mode, said):
    """What runs is what was uploaded, and nothing that somebody put in its place."""
    place = tmp_path / "open"
    place.mkdir()
    os.chown(place, owner, -1)
    place.chmod(mode)
    inventory = lab.inventory(hook_a={"workdir": str(place)})
    with ClusterHook(inventory=inventory) as hook, pytest.raises(HostNotReadyError, match=said):
        hook.ensure(lab.job(), lab.training())


# --- odd values -----------------------------------------------------------------------------------------------------

FACTS = textwrap.dedent(
    """
    import json, os, sys, time
    facts = {"argv": sys.argv[1:], "env": {k: v for k, v in os.environ.items() if k.startswith("ODD_")},
             "argv0": sys.orig_argv[0], "cwd": os.getcwd()}
    print("FACTS", json.dumps(facts), flush=True)
    time.sleep(600)
    """
)


@pytest.fixture(params=["demo", "openssh", "local"])
def odd_host(request, define) -> dict[str, str]:
    """A host's connection and its user's home directory."""
    if request.param == "local":
        return {"ssh_conn_id": "local", "home": str(Path.home())}
    host = request.getfixturevalue({"demo": "demo_host", "openssh": "sshd_host"}[request.param])
    return {"ssh_conn_id": define(host, "odd").ssh_conn_id, "home": host.home}


def odd_folder(value: str) -> str:
    """A name for a folder with as much of the value as a name may hold."""
    return f"{value.replace('/', '_')[:60]}"


@pytest.mark.parametrize("launch", ["warm", "spawn"])
def test_odd_arguments_environment_ids_and_paths_arrive(odd_host, tmp_path, launch):
    """Arguments, environment, inputs, secrets, run id, workdir, interpreter, checkpoint directory: as they are."""
    odd = tmp_path / "".join(odd_folder(v) for v in HOSTILE[1:14])
    odd.mkdir()
    (tmp_path / "facts.py").write_text(FACTS)
    checkpoints = f"{odd}/check points\n'$(touch pwned)"
    job = JobSpec.from_dict(
        {
            "script": "facts.py",
            "args": [*HOSTILE, "{checkpoint_dir}", "{inputs.train}"],
            "env": {f"ODD_{i}": value for i, value in enumerate(HOSTILE)},
            "inputs": {"train": f"host:{odd}/in put"},
            "roles": {"worker": 1},
            "preload": ["json"],
            "launch": launch,
            "checkpoint": {"dir": checkpoints},
            "timeouts": {"grace_secs": 1, "lease_secs": 120},
        },
        base_dir=tmp_path,
    )
    wrapper = odd / "-py thon"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    inventory = Inventory.from_dict(
        {
            "hosts": {
                "odd": {
                    "ssh_conn_id": odd_host["ssh_conn_id"],
                    "address": "127.0.0.1",
                    "gpus": 0,
                    "python": str(wrapper),
                    "workdir": f"{odd}/-work dir; touch pwned",
                    "ports": "15000-19999",
                }
            }
        }
    )
    key = f"dag/run {''.join(HOSTILE[1:13])}/group"
    training = TrainingId(key, uuid.uuid4().hex[:8])
    with ClusterHook(inventory=inventory) as hook:
        handle = hook.ensure(job, training, wait=False)
        try:
            hook.launch(handle)
            [line] = until(
                lambda: [x for x in hook.log_tail(handle, Task("worker", 0)) if x.startswith("FACTS")],
                "its facts",
            )
            facts = json.loads(line.partition(" ")[2])
            assert facts["argv"] == [*HOSTILE, checkpoints, f"{odd}/in put"]
            assert facts["env"] == {f"ODD_{i}": value for i, value in enumerate(HOSTILE)}
            assert facts["cwd"] == checkpoints
            assert hook.stop_key(key, "by its key") == {"odd": {str(training): "STOPPED"}}
        finally:
            hook.stop(handle, "seen", grace_secs=0)
    assert not list(tmp_path.rglob("pwned"))
    assert not Path(odd_host["home"], "pwned").exists()


def test_odd_hparams_arrive(lab, hook):
    """What a harness program is told is what the job says."""
    hparams = {f"odd {v[:40]}": v for v in HOSTILE}
    (lab.folder / "program.py").write_text("")
    job = {
        "program": "program.py",
        "script": None,
        "args": (),
        "progress": None,
        "launch": "spawn",
        "preload": ["json"],
    }
    handle = hook.ensure(lab.job(**job, hparams=hparams), lab.training(), wait=False)
    host = handle.of(Task("worker", 1)).host
    context = Path(lab.paths(handle.training, host).context(Task("worker", 1)))
    until(context.exists, "it is told")
    assert json.loads(context.read_text())["hparams"] == hparams
    hook.stop(handle, "seen", grace_secs=0)


@pytest.mark.parametrize(
    "key", ["name", "address", "python", "workdir", "ssh_conn_id", "checkpoint_dir", "run id"]
)
@pytest.mark.parametrize("value", ["", "\0", "a\0b", "\ud800", "-rf", *HOSTILE])
def test_odd_places_are_refused_or_taken_before_anything_is_touched(key, value):
    """A name that cannot be is one SpecError, which says where; all others can be quoted."""
    host = {"address": "10.0.0.1", "ssh_conn_id": "x"}
    said = ""
    try:
        if key == "checkpoint_dir":
            roles = {"ps": 1, "worker": 1}
            JobSpec.from_dict({"program": "x.py", "roles": roles, "checkpoint": {"dir": value}})
        elif key == "run id":
            TrainingId(f"dag/{value}/group", "0a1b2c3d")
        else:
            name = value if key == "name" else "gpu-a"
            written = host if key == "name" else {**host, key: value}
            spec = Inventory.from_dict({"hosts": {name: written}})[name]
            argv = remote.argv(spec, "status")
            assert not quote(argv).startswith("exec -")
            assert not argv[1].startswith("-")
    except (SpecError, ProtocolError) as error:
        said = str(error)
    places = {"name": "the host's name", "checkpoint_dir": "checkpoint.dir", "run id": "not a training key"}
    assert not said or places.get(key, f"hosts.gpu-a.{key}") in said


# --- what TensorFlow leaves open ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("8.8.8.8", True),
        ("10.1.2.3", False),
        ("127.0.0.1", False),
        ("100.64.0.1", False),
        ("169.254.1.1", False),
    ]
    + [
        ("2001:4860:4860::8888", True),
        ("fd00::1", False),
        ("localhost", False),
        ("no.such.host.invalid", False),
    ],
)
def test_a_public_address_is_warned_of(lab, caplog, address, is_public):
    """The log of `provision` says what stands open to everybody, and what to do; a private network is fine."""
    with (
        ClusterHook(inventory=lab.inventory(hook_a={"address": address})) as hook,
        caplog.at_level(logging.WARNING),
    ):
        report = hook.preflight(["hook-a"])["hook-a"]
    assert report["public"] == ([address] if is_public else [])
    warnings = [
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "public" in r.getMessage()
    ]
    assert len(warnings) == is_public
    assert all(f"hook-a: its address {address} is public" in w and "15000-19999" in w for w in warnings)
