"""What is brought to a host arrives whole or not at all. Real agents and processes; no TensorFlow, no SSH."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest
from agents import Refused


@pytest.mark.parametrize("kind", ["good", "wrong hash", "cut short", "traversal"])
def test_uploads_over_standard_input(host, kind):
    """What arrives is what was sent, or nothing."""
    content = b"print('hello')\n" * 10_000
    if kind == "traversal":
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            info = tarfile.TarInfo("../../../evil")
            info.size = 4
            archive.addfile(info, io.BytesIO(b"evil"))
        content = buffer.getvalue()
    request = {
        "workdir": str(host.workdir / "w"),
        "name": "x.py",
        "sha256": hashlib.sha256(b"other" if kind == "wrong hash" else content).hexdigest()[:16],
        "size": len(content),
        "kind": "tar" if kind == "traversal" else "file",
    }
    sent = content[:-1] if kind == "cut short" else content
    if kind == "good":
        assert Path(host.ask("put", request, sent)["path"]).read_bytes() == content
        assert host.ask("put", {**request, "only_ask": True})["is_there"]
        return
    with pytest.raises(Refused, match="damaged|cut short|does not belong"):
        host.ask("put", request, sent)
    assert list((host.workdir / "w" / "blobs").iterdir()) == []
    assert not list(host.workdir.rglob("evil"))
