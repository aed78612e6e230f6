"""What is brought to hosts: the same bytes from anywhere, a runtime that old interpreters run, blobs that arrive whole."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tfps_runtime
from tfps_runtime.protocol import ProtocolError, RefusedError, blob_path
from tfps_runtime.uploads import put

from airflow_tfps import deploy, remote
from airflow_tfps.deploy import INSTALL, Blob, blob, blobs_of, build_runtime
from airflow_tfps.errors import SpecError
from airflow_tfps.inventory import HostSpec
from airflow_tfps.spec import JobSpec

ROOT = Path(__file__).parents[2]
SOURCES = Path(tfps_runtime.__file__).parent


def interpreters() -> list:
    """This one, and Python 3.9, the oldest that hosts may have, where it is installed."""
    pattern = os.environ.get("TFPS_PYTHON39") or str(Path.home() / ".pyenv/versions/3.9.*/bin/python")
    old = [*glob.glob(pattern), *filter(None, [shutil.which("python3.9")])]
    missing = pytest.mark.skip(reason="Python 3.9 is not installed (TFPS_PYTHON39 names one)")
    return [
        pytest.param(sys.executable, id="this"),
        pytest.param(old[0], id="3.9") if old else pytest.param("", id="3.9", marks=missing),
    ]


@pytest.fixture(params=interpreters())
def python(request) -> str:
    return request.param


def run(argv: list[str], stdin: bytes = b"", **keywords) -> subprocess.CompletedProcess:
    """As on a host: nothing of this environment but its PATH."""
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        argv, input=stdin, capture_output=True, timeout=60, env=env, check=False, **keywords
    )


@pytest.fixture(scope="module")
def pyz(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bin") / "tfps.pyz"
    path.write_bytes(build_runtime().content)
    return path


# --- the runtime --------------------------------------------------------------------------------------------------------


def test_the_same_sources_give_the_same_bytes_anywhere(tmp_path):
    """Another folder, other times and modes, another order of creation, compiled files beside: byte for byte the same."""
    copy = tmp_path / "elsewhere" / "tfps_runtime"
    files = sorted(SOURCES.rglob("*.py"), reverse=True)
    for path in files:
        target = copy / path.relative_to(SOURCES)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        target.chmod(0o755)
        os.utime(target, (1e9, 1e9))
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "core.cpython-311.pyc").write_bytes(b"compiled")
    (copy / "__pycache__" / "core.py").write_bytes(b"strange")
    code = "import sys; from airflow_tfps.deploy import build_runtime as b; r = b(); sys.stdout.buffer.write(r.content)"
    path = os.pathsep.join([str(copy.parent), str(ROOT)])
    built = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, check=True
    )
    assert built.stdout == build_runtime().content
    assert len(files) > 10


def test_another_source_has_another_name(tmp_path, monkeypatch):
    """The file is named by what is in it: hosts never run yesterday's runtime by mistake."""
    shutil.copytree(SOURCES, tmp_path / "tfps_runtime")
    monkeypatch.setattr(tfps_runtime, "__file__", str(tmp_path / "tfps_runtime/__init__.py"))
    same = deploy.build_runtime.__wrapped__()
    (tmp_path / "tfps_runtime/core.py").write_text("# changed\n")
    changed = deploy.build_runtime.__wrapped__()
    assert same == build_runtime()
    assert changed.hash != same.hash


def test_the_archive_holds_sources_only():
    """No tests, no compiled files, no path of the machine that built it, fixed times."""
    with zipfile.ZipFile(io.BytesIO(build_runtime().content)) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert "__main__.py" in names
        assert "tfps_runtime/training/__init__.py" in names
        assert all(name.endswith(".py") for name in names)
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert not any(str(ROOT).encode() in archive.read(name) for name in names)


def test_the_archive_runs_by_itself(python, pyz, tmp_path):
    """On a host there is nothing but Python: `preflight` answers, from any directory."""
    request = json.dumps({"workdir": str(tmp_path / "w"), "preload": ["json", "no_such_module"]})
    done = run([python, str(pyz), "preflight"], request.encode() + b"\n", cwd="/")
    [answer] = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert answer["type"] == "preflight"
    [fault] = answer["faults"]
    assert "has no module no_such_module" in fault
    assert python in fault


def test_an_unknown_command_says_what_there_is(python, pyz):
    """Exit code 2 and the usage, as any command line."""
    done = run([python, str(pyz), "frobnicate"])
    assert done.returncode == 2
    assert b"usage" in done.stderr


def test_every_module_is_understood_by_old_interpreters(python):
    """All but the harness, whose TensorFlow needs a newer Python, are imported; the harness compiles."""
    modules = sorted(
        ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts)
        for path in SOURCES.glob("*.py")
        if path.stem not in ("__main__", "__init__")
    )
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = run(
        [
            python,
            "-W",
            "error",
            "-c",
            f"import sys; sys.path.insert(0, {str(SOURCES.parent)!r}); {code}",
            *modules,
        ]
    )
    assert done.returncode == 0, done.stderr.decode()
    assert len(modules) > 10
    for path in SOURCES.rglob("*.py"):
        compiled = "import sys; compile(open(sys.argv[1], encoding='utf-8').read(), sys.argv[1], 'exec')"
        done = run([python, "-W", "error", "-c", compiled, str(path)])
        assert done.returncode == 0, done.stderr.decode()


def test_messages_work_on_old_interpreters(python):
    """Their types are looked up at run time, where `X | Y` and the like would fail."""
    code = f"""
import sys; sys.path.insert(0, {str(SOURCES.parent)!r})
from tfps_runtime import protocol, launch, checkpoint
kinds = [c for m in (protocol, launch, checkpoint) for c in vars(m).values()
         if isinstance(c, type) and issubclass(c, protocol.Message) and c is not protocol.Message]
for kind in kinds:
    try:
        kind.from_json({{"nonsense": 1}})
    except protocol.ProtocolError:
        continue
    raise SystemExit(f"{{kind}} took nonsense")
request = protocol.ReserveRequest("k#0a1b2c3d", "a", "/w", (protocol.TaskSpec("ps:0"),))
assert protocol.ReserveRequest.loads(request.dumps()) == request
print(len(kinds))
"""
    done = run([python, "-c", code])
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) > 10


def test_the_runtime_imports_nothing_but_the_standard_library(python):
    """Nothing is installed on a host: `-S` takes site-packages away, `-I` everything of the user."""
    modules = [
        f"tfps_runtime.{path.stem}" for path in sorted(SOURCES.glob("*.py")) if path.stem != "__main__"
    ]
    code = f"import sys; sys.path.insert(0, {str(SOURCES.parent)!r})\n" + "".join(
        f"import {m}\n" for m in modules
    )
    done = run([python, "-I", "-S", "-c", code.replace(".__init__", "")])
    assert done.returncode == 0, done.stderr.decode()


# --- how the runtime gets there -------------------------------------------------------------------------------------------


def install(python: str, target: Path, content: bytes, size: int) -> subprocess.CompletedProcess:
    return run([python, "-c", INSTALL, str(target), str(size)], content)


def test_installing_stores_standard_input(python, tmp_path):
    """Folders are made, the file appears whole, nothing else stays."""
    target, content = tmp_path / "w o r k" / "bin" / "tfps-1.pyz", build_runtime().content
    done = install(python, target, content, len(content))
    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target]
    assert (target.parent.stat().st_mode & 0o077) == 0


def test_an_upload_that_breaks_off_installs_nothing(python, tmp_path):
    """A lost connection looks like the end of the input; half a runtime under its name would stay broken for ever."""
    target = tmp_path / "bin" / "tfps-1.pyz"
    done = install(python, target, build_runtime().content[:-1], len(build_runtime().content))
    assert done.returncode != 0
    assert b"cut short" in done.stderr
    assert not target.exists()


def test_the_command_line_says_how_much_must_arrive():
    """`remote` and INSTALL agree on the arguments."""
    argv = remote.install_argv(HostSpec(name="a", workdir="~/.tfps"))
    assert argv[1:] == [
        "-c",
        INSTALL,
        f"~/.tfps/bin/tfps-{build_runtime().hash}.pyz",
        str(len(build_runtime().content)),
    ]


# --- programs and inputs ----------------------------------------------------------------------------------------------------


def make_tree(root: Path, *, reverse: bool = False) -> Path:
    files = {"a.txt": b"1", "sub/b.bin": b"\0\xff" * 1000, "sub/deeper/ü '$(x)' .txt": b"", "z": b"9"}
    for name in sorted(files, reverse=reverse):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(files[name])
    return root


def store(one: Blob, workdir: Path, content: bytes | None = None, **changes) -> dict:
    return put(
        {**one.request(str(workdir)), **changes}, io.BytesIO(one.content() if content is None else content)
    )


def test_a_directory_is_the_same_wherever_it_lies(tmp_path):
    """Names and contents count; order, times, modes and the folder above do not."""
    one = blob("inputs.train", str(make_tree(tmp_path / "x" / "data")))
    other = make_tree(tmp_path / "y" / "data", reverse=True)
    os.utime(other / "a.txt", (1, 1))
    (other / "z").chmod(0o755)
    assert blob("inputs.train", str(other)).sha256 == one.sha256
    (other / "z").write_bytes(b"8")
    assert blob("inputs.train", str(other)).sha256 != one.sha256
    assert (one.kind, one.name) == ("tar", "data")


def test_a_directory_arrives_as_it_is(tmp_path):
    """Every file at its place, with odd names and without content as well."""
    source = make_tree(tmp_path / "data")
    answer = store(blob("inputs.train", str(source)), tmp_path / "w")
    there = Path(answer["path"])
    assert {p.relative_to(source): p.read_bytes() for p in source.rglob("*") if p.is_file()} == {
        p.relative_to(there): p.read_bytes() for p in there.rglob("*") if p.is_file()
    }


def test_a_script_and_what_it_imports_arrive_in_one_folder(tmp_path):
    """`files` lie beside the script on the host, folders whole, bytecode left behind; any change is another blob."""
    jobs = tmp_path / "dags" / "jobs"
    jobs.mkdir(parents=True)
    (tmp_path / "dags" / "train.py").write_text("import network, layers.dense")
    (tmp_path / "dags" / "network.py").write_text("x = 1")
    (tmp_path / "dags" / "layers" / "__pycache__").mkdir(parents=True)
    (tmp_path / "dags" / "layers" / "dense.py").write_text("y = 2")
    (tmp_path / "dags" / "layers" / "__pycache__" / "dense.pyc").write_text("")
    data = {"script": "../train.py", "files": ["../network.py", "../layers/"], "roles": {"worker": 1}}
    job = JobSpec.from_dict(data, base_dir=jobs)
    (one,) = blobs_of(job)
    folder = Path(store(one, tmp_path / "w")["path"])
    assert (one.key, one.name, one.kind, one.entry) == ("script", "train", "tar", "train.py")
    found = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert found == {
        "train.py": "import network, layers.dense",
        "network.py": "x = 1",
        "layers/dense.py": "y = 2",
    }
    (tmp_path / "dags" / "layers" / "dense.py").write_text("y = 3")
    assert next(blobs_of(job)).sha256 != one.sha256


def test_an_empty_directory_arrives(tmp_path):
    """An input that holds nothing yet is there all the same."""
    (tmp_path / "data").mkdir()
    answer = store(blob("inputs.train", str(tmp_path / "data")), tmp_path / "w")
    assert list(Path(answer["path"]).iterdir()) == []


def test_a_file_arrives_once(tmp_path):
    """Asked first, it is not there, then it is; a second upload changes nothing and leaves nothing."""
    (tmp_path / "ctr.py").write_text("print('hello')\n")
    one, workdir = blob("program", str(tmp_path / "ctr.py")), tmp_path / "w"
    assert store(one, workdir, b"", only_ask=True)["is_there"] is False
    assert not (workdir / "blobs").exists(), "asking makes nothing"
    path = Path(store(one, workdir)["path"])
    assert path.name == "ctr.py"
    assert path.read_text() == "print('hello')\n"
    assert store(one, workdir, b"", only_ask=True) == {"type": "blob", "path": str(path), "is_there": True}
    assert store(one, workdir)["path"] == str(path)
    assert [p.name for p in (workdir / "blobs").iterdir()] == [one.sha256]


def test_the_same_content_under_another_name(tmp_path):
    """A program that was renamed, or two empty files: both are there."""
    paths = []
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("x = 1\n")
        paths.append(Path(store(blob("program", str(tmp_path / name)), tmp_path / "w")["path"]))
    assert [p.name for p in paths] == ["one.py", "two.py"]
    assert all(p.read_text() == "x = 1\n" for p in paths)


def left_over(workdir: Path) -> list[Path]:
    return list((workdir / "blobs").iterdir()) if (workdir / "blobs").exists() else []


@pytest.mark.parametrize("kind", ["wrong hash", "cut short", "nothing"])
def test_what_arrives_damaged_is_refused_and_leaves_nothing(tmp_path, kind):
    """The next try begins anew."""
    (tmp_path / "ctr.py").write_text("print('hello')\n")
    one, workdir = blob("program", str(tmp_path / "ctr.py")), tmp_path / "w"
    content = {"wrong hash": b"PRINT('hello')\n", "cut short": one.content()[:-1], "nothing": b""}[kind]
    with pytest.raises(RefusedError, match="damaged" if kind == "wrong hash" else "cut short") as caught:
        store(one, workdir, content)
    assert caught.value.transient
    assert left_over(workdir) == []
    assert store(one, workdir)["is_there"]


def evil(kind: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("x")
        match kind:
            case "parent":
                info.name = "../../evil"
            case "absolute":
                info.name = "/tmp/tfps-evil"
            case "hidden parent":
                info.name = "a/../../evil"
            case "sibling with the same beginning":
                info.name = "../data-evil"
            case "symbolic link":
                info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            case "hard link":
                info.type, info.linkname = tarfile.LNKTYPE, "/etc/passwd"
            case "device":
                info.type = tarfile.CHRTYPE
            case "pipe":
                info.type = tarfile.FIFOTYPE
            case "through a link":
                link = tarfile.TarInfo("link")
                link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
                archive.addfile(link)
                info.name = "link/tfps-evil"
        info.size = 4 if info.type == tarfile.REGTYPE else 0
        archive.addfile(info, io.BytesIO(b"evil"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "kind",
    [
        "parent",
        "absolute",
        "hidden parent",
        "sibling with the same beginning",
        "symbolic link",
        "hard link",
        "device",
    ]
    + ["pipe", "through a link"],
)
def test_an_archive_stays_in_its_folder(tmp_path, kind):
    """Regular files and folders below it; everything else is refused, and nothing of it stays."""
    content, workdir = evil(kind), tmp_path / "w"
    digest = hashlib.sha256(content).hexdigest()[:16]
    request = {"workdir": str(workdir), "name": "data", "sha256": digest, "size": len(content), "kind": "tar"}
    with pytest.raises(RefusedError, match="does not belong"):
        put(request, io.BytesIO(content))
    assert left_over(workdir) == []
    assert not list(tmp_path.rglob("*evil*"))
    assert not Path("/tmp/tfps-evil").exists()


@pytest.mark.parametrize("kind", ["file", "tar"])
@pytest.mark.parametrize("place", ["folder", "blob", "dangling"])
def test_a_link_in_the_place_of_an_upload_is_refused(tmp_path, kind, place):
    """What runs is what was sent: nothing is taken from, or written to, where a link leads."""
    content = b"print(1)" if kind == "file" else good_tar()
    digest = hashlib.sha256(content).hexdigest()[:16]
    workdir, elsewhere = tmp_path / "w", tmp_path / "elsewhere"
    (workdir / "blobs").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "x.py").write_text("evil")
    if place == "folder":
        (workdir / "blobs" / digest).symlink_to(elsewhere)
    else:
        (workdir / "blobs" / digest).mkdir()
        target = elsewhere / ("x.py" if place == "blob" else "nothing")
        (workdir / "blobs" / digest / "x.py").symlink_to(target)
    request = {"workdir": str(workdir), "name": "x.py", "sha256": digest, "size": len(content), "kind": kind}
    for more in ({"only_ask": True}, {}):
        with pytest.raises(RefusedError, match="is a symbolic link, which no upload makes") as caught:
            put({**request, **more}, io.BytesIO(content))
        assert caught.value.code == "workdir"
    assert sorted(p.name for p in elsewhere.iterdir()) == ["x.py"]
    assert (elsewhere / "x.py").read_text() == "evil"
    assert not list(workdir.rglob("*.tmp"))


def good_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["file", "folder", "from a folder below"])
def test_a_link_out_of_an_uploaded_folder_is_refused(tmp_path, kind):
    """It would bring what nobody named: a key of the worker's user, say. A link inside, and one that is named, is fine."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "id_ed25519").write_text("the key")
    folder = tmp_path / "job" / "package"
    (folder / "below").mkdir(parents=True)
    (folder / "real.py").write_text("x = 1")
    (folder / "below" / "inside.py").symlink_to("../real.py")
    (tmp_path / "job" / "train.py").write_text("import package")
    (tmp_path / "job" / "linked.py").symlink_to(tmp_path / "secret" / "id_ed25519")
    found = blob(
        "script", str(tmp_path / "job" / "train.py"), (str(folder), str(tmp_path / "job" / "linked.py"))
    )
    with tarfile.open(fileobj=io.BytesIO(found.content())) as archive:
        names = archive.getnames()
    assert set(names) == {"train.py", "package/real.py", "package/below/inside.py", "linked.py"}
    place = folder / "below" if kind == "from a folder below" else folder
    target = tmp_path / "secret" / ("" if kind == "folder" else "id_ed25519")
    (place / "innocent").symlink_to(target)
    if kind == "folder":  # is not followed, whatever Python does
        with tarfile.open(fileobj=io.BytesIO(blob("inputs.x", str(folder)).content())) as archive:
            names = archive.getnames()
        assert not [n for n in names if "id_ed25519" in n]
        return
    for key, path, beside in (
        ("script", tmp_path / "job" / "train.py", (str(folder),)),
        ("inputs.x", folder, ()),
    ):
        with pytest.raises(SpecError, match=r"innocent is a symbolic link to .*id_ed25519, outside of"):
            blob(key, str(path), beside)


@pytest.mark.parametrize("content", [b"", b"no archive at all", evil("parent")[:100], b"\0" * 300])
def test_what_is_no_archive_is_refused(tmp_path, content):
    """With a reason, as any other refusal."""
    digest = hashlib.sha256(content).hexdigest()[:16]
    request = {
        "workdir": str(tmp_path / "w"),
        "name": "data",
        "sha256": digest,
        "size": len(content),
        "kind": "tar",
    }
    with pytest.raises(RefusedError, match="archive|belong"):
        put(request, io.BytesIO(content))
    assert left_over(tmp_path / "w") == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", n) for n in ("", ".", "..", "a/b", "/etc/passwd", "../x", "a\0b")]
    + [("sha256", h) for h in ("", "..", "a/b", "x" * 16, "0" * 15, "0" * 65, "A" * 16, "٣" * 16)]
    + [("size", s) for s in (-1, None, "5", 1.5, True)],
)
def test_a_request_that_would_leave_the_blobs_is_refused(tmp_path, key, value):
    """Names and hashes become paths."""
    request = {
        "workdir": str(tmp_path),
        "name": "x",
        "sha256": "0" * 16,
        "size": 0,
        "kind": "file",
        key: value,
    }
    with pytest.raises(ProtocolError):
        put(request, io.BytesIO(b""))
    assert list(tmp_path.iterdir()) == []


def test_what_a_job_needs_is_found(tmp_path):
    """Program or script and local inputs, relative to the job's folder; what is on the hosts is left alone."""
    (tmp_path / "ctr.py").write_text("")
    (tmp_path / "labels.txt").write_text("a\n")
    make_tree(tmp_path / "train")
    job = JobSpec.from_dict(
        {
            "program": "ctr.py",
            "roles": {"ps": 1, "worker": 1},
            "inputs": {
                "train": "train",
                "labels": f"file://{tmp_path}/labels.txt",
                "eval": "host:/data/eval",
            },
        },
        base_dir=tmp_path,
    )
    found = {b.key: b for b in blobs_of(job)}
    assert {key: (b.name, b.kind) for key, b in found.items()} == {
        "program": ("ctr.py", "file"),
        "inputs.train": ("train", "tar"),
        "inputs.labels": ("labels.txt", "file"),
    }
    assert found["inputs.labels"].sha256 == hashlib.sha256(b"a\n").hexdigest()[:16]
    assert blob_path("/w", found["program"].sha256, "ctr.py").endswith("/ctr.py")
