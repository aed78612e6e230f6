"""Pins: checkpoints that outlive the trainer's clean-up, and go when nobody wants them any more."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from bundles import delete, save, save_sharded
from tfps_runtime import pins as pins_module
from tfps_runtime.checkpoint import (
    Checkpoint,
    complete_checkpoints,
    latest_checkpoint,
    read_index,
    read_state,
    verify,
)
from tfps_runtime.pins import PINS_AT_MOST, Pin, pin, pins, pins_dir, release, renew, sweep
from tfps_runtime.protocol import RefusedError

RUNTIME = str(Path(__file__).parents[2] / "runtime")


@pytest.fixture
def ckpt(tmp_path):
    directory = tmp_path / "it's ckpt"
    directory.mkdir()
    return directory


def newest(directory: Path) -> Checkpoint:
    return latest_checkpoint(str(directory))


def test_a_pin_outlives_its_checkpoint(ckpt):
    """A directory with the checkpoint under its own name, complete, checked, and named by a state file."""
    prefix = save(ckpt, 7)
    found = pin(str(ckpt), newest(ckpt), "nightly/run/watch")
    delete(prefix)
    assert complete_checkpoints(str(ckpt)) == []
    [kept] = complete_checkpoints(found.directory)
    assert (kept.prefix, kept.global_step, kept.size) == (found.prefix, 7, found.size)
    assert os.path.basename(found.prefix) == "model.ckpt-7"
    assert read_state(found.directory)[0] == found.prefix
    assert verify(found.prefix).tensors == 4
    assert not found.directory.startswith(f"{ckpt}/")


def test_a_pin_takes_no_room_of_its_own(ckpt):
    """The files are links, on whatever disk the directory lies; through a symbolic link, too."""
    prefix = save_sharded(ckpt, 3)
    link = ckpt.parent / "link"
    link.symlink_to(ckpt)
    found = pin(str(link), newest(link), "me")
    assert found.directory.startswith(os.path.realpath(f"{ckpt}.pins"))
    for name in ("index", "data-00000-of-00003", "data-00002-of-00003"):
        assert os.path.samefile(f"{prefix}.{name}", f"{found.prefix}.{name}")


def test_where_files_cannot_be_linked_they_are_copied(ckpt, monkeypatch):
    """Across file systems, or where the kernel forbids links to files of others."""

    def link(_source, _target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    prefix = save(ckpt, 3)
    found = pin(str(ckpt), newest(ckpt), "me")
    assert not os.path.samefile(f"{prefix}.index", f"{found.prefix}.index")
    delete(prefix)
    assert verify(found.prefix).size == 1000
    assert [one.time for one in complete_checkpoints(found.directory)] == [found.time]


def test_pinning_twice_is_pinning_once(ckpt):
    """The second time renews the lease."""
    save(ckpt, 3)
    first = pin(str(ckpt), newest(ckpt), "me", secs=10)
    second = pin(str(ckpt), newest(ckpt), "me", secs=1000)
    assert second.until > first.until + 900
    assert pins(str(ckpt)) == [second]
    renew(str(ckpt), "me", secs=5000)
    assert pins(str(ckpt))[0].until > second.until + 3900


def test_another_save_of_the_same_step_takes_its_place(ckpt):
    """A training that began again in the same directory."""
    prefix = save(ckpt, 3)
    os.utime(f"{prefix}.index", (1000, 1000))
    pin(str(ckpt), newest(ckpt), "me")
    delete(prefix)
    save(ckpt, 3)
    found = pin(str(ckpt), newest(ckpt), "me")
    assert pins(str(ckpt)) == [found]
    assert os.stat(f"{found.prefix}.index").st_mtime > 1000


def test_owners_do_not_touch_each_other(ckpt):
    """Each has its own pins, and releases them alone: one, or all."""
    for step in (1, 2):
        save(ckpt, step)
        for owner in ("a", "b"):
            pin(str(ckpt), newest(ckpt), owner)
    assert [(p.owner, p.global_step) for p in pins(str(ckpt))] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [p.global_step for p in release(str(ckpt), "a", 1)] == [1]
    assert release(str(ckpt), "a", 1) == []
    assert [p.global_step for p in pins(str(ckpt), "a")] == [2]
    release(str(ckpt), "b")
    assert [(p.owner, p.global_step) for p in pins(str(ckpt))] == [("a", 2)]
    release(str(ckpt), "a")
    assert not Path(pins_dir(str(ckpt))).exists()


def test_pins_of_owners_that_are_gone_are_swept(ckpt):
    """When their lease has run out; half-made ones after an hour; nothing else."""
    save(ckpt, 1)
    pin(str(ckpt), newest(ckpt), "gone", secs=-1)
    kept = pin(str(ckpt), newest(ckpt), "alive", secs=1000)
    half = Path(pins_dir(str(ckpt))) / ".1-0123456789ab.77"
    shutil.copytree(kept.directory, half)
    assert [p.owner for p in sweep(str(ckpt))] == ["gone"]
    assert half.exists()
    os.utime(half, (1000, 1000))
    assert sweep(str(ckpt)) == []
    assert not half.exists()
    assert pins(str(ckpt)) == [kept]
    assert [p.owner for p in sweep(str(ckpt), time.time() + 2000)] == ["alive"]


def test_a_hosts_sweep_takes_pins_of_owners_that_are_gone(tmp_path):
    """In its workdir; it says so, and a dry run only says so."""
    directory = tmp_path / "checkpoints" / "nightly-0123456789ab"
    directory.parent.mkdir()
    save(directory, 1)
    pin(str(directory), newest(directory), "gone", secs=-1)
    kept = pin(str(directory), newest(directory), "alive")
    answers = []
    for dry_run in (True, False):
        request = {"workdir": str(tmp_path), "host": "gpu-a", "dry_run": dry_run}
        [answer] = ask("sweep", request)
        assert [one["what"] for one in answer["removed"] if one["what"] == "pin"] == ["pin"]
        answers.append(len(pins(str(directory))))
    assert answers == [2, 1]
    assert pins(str(directory)) == [kept]
    assert [c.global_step for c in complete_checkpoints(str(directory))] == [1]


def test_what_is_gone_cannot_be_pinned(ckpt):
    """None, and nothing is left behind."""
    prefix = save(ckpt, 1)
    found = newest(ckpt)
    delete(prefix)
    assert pin(str(ckpt), found, "me") is None
    assert os.listdir(pins_dir(str(ckpt))) == []


def test_what_goes_while_it_is_linked_is_not_pinned(ckpt, monkeypatch):
    """Deleted after the first of its files: half a pin is none."""
    prefix, link = save_sharded(ckpt, 1), os.link
    found = newest(ckpt)

    def slow(source, target):
        link(source, target)
        delete(prefix)

    monkeypatch.setattr(os, "link", slow)
    assert pin(str(ckpt), found, "me") is None
    assert pins(str(ckpt)) == []
    assert os.listdir(pins_dir(str(ckpt))) == []


def test_every_pin_is_whole_beside_a_writer_that_deletes(ckpt):
    """A trainer that keeps one checkpoint, saving as fast as it can: each is pinned whole, or not at all."""
    is_over = threading.Event()

    def write():
        step = 0
        while not is_over.is_set():
            step += 1
            save(ckpt, step)
            delete(ckpt / f"model.ckpt-{step - 1}")

    writer = threading.Thread(target=write)
    writer.start()
    taken = set()
    try:
        deadline = time.monotonic() + 30
        while len(taken) < 8 and time.monotonic() < deadline:
            found = newest(ckpt)
            one = None if found is None else pin(str(ckpt), found, "me")
            if one is not None:
                taken.add(one.global_step)
    finally:
        is_over.set()
        writer.join()
    assert len(taken) >= 8
    assert {one.global_step for one in pins(str(ckpt))} == taken
    for one in pins(str(ckpt)):
        assert verify(one.prefix).size == 1000
        assert [c.global_step for c in complete_checkpoints(one.directory)] == [one.global_step]


def test_damaged_pins_are_passed_over(ckpt):
    """Whatever lies in the directory."""
    save(ckpt, 1)
    kept = pin(str(ckpt), newest(ckpt), "me")
    folder = Path(pins_dir(str(ckpt)))
    (folder / "2-0123456789ab").mkdir()
    (folder / "3-0123456789ab").mkdir()
    (folder / "3-0123456789ab" / "pin.json").write_text('{"prefix": 1}')
    (folder / "4-0123456789ab").write_text("")
    (folder / "notes").mkdir()
    assert pins(str(ckpt)) == [kept]
    assert sweep(str(ckpt)) == []
    assert len(os.listdir(folder)) == 5


def test_nothing_can_be_written_beside_the_directory(ckpt):
    """Said with the place."""
    Path(pins_dir(str(ckpt))).write_text("")
    save(ckpt, 1)
    with pytest.raises(RefusedError, match=r"pins go to .*ckpt\.pins") as caught:
        pin(str(ckpt), newest(ckpt), "me")
    assert caught.value.code == "workdir"


# --- the commands -------------------------------------------------------------------------------------------------


def ask(command: str, request: dict) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "tfps_runtime", command],
        input=json.dumps(request) + "\n", capture_output=True, text=True, timeout=30, check=False,
        env={"PYTHONPATH": RUNTIME, "HOME": "/nowhere"},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_command_pins_lists_and_releases(ckpt):
    """The newest or a step; a step that is pinned is found after the trainer has deleted it."""
    request = {"directory": str(ckpt), "owner": "me"}
    [refused] = ask("pin", {**request, "action": "pin"})
    assert refused["code"] == "not_found"
    first = save(ckpt, 1)
    save(ckpt, 2)
    for step in (1, None):
        [answer] = ask("pin", {**request, "action": "pin", "step": step})
        assert [p["global_step"] for p in answer["pins"]] == [step or 2]
    delete(first)
    [answer] = ask("pin", {**request, "action": "pin", "step": 1})
    assert Path(answer["pins"][0]["prefix"] + ".index").exists()
    [answer] = ask("pin", {"directory": str(ckpt), "action": "list"})
    assert [p["global_step"] for p in answer["pins"]] == [1, 2]
    [answer] = ask("pin", {**request, "action": "release", "step": 2})
    assert [p["global_step"] for p in answer["pins"]] == [2]
    [answer] = ask("pin", {**request, "action": "release"})
    assert [p["global_step"] for p in answer["pins"]] == [1]
    assert ask("pin", {"directory": str(ckpt)}) == [{"type": "pins", "pins": []}]


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"directory": 7},
        {"action": "burn"},
        {"action": "release"},
        {"owner": "me", "action": "pin", "step": "x"},
    ],
)
def test_requests_that_make_no_sense(ckpt, request_):
    """Are refused as such."""
    request = {"directory": str(ckpt), **request_} if request_ else {}
    if "action" in request and request["action"] == "burn":
        request["owner"] = "me"
    [answer] = ask("pin", request)
    assert (answer["type"], answer["code"]) == ("error", "bad_request")


def test_an_owner_has_only_so_many(ckpt):
    """The next is refused by name, and told unpinned to a watcher."""
    for step in range(1, PINS_AT_MOST + 2):
        save(ckpt, step)
    found = complete_checkpoints(str(ckpt))
    for one in found[:-1]:
        pin(str(ckpt), one, "me")
    [refused] = ask("pin", {"directory": str(ckpt), "owner": "me", "action": "pin"})
    assert (refused["code"], "release some" in refused["message"]) == ("pins", True)
    said = ask("checkpoints", {"directory": str(ckpt), "pin": "me", "after_step": PINS_AT_MOST - 1})
    assert [(m["checkpoint"]["global_step"], m["pin"] is None) for m in said[:-1]] == [
        (PINS_AT_MOST, False),
        (PINS_AT_MOST + 1, True),
    ]


class Watcher:
    """`checkpoints` with `follow` and `pin`."""

    def __init__(self, directory: Path, **request) -> None:
        self._lives, held = os.pipe()  # open in the process and whatever it becomes
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfps_runtime", "checkpoints"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={"PYTHONPATH": RUNTIME, "HOME": "/nowhere"}, pass_fds=[held],
        )  # fmt: skip
        os.close(held)
        request = {"directory": str(directory), "follow": True, "pin": "me", **request}
        self.process.stdin.write(json.dumps(request) + "\n")

    def next(self) -> dict:
        while True:
            message = json.loads(self.process.stdout.readline())
            if message["type"] not in ("beat", "caught_up"):
                return message

    def leave(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(10) == 0

    def wait_until_nothing_is_left(self) -> None:
        assert select.select([self._lives], [], [], 10)[0]
        os.close(self._lives)


def until(condition, secs: float = 10.0):
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_watcher_pins_what_it_tells_and_goes_on_when_it_is_left(ckpt):
    """Between two followers nothing is missed; the second is told what was pinned and deleted meanwhile."""
    first = Watcher(ckpt, linger_secs=60)
    prefix = save(ckpt, 1)
    message = first.next()
    delete(prefix)
    assert complete_checkpoints(message["pin"]["prefix"].rpartition("/")[0])
    first.leave()
    for step in (2, 3):
        prefix = save(ckpt, step)
        until(lambda step=step: len(pins(str(ckpt))) == step)
        delete(prefix)
    second = Watcher(ckpt, after_step=1)
    told = [second.next() for _ in range(2)]
    assert [m["checkpoint"]["global_step"] for m in told] == [2, 3]
    assert all(Path(m["pin"]["prefix"] + ".index").exists() for m in told)
    second.leave()
    for one in (first, second):
        one.wait_until_nothing_is_left()
    [answer] = ask("pin", {"directory": str(ckpt), "owner": "me", "action": "release"})
    assert [p["global_step"] for p in answer["pins"]] == [1, 2, 3]
    assert not Path(pins_dir(str(ckpt))).exists()


def test_a_watcher_that_is_left_ends_when_its_owner_releases(ckpt):
    """All pins let go of: there is nobody to pin for."""
    one = Watcher(ckpt, linger_secs=60)
    save(ckpt, 1)
    one.next()
    one.leave()
    ask("pin", {"directory": str(ckpt), "owner": "me", "action": "release"})
    one.wait_until_nothing_is_left()
    assert pins(str(ckpt)) == []


def test_a_watcher_makes_no_directories_for_a_trainer(tmp_path):
    """Where nothing is yet; when it comes, it is pinned."""
    one = Watcher(tmp_path / "later" / "ckpt")
    (tmp_path / "later").mkdir()
    save(tmp_path / "later" / "ckpt", 1)
    assert one.next()["pin"]["global_step"] == 1
    one.leave()
    one.wait_until_nothing_is_left()
    assert ask("checkpoints", {"directory": str(tmp_path / "no" / "ckpt"), "pin": "me"}) == [
        {"type": "caught_up"}
    ]
    assert not (tmp_path / "no").exists()


def test_pins_are_messages(ckpt):
    """What is said of a pin can be read back."""
    save(ckpt, 1)
    found = pin(str(ckpt), newest(ckpt), "me")
    assert Pin.from_json(json.loads(found.dumps())) == found
    assert read_index(found.prefix).shards == 1
    assert pins_module.PIN_FILE in os.listdir(found.directory)
