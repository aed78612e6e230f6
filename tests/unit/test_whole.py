"""Small files that appear whole or not at all, and what killed writers leave."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tfps_runtime.whole import clear_parts, write_new, write_whole

RUNTIME = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "runtime")}


def begin(path: Path, function: str, instead: str) -> subprocess.Popen[str]:
    """A process that writes `new` to a file, and does something else where it would rename."""
    code = f"""
import os, signal, sys
rename = os.replace
def put(*names):
    {instead}
os.replace = os.link = put
from tfps_runtime.whole import {function}
{function}(sys.argv[1], "new")
"""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=RUNTIME,
    )  # fmt: skip


@pytest.mark.parametrize("function", ["write_whole", "write_new"])
def test_a_writer_killed_before_the_rename_is_cleared_away(tmp_path, function):
    """The file is what it was; the next one who writes to the directory, whatever file, clears the rest."""
    path = tmp_path / "file"
    if function == "write_whole":
        path.write_text("old")
    process = begin(path, function, "os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (part,) = tmp_path.glob("file.*.tmp")
    assert part.read_text() == "new"
    assert not path.exists() or path.read_text() == "old"
    write_whole(str(tmp_path / "other"), "text")
    assert {p.name for p in tmp_path.iterdir()} - {"file"} == {"other"}
    write_whole(str(path), "newest")
    assert path.read_text() == "newest"


def test_a_living_writer_is_left_alone(tmp_path):
    """While it lives its part stays, whoever clears, and then has its name."""
    path = tmp_path / "file"
    process = begin(path, "write_whole", "print(flush=True); sys.stdin.readline(); rename(*names)")
    process.stdout.readline()
    clear_parts(str(tmp_path))
    write_whole(str(path), "meanwhile")
    assert len(list(tmp_path.iterdir())) == 2
    process.communicate("\n")
    assert process.returncode == 0
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_part_cleared_before_it_was_locked_is_made_anew(tmp_path, monkeypatch, is_slow):
    """Somebody who clears may lock a part that is not locked yet, and remove it, at once or only before the rename."""
    make, put, cleared = os.open, os.replace, []

    def made(path, flags, *args, **more):
        fd = make(path, flags, *args, **more)
        if flags & os.O_EXCL and not cleared:
            cleared.append((path, make(path, os.O_RDONLY)))
            fcntl.flock(cleared[0][1], fcntl.LOCK_EX)
            if not is_slow:
                os.unlink(path)
                os.close(cleared[0][1])
        return fd

    def late(*names):
        if is_slow:
            Path(cleared[0][0]).unlink(missing_ok=True)
        put(*names)

    monkeypatch.setattr(os, "open", made)
    monkeypatch.setattr(os, "replace", late)
    path = tmp_path / "file"
    write_whole(str(path), "new")
    assert cleared
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_many_writers_and_clearers_lose_nothing(tmp_path):
    """Four threads write the same file while one clears: every write succeeds, and one file is left."""
    path, is_over, faults = tmp_path / "file", threading.Event(), []

    def write(number):
        try:
            for turn in range(100):
                write_whole(str(path), f"{number} {turn}")
        except OSError as error:
            faults.append(error)

    def clear():
        while not is_over.is_set():
            clear_parts(str(tmp_path))

    clearer = threading.Thread(target=clear)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in (clearer, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    is_over.set()
    clearer.join()
    assert faults == []
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text().endswith(" 99")


def test_what_is_no_part_stays(tmp_path):
    """Other names, links, pipes and folders are not ours; none of them stops who clears."""
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "a.12345678.tmp").mkdir()
    (tmp_path / "b.12345678.tmp").symlink_to(tmp_path / "kept")
    os.mkfifo(tmp_path / "c.12345678.tmp")
    for name in ("d.1234567.tmp", "e.12345678.tmp.gz", ".12345678.tmp", "f.1234567G.tmp"):
        (tmp_path / name).write_text("")
    (tmp_path / "z.12345678.tmp").write_text("")
    before = set(os.listdir(tmp_path))
    clear_parts(str(tmp_path))
    assert before - set(os.listdir(tmp_path)) == {"z.12345678.tmp"}
    assert (tmp_path / "kept").read_text() == "kept"
    clear_parts(str(tmp_path / "absent"))


def test_permissions_and_failures(tmp_path):
    """Private unless said otherwise; when it cannot be written, nothing is changed and nothing left."""
    path = tmp_path / "file"
    write_whole(str(path), "one")
    assert path.stat().st_mode & 0o777 == 0o600
    write_whole(str(path), "two", mode=0o644, is_durable=True)
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(FileExistsError):
        write_new(str(path), "three")
    with pytest.raises(IsADirectoryError):
        write_whole(str(tmp_path), "four")
    with pytest.raises(FileNotFoundError):
        write_whole(str(tmp_path / "absent" / "file"), "five")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]
    write_new(str(tmp_path / "another"), "six")
    assert sorted(os.listdir(tmp_path)) == ["another", "file"]
