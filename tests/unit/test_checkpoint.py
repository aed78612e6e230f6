"""Which checkpoints are complete: files as TensorFlow leaves them, halfway, moved, damaged and mixed up."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from pathlib import Path

import pytest
from bundles import TENSORS, index, save, save_sharded, varint, write_state
from tfps_runtime.checkpoint import (
    complete_checkpoints,
    latest_checkpoint,
    read_state,
    remove_unfinished,
    watch,
)
from tfps_runtime.checkpoint.table import TABLE_MAGIC


def steps(directory: Path) -> list[int]:
    return [checkpoint.global_step for checkpoint in complete_checkpoints(str(directory))]


# --- what is complete -----------------------------------------------------------------------------------------------


def test_a_complete_checkpoint_is_found_with_its_size_and_time(tmp_path):
    """Its prefix is what `Saver.restore` takes."""
    prefix = save(tmp_path, 1200)
    [found] = complete_checkpoints(str(tmp_path))
    assert (found.prefix, found.global_step) == (str(prefix), 1200)
    assert found.size == 1000 + Path(f"{prefix}.index").stat().st_size
    assert found.time == Path(f"{prefix}.index").stat().st_mtime


def test_a_sharded_checkpoint_is_found(tmp_path):
    """With all its shards, each as long as the index says."""
    save_sharded(tmp_path, 5)
    assert steps(tmp_path) == [5]


def test_steps_are_numbers(tmp_path):
    """ckpt-100 is newer than ckpt-99, and ckpt-9 older than both."""
    for step in (100, 9, 99):
        save(tmp_path, step)
    assert steps(tmp_path) == [9, 99, 100]
    assert latest_checkpoint(str(tmp_path)).global_step == 100


def test_the_state_file_does_not_matter(tmp_path):
    """Deleted, or naming something that is gone: what is complete can be restored all the same."""
    save(tmp_path, 1)
    (tmp_path / "checkpoint").unlink()
    assert steps(tmp_path) == [1]
    write_state(tmp_path, ["model.ckpt-77"])
    assert steps(tmp_path) == [1]


def test_nothing_is_there(tmp_path):
    """No directory, an empty one, and a file in its place are all without checkpoints."""
    (tmp_path / "file").write_text("")
    for directory in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        assert steps(directory) == []
        assert latest_checkpoint(str(directory)) is None


def damage(kind: str, prefix: Path) -> None:
    shard, table = Path(f"{prefix}.data-00001-of-00003"), Path(f"{prefix}.index")
    match kind:
        case "missing shard":
            shard.unlink()
        case "short shard":
            os.truncate(shard, 99)
        case "empty shard":
            os.truncate(shard, 0)
        case "shard of another count":
            shard.rename(f"{prefix}.data-00001-of-00002")
        case "shards of another count":
            for i in range(3):
                Path(f"{prefix}.data-{i:05}-of-00003").rename(f"{prefix}.data-{i:05}-of-00004")
        case "shard still has its temporary name":
            shard.rename(f"{shard}.tempstate123")
        case "missing index":
            table.unlink()
        case "empty index":
            table.write_bytes(b"")
        case "index still has its temporary name":
            table.rename(f"{table}.tempstate123")
        case "half an index":
            table.write_bytes(table.read_bytes()[: table.stat().st_size // 2])
        case "index without its last byte":
            table.write_bytes(table.read_bytes()[:-1])
        case "index with a hole":
            content = table.read_bytes()
            table.write_bytes(b"\0" * (len(content) - 48) + content[-48:])
        case "only a footer":
            table.write_bytes(table.read_bytes()[-48:])
        case "zeros":
            table.write_bytes(b"\0" * table.stat().st_size)
        case "footer that points outside":
            footer = varint(0) + varint(0) + varint(2**40) + varint(2**40)
            table.write_bytes(footer.ljust(40, b"\0") + struct.pack("<Q", TABLE_MAGIC))
        case "footer without an end":
            table.write_bytes(b"\xff" * 40 + struct.pack("<Q", TABLE_MAGIC))
        case "index of one shard":
            table.write_bytes(index(TENSORS, 1))
        case "tensor in a shard that the header does not know":
            table.write_bytes(index({"a": (7, 0, 1)}, 3))
        case "directory in place of the index":
            table.unlink()
            table.mkdir()


@pytest.mark.parametrize(
    "kind",
    [
        "missing shard",
        "short shard",
        "empty shard",
        "shard of another count",
        "shards of another count",
        "shard still has its temporary name",
        "missing index",
        "empty index",
        "index still has its temporary name",
        "half an index",
        "index without its last byte",
        "index with a hole",
        "only a footer",
        "zeros",
        "footer that points outside",
        "footer without an end",
        "index of one shard",
        "tensor in a shard that the header does not know",
        "directory in place of the index",
    ],
)
def test_what_is_not_complete_does_not_exist(tmp_path, kind):
    """Half-written, cut short or mixed up: the one before it is the latest."""
    save_sharded(tmp_path, 1)
    prefix = save_sharded(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]
    damage(kind, prefix)
    assert steps(tmp_path) == [1]


def test_an_index_is_complete_at_its_last_byte_and_not_before(tmp_path):
    """No prefix of a finished index passes for one."""
    prefix = save(tmp_path, 1)
    whole = Path(f"{prefix}.index").read_bytes()
    for size in range(len(whole)):
        Path(f"{prefix}.index").write_bytes(whole[:size])
        assert steps(tmp_path) == [], size
    Path(f"{prefix}.index").write_bytes(whole)
    assert steps(tmp_path) == [1]


def test_an_empty_shard_may_belong_to_a_checkpoint(tmp_path):
    """A ps without a variable writes nothing into its part."""
    prefix = tmp_path / "model.ckpt-3"
    Path(f"{prefix}.data-00000-of-00002").write_bytes(b"x" * 100)
    Path(f"{prefix}.data-00001-of-00002").write_bytes(b"")
    Path(f"{prefix}.index").write_bytes(index({"a": (0, 0, 100)}, 2))
    assert steps(tmp_path) == [3]


def test_leftovers_of_another_shard_count_do_no_harm(tmp_path):
    """The same step saved again with more ps: the index says which files belong to it."""
    prefix = save_sharded(tmp_path, 4)
    Path(f"{prefix}.data-00000-of-00002").write_bytes(b"old")
    assert steps(tmp_path) == [4]


def test_files_that_are_no_checkpoints_are_passed_over(tmp_path):
    """Events, graphs, owner files, and an index whose name has no step."""
    save(tmp_path, 8)
    for name in (
        "graph.pbtxt",
        "events.out.tfevents.1.gpu-a",
        ".tfps-owner",
        "model.ckpt-8.meta",
        "best.index",
    ):
        (tmp_path / name).write_bytes(index(TENSORS))
    (tmp_path / "model.ckpt-9_temp").mkdir()
    assert steps(tmp_path) == [8]


# --- the state file -------------------------------------------------------------------------------------------------


def test_a_state_file_that_was_moved_is_read_where_it_is(tmp_path):
    """Absolute paths of the machine that wrote it are re-based on the directory it lies in."""
    write_state(tmp_path, ["/old/place/model.ckpt-1", "/old/place/model.ckpt-2"])
    newest, paths = read_state(str(tmp_path))
    assert newest == str(tmp_path / "model.ckpt-2")
    assert paths == [str(tmp_path / "model.ckpt-1"), str(tmp_path / "model.ckpt-2")]


def test_a_moved_directory_has_the_same_checkpoints(tmp_path):
    """Everything below it is relative to where it is now."""
    old = tmp_path / "old"
    save(old, 3)
    write_state(old, [str(old / "model.ckpt-3")])
    new = old.rename(tmp_path / "new")
    assert [c.prefix for c in complete_checkpoints(str(new))] == [str(new / "model.ckpt-3")]
    assert read_state(str(new))[0] == str(new / "model.ckpt-3")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "\0\0\0",
        'model_checkpoint_path: "',
        'xmodel_checkpoint_path: "a"',
        "model_checkpoint_path: a",
    ],
)
def test_a_state_file_that_is_none(tmp_path, text):
    """Torn or written by something else: it says nothing, and nobody falls over."""
    (tmp_path / "checkpoint").write_text(text)
    assert read_state(str(tmp_path)) == (None, [])


def test_a_state_file_with_quotes_and_backslashes(tmp_path):
    """Text protocol buffers escape them."""
    (tmp_path / "checkpoint").write_text(r'model_checkpoint_path: "/a/it\'s \"new\"\\-1"' + "\n")
    assert read_state(str(tmp_path))[0] == str(tmp_path / 'it\'s "new"\\-1')
    (tmp_path / "checkpoint").unlink()
    assert read_state(str(tmp_path)) == (None, [])


# --- watching -------------------------------------------------------------------------------------------------------


class Watch:
    """`watch` of a directory, with deadlines."""

    def __init__(self, directory: Path, **keywords) -> None:
        self._found = watch(str(directory), poll_secs=0.01, **keywords)

    def next(self, secs: float = 10.0) -> int:
        deadline = time.monotonic() + secs
        for found in self._found:
            if found is not None:
                return found.global_step
            assert time.monotonic() < deadline, "nothing new was found"
        raise AssertionError("watching must not end")

    def now(self) -> list[int]:
        """What comes before the next look that finds nothing."""
        return [c.global_step for c in itertools.takewhile(lambda c: c is not None, self._found)]


def test_watching_tells_each_once_in_order(tmp_path):
    """Those that are there, then new ones, none twice, and none that is not complete."""
    save(tmp_path, 100)
    save(tmp_path, 99)
    one = Watch(tmp_path)
    assert one.now() == [99, 100]
    assert one.now() == []
    prefix = save(tmp_path, 101)
    table = Path(f"{prefix}.index").read_bytes()
    Path(f"{prefix}.index").unlink()
    assert one.now() == []
    (tmp_path / "temporary").write_bytes(table)
    (tmp_path / "temporary").rename(f"{prefix}.index")
    assert one.next() == 101
    assert one.now() == []


@pytest.mark.parametrize("has_state", [True, False])
def test_watching_needs_no_state_file(tmp_path, has_state):
    """A copy of a checkpoint without `checkpoint`, or one whose state file was deleted, is found as well."""
    directory = tmp_path / "later"
    one = Watch(directory)
    assert one.now() == []
    save(directory, 5)
    if not has_state:
        (directory / "checkpoint").unlink()
    assert one.next() == 5


def test_watching_finds_what_appears_within_one_tick_of_the_clock(tmp_path):
    """Coarse time stamps make a directory look unchanged: it is looked through now and then nevertheless."""
    save(tmp_path, 1)
    one, before = Watch(tmp_path), tmp_path.stat()
    assert one.now() == [1]
    save(tmp_path, 2)
    os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert one.next() == 2


def test_watching_the_newest(tmp_path):
    """Older ones are passed over for good."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    one = Watch(tmp_path, newest=True)
    assert one.now() == [3]
    save(tmp_path, 4)
    assert one.next() == 4


def test_watching_from_a_step_and_from_a_time_on(tmp_path):
    """Last night's checkpoints are not this training's."""
    old = save(tmp_path, 1)
    os.utime(f"{old}.index", (1000.0, 1000.0))
    save(tmp_path, 2)
    assert Watch(tmp_path, after_step=1).now() == [2]
    assert Watch(tmp_path, after_step=2).now() == []
    assert Watch(tmp_path, newer_than=1000.5).now() == [2]
    assert Watch(tmp_path, newer_than=1000.0).now() == [1, 2]


def test_watching_beside_a_writer_that_cleans_up(tmp_path):
    """While checkpoints come and go, everything that is told was complete, and the last one is told."""
    last = 60

    def write():
        for step in range(1, last + 1):
            save(tmp_path, step)
            if step > 2:
                for path in tmp_path.glob(f"model.ckpt-{step - 2}.*"):
                    path.unlink()

    writer = threading.Thread(target=write)
    one, told = Watch(tmp_path), []
    writer.start()
    while not told or told[-1] != last:
        told.append(one.next())
    writer.join()
    assert told == sorted(set(told))


# --- what killed saves have left ------------------------------------------------------------------------------------


def test_what_no_save_will_finish_is_removed_and_nothing_else(tmp_path):
    """Parts under TensorFlow's own temporary names, and files whose index is missing; of this name only."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "model.ckpt-2.index").write_bytes(b"damaged: not ours to throw away")
    before = {path.name for path in tmp_path.iterdir()}
    left = [
        "checkpoint.tmp12ab",
        "model.ckpt-3.data-00000-of-00001",
        "model.ckpt-3.data-00001-of-00002.tempstate18446744073709551615",
        "model.ckpt-3.index.tempstate7",
        "model.ckpt-3.meta",
        "model.ckpt-4.meta.tmp00ff",
    ]
    foreign = [
        "other-3.data-00000-of-00001",
        "model.ckpt-3.data-00000-of-00001.bak",
        "model.ckpt-x.meta",
        "events.1",
    ]
    for name in (*left, *foreign):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "model.ckpt-5_temp").mkdir()
    (tmp_path / "model.ckpt-5_temp" / "part-00000-of-00002.index").write_bytes(b"x")
    assert remove_unfinished(str(tmp_path), "model.ckpt") == [*left, "model.ckpt-5_temp"]
    assert {path.name for path in tmp_path.iterdir()} == before | set(foreign)
    assert remove_unfinished(str(tmp_path / "missing"), "model.ckpt") == []


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (tmp_path / "model.ckpt-5_temp").symlink_to(tmp_path / "precious")
    remove_unfinished(str(tmp_path), "model.ckpt")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "precious"]
