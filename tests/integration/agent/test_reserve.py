"""Reserving: ports, locks, owners, and what is refused. Real agents and processes; no TensorFlow, no SSH."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from agents import PORTS, RUNTIME, Refused, is_free, is_listening, wait_until
from tfps_runtime.reserve import is_held


def test_reserving_twice_gives_the_same(training):
    """A second `reserve`, after a lost answer, finds the same agent with the same ports."""
    training.reserve("ps:0", "worker:0", "worker:1")
    agent = training.agent
    again = training.host.ask("reserve", training.wanted)
    assert again == training.reservation
    assert again["state"] == "RESERVED"
    assert training.agent == agent
    assert len(set(training.ports.values())) == 3


def test_reserving_from_many_sides_at_once_starts_one_agent(training):
    """Two workers of Airflow may run the same task for a moment."""
    wanted = json.dumps(
        {**training.request, "tasks": [{"task": "ps:0"}], "ports": PORTS, "lease_secs": 60}
    ).encode()
    processes = [training.host.popen("reserve") for _ in range(5)]
    answers = []
    for process in processes:
        process.stdin.write(wanted + b"\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, (out, err)
        answers.append(json.loads(out))
    assert all(answer == answers[0] for answer in answers)

    def agents() -> list[int]:  # one that came second may still be on its way out
        return [p for p in training.host.marked() if b"agent" in Path(f"/proc/{p}/cmdline").read_bytes()]

    wait_until(lambda: len(agents()) == 1, "one agent")


def test_two_trainings_never_share_a_port(host):
    """In a range with room for both, each has its own; a third finds it full and is told that it may try again."""
    ports = [25000 + os.getpid() % 4000, 25003 + os.getpid() % 4000]
    one = host.training().reserve("ps:0", "worker:0", ports=ports)
    other = host.training().reserve("ps:0", "worker:0", ports=ports)
    assert len({*one.ports.values(), *other.ports.values()}) == 4
    with pytest.raises(Refused, match="only 0 of 1 ports are free") as caught:
        host.training().reserve("ps:0", ports=ports)
    assert (caught.value.code, caught.value.transient) == ("busy", True)
    one.stop()
    host.training().reserve("ps:0", "worker:0", ports=ports)


def test_a_range_that_is_too_small_for_ever_is_not_busy(training):
    """Waiting does not make more ports: nothing to try again."""
    with pytest.raises(Refused, match="2 ports are needed") as caught:
        training.reserve("ps:0", "worker:0", ports=[25000, 25000])
    assert (caught.value.code, caught.value.transient) == ("port", False)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_strangers_port_is_skipped(training, address):
    """Whether it is taken on one address or on all, with IPv4 or IPv6."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as stranger:
        try:
            stranger.bind((address, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        stranger.listen()
        taken = stranger.getsockname()[1]
        first = min(taken, 65534)
        training.reserve("ps:0", ports=[first, first + 1])
        assert training.ports["ps:0"] != taken


def test_a_held_port_refuses_until_the_task_listens(training):
    """Nobody else can take it, and a probe says the truth about the task."""
    training.reserve("ps:0", "worker:0")
    port = training.ports["ps:0"]
    assert not is_listening(port)
    assert not is_free(port)
    training.start()
    training.wait("ps:0", "RUNNING")
    assert is_listening(port)


def test_a_refused_reservation_leaves_nothing(host):
    """A request that cannot be read, or be had: no agent, no lock."""
    training = host.training()
    for wrong in ({"tasks": 5}, {"tasks": [{"task": "../x"}]}, {"colour": "red"}, {"ports": []}):
        with pytest.raises(Refused) as caught:
            host.ask("reserve", {**training.request, "tasks": [{"task": "ps:0"}], "ports": PORTS, **wrong})
        assert caught.value.code == "bad_request", str(caught.value)
    assert not is_held(training.paths.lock)


@pytest.mark.parametrize("place", ["a file", "read-only"])
def test_a_workdir_that_cannot_be_written(host, place):
    """The refusal names the path."""
    training = host.training()
    bad = host.workdir / "bad"
    bad.write_text("") if place == "a file" else bad.mkdir(mode=0o500)
    if place == "read-only" and os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    training.request["workdir"] = str(bad)
    with pytest.raises(Refused, match=str(bad)) as caught:
        training.reserve("ps:0")
    assert caught.value.code == "workdir"


def test_a_run_directory_of_another_user_is_refused(tmp_path):
    """Whoever prepared it could put sockets and locks there; one of our own is made private."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    uid = 54321
    place = Path(f"/var/tmp/tfps-{uid}")
    code = f"import os; from tfps_runtime import reserve; os.setuid({uid}); print(reserve.ensure_run_dir())"

    def run() -> subprocess.CompletedProcess:
        env = {"PYTHONPATH": str(RUNTIME)}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )

    assert not place.exists()
    try:
        place.mkdir(mode=0o777)
        assert "is not a directory of this user" in run().stderr
        place.rmdir()
        place.symlink_to(tmp_path)
        assert "is not a directory of this user" in run().stderr
        place.unlink()
        place.write_text("")
        assert "is not a directory of this user" in run().stderr
        place.unlink()
        place.mkdir()
        os.chown(place, uid, -1)
        place.chmod(0o777)
        assert run().stdout.strip() == str(place)
        assert place.stat().st_mode & 0o777 == 0o700
    finally:
        with contextlib.suppress(FileNotFoundError):
            place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
