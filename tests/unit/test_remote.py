"""How commands are called, and how whatever comes back is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from airflow_tfps import remote
from airflow_tfps.deploy import build_runtime
from airflow_tfps.errors import BusyError, CommandError, HostNotReadyError, TfpsError
from airflow_tfps.inventory import HostSpec
from airflow_tfps.ssh import Completed

PYZ = f"bin/tfps-{build_runtime().hash}.pyz"


def completed(stdout: bytes = b"", stderr: bytes = b"", returncode: int = 0) -> Completed:
    return Completed(returncode=returncode, stdout=stdout, stderr=stderr)


def error(**keywords) -> bytes:
    return json.dumps(
        {"type": "error", "code": "workdir", "message": "no", "transient": False, **keywords}
    ).encode()


@pytest.mark.parametrize(
    ("python", "workdir", "expected"),
    [
        ("python3", "~/.tfps", ["python3", f".tfps/{PYZ}", "status"]),
        ("/opt/tf/bin/python", "/data/a b", ["/opt/tf/bin/python", f"/data/a b/{PYZ}", "status"]),
        ("~/venv/bin/python", "~/x", ["venv/bin/python", f"x/{PYZ}", "status"]),
    ],
)
def test_a_command_line(python, workdir, expected):
    """`~` is the home directory, which is where commands run: no shell has to expand it."""
    assert remote.argv(HostSpec(name="a", python=python, workdir=workdir), "status") == expected


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
def test_a_request_is_one_line(request):
    """Whatever is in it."""
    line = remote.request_line(request)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == request


def test_answers_are_found_between_what_login_scripts_print():
    """A banner, an empty line, odd bytes and JSON that is no object are not ours."""
    out = b'Welcome to gpu-a!\n\n\xff\xfe\n[1]\n42\nNaN\n{"type": 5}\n{"type": "status", "state": "READY"}\n'
    assert remote.answers("gpu-a", "status", completed(out)) == [{"type": "status", "state": "READY"}]


def test_a_refusal_names_the_host_and_says_whether_to_try_again():
    """What the host said, as the error that Airflow's side knows."""
    with pytest.raises(CommandError, match="gpu-a: no") as caught:
        remote.answers("gpu-a", "reserve", completed(error(), returncode=1))
    assert (caught.value.code, caught.value.transient, caught.value.host) == ("workdir", False, "gpu-a")
    with pytest.raises(CommandError) as caught:
        remote.answers("gpu-a", "reserve", completed(error(transient=True), returncode=1))
    assert caught.value.transient
    with pytest.raises(BusyError, match="gpu-a: no") as busy:
        remote.answers("gpu-a", "reserve", completed(error(code="busy"), returncode=1))
    assert busy.value.transient


@pytest.mark.parametrize(
    "keys", [{"code": None}, {"message": None}, {"transient": "yes"}, {"message": "x" * 10**6}]
)
def test_a_hostile_refusal_is_still_a_refusal(keys):
    """Of any type and length; only a true `transient` counts."""
    with pytest.raises(CommandError) as caught:
        remote.answers("gpu-a", "reserve", completed(error(**keys), returncode=1))
    assert caught.value.transient is False
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    ("returncode", "stderr", "kind", "said"),
    [
        (
            127,
            b"python3: command not found",
            HostNotReadyError,
            r"gpu-a: python3: command not found \(set `python`",
        ),
        (127, b"", HostNotReadyError, "the interpreter was not found"),
        (126, b"permission denied", HostNotReadyError, "permission denied"),
        (-9, b"", CommandError, "status was killed by signal 9"),
        (1, b"ImportError: no json", HostNotReadyError, "exit code 1: ImportError: no json"),
        (1, b"x" * 10**6, HostNotReadyError, "exit code 1"),
        (255, b"\xff\xfe", HostNotReadyError, "exit code 255"),
    ],
)
def test_when_it_was_not_our_runtime_that_answered(returncode, stderr, kind, said):
    """No answer and a failure: the end of what it complained about is told."""
    with pytest.raises(kind, match=said) as caught:
        remote.answers("gpu-a", "status", completed(b"banner\n", stderr, returncode))
    assert len(str(caught.value)) < 1500


def test_a_runtime_that_is_not_there_yet_is_told_from_a_broken_one():
    """Only Python's own complaint about the missing file leads to an installation."""
    missing = (
        b"python3: can't open file '/home/u/.tfps/bin/tfps-1.pyz': [Errno 2] No such file or directory\n"
    )
    assert remote.lacks_runtime(completed(b"", missing, 2))
    assert not remote.lacks_runtime(completed(b"", missing, 1))
    assert not remote.lacks_runtime(completed(b"", b"usage: tfps.pyz", 2))
    assert not remote.lacks_runtime(completed(b"", b"", 0))


@given(st.binary(max_size=300), st.integers(-20, 255))
def test_whatever_comes_back_is_answers_or_one_of_our_errors(stdout, returncode):
    """No host can raise anything else here."""
    try:
        found = remote.answers("gpu-a", "status", completed(stdout, b"", returncode))
    except TfpsError:
        return
    assert all(isinstance(message, dict) for message in found)
