"""Complete checkpoints in object storage, through Airflow's ObjectStoragePath. Everything here blocks.

Object stores list names with sizes, and what is listed is whole: no rename is needed. Reads indices only, each once.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from tfps_runtime.checkpoint import (
    MAX_INDEX_BYTES,
    Checkpoint,
    CheckpointError,
    FileStatus,
    complete_in,
    parse_index,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
"""Names that the file systems of fsspec give to the time of the last change."""
_IDENTITIES = ("ETag", "etag", "md5Hash", "generation", "ino")
MAX_KEPT = 1000


class Storage:
    """A directory in object storage, `scheme://[connection@]bucket/path`.

    Raises ValueError or ImportError when its scheme is unknown, or the provider for it is not installed.
    """

    def __init__(self, url: str) -> None:
        from airflow.sdk import ObjectStoragePath

        self._url = url.rstrip("/")
        path = ObjectStoragePath(self._url)
        self._fs: Any = path.fs
        self._path = str(path.path)
        self._needs: dict[tuple[str, object], Mapping[int, int] | None] = {}

    def complete(self) -> list[Checkpoint]:
        """Complete checkpoints, by global step; their prefixes are URLs. Raises OSError when it cannot be reached."""
        self._fs.invalidate_cache()
        files = {}
        try:
            listed = self._fs.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        for info in listed:
            if info.get("type") == "file":
                name = str(info["name"]).rpartition("/")[2]
                files[name] = self._status(info, name)
        return [
            Checkpoint(f"{self._url}/{c.prefix}", c.global_step, c.size, c.time)
            for c in complete_in(files, self._needed)
        ]

    def _status(self, info: Mapping[str, Any], name: str) -> FileStatus:
        size = int(info.get("size") or 0)
        changed = 0.0
        if name.endswith(".index"):
            said = next((info[key] for key in _TIMES if info.get(key) is not None), None)
            changed = _seconds(self._fs.modified(info["name"]) if said is None else said)
        identity = next((info[key] for key in _IDENTITIES if info.get(key) is not None), None)
        return FileStatus(size, changed, (size, changed, str(identity)))

    def _needed(self, name: str, status: FileStatus) -> Mapping[int, int] | None:
        key = (name, status.identity)
        if key not in self._needs:
            if len(self._needs) >= MAX_KEPT:
                self._needs.clear()
            self._needs[key] = self._read(name, status)
        return self._needs[key]

    def _read(self, name: str, status: FileStatus) -> Mapping[int, int] | None:
        if status.size > MAX_INDEX_BYTES:
            return None
        try:
            return parse_index(self._fs.cat_file(f"{self._path.rstrip('/')}/{name}")).needed_bytes()
        except (CheckpointError, FileNotFoundError):
            return None


def _seconds(said: Any) -> float:
    """Seconds since the epoch, of what a file system calls the time of a file."""
    if isinstance(said, str):
        said = datetime.fromisoformat(said)
    return said.timestamp() if isinstance(said, datetime) else float(said)
