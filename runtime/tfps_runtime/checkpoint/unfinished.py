"""What saves and clean-ups that were killed have left beside the checkpoints; standard library only.

TensorFlow writes each file under another name and renames it, the index last; its clean-up (`max_to_keep`) deletes the
index first. So files of a checkpoint that has no index are of no use to anybody, and each may be as large as the model.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil


def remove_unfinished(directory: str, name: str) -> list[str]:
    """Remove what no save under `name` will finish any more; the names of what was removed, sorted.

    For the directory's only writer, when it saves nothing. Whatever has an index stays, complete or not, and so does
    what TensorFlow does not write under that name (`tensor_bundle.cc`, `atomic_write_string_to_file`: `.tempstate…`,
    `.tmp…`; sharded: a folder `…_temp`). A missing directory has nothing. What cannot be removed stays, silently.
    """
    try:
        names = set(os.listdir(directory))
    except OSError:
        return []
    save = rf"(?P<prefix>{re.escape(name)}-\d+)"
    part = re.compile(rf"{save}(\.(data-\d{{5}}-of-\d{{5}}|index)\.tempstate\d+|\.meta\.tmp\w+|_temp)")
    state = re.compile(r"checkpoint\.tmp\w+")
    orphan = re.compile(rf"{save}\.(data-\d{{5}}-of-\d{{5}}|meta)")
    removed = []
    for found in sorted(names):
        is_orphan = orphan.fullmatch(found)
        if is_orphan is not None and f"{is_orphan['prefix']}.index" in names:
            continue
        if is_orphan is None and part.fullmatch(found) is None and state.fullmatch(found) is None:
            continue
        path = os.path.join(directory, found)
        with contextlib.suppress(OSError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
            removed.append(found)
    return removed
