"""Programs that stop, end, hang, will not end, or find their disk full, their port taken, their clock wrong."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bed_runs import CHIEF, PS, WORKER
from live import until

if TYPE_CHECKING:
    from bed import Host
    from bed_runs import BedLive, BedRun

pytestmark = pytest.mark.faults

STOP_SECS = 30.0
SMALL = "4m"
"""Size of a disk that is to be full."""


def test_stopped_worker(live: BedLive) -> None:
    """A worker that stands still for half a minute holds up nobody and is let be: `stall_secs` is longer."""
    run = live.start("faults")
    training = run.until_training()
    with run.row(
        f"SIGSTOP of a worker for {STOP_SECS:.0f} s", "the others go on; so does it, afterwards"
    ) as row:
        began = time.monotonic()
        os.kill(training.tasks[WORKER][0], signal.SIGSTOP)
        while time.monotonic() - began < STOP_SECS:
            run.goes_on(training)
        assert not run.said("train", rf"{WORKER}@\w+ (BACKOFF|FAILED)")
        os.kill(training.tasks[WORKER][0], signal.SIGCONT)
        run.goes_on(training, WORKER)
        assert run.training() == training
        row.seen = "the chief went on, the worker too after SIGCONT; no process changed"
    run.finish()


def test_exit_codes(live: BedLive) -> None:
    """A script that ends with an error is started again, whatever its code, as often as `restarts` allows."""
    run = live.start("faults", restarts=2)
    training = run.until_training()
    run.until_saved()
    for code, task in ((75, CHIEF), (137, WORKER), (1, CHIEF)):
        with run.row(f"{task} exits {code}", "starts again in place") as row:
            run.tell(f"exit-{task.replace(':', '-')}", f"{code} once")
            training = run.restarted(training, task)
            run.goes_on(training)
            run.until_said("train", rf"{task}@\w+ BACKOFF \(exit code {code}\)")
            row.restored = run.restored(training) if task == CHIEF else None
            row.seen = "restarted in place, training went on"
    with run.row(
        "the chief exits 1 once more: its restarts are used up", "the try fails, the retry continues"
    ) as row:
        run.tell("exit-worker-0", "1 once")
        after = run.until_training(other_than=training)
        run.goes_on(after)
        row.restored = run.restored(after)
        row.seen = f"{run.reason()}; the retry continued"
    run.finish()


def test_final_exit(live: BedLive) -> None:
    """Without restarts and retries the run fails for the program's own reason."""
    run = live.start("faults_once", restarts=0)
    training = run.until_training()
    with run.row("the chief exits 137, no restarts, no retries", "the run fails and says why") as row:
        run.tell("exit-worker-0", "137")
        run.until_over(state="failed")
        assert run.reason() == f"training failed: {CHIEF}@{training.host(CHIEF)}: exit code 137"
        assert run.said("train", "told to fail"), "the log's end is not in the error"
        row.seen = run.reason()
    run.until_clean()


def test_never_ends(live: BedLive) -> None:
    """A chief that makes no step any more shows its stacks, is killed and started again."""
    run = live.start("faults", stall_secs=8)
    training = run.until_training()
    run.until_saved()
    with run.row(
        "the chief hangs for ever (stall_secs 8)", "stacks in its log, killed, started again"
    ) as row:
        run.tell("stuck-worker-0")
        said = run.until_said("train", "no progress for 8 s")[1]
        training = run.restarted(training, CHIEF)
        run.untell("stuck-worker-0")
        run.goes_on(training)
        assert any("most recent call first" in line for line in run.task_log(training, CHIEF)), "no stacks"
        row.restored = run.restored(training)
        row.seen = f"{said}; restarted in place, training went on"
    run.finish()


def test_stubborn(live: BedLive) -> None:
    """Programs that ignore SIGTERM, their children and their orphans are gone soon after the grace time."""
    run = live.start("faults", grace_secs=5)
    for task in (PS, CHIEF, WORKER):
        run.tell(f"stubborn-{task.replace(':', '-')}")
    run.until_training()
    run.until_saved()
    secs = 5 + 10.0
    with run.row(
        "marked failed; every program ignores SIGTERM and has grandchildren (grace_secs 5)",
        f"nothing is left within {secs:.0f} s",
    ) as row:
        began = time.monotonic()
        run.mark("train", "failed")
        run.until_nothing_is_left(secs)
        row.secs = time.monotonic() - began
        row.seen = f"every process was gone after {row.secs:.1f} s"
    run.until_over(state="failed")
    run.until_clean()


@pytest.mark.parametrize("part", ["data", "index", "state"])
def test_killed_during_a_save(live: BedLive, part: str) -> None:
    """Half a checkpoint is none: the chief goes on from the one before."""
    run = live.start("faults")
    training = run.until_training()
    run.until_saved()
    before = {"data": "its data is", "index": "its index is", "state": "the state file is"}[part]
    with run.row(
        f"kill -9 of the chief during a save, before {before} there", "goes on from a complete one"
    ) as row:
        run.tell("slow-save", part)
        until(lambda: list(run.control.glob("checkpoints/*/*.partial")), what="a save stands still")
        row.saved = run.checkpoints()[-1].global_step
        os.kill(training.tasks[CHIEF][0], signal.SIGKILL)
        run.untell("slow-save")
        training = run.restarted(training, CHIEF)
        run.goes_on(training)
        row.restored = run.restored(training)
        row.seen = "restarted in place from the newest complete checkpoint"
    run.until_saved(more_than=row.restored)
    run.finish()


def test_early_worker(live: BedLive) -> None:
    """A worker that is through before anybody has reached it is not waited for."""
    run = live.start("faults", ready_secs=60)
    run.tell("early-worker-1")
    with run.row("a worker exits 0 before it listens", "nobody waits for it, training goes on") as row:
        training = run.until_training(tasks=2)
        run.goes_on(training)
        assert run.task("train")["try_number"] == 1
        row.seen = "ready without it; the chief trained"
    run.finish()


# --- disks --------------------------------------------------------------------------------------------------------


def small_disk(host: Host, path: Path) -> None:
    host.run("mkdir", "-p", str(path))
    host.run("mount", "-t", "tmpfs", "-o", f"size={SMALL},mode=0700", "tmpfs", str(path))


def fill(host: Host, path: Path) -> None:
    """Leave not a byte."""
    host.run(
        "sh",
        "-c",
        f"dd if=/dev/zero of={path}/filler bs=4k 2>/dev/null; dd if=/dev/zero of={path}/filler2 bs=1 2>/dev/null; true",
    )


def full_disk(run: BedRun, host: Host, path: Path, what: str) -> None:
    """A disk is full until the try and the next one have failed; then there is room again."""
    training = run.until_training()
    run.until_saved()
    with run.row(f"{what} is full", "two tries fail and say so; with room again the third continues") as row:
        row.saved = run.checkpoints()[-1].global_step
        fill(host, path)
        failed, _ = run.until_said("train", "training failed: ")
        refused = run.until_said("train", "No space left on device", since=failed + 1.5)[1]
        host.run("sh", "-c", f"rm {path}/filler*")
        after = run.until_training(other_than=training)
        run.goes_on(after)
        row.restored = run.restored(after)
        row.seen = f"{run.reason()}; then {refused.splitlines()[0]}; then it continued"
    run.finish()
    host.run("umount", "--lazy", str(path))


def test_checkpoint_disk_full(live: BedLive) -> None:
    """A chief that cannot save fails; what it had saved is whole, and is continued from."""
    host = live.bed.hosts["gpu_b"]
    path = Path("/mnt/tfps-checkpoints")
    run = live.start("faults", directory=str(path), restarts=1)
    run.checkpoint_root = lambda: host.path(path)
    small_disk(host, path)
    full_disk(run, host, path, "the disk of the checkpoints")


def test_workdir_full(live: BedLive) -> None:
    """A host whose workdir is full cannot write logs: the try fails, and the next one finds room."""
    host = live.bed.hosts["gpu_b"]
    path = host.folder / "home" / ".tfps-small"
    small_disk(host, path)
    run = live.start("faults", workdir_b=str(path), restarts=1)
    full_disk(run, host, path, "the disk of the workdir on the chief's host")


# --- ports, proxies, clocks -------------------------------------------------------------------------------------------


def test_port_taken_by_a_stranger(live: BedLive) -> None:
    """A port that a stranger listens on is not taken from it; provision says so, waits, and goes on when it is free."""
    port = live.take_ports(1)
    host = live.bed.hosts["gpu_c"]
    stranger = host.popen(
        sys.executable, "-S", "-c",
        f"import socket; s = socket.create_server(('', {port[0]})); print('here', flush=True); s.accept()",
    )  # fmt: skip
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"here\n"
        run = live.start("faults", ports=port)
        with run.row(
            "the only port is a stranger's", "provision says so and waits, then the training starts"
        ) as row:
            said = run.until_said("provision", "ports are free in")[1]
            run.until_state("provision", "deferred")
            assert not run.locks()
            stranger.kill()
            stranger.wait()
            run.until_training()
            row.seen = f"{said.splitlines()[0]}; then it trained"
        run.finish()
    finally:
        stranger.kill()
        stranger.wait()


def test_port_taken_between_two_tries(live: BedLive) -> None:
    """When train comes back and its only port is a stranger's, it waits like provision does, holding nothing."""
    run = live.start("faults", ports_count=1)
    training = run.until_training()
    run.until_saved()
    with run.row(
        "a stranger takes the only port while train is up for retry", "it waits, then continues"
    ) as row:
        os.kill(training.agents["gpu_c"][0], signal.SIGSTOP)  # so that the port is not free too soon
        stranger = live.bed.hosts["gpu_c"].popen(
            sys.executable, "-S", "-c",
            "import socket, time\n"
            "while True:\n"
            f"    try: s = socket.create_server(('', {run.ports[0]}))\n"
            "    except OSError: time.sleep(0.001)\n"
            "    else: break\n"
            "print('here', flush=True); s.accept()",
        )  # fmt: skip
        try:
            os.kill(training.agents["gpu_c"][0], signal.SIGKILL)
            os.kill(training.agents[training.host(CHIEF)][0], signal.SIGKILL)
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"here\n"
            said = run.until_said("train", "ports are free in .*looking again")[1]
            run.until_state("train", "deferred")
            assert not run.locks()
        finally:
            stranger.kill()
            stranger.wait()
        after = run.until_training(other_than=training)
        run.goes_on(after)
        row.restored = run.restored(after)
        row.seen = f"{said.splitlines()[0]}; then it continued"
    run.finish()


def test_proxy_variables(live: BedLive) -> None:
    """What a host's shell exports for proxies does not reach a TF task, and provision says that it left it out."""
    run = live.start("faults")
    training = run.until_training()
    with run.row("http_proxy, https_proxy, HTTPS_PROXY are set on every host", "no TF task sees them") as row:
        told = run.until_said("provision", "leaving out .*http_proxy")[1]
        for task, (pid, _) in training.tasks.items():
            environment = Path(f"/proc/{pid}/environ").read_bytes().lower()
            assert b"_proxy=" not in environment, task
        row.seen = told
    run.finish()


def test_clock_jumps(live: BedLive) -> None:
    """When the chief's host's wall clock jumps, forth and back, nothing is restarted, expired or lost.

    The kernel has one wall clock for all namespaces: here `time.time` of every process on that host is told to jump.
    """
    folder = live.folder / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, time\n"
        "_true, _path = time.time, os.path.join(os.path.dirname(__file__), 'offset')\n"
        "def _time():\n"
        "    try:\n"
        "        with open(_path) as file: return _true() + float(file.read())\n"
        "    except (OSError, ValueError): return _true()\n"
        "time.time = _time\n"
    )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={folder}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = live.start("faults", python_b=str(python), stall_secs=20, lease_secs=60)
    training = run.until_training()
    run.until_saved()
    with run.row(
        "the wall clock of the chief's host jumps a day ahead, then two back", "nothing happens"
    ) as row:
        for offset in (86400, -86400):
            (folder / "offset").write_text(str(offset))
            began = time.monotonic()
            while time.monotonic() - began < 15:
                run.goes_on(training)
            run.until_saved(more_than=run.checkpoints()[-1].global_step)
        assert run.training() == training
        row.seen = "no process changed; steps, log and checkpoints went on"
    run.finish()
