"""Programs and inputs that come over standard input and are stored by the hash of their contents.

Standard library only. What arrives is checked against its hash; an archive may hold regular files below its own folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tarfile
import tempfile
from typing import Any, BinaryIO

from tfps_runtime.followers import integer
from tfps_runtime.protocol import ProtocolError, RefusedError, blob_path, is_text

_HASH = re.compile(r"[0-9a-f]{16,64}\Z")


def put(request: dict[str, Any], content: BinaryIO) -> dict[str, Any]:
    """Store what follows on standard input under its hash, unless it is there; answers with its `path`.

    `kind` is `file` or `tar` (unpacked; regular files and folders below the blob only). Raises RefusedError when what
    arrives is not what `sha256` says.
    """
    workdir = os.path.expanduser(str(request["workdir"]))
    if not os.path.isabs(workdir):
        raise ProtocolError(f"not an absolute path: {workdir[:80]!r}")
    name, expected, size = str(request["name"]), str(request["sha256"]), integer(request.get("size"))
    if (
        not _HASH.match(expected)
        or name in ("", ".", "..")
        or "/" in name
        or "\0" in name
        or not is_text(name)
    ):
        raise ProtocolError(f"not a blob: {expected[:80]!r} {name[:80]!r}")
    target = blob_path(workdir, expected, name)
    for place in (os.path.dirname(target), target):
        if os.path.islink(place):
            raise RefusedError("workdir", f"{place} is a symbolic link, which no upload makes; remove it")
    if request.get("only_ask"):
        note_use(os.path.dirname(target))
        return {"type": "blob", "path": target, "is_there": os.path.exists(target)}
    os.makedirs(os.path.join(workdir, "blobs"), mode=0o700, exist_ok=True)
    folder = os.path.dirname(target)
    temporary = tempfile.mkdtemp(prefix=f"{expected}.", suffix=".tmp", dir=os.path.dirname(folder))
    is_tar = request.get("kind") == "tar"
    try:
        arrived = os.path.join(temporary, f"{name}.tar" if is_tar else name)
        digest = hashlib.sha256()
        with open(arrived, "wb") as file:
            left = size
            while left:
                chunk = content.read(min(left, 1 << 20))
                if not chunk:
                    raise RefusedError("bad_request", f"{name}: the upload was cut short", transient=True)
                digest.update(chunk)
                file.write(chunk)
                left -= len(chunk)
        if digest.hexdigest()[: len(expected)] != expected:
            raise RefusedError("bad_request", f"{name}: the upload arrived damaged", transient=True)
        if is_tar:
            _unpack(arrived, os.path.join(temporary, name))
            os.unlink(arrived)
        _move(temporary, folder, name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"type": "blob", "path": target, "is_there": True}


def note_use(path: str) -> None:
    """Let a program, an input or a runtime count as used now: what was not for long is swept. Absent is no error."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _move(temporary: str, folder: str, name: str) -> None:
    """Put what has arrived in its place. Somebody else may have done so; another name may have the same content."""
    try:
        os.rename(temporary, folder)
    except OSError:
        target = os.path.join(folder, name)
        if not os.path.exists(target):
            os.rename(os.path.join(temporary, name), target)
        note_use(folder)


def _unpack(archive: str, target: str) -> None:
    os.mkdir(target, 0o700)
    try:
        _unpack_members(archive, target)
    except (tarfile.TarError, EOFError) as error:
        raise RefusedError("bad_request", f"not an archive: {error}") from None


def _unpack_members(archive: str, target: str) -> None:
    with tarfile.open(archive, "r:") as tar:
        for member in tar.getmembers():
            path = os.path.normpath(os.path.join(target, member.name))
            if not (member.isreg() or member.isdir()) or not (path + os.sep).startswith(target + os.sep):
                raise RefusedError("bad_request", f"{member.name[:80]!r} does not belong into an upload")
            if member.isdir():
                os.makedirs(path, mode=0o700, exist_ok=True)
                continue
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with open(path, "wb") as file:
                shutil.copyfileobj(source, file)
