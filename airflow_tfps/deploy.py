"""What is brought to hosts: the runtime as one `.pyz`, programs and inputs by the hash of their contents.

Builds bytes and names; touches no host (`hook` does). Imports the runtime's location and `protocol` only.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import tarfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tfps_runtime

from airflow_tfps.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from airflow_tfps.spec import JobSpec

_ENTRY = "import sys\n\nfrom tfps_runtime.__main__ import main\n\nsys.exit(main())\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)
HASH_DIGITS = 16

INSTALL = """
import os, sys, tempfile
os.umask(0o077)
path = os.path.expanduser(sys.argv[1])
content = sys.stdin.buffer.read()
if len(content) != int(sys.argv[2]):
    sys.exit("the upload was cut short")
os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
fd, temporary = tempfile.mkstemp(".tmp", dir=os.path.dirname(path))
with open(fd, "wb") as file:
    file.write(content)
os.replace(temporary, path)
"""
"""Python source that stores standard input at its first argument; the second is how many bytes there must be.

How the `.pyz` itself reaches a host. A connection that breaks looks like the end of the input.
"""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The on-host runtime as one file, named by the hash of its contents."""

    content: bytes
    hash: str


@functools.cache
def build_runtime() -> Runtime:
    """Zip the installed `tfps_runtime`: the same sources give the same bytes, on any machine."""
    root = Path(tfps_runtime.__file__).parent
    sources = sorted(p for p in root.rglob("*.py") if "__pycache__" not in p.parts)
    entries = {"__main__.py": _ENTRY.encode()}
    entries.update({f"tfps_runtime/{p.relative_to(root).as_posix()}": p.read_bytes() for p in sources})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(entries):
            archive.writestr(_entry(name), entries[name])
    content = buffer.getvalue()
    digest = hashlib.sha256()
    for name in sorted(entries):
        digest.update(f"{name}\0{len(entries[name])}\0".encode() + entries[name])
    return Runtime(content=content, hash=digest.hexdigest()[:HASH_DIGITS])


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.external_attr = 0o600 << 16
    info.compress_type = zipfile.ZIP_STORED  # inflating costs each command more than the upload costs once
    return info


def assess_script() -> Path:
    """The script of an evaluation: part of the runtime, run like any other script."""
    return Path(tfps_runtime.__file__).parent / "training" / "assess.py"


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A program or an input, as it travels: its bytes come from `open`, hash and size are known before."""

    key: str
    """`program`, `script` or `inputs.NAME`."""
    name: str
    sha256: str
    size: int
    kind: str
    """`file`, or `tar` for a directory."""
    path: str
    beside: tuple[str, ...] = ()
    """Files and folders that go into one folder with `path`."""

    @property
    def entry(self) -> str:
        """What is meant of an uploaded folder: the program in it, or nothing, the folder itself."""
        return Path(self.path).name if self.beside else ""

    def request(self, workdir: str) -> dict[str, Any]:
        """The request of the on-host command `put`."""
        return {
            "workdir": workdir,
            "name": self.name,
            "sha256": self.sha256,
            "size": self.size,
            "kind": self.kind,
        }

    def content(self) -> bytes:
        """The bytes to send. Reads the whole file."""
        if self.beside:
            return _archive(*map(Path, (self.path, *self.beside)))
        source = _open(self.path)
        return _archive(source, is_content=True) if self.kind == "tar" else source.read_bytes()


def _open(path: str) -> Any:
    if "://" in path and not path.startswith("file://"):
        from airflow.sdk import ObjectStoragePath

        return ObjectStoragePath(path)
    return Path(path.removeprefix("file://"))


def blobs_of(job: JobSpec) -> Iterator[Blob]:
    """What must be uploaded for a job: its program or script, and every input that is not on the hosts already."""
    for key, path in (("program", job.program), ("script", job.script)):
        if path is not None:
            beside = tuple(str(job.local_path(file)) for file in job.files)
            yield blob(key, str(job.local_path(path)), beside)
    local = job.local_inputs
    for name, value in job.inputs.items():
        if not value.startswith("host:"):
            yield blob(f"inputs.{name}", str(local.get(name, value)))


def blob(key: str, path: str, beside: tuple[str, ...] = ()) -> Blob:
    """Hash a file or a directory, or a file with all that goes beside it.

    Raises OSError when one cannot be read, SpecError for links in a directory that lead out of it.
    """
    source = _open(path)
    is_tar = bool(beside) or source.is_dir()
    name = Path(path).stem if beside else source.name
    made = Blob(
        key=key, name=name, sha256="", size=0, kind="tar" if is_tar else "file", path=path, beside=beside
    )
    content = made.content()
    digest = hashlib.sha256(content).hexdigest()[:HASH_DIGITS]
    return replace(made, sha256=digest, size=len(content))


def _refuse_links_out_of(root: Any, paths: Iterable[Any]) -> None:
    """A link in a folder would bring to the hosts what nobody named: a key, say. Raises SpecError."""
    if not isinstance(root, Path):
        return
    inside = root.resolve()
    faults = [
        f"{path} is a symbolic link to {target}, outside of {root}; copy it there, or name it by itself"
        for path in paths
        if not (target := path.resolve()).is_relative_to(inside)
    ]
    if faults:
        raise SpecError("upload", faults)


def _archive(*roots: Any, is_content: bool = False) -> bytes:
    """Files and directories as a tar whose bytes depend on names and contents only; regular files.

    With `is_content` it is all that the one root holds; otherwise each root keeps its name, and bytecode stays here.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for root in roots:
            paths = {
                os.path.relpath(str(path), str(root if is_content else root.parent)): path
                for path in ([root] if root.is_file() else root.rglob("*"))
                if path.is_file()
            }
            _refuse_links_out_of(root, paths.values())
            for name, path in sorted(paths.items()):
                if is_content or "__pycache__" not in Path(name).parts:
                    content = path.read_bytes()
                    info = tarfile.TarInfo(name)
                    info.size, info.mode = len(content), 0o600
                    archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
