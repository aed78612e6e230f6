"""GPUs are held, assigned and shown, with a stand-in `nvidia-smi`. Real agents and processes; no TensorFlow, no SSH."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import Refused
from tfps_runtime.protocol import run_dir


@pytest.fixture
def gpus(host) -> Callable[[str], None]:
    """A stand-in for nvidia-smi: lines `bus, used MiB`, in any order, or a script."""
    folder = host.workdir / "nvidia"
    folder.mkdir()
    host.env["PATH"] = f"{folder}:{host.env['PATH']}"

    def provide(lines: str) -> None:
        script = folder / "nvidia-smi"
        script.write_text(lines if lines.startswith("#!") else f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
        script.chmod(0o755)

    return provide


@pytest.fixture
def buses() -> Iterator[list[str]]:
    """Bus addresses that no other test has, so that real locks do not meet; their lock files are taken away."""
    prefix = uuid.uuid4().hex[:8].upper()
    yield [f"{prefix}:0{i}:00.0" for i in range(3)]
    for path in Path(run_dir()).glob(f"gpu-{prefix.lower()}-*.lock"):
        path.unlink()


def test_two_trainings_get_different_gpus(host, gpus, buses):
    """Each GPU is held for the whole training, seen by its task alone, in bus order; a ps sees none."""
    gpus("\n".join([f"{buses[2]}, 3", f"{buses[0]}, 0", f"{buses[1]}, 12"]))
    one = host.training().up("ps:0", {"task": "worker:0", "gpus": 2})
    assert one.reservation["gpus"] == {"worker:0": [0, 1]}
    other = host.training().up("ps:0", {"task": "worker:0", "gpus": 1})
    assert other.reservation["gpus"] == {"worker:0": [2]}
    with pytest.raises(Refused, match="1 GPUs are needed, 0 of 3 are free") as caught:
        host.training().reserve({"task": "worker:0", "gpus": 1})
    assert (caught.value.code, caught.value.transient) == ("busy", True)
    assert one.facts("worker:0")["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert one.facts("worker:0")["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert one.facts("ps:0")["env"]["CUDA_VISIBLE_DEVICES"] == "-1"
    assert other.facts("worker:0")["env"]["CUDA_VISIBLE_DEVICES"] == "2"
    one.stop()
    assert host.training().reserve({"task": "worker:0", "gpus": 2}).reservation["gpus"] == {
        "worker:0": [0, 1]
    }


def test_a_gpu_that_somebody_uses_is_left_alone(host, gpus, buses):
    """Used memory tells of strangers that hold no lock of ours."""
    gpus(f"{buses[0]}, 8000\n{buses[1]}, 10\n{buses[2]}, 300")
    assert host.training().reserve({"task": "worker:0", "gpus": 1}).reservation["gpus"] == {"worker:0": [1]}
    with pytest.raises(Refused, match="4 GPUs are needed, the host has 3") as caught:
        host.training().reserve({"task": "worker:0", "gpus": 4})
    assert (caught.value.code, caught.value.transient) == ("gpu", False)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho no driver >&2; exit 9\n", "no driver"),
        ("#!/bin/sh\nexec /nonexistent\n", "nvidia-smi"),
    ],
)
def test_a_gpu_driver_that_is_broken_is_told(host, gpus, script, said):
    """And never taken for a host without GPUs."""
    gpus(script)
    with pytest.raises(Refused, match=said):
        host.training().reserve({"task": "worker:0", "gpus": 1})
    assert any(said in f for f in host.ask("preflight", {"workdir": str(host.workdir), "gpus": 1})["faults"])
    host.training().reserve("worker:0")  # without GPUs nobody asks
