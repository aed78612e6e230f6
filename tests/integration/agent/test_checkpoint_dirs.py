"""Whose a checkpoint directory is, and where the next incarnation writes. Real agents and processes; no TensorFlow, no SSH."""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid

import pytest
from agents import Refused, wait_until
from tfps_runtime.reserve import change_owner, is_held, read_owner


def test_a_checkpoint_directory_has_one_living_owner(host):
    """Two trainings never write the same checkpoints; the unfinished one's are taken up by its next incarnation."""
    directory, key = str(host.workdir / "ckpt"), f"test/{uuid.uuid4().hex}"
    first = host.training(key).reserve("worker:0", checkpoint_dir=directory)
    assert first.reservation["checkpoint_dir"] == directory
    with pytest.raises(Refused, match=f"{directory} is being written by training {first.id}") as caught:
        host.training(key).reserve("worker:0", checkpoint_dir=directory)
    assert (caught.value.code, caught.value.transient) == ("checkpoint_owned", True)
    first.stop()
    second = host.training(key).reserve("worker:0", checkpoint_dir=directory)
    assert second.reservation["checkpoint_dir"] == directory
    os.kill(second.agent, signal.SIGKILL)
    wait_until(lambda: not is_held(second.paths.lock), "it is dead")
    third = host.training(key).reserve("worker:0", checkpoint_dir=directory)
    assert third.reservation["checkpoint_dir"] == directory
    host.ask("sweep", {})


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"machine": "elsewhere", "until": 60.0}, True),
        ({"machine": "elsewhere", "until": -1.0}, False),
        ({"machine": "elsewhere", "until": 60.0, "ended": True}, False),
        ({"until": 60.0}, False),
    ],
    ids=["its lease runs", "its lease is over", "it has ended", "it was on this machine, and is dead"],
)
def test_an_owner_on_another_machine_is_believed(host, changes, is_refused):
    """On a shared file system a lock cannot be asked from elsewhere: what counts is what the owner wrote."""
    directory, key = str(host.workdir / "ckpt"), f"test/{uuid.uuid4().hex}"
    first = host.training().reserve("worker:0", checkpoint_dir=directory)
    os.kill(first.agent, signal.SIGKILL)
    wait_until(lambda: not is_held(first.paths.lock), "it is dead")
    until = time.time() + changes.pop("until")
    change_owner(directory, str(first.id), until=until, **changes)
    same_key = host.training(first.id.key)
    other = host.training(key)
    if is_refused:
        with pytest.raises(
            Refused, match=f"is being written by training {first.id}, on {host.name}"
        ) as caught:
            other.reserve("worker:0", checkpoint_dir=directory)
        assert (caught.value.code, caught.value.transient) == ("checkpoint_owned", True)
        assert (
            same_key.reserve("worker:0", checkpoint_dir=directory).reservation["checkpoint_dir"] == directory
        )
    else:
        assert other.reserve("worker:0", checkpoint_dir=directory).reservation["checkpoint_dir"] == directory
    host.ask("sweep", {})


def test_the_owner_file_keeps_up_with_the_lease(host):
    """By what stands there the lease never ends too early, and an end in order is noted."""
    directory = str(host.workdir / "ckpt")
    training = host.training().reserve("worker:0", checkpoint_dir=directory)
    assert 0 < read_owner(directory).until - time.time() <= 120
    for secs in (1000.0, 1100.0, 4000.0):
        host.ask("renew", {**training.request, "lease_secs": secs})
        assert read_owner(directory).until - time.time() >= secs - 1
    assert not read_owner(directory).ended
    training.stop()
    assert read_owner(directory).ended


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_finished_directory_stays_as_it_is(host, is_fixed):
    """The next training of the key begins elsewhere, unless the script goes on in its own directory."""
    directory = str(host.workdir / "ckpt")
    seen = []
    for _ in range(3):
        training = host.training()
        training.reserve("worker:0", checkpoint_dir=directory, checkpoint_dir_is_fixed=is_fixed)
        training.start("steps=1").launch()
        training.wait("worker:0", "SUCCEEDED")
        training.stop()
        seen.append(training.reservation["checkpoint_dir"])
    assert seen == ([directory] * 3 if is_fixed else [directory, f"{directory}-2", f"{directory}-3"])


def test_a_script_that_takes_its_checkpoint_directory_away_has_succeeded(training):
    """It moves its results elsewhere as its last act."""
    directory = training.host.workdir / "ckpt"
    training.host.script.write_text("import os, shutil\nprint(os.getcwd())\nshutil.rmtree(os.getcwd())\n")
    training.reserve("worker:0", checkpoint_dir=str(directory)).start().launch()
    training.wait("worker:0", "SUCCEEDED")
    assert str(directory) in training.log("worker:0")
    assert training.stop() == "SUCCEEDED"


def test_a_checkpoint_directory_that_is_gone_is_made_again(training):
    """Somebody cleared it away between the reservation and the start of the chief."""
    directory = training.host.workdir / "ckpt"
    training.reserve("worker:0", checkpoint_dir=str(directory))
    shutil.rmtree(directory)
    training.start("steps=1").launch()
    training.wait("worker:0", "SUCCEEDED")
    assert training.stop() == "SUCCEEDED"


def test_the_same_training_after_its_end_begins_anew(training):
    """Numbers begin at 1 again, and nothing of the first life is taken for the second's."""
    training.up("ps:0", "worker:0", args=("steps=3", "chief=worker:0"))
    training.wait("worker:0", "SUCCEEDED")
    training.stop()
    training.reserve("ps:0", "worker:0")
    assert training.status()["state"] == "RESERVED"
    training.start("steps=1", "chief=worker:0").launch()
    training.wait("worker:0", "SUCCEEDED")
    assert [e["seq"] for e in training.events()] == list(range(1, len(training.events()) + 1))
    assert training.status()["result"]["global_step"] == 1
