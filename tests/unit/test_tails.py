"""Files that TF tasks append to while an agent reads: offsets over rotations, torn lines, acknowledgements."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st
from tfps_runtime import tails
from tfps_runtime.protocol import Progress
from tfps_runtime.tails import CHUNK, Acknowledged, LogFile, ProgressFile


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "log")


class Writer:
    """What a TF task's descriptor is: opened once, for appending."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, text: str | bytes) -> None:
        os.write(self._fd, text.encode() if isinstance(text, str) else text)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._fd)


def read_all(log: LogFile, offset: int = 0, *, is_complete: bool = False) -> tuple[int, list[str]]:
    lines = []
    while True:
        after, more = log.read_lines(offset, is_complete=is_complete)
        if after == offset:
            return offset, lines
        offset, lines = after, lines + more


# --- lines ------------------------------------------------------------------------------------------------------------


def test_lines_come_whole_and_once(path):
    """The offset after them is where the next reading goes on; a torn line waits for its end."""
    log = LogFile(path)
    assert log.read_lines(0) == (0, [])
    assert log.size() == 0
    with Writer(path) as writer:
        writer.write("one\ntwo\nthr")
        assert log.read_lines(0) == (8, ["one", "two"])
        assert log.read_lines(8) == (8, [])
        writer.write("ee\n")
        assert log.read_lines(8) == (14, ["three"])


def test_a_last_line_without_an_end_comes_when_the_writer_is_gone(path):
    """A traceback's last words need no newline."""
    log = LogFile(path)
    with Writer(path) as writer:
        writer.write("one\nkilled in the mid")
    assert log.read_lines(4) == (4, [])
    assert log.read_lines(4, is_complete=True) == (21, ["killed in the mid"])


def test_a_line_longer_than_a_chunk_does_not_block(path):
    """It comes in pieces, of which none is lost."""
    text = "x" * (3 * CHUNK + 5)
    with Writer(path) as writer:
        writer.write(f"{text}\nafter\n")
    _, lines = read_all(LogFile(path))
    assert "".join(lines) == text + "after"
    assert lines[-1].endswith("after")


def test_bytes_that_are_no_text_are_replaced(path):
    """A program may print anything."""
    with Writer(path) as writer:
        writer.write(b"\xff\xfe bad\n\0\n")
    assert LogFile(path).read_lines(0)[1] == ["\ufffd\ufffd bad", "\0"]


def test_an_offset_beyond_the_end_waits(path):
    """A follower of another time asks for what is not there yet."""
    with Writer(path) as writer:
        writer.write("one\n")
        assert LogFile(path).read_lines(1000) == (1000, [])


# --- rotation -----------------------------------------------------------------------------------------------------------


def test_offsets_count_from_the_first_byte_ever_written(path):
    """A rotation between two readings is not noticed by the reader."""
    log = LogFile(path)
    with Writer(path) as writer:
        writer.write("one\ntwo\n")
        assert log.read_lines(0, is_complete=False)[0] == 8
        assert log.rotate_if_large(8)
        assert not log.rotate_if_large(8), "there is nothing in it any more"
        assert log.size() == 8
        writer.write("three\n")
        assert log.read_lines(8) == (14, ["three"])
        assert log.read_lines(4) == (14, ["two", "three"])
        assert LogFile(path).read_lines(8) == (14, ["three"]), "another process, later, counts the same"


def test_a_line_that_the_rotation_cut_through_is_whole(path):
    """The writer was in the middle of a line: it must neither be torn nor hold up everything after it."""
    log = LogFile(path)
    with Writer(path) as writer:
        writer.write("one\nhalf ")
        assert log.read_lines(0) == (4, ["one"])
        assert log.rotate_if_large(1)
        assert log.read_lines(4) == (4, [])
        writer.write("and half\nnext\n")
        assert log.read_lines(4) == (23, ["half and half", "next"])


def test_what_was_rotated_away_twice_goes_on_at_the_oldest_byte(path):
    """A follower that was away for long misses the beginning, not the rest."""
    log = LogFile(path)
    with Writer(path) as writer:
        for line in ("one\n", "two\n", "six\n"):
            writer.write(line)
            if line != "six\n":
                assert log.rotate_if_large(1)
    assert log.read_lines(0) == (12, ["two", "six"])
    os.unlink(path + ".1")
    assert log.read_lines(0) == (12, ["six"])


def test_rotation_survives_a_disk_that_has_no_room_for_a_copy(path):
    """Then the part before goes, to make room; the agent must not fall over, and nothing of the log is lost."""
    log = LogFile(path)
    with Writer(path) as writer:
        writer.write("one\n")
        assert log.rotate_if_large(1)
        writer.write("two\n")
        os.mkdir(path + ".1.tmp")  # copying fails
        assert not log.rotate_if_large(1)
        assert log.size() == 8
        assert log.read_lines(4) == (8, ["two"])
        assert not os.path.exists(path + ".1")
        os.rmdir(path + ".1.tmp")
        assert log.rotate_if_large(1)
        assert log.read_lines(4) == (8, ["two"])


def test_rotation_beside_a_writer_keeps_order_and_offsets(path):
    """No line twice, none out of order, the last one there; lost is only what falls between copy and cut."""
    count, log, told, offset, rotations = 30_000, LogFile(path), [], 0, 0
    code = "import os\nfor i in range(%d): os.write(1, b'line %%d\\n' %% i)" % count
    with open(path, "ab") as output, subprocess.Popen([sys.executable, "-c", code], stdout=output) as writer:
        while writer.poll() is None or offset < log.size():
            rotations += log.rotate_if_large(40_000)
            offset, lines = log.read_lines(offset)
            told += lines
    whole = [int(line.split()[1]) for line in told if re.fullmatch(r"line \d+", line)]
    assert rotations > 2
    assert len(whole) > count / 2
    assert whole[-1] == count - 1
    # A cut may join the beginning of one line with the end of another.
    assert sum(a >= b for a, b in itertools.pairwise(whole)) <= rotations
    assert len(told) - len(whole) <= rotations


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text("ab\n", max_size=12), st.booleans(), st.booleans()), max_size=30))
def test_any_mix_of_writing_reading_and_rotating_gives_every_byte_once(tmp_path_factory, script):
    """One rotation between two readings, wherever it cuts: the reader sees what was written."""
    path = str(tmp_path_factory.mktemp("any") / "log")
    log, offset, told, written, may_rotate = LogFile(path), 0, [], "", True
    with Writer(path) as writer:
        for text, rotates, reads in script:
            writer.write(text)
            written += text
            if rotates and may_rotate and log.rotate_if_large(1):
                may_rotate = False  # two of them before a reading throw the first part away
            if reads:
                offset, lines = read_all(log, offset)
                told += lines
                may_rotate = offset >= log.size() - os.stat(path).st_size
    _, lines = read_all(log, offset, is_complete=True)
    assert told + lines == written.splitlines()


# --- tails ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [0, 1, 3, 500, 5000])
def test_the_tail_is_the_end(path, lines):
    """As many lines as wanted, over a rotation as well."""
    log = LogFile(path)
    with Writer(path) as writer:
        for i in range(1000):
            writer.write(f"line {i}\n")
            if i == 700:
                log.rotate_if_large(1)
        writer.write("no newline")
    expected = [*(f"line {i}" for i in range(1000)), "no newline"]
    assert log.tail(lines) == (expected[-lines:] if lines else [])


def test_the_tail_of_nothing(path):
    """A task that never started has no log."""
    assert LogFile(path).tail(5) == []


def test_the_tail_is_bounded(path):
    """Endless output is not read as a whole."""
    with Writer(path) as writer:
        for _ in range(40):
            writer.write("x" * 65536)
    assert sum(map(len, LogFile(path).tail(100))) <= 256 * 1024


# --- progress -----------------------------------------------------------------------------------------------------------------


def record(step: int, **more) -> bytes:
    return json.dumps({"time": 1.0, "global_step": step, **more}).encode() + b"\n"


def test_progress_comes_as_it_is_written(path):
    """Each record once, the newest is remembered, a torn one waits."""
    file = ProgressFile(path)
    assert file.read() == []
    with Writer(path) as writer:
        writer.write(record(1) + record(2)[:10])
        assert [r.global_step for r in file.read()] == [1]
        writer.write(record(2)[10:])
        assert [r.global_step for r in file.read()] == [2]
    assert file.read() == []
    assert file.newest.global_step == 2


@pytest.mark.parametrize(
    "line",
    [b"nonsense\n", b"{}\n", b"\n", b"\xff\n", b"[1]\n", record(5, loss=float("nan")), record(5, color="red")]
    + [
        b'{"time": ' + b"9" * 500 + b', "global_step": 1}\n',
        b'{"time": 1, "global_step": 1.5}\n',
        b"[" * 9999 + b"\n",
    ],
)
def test_what_is_no_progress_is_passed_over(path, line):
    """A program writes its own file; its records must not end the agent that reads them."""
    file = ProgressFile(path)
    with Writer(path) as writer:
        writer.write(record(1) + line + record(2))
    assert [r.global_step for r in file.read()] == [1, 2]


def test_an_endless_line_of_progress_is_passed_over(path):
    """It is never a record, and must not be read again and again."""
    file = ProgressFile(path)
    with Writer(path) as writer:
        writer.write(b"x" * (3 << 20))
        for _ in range(4):
            assert file.read() == []
        writer.write(b"\n" + record(3))
    assert [r.global_step for r in [*file.read(), *file.read()]] == [3]


def test_progress_of_an_earlier_life_is_not_news(path):
    """A training that is reserved again in the same directory has not advanced yet."""
    with Writer(path) as writer:
        writer.write(record(1))
        file = ProgressFile(path)
        assert file.read() == []
        assert file.newest is None
        writer.write(record(2))
    assert [r.global_step for r in file.read()] == [2]


def test_what_is_appended_for_a_script_is_read_like_any_other(path):
    """The agent writes what it found in the log."""
    file = ProgressFile(path)
    file.append(Progress(time=2.0, global_step=9, loss=0.5))
    assert file.read() == [Progress(time=2.0, global_step=9, loss=0.5)]


# --- acknowledgements --------------------------------------------------------------------------------------------------------


def test_acknowledgements_outlive_the_agent_and_never_go_back(path):
    """Late ones, of a follower that is gone, do not make lines come twice."""
    first = Acknowledged(path)
    assert first.get("ps:0") == 0
    first.put("ps:0", 100)
    first.put("ps:0", 50)
    first.put("worker:0", 7)
    second = Acknowledged(path)
    assert (second.get("ps:0"), second.get("worker:0"), second.get("worker:1")) == (100, 7, 0)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"ps:0": "x"}', "\xff", "null"])
def test_acknowledgements_that_cannot_be_read(path, content):
    """Lines come again then; better twice than never."""
    with open(path, "w", encoding="latin-1") as file:
        file.write(content)
    one = Acknowledged(path)
    assert one.get("ps:0") == 0
    one.put("ps:0", 3)
    assert Acknowledged(path).get("ps:0") == 3


def test_a_log_is_rotated_before_it_fills_the_disk():
    """The limit and the part before it: 128 MiB a task at most."""
    assert 2 * tails.ROTATE_BYTES <= 128 * 1024 * 1024
