r"""The state file `checkpoint`: which checkpoint is the newest; standard library only.

A text protocol buffer CheckpointState (tensorflow/python/training/checkpoint_state.proto): a line
`model_checkpoint_path: "model.ckpt-1200"`, one `all_model_checkpoint_paths` for each that the trainer keeps. Strings
are escaped as in C, bytes that are no ASCII as octal numbers: `"\303\244-1"`.
"""

from __future__ import annotations

import os
import re
from typing import Optional

STATE_FILE = "checkpoint"
MAX_STATE_BYTES = 1024 * 1024
_LINE = re.compile(
    rb'^\s*(?P<field>model_checkpoint_path|all_model_checkpoint_paths)\s*:\s*"(?P<path>(?:[^"\\]|\\.)*)"'
)
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)")
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


def read_state(directory: str) -> tuple[Optional[str], list[str]]:
    """The state file's newest path and all its paths, re-based on `directory`; (None, []) without a state file.

    Absolute paths in the file are of the machine and folder where it was written; what counts is the last part.
    """
    newest, paths = None, []
    try:
        with open(os.path.join(directory, STATE_FILE), "rb") as file:
            text = file.read(MAX_STATE_BYTES)
    except OSError:
        return None, []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is not None:
            name = os.path.basename(os.fsdecode(_ESCAPE.sub(_unescape, found["path"])))
            path = os.path.join(directory, name)
            if found["field"] == b"model_checkpoint_path":
                newest = path
            else:
                paths.append(path)
    return newest, paths


def write_state(directory: str, name: str) -> None:
    """Write a state file that names one checkpoint of `directory`, relative to it, where nobody reads yet."""
    text = "".join(_escape(byte) for byte in os.fsencode(name))
    with open(os.path.join(directory, STATE_FILE), "w", encoding="ascii") as file:
        file.write(f'model_checkpoint_path: "{text}"\nall_model_checkpoint_paths: "{text}"\n')


def _escape(byte: int) -> str:
    character = chr(byte)
    if character in '"\\' or not 32 <= byte < 127:
        return f"\\{byte:03o}"
    return character


def _unescape(found: re.Match[bytes]) -> bytes:
    what = found[1]
    if what[:1] == b"x" and len(what) > 1:
        return bytes([int(what[1:], 16)])
    if what[:1].isdigit() and what[:1] < b"8":
        return bytes([int(what, 8) & 0xFF])
    return _LETTERS.get(what, what)
