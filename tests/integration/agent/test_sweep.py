"""What a sweep removes, and what it must not: real agents and processes, real files. No TensorFlow, no SSH."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agents import Host, Refused, Training, children, is_running, wait_until
from tfps_runtime import orphans
from tfps_runtime.protocol import OWNER_FILE, Paths, TrainingId, run_dir
from tfps_runtime.reserve import Lock, is_held
from tfps_runtime.sweep import erase, sweep

DAY = 86400.0


def age(path: Path, days: float) -> None:
    """Let all of it look as if nobody had written there for so long."""
    then = time.time() - days * DAY
    for below in (*path.rglob("*"), path):
        os.utime(below, (then, then), follow_symlinks=False)


def tree(path: Path) -> set[str]:
    return {os.fsdecode(os.path.relpath(p, path)) for p in path.rglob("*")}


def swept(host: Host, name: str | None = None, **more) -> dict:
    return host.ask("sweep", {"workdir": str(host.workdir), "host": name or host.name, **more})


def removed(answer: dict, what: str) -> list[str]:
    return [found["name"] for found in answer["removed"] if found["what"] == what]


def below(answer: dict) -> list[str]:
    """What was removed below the workdir; locks and processes are the machine's, and other tests run on it."""
    return [
        found["name"] for found in answer["removed"] if found["what"] not in ("lock", "socket", "process")
    ]


def kill(training: Training) -> int:
    """Kill the agent; what it held is free when this returns. Its pid."""
    agent = training.agent
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not is_held(training.paths.lock), "the agent is dead")
    return agent


def finished(host: Host, name: str | None = None) -> Training:
    """A training that ended well."""
    training = host.training(name=name)
    training.reserve("worker:0").start("steps=1").launch()
    training.wait("worker:0", "SUCCEEDED")
    training.stop()
    return training


def blob(host: Host, content: bytes = b"print('hello')\n", days: float = 0.0) -> Path:
    """A program that was uploaded, and asked for last so long ago."""
    digest = hashlib.sha256(content).hexdigest()[:16]
    request = {
        "workdir": str(host.workdir),
        "name": "x.py",
        "sha256": digest,
        "size": len(content),
        "kind": "file",
    }
    path = Path(host.ask("put", request, content)["path"])
    age(path.parent, days)
    return path


# --- processes, locks, sockets -------------------------------------------------------------------------------------


def test_what_a_dead_agents_tasks_have_started_is_ended(host):
    """Children of TF tasks outlive a killed agent; those of a living one are left alone."""
    living = host.training().up("worker:0", args=("daemon",))
    dead = host.training().up("worker:0", args=("daemon", "grandchild"))
    mine = set(children(dead.task("worker:0")["pid"]))
    theirs = set(children(living.task("worker:0")["pid"]))
    assert (len(mine), len(theirs)) == (2, 1)
    kill(dead)
    wait_until(lambda: mine <= set(orphans.orphans()), "they are orphans")
    told = swept(host, dry_run=True)
    assert all(map(is_running, mine))
    told = [removed(told, "process"), removed(swept(host), "process")]
    for names in told:
        assert mine <= {int(name.split()[0]) for name in names}
        assert not theirs & {int(name.split()[0]) for name in names}
    wait_until(lambda: not any(map(is_running, mine)), "they are gone")
    assert all(map(is_running, theirs))
    assert living.status()["is_alive"]


def test_stopping_a_training_whose_agent_was_killed_ends_what_it_left(host):
    """Nobody needs to wait for a sweep; and other trainings' leftovers are not this one's business."""
    one, other = (host.training().up("worker:0", args=("daemon",)) for _ in range(2))
    mine, theirs = (children(t.task("worker:0")["pid"])[0] for t in (one, other))
    for training in (one, other):
        kill(training)
    one.stop()
    wait_until(lambda: not is_running(mine), "it is gone")
    assert is_running(theirs)
    other.stop()
    wait_until(lambda: not is_running(theirs), "so is the other")


@pytest.mark.parametrize("why", ["no mark", "another namespace", "its agent lives", "not a mark"])
def test_a_process_that_may_not_be_ours_is_left_alone(why):
    """Only a mark of an agent that is provably dead makes an orphan."""
    namespace, pid, started = orphans.agent_mark(os.getpid()).split(":")
    mark = {
        "no mark": None,
        "another namespace": f"{int(namespace) + 1}:{pid}:{int(started) - 1}",
        "its agent lives": f"{namespace}:{pid}:{started}",
        "not a mark": f"{namespace}:{pid}",
    }[why]
    env = {"PATH": os.environ["PATH"], **({} if mark is None else {orphans.AGENT_VARIABLE: mark})}
    process = subprocess.Popen(["sleep", "60"], env=env)
    try:
        wait_until(lambda: orphans.describe(process.pid).endswith("(sleep 60)"), "it has started")
        assert process.pid not in orphans.orphans()
        assert not orphans.end_orphan(process.pid)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_mark_with_a_pid_that_was_given_anew_is_a_dead_agents():
    """The same pid with another start time is another process."""
    namespace, pid, started = orphans.agent_mark(os.getpid()).split(":")
    env = {"PATH": os.environ["PATH"], orphans.AGENT_VARIABLE: f"{namespace}:{pid}:{int(started) - 1}"}
    process = subprocess.Popen(["sleep", "60"], env=env)
    try:
        wait_until(lambda: process.pid in orphans.orphans(), "it is seen")
        assert orphans.end_orphan(process.pid)
        assert process.wait(20) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_a_gpus_lock_file_stays(host):
    """It says nothing about a training; strangers' names in our folder stay, too."""
    training = host.training().reserve("ps:0")
    kept = [Path(run_dir()) / name for name in (f"gpu-test-{os.getpid()}.lock", f"notes-{os.getpid()}.txt")]
    try:
        for path in kept:
            path.write_text("")
        kill(training)
        assert str(training.paths.lock) in removed(swept(host), "lock")
        assert all(path.exists() for path in kept)
    finally:
        for path in kept:
            path.unlink()


def test_a_socket_of_an_agent_that_is_starting_is_not_taken(host):
    """The lock is held while the socket is removed, so a starting agent comes before or after, not in between."""
    training = host.training()
    stop = host.workdir / "stop"
    code = (
        "import os, sys; from tfps_runtime.sweep import sweep\n"
        f"while not os.path.exists({str(stop)!r}): sweep({{}})"
    )
    sweepers = [subprocess.Popen([sys.executable, "-c", code], env=host.env) for _ in range(2)]
    try:
        for _ in range(5):
            training.reserve("ps:0")
            assert training.status()["state"] == "RESERVED"
            assert os.path.exists(training.paths.socket)
            kill(training)
    finally:
        stop.touch()
        assert [sweeper.wait(20) for sweeper in sweepers] == [0, 0]
    swept(host)


# --- directories of trainings ----------------------------------------------------------------------------------------


def test_an_old_training_that_is_over_goes_and_the_others_stay(host):
    """Over and old: gone, with its key's folder. Over and young, old and living, old and reserved: not touched."""
    old, young = finished(host), finished(host)
    killed = host.training().up("worker:0")
    kill(killed)
    living = host.training().up("ps:0")
    for training in (old, killed, living):
        age(Path(training.paths.directory).parent, 20)
    size = sum(p.stat().st_size for p in Path(old.paths.directory).rglob("*") if p.is_file())
    before = tree(host.workdir)
    told = swept(host, dry_run=True)
    assert tree(host.workdir) == before
    answer = swept(host)
    assert sorted(removed(answer, "training")) == sorted([old.paths.directory, killed.paths.directory])
    assert removed(told, "training") == removed(answer, "training")
    assert next(f["bytes"] for f in answer["removed"] if f["name"] == old.paths.directory) == size
    assert answer["bytes"] >= size
    assert (answer["is_complete"], answer["faults"]) == (True, [])
    for training in (old, killed):
        assert not Path(training.paths.directory).parent.exists()
    assert young.status()["state"] == "SUCCEEDED"
    assert living.status()["is_alive"]
    assert not list((host.workdir / "trainings").glob(".swept-*"))
    age(Path(young.paths.directory), 20)
    assert below(swept(host, training_days=30)) == []
    assert removed(swept(host), "training") == [young.paths.directory]


def test_a_training_is_over_when_it_is_over_on_all_hosts_of_a_shared_workdir(host):
    """Another host's agent cannot be seen from here: only its own last word says that it has ended."""
    elsewhere = host.training()
    here = Training(host, elsewhere.id, "gpu-b")
    host.trainings.append(here)
    for part in (elsewhere, here):
        part.reserve("worker:0").start().launch()
        part.wait("worker:0", "RUNNING")
    here.stop()
    age(Path(here.paths.directory).parent, 20)
    assert below(swept(host, "gpu-b")) == []  # gpu-a goes on
    lock = Path(elsewhere.paths.lock)
    kill(elsewhere)
    lock.unlink()  # as on another machine: neither lock nor process can be seen
    age(Path(here.paths.directory).parent, 20)
    assert below(swept(host, "gpu-b")) == []  # as far as gpu-b knows, gpu-a goes on
    assert sorted(removed(swept(host, "gpu-a"), "training")) == sorted(
        [here.paths.directory, elsewhere.paths.directory]
    )


def test_a_checkpoint_is_never_removed(host):
    """Whoever lets a script write its checkpoints into a TF task's own folder keeps them."""
    kept = []
    for name in (OWNER_FILE, "checkpoint", "model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"):
        training = finished(host)
        path = Path(training.paths.directory) / "tasks" / "worker-0" / "deep" / name
        path.parent.mkdir()
        path.write_text("x")
        age(Path(training.paths.directory), 20)
        kept.append(path)
    directory = host.workdir / "checkpoints" / "key"
    directory.mkdir(parents=True)
    (directory / OWNER_FILE).write_text("{}")
    age(host.workdir / "checkpoints", 400)
    assert removed(swept(host, training_days=0, unused_days=0, upload_hours=0), "training") == []
    assert all(path.exists() for path in kept)
    assert (directory / OWNER_FILE).exists()


def test_nothing_behind_a_symbolic_link_is_touched(host, tmp_path_factory):
    """Links in the workdir that lead outside: to a folder, to a file, from within a training, for a whole place."""
    outside = tmp_path_factory.mktemp("outside")
    for name in ("folder/inner", "blobs/0123456789abcdef", "bin"):
        (outside / name).mkdir(parents=True)
    for name in (
        "folder/inner/precious",
        "precious",
        "blobs/0123456789abcdef/x",
        "bin/tfps-0123456789abcdef.pyz",
    ):
        (outside / name).write_text("x")
    age(outside, 400)
    before = tree(outside)
    old = finished(host)
    inside = Path(old.paths.directory)
    (inside / "to-folder").symlink_to(outside / "folder")
    (inside / "to-file").symlink_to(outside / "precious")
    (host.workdir / "trainings" / "x-0123456789ab").symlink_to(outside / "folder")
    linked = finished(host)
    (Path(linked.paths.directory).parent / "gpu-z").symlink_to(outside / "folder")
    shutil.rmtree(host.workdir / "blobs", ignore_errors=True)
    (host.workdir / "blobs").symlink_to(outside / "blobs")
    (host.workdir / "bin").symlink_to(outside / "bin")
    age(host.workdir / "trainings", 400)
    answer = swept(host)
    assert removed(answer, "training") == [old.paths.directory]
    assert answer["faults"] == []
    assert tree(outside) == before
    assert not inside.exists()


def test_a_place_that_is_a_link_is_not_entered(host, tmp_path_factory):
    """Then nobody can say what is in use: programs stay, too."""
    training = finished(host)
    kept = blob(host, days=400)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "trainings"
    shutil.move(host.workdir / "trainings", elsewhere)
    (host.workdir / "trainings").symlink_to(elsewhere)
    age(elsewhere, 400)
    assert below(swept(host)) == []
    assert kept.exists()
    assert (elsewhere / Path(training.paths.directory).relative_to(host.workdir / "trainings")).exists()


def test_names_of_all_kinds(host):
    """Spaces, quotes, line breaks, bytes that are no text: removed where they are ours, told so that one can print them."""
    training = finished(host)
    odd = [b"a b", b"'; echo x; '", b"$(touch x)", b"new\nline", b"-rf", b"\xff\xfe", "naïve".encode()]
    for name in odd:
        folder = os.path.join(os.fsencode(training.paths.directory), b"tasks", name)
        os.mkdir(folder)
        Path(os.fsdecode(os.path.join(folder, name))).write_text("x")
    strange = os.path.join(os.fsencode(str(host.workdir)), b"trainings", b"odd\n\xff-0123456789ab")
    os.makedirs(os.path.join(strange, b"gpu-a"))
    ours = os.path.join(os.fsencode(str(host.workdir)), b"trainings", b"no training \xff")
    os.makedirs(os.path.join(ours, b"gpu-a"))
    age(host.workdir / "trainings", 20)
    answer = swept(host)
    assert answer["faults"] == []
    names = removed(answer, "training")
    assert len(names) == 2
    assert any(name.endswith(r"odd\n\xff-0123456789ab/gpu-a") for name in names)
    assert os.path.isdir(ours)
    assert not os.path.exists(training.paths.directory)
    assert not os.path.exists(strange)


def test_what_cannot_be_removed_is_told_and_stops_nothing(host, monkeypatch):
    """One fault, and the rest is removed all the same."""
    stuck, other = finished(host), finished(host)
    for training in (stuck, other):
        age(Path(training.paths.directory), 20)
    real = os.rename

    def rename(source, target, **keywords):
        if str(source) == stuck.paths.directory:
            raise PermissionError(1, "Operation not permitted", source)
        real(source, target, **keywords)

    monkeypatch.setattr(os, "rename", rename)
    answer = sweep({"workdir": str(host.workdir), "host": "gpu-a"})
    assert answer["faults"] == [f"{stuck.paths.directory}: Operation not permitted"]
    assert removed(answer, "training") == [other.paths.directory]
    assert not is_held(stuck.paths.lock)


def test_a_read_only_folder_is_no_obstacle(tmp_path):
    """Programs make such ones; they are their user's all the same."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    inner.chmod(0o500)
    erase(str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


# --- programs, inputs, runtimes, uploads ------------------------------------------------------------------------------


def test_programs_that_nobody_uses_go(host):
    """Old and unused: gone. Used by a living training, or asked for lately: stays."""
    unused, asked, used = blob(host, b"1", 20), blob(host, b"2", 20), blob(host, b"3", 20)
    host.ask(
        "put",
        {
            "workdir": str(host.workdir),
            "name": "x.py",
            "sha256": asked.parent.name,
            "size": 1,
            "only_ask": True,
        },
    )
    training = host.training().reserve("ps:0")
    training.start(inputs={"train": str(used), "there": "/no/such/place"})
    training.wait("ps:0", "RUNNING")
    age(used.parent, 20)
    answer = swept(host)
    assert removed(answer, "program or input") == [str(unused.parent)]
    assert [f["bytes"] for f in answer["removed"] if f["what"] == "program or input"] == [1]
    assert asked.exists()
    assert used.exists()
    training.stop()
    assert removed(swept(host), "program or input") == [str(used.parent)]


def test_a_program_that_is_taken_up_while_it_is_swept_comes_back(host, monkeypatch):
    """An `ensure` asks for it between the look and the rename: it must find it where it was told."""
    path = blob(host, days=20)
    real = os.rename

    def rename(source, target, **keywords):
        if source == str(path.parent):
            os.utime(source)
        real(source, target, **keywords)

    monkeypatch.setattr(os, "rename", rename)
    answer = sweep({"workdir": str(host.workdir), "host": "gpu-a"})
    assert removed(answer, "program or input") == []
    assert path.read_text() == "print('hello')\n"
    assert not list((host.workdir / "blobs").glob(".swept-*"))


def test_runtimes_of_other_versions_go(host):
    """Those that no living training was started with, and that nobody called lately."""
    folder = host.workdir / "bin"
    folder.mkdir()
    old, young, stranger = (folder / f"tfps-{digit * 16}.pyz" for digit in "012")
    for path in (old, young, stranger):
        path.write_bytes(b"x" * 10)
    for path in (old, stranger):
        age(path, 20)
    stranger = stranger.rename(folder / "mine.pyz")
    assert removed(swept(host), "runtime") == [str(old)]
    assert young.exists()
    assert stranger.exists()


def test_a_living_trainings_runtime_stays(host):
    """It starts TF tasks from there until its end, whatever version sweeps."""
    training = host.training().reserve("ps:0")
    used = host.workdir / "bin" / f"tfps-{'a' * 16}.pyz"
    used.parent.mkdir()
    used.write_bytes(b"x")
    age(used, 20)
    spec = json.loads(Path(training.paths.spec).read_text())
    assert spec["uses"]
    Path(training.paths.spec).write_text(json.dumps({**spec, "uses": [str(used)]}))
    assert removed(swept(host), "runtime") == []
    Path(training.paths.spec).write_text(json.dumps({k: v for k, v in spec.items() if k != "uses"}))
    assert removed(swept(host), "runtime") == []  # of a version that did not say: better leave all
    Path(training.paths.spec).write_text(json.dumps(spec))
    assert removed(swept(host), "runtime") == [str(used)]


def test_uploads_that_broke_off_go(host):
    """A `put` that was killed leaves its half; one that goes on stays."""
    request = {
        "workdir": str(host.workdir),
        "name": "x.bin",
        "sha256": "0" * 16,
        "size": 10**9,
        "kind": "file",
    }
    blobs = host.workdir / "blobs"
    with host.popen("put") as process:
        process.stdin.write(json.dumps(request).encode() + b"\n" + b"x" * 3_000_000)
        process.stdin.flush()
        wait_until(lambda: blobs.exists() and any(p.is_file() for p in blobs.rglob("*")), "it arrives")
        assert below(swept(host)) == []
        process.kill()
        process.stdin.close()
    [half] = blobs.iterdir()
    (host.workdir / "bin").mkdir()
    for name in ("tmpabc.tmp", "notes.tmp"):
        (host.workdir / "bin" / name).write_text("x")
    age(blobs, 0.5)
    age(host.workdir / "bin", 0.5)
    assert removed(swept(host), "upload") == [str(half), str(host.workdir / "bin" / "tmpabc.tmp")]
    assert (host.workdir / "bin" / "notes.tmp").exists()


def test_an_interrupted_sweep_is_finished_by_a_later_one(host):
    """What was put aside and not yet erased belongs to nobody; what another sweep has just put aside is its own."""
    aside = host.workdir / "trainings" / ".swept-abc"
    (aside / "it" / "tasks").mkdir(parents=True)
    (aside / "it" / "log").write_text("x")
    age(aside / "it", 30)
    assert below(swept(host)) == []
    age(aside, 0.5)
    assert removed(swept(host), "leftover") == [str(aside)]
    assert not aside.exists()


def test_a_sweep_keeps_to_its_time(host):
    """It says that it did not get through; the next one does."""
    training = finished(host)
    age(Path(training.paths.directory), 20)
    answer = swept(host, max_secs=-1)
    assert answer["is_complete"] is False
    assert os.path.exists(training.paths.directory)
    assert swept(host)["is_complete"] is True
    assert not os.path.exists(training.paths.directory)


# --- at the same time --------------------------------------------------------------------------------------------------


def test_many_sweeps_beside_trainings_that_start(host):
    """Reservations of old trainings, over and over, while sweeps with no patience run: none loses its directory."""
    training = finished(host)
    stop = host.workdir / "stop"
    code = (
        "import os, sys; from tfps_runtime.sweep import sweep\n"
        f"while not os.path.exists({str(stop)!r}):\n"
        f"    found = sweep({{'workdir': {str(host.workdir)!r}, 'host': 'gpu-a', 'training_days': 0}})\n"
        "    assert not found['faults'], found"
    )
    sweepers = [subprocess.Popen([sys.executable, "-c", code], env=host.env) for _ in range(2)]
    try:
        for _ in range(5):
            training.reserve("worker:0").start("steps=1").launch()
            assert os.path.exists(training.paths.spec)
            training.wait("worker:0", "SUCCEEDED")
            training.stop()
    finally:
        stop.touch()
        assert [sweeper.wait(20) for sweeper in sweepers] == [0, 0]


def test_preflight_sweeps_first(host):
    """The start of every `ensure`: no command of its own, and whatever happens is no fault of the host."""
    training = finished(host)
    age(Path(training.paths.directory), 20)
    request = {"workdir": str(host.workdir), "sweep": {"workdir": str(host.workdir), "host": "gpu-a"}}
    report = host.ask("preflight", request)
    assert removed(report["swept"], "training") == [training.paths.directory]
    assert report["faults"] == []
    report = host.ask("preflight", {**request, "sweep": {"colour": "red"}})
    assert "unknown key 'colour'" in report["swept"]["faults"][0]
    assert report["faults"] == []
    assert host.ask("preflight", {"workdir": str(host.workdir)})["swept"] is None


def test_another_users_things_are_left_alone(tmp_path):
    """A workdir that two users share, unwisely."""
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's files")
    folder = tmp_path / "trainings" / "x-0123456789ab" / "gpu-a"
    inner = tmp_path / "trainings" / "y-0123456789ab" / "gpu-a"
    for path in (folder, inner):
        path.mkdir(parents=True)
        (path / "log").write_text("x")
        age(path.parent, 20)
    os.chown(folder, 12345, 12345)
    os.chown(inner / "log", 12345, 12345)
    assert below(sweep({"workdir": str(tmp_path), "host": "gpu-a"})) == []
    assert (folder / "log").exists()
    assert (inner / "log").exists()


def test_a_folder_that_another_user_prepared_is_not_believed(tmp_path):
    """Locks, sockets and links in it are that user's: nothing is swept on their word."""
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    uid = 50_000 + os.getpid() % 10_000
    bait, place = tmp_path / "bait", Path(run_dir(uid))
    bait.write_text("precious")
    place.mkdir(mode=0o777)
    try:
        (place / "0123456789ab.lock").symlink_to(bait)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(uid)
                os.write(writer, json.dumps(sweep({})).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as file:
            answer = json.loads(file.read())
        os.waitpid(pid, 0)
        assert answer["removed"] == []
        assert answer["faults"] == [f"{place} is not a directory of this user; remove it and try again"]
        assert (place / "0123456789ab.lock").is_symlink()
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize(
    "wrong", [{"host": "../x"}, {"workdir": "here"}, {"training_days": "x"}, {"colour": "red"}]
)
def test_a_request_that_makes_no_sense_is_refused(host, wrong):
    """Names become parts of paths."""
    with pytest.raises(Refused) as caught:
        host.ask("sweep", {"workdir": str(host.workdir), "host": host.name, **wrong})
    assert caught.value.code == "bad_request"


def test_a_lock_that_is_taken_meanwhile_saves_the_training(host):
    """Between the look and the removal an agent came up: its lock says so."""
    training = finished(host)
    age(Path(training.paths.directory), 20)
    paths = Paths(str(host.workdir), TrainingId.parse(str(training.id)), "gpu-a")
    lock = Lock.acquire(paths.lock, None)
    try:
        assert below(swept(host)) == []
    finally:
        lock.release()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.lock)
    assert removed(swept(host), "training") == [training.paths.directory]
