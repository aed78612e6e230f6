"""Hosts that are broken: full disks, odd environments, files that are damaged. Real agents and processes; no TensorFlow, no SSH."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from agents import children, wait_until
from tfps_runtime.reserve import is_held


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot import broken_module: ModuleNotFoundError"),
        (
            "raise ImportError('libcuda.so.1 is missing')",
            "cannot import broken_module: ImportError: libcuda.so.1",
        ),
        ("import sys; sys.exit(3)", "cannot import broken_module: SystemExit: 3"),
        ("def f(:", "cannot import broken_module: SyntaxError"),
        (
            "print('x' * 200_000); raise RuntimeError('late')",
            "cannot import broken_module: RuntimeError: late",
        ),
    ],
)
def test_a_module_that_does_not_import_fails_the_training(host, text, said):
    """With the module's name and the reason, not with a riddle; the traceback is in the agent's log."""
    if text is not None:
        (host.workdir / "broken_module.py").write_text(text)
    host.env["PYTHONPATH"] += f":{host.workdir}"
    training = host.training().reserve("ps:0", "worker:0", preload=["json", "broken_module"]).start()
    wait_until(lambda: "FAILED" in training.trainings, "it has failed")
    status = training.status()
    assert said in status["reason"]
    assert "broken_module" in Path(training.paths.agent_log).read_text()
    probe = {
        **training.request,
        "addresses": {"ps:0": f"127.0.0.1:{training.ports['ps:0']}"},
        "timeout_secs": 20,
    }
    assert said in host.ask("probe", probe)["failed"]
    assert training.stop() == "FAILED"


def test_modules_that_print_at_import_do_not_break_the_nursery(host):
    """The command that started the agent has long gone; what they write goes to the agent's log."""
    (host.workdir / "talkative.py").write_text(
        "import sys, time; time.sleep(0.5)\nfor s in (sys.stdout, sys.stderr):\n    print('hello ' * 20_000, file=s, flush=True)\n"
    )
    host.env["PYTHONPATH"] += f":{host.workdir}"
    training = host.training().up("ps:0", "worker:0", preload=["talkative"])
    assert Path(training.paths.agent_log).read_text().count("hello") == 40_000


def test_a_training_without_preload_needs_no_nursery(training):
    """Everything is spawned then."""
    training.up("ps:0", "worker:0", preload=[])
    assert sorted(children(training.agent)) == sorted(t["pid"] for t in training.status()["tasks"])


def test_preflight_tells_everything_at_once(host):
    """What there is and all that is missing, before anything is reserved; it makes only its own folder."""
    good = host.ask("preflight", {"workdir": str(host.workdir / "w"), "preload": ["json", "os.path"]})
    assert good["faults"] == []
    assert good["python"] == ".".join(map(str, sys.version_info[:3]))
    assert good["uid"] == os.getuid()
    assert abs(good["time"] - time.time()) < 30
    assert good["disk_free"] > 0
    assert (host.workdir / "w").stat().st_mode & 0o777 == 0o700
    (host.workdir / "file").write_text("")
    host.env["http_proxy"] = "http://proxy.example"
    request = {
        "workdir": str(host.workdir / "file" / "x"),
        "preload": ["no_such_module", "json.no.such", "a b"],
    }
    bad = host.ask("preflight", request)
    assert len(bad["faults"]) == 4
    assert str(host.workdir / "file") in bad["faults"][0]
    assert all(
        name in text
        for name, text in zip(["no_such_module", "json.no.such", "a b"], bad["faults"][1:], strict=True)
    )
    assert bad["proxies"] == ["http_proxy"]


def test_preflight_lists_the_living(training):
    """For people who wonder who holds the GPUs."""
    training.reserve("ps:0")
    assert (
        str(training.id)
        in training.host.ask("preflight", {"workdir": str(training.host.workdir)})["trainings"]
    )


def test_probing_names_what_is_missing(training):
    """A task that never listens, and an address that nobody has; with the log's end when one has failed."""
    training.reserve("ps:0", "worker:0", "worker:1").start("deaf=ps")
    addresses = {name: f"127.0.0.1:{port}" for name, port in training.ports.items() if name != "worker:0"}
    found = training.host.ask("probe", {**training.request, "addresses": addresses, "timeout_secs": 1.5})
    assert found["missing"] == {"ps:0": f"{addresses['ps:0']} does not accept connections"}
    assert found["failed"] is None


def test_probing_many_silent_addresses_takes_no_longer_than_one(training):
    """A firewall drops packets: forty seconds of silence, one after the other, would outlast every patience."""
    training.reserve("ps:0")
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # nobody accepts: once these wait, further ones get no answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        address = f"127.0.0.1:{full.getsockname()[1]}"
        request = {
            **training.request,
            "addresses": {f"worker:{i}": address for i in range(40)},
            "timeout_secs": 0.1,
        }
        begun = time.monotonic()
        assert len(training.host.ask("probe", request)["missing"]) == 40
        assert time.monotonic() - begun < 20


def test_probing_ends_at_once_when_a_task_has_failed(training):
    """Nobody waits five minutes for what cannot come."""
    training.reserve({"task": "ps:0", "restarts": 0}).start("exit=4")
    begun = time.monotonic()
    request = {
        **training.request,
        "addresses": {"ps:0": f"127.0.0.1:{training.ports['ps:0']}"},
        "timeout_secs": 60,
    }
    failed = training.host.ask("probe", request)["failed"]
    assert time.monotonic() - begun < 15
    assert failed.splitlines()[0] == "ps:0@gpu-a failed: exit code 4; the end of its log:"
    assert failed.splitlines()[-1] == "leaving with 4"


def test_sweeping_takes_what_is_dead_and_leaves_what_lives(host):
    """Locks and sockets of killed agents; nothing of a living one."""
    living, dead = host.training().reserve("ps:0"), host.training().reserve("ps:0")
    os.kill(dead.agent, signal.SIGKILL)
    wait_until(lambda: not is_held(dead.paths.lock), "it is dead")
    removed = [found["name"] for found in host.ask("sweep", {})["removed"]]
    assert {dead.paths.lock, dead.paths.socket} <= set(removed)
    assert not {living.paths.lock, living.paths.socket} & set(removed)
    assert living.status()["is_alive"]
