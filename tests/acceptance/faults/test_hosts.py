"""Hosts and links that go away: noticed soon, survived where that is possible, and nothing is left when they return."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
from bed_runs import CHIEF, WORKER
from live import until

if TYPE_CHECKING:
    from bed_runs import BedLive, BedRun
    from live import Training

pytestmark = [pytest.mark.faults, pytest.mark.alone]

LOST_SECS = 30.0
"""Between the loss of a host and the line about it in Airflow's log."""


@pytest.mark.quick
def test_lost_host(live: BedLive) -> None:
    """Without a worker's host asynchronous training goes on; without the chief's the try fails, the retry continues."""
    run = live.start("faults", unreachable_secs=25)
    training = run.until_training()
    run.until_saved()
    worker, chief = live.bed.hosts[training.host(WORKER)], live.bed.hosts[training.host(CHIEF)]
    with run.row("host of a worker gone, back after a while", "noticed; training goes on without it") as row:
        killed = time.time()
        worker.kill()
        noticed = run.until_said("train", f"{worker.name}: connection lost", since=killed)[0] - killed
        assert noticed <= LOST_SECS, f"noticed after {noticed:.1f} s"
        run.goes_on(training)
        worker.boot()
        run.until_said("train", f"{worker.name}: the agent is gone", since=killed)
        run.goes_on(training)
        row.seen = f"noticed after {noticed:.1f} s; the chief went on, before and after the host was back"
    with run.row("host of the chief gone, back after a while", "the try fails, the retry continues") as row:
        killed = time.time()
        chief.kill()
        noticed = run.until_said("train", f"{chief.name}: connection lost", since=killed)[0] - killed
        assert noticed <= LOST_SECS, f"noticed after {noticed:.1f} s"
        until(
            lambda: run.task("train")["try_number"] > 1 or run.state("train") != "deferred",
            what="the try fails",
        )
        chief.boot()
        after = run.until_training(other_than=training)
        run.goes_on(after)
        row.restored = run.restored(after)
        row.seen = f"noticed after {noticed:.1f} s; {run.reason()}; the retry continued"
    run.finish()


def test_links(live: BedLive) -> None:
    """Cut links and a restarted sshd: connections come back, nothing is restarted, no line is lost or repeated."""
    run = live.start("faults")
    training = run.until_training()
    run.until_saved()
    host = live.bed.hosts[training.host(CHIEF)]
    for secs in (5, 60):
        expected = "nothing" if secs < LOST_SECS else "noticed; nothing is restarted; the log catches up"
        with run.row(f"link to the chief's host cut for {secs} s", expected) as row:
            began = time.time()
            host.cut()
            time.sleep(secs)  # the fault's own length
            host.mend()
            run.goes_on(training)
            caught_up(run, training)
            assert run.training() == training
            lost = run.said("train", f"{host.name}: connection lost", since=began)
            if secs > LOST_SECS:
                assert lost
                assert lost[0][0] - began <= LOST_SECS
            row.seen = f"noticed after {lost[0][0] - began:.1f} s; " if lost else ""
            row.seen += "no process changed, no line was lost or repeated"
    with run.row(
        "sshd restarted on every host, its connections killed", "reconnected, nothing is restarted"
    ) as row:
        began = time.time()
        for each in live.bed.hosts.values():
            each.restart_sshd()
        for each in live.bed.hosts.values():
            run.until_said("train", f"{each.name}: connection lost", since=began)
        run.goes_on(training)
        caught_up(run, training)
        assert run.training() == training
        row.seen = "no process changed, no line was lost or repeated"
    run.finish()


def caught_up(run: BedRun, training: Training) -> None:
    """Wait until the task log has what the chief has printed; each step must be there once."""
    pattern = r"\[worker:0@\w+\] step (\d+) "

    def logged() -> list[int]:
        return [int(re.search(pattern, line)[1]) for _, line in run.said("train", pattern)]

    printed = run.steps(training)[-1]
    until(lambda: max(logged(), default=0) >= printed, what=f"step {printed} in the task log")
    found = logged()
    assert sorted(found) == list(range(found[0], found[0] + len(found))), "lines were lost or repeated"


def test_link_cut_for_good(live: BedLive) -> None:
    """A ps's host that never comes back fails the run for that reason; what ran there ends by its lease."""
    run = live.start("faults", unreachable_secs=25, lease_secs=60)
    training = run.until_training()
    run.until_saved()
    host = live.bed.hosts[training.host("ps:0")]
    with run.row(
        "link to a ps's host cut for good", "the run fails and names the host; its lease ends the rest"
    ) as row:
        host.cut()
        try:
            run.until_over(state="failed", secs=300)
            reason = run.reason(pattern=r"(training \w+: |gpu_a: )")
            assert host.name in reason, reason
            failed = run.reason("teardown", r"gpu_a: ")
        finally:
            host.mend()
        row.seen = f"{run.reason()}; the tries after it and teardown failed: {failed}"
        run.until_nothing_is_left(90)
    run.until_clean()


def test_marked_failed_while_away(live: BedLive) -> None:
    """A host that was away when its training was ended ends it soon after it is back, however long that took."""
    run = live.start("faults_once")
    training = run.until_training()
    run.until_saved()
    host = live.bed.hosts[training.host(WORKER)]
    with run.row(
        "marked failed while a host is away for 100 s", "nothing is left there 60 s after it is back"
    ) as row:
        cut = time.monotonic()
        host.cut()
        try:
            run.mark("train", "failed")
            run.until_over(state="failed", secs=90)
            while time.monotonic() - cut < 100:
                time.sleep(1)  # the fault's own length
        finally:
            host.mend()
        began = time.monotonic()
        run.until_nothing_is_left(60)
        row.secs = time.monotonic() - began
        row.seen = f"gone {row.secs:.1f} s after the host was back"
    run.until_clean()


def test_host_gone_for_good(live: BedLive) -> None:
    """When a worker's host never comes back the training has its result; teardown says which host it could not ask."""
    run = live.start("faults")
    training = run.until_training()
    run.until_saved()
    host = live.bed.hosts[training.host(WORKER)]
    with run.row(
        "host of a worker gone for good", "train has its result; teardown fails and names the host"
    ) as row:
        host.kill()
        try:
            run.goes_on(training)
            run.tell("finish")
            run.until_over(state="failed", secs=300)
        finally:
            host.boot()
        assert run.state("train") == "success"
        assert run.state("teardown") == "failed"
        assert run.xcom("train")["finished"] is True
        row.seen = f"train succeeded; teardown: {run.reason('teardown', 'gpu_c: ')}"
    # The lock file of its agent, which nobody holds, is on the disk of that host.
    run.clear("teardown")
    until(lambda: run.state("teardown") == "success", what="teardown, cleared when the host was back")
    run.until_clean()


def test_owned_checkpoints(live: BedLive) -> None:
    """Of two trainings aimed at one directory the second is refused, on the same machine and on another."""
    directory = live.folder / "fixed"
    first = live.start("faults_fixed", directory=str(directory))
    first.checkpoint_root = lambda: directory
    training = first.until_training()
    first.until_saved()
    for dag, where in (("faults_fixed", "the same machine"), ("faults_fixed_elsewhere", "another machine")):
        second = live.start(dag, directory=str(directory))
        with first.row(
            f"a second training with the same checkpoint directory, its chief on {where}", "refused"
        ) as row:
            second.until_over(state="failed")
            reason = second.reason("provision", r"gpu_\w: .*")
            assert f"is being written by training {training.id}" in reason, reason
            first.goes_on(training)
            assert first.training() == training
            row.seen = reason
        second.until_clean()
    first.finish()
    third = live.start("faults_fixed_elsewhere", directory=str(directory))
    third.checkpoint_root = lambda: directory
    with third.row(
        "the first has ended: another with that directory, on another machine", "continues in it"
    ) as row:
        after = third.until_training(tasks=2)
        third.goes_on(after)
        row.restored = third.restored(after)
        row.seen = "it continued"
    third.finish()
