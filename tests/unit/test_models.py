"""Model directories: which model is good enough, and what promotions, refusals and rollbacks leave behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tfps_runtime import models
from tfps_runtime.models import (
    Compared,
    ModelDirectory,
    PromoteRequest,
    RollbackRequest,
    hold_checkpoint,
    note_metrics,
    promote,
    rollback,
)
from tfps_runtime.protocol import ProtocolError, RefusedError
from tfps_runtime.rules import Rule, decide

BETTER = Rule("auc")


@pytest.mark.parametrize(
    ("rule", "value", "current", "is_good"),
    [
        (Rule("auc"), 0.5, None, True),
        (Rule("auc"), 0.51, 0.5, True),
        (Rule("auc"), 0.5, 0.5, False),
        (Rule("auc"), 0.4, 0.5, False),
        (Rule("auc", min_gain=0.1), 0.3, 0.2, True),  # 0.3 - 0.2 is 0.09999999999999998
        (Rule("auc", min_gain=0.1), 0.29, 0.2, False),
        (Rule("loss", higher_is_better=False), 0.4, 0.5, True),
        (Rule("loss", higher_is_better=False), 0.5, 0.4, False),
        (Rule("loss", higher_is_better=False, min_gain=0.1), 0.2, 0.3, True),
        (Rule("loss", higher_is_better=False, threshold=0.3), 0.31, None, False),
        (Rule("auc", compare="not_worse"), 0.5, 0.5, True),
        (Rule("auc", compare="not_worse"), 0.49, 0.5, False),
        (Rule("auc", compare="not_worse", tolerance=0.01), 0.49, 0.5, True),
        (Rule("auc", compare="not_worse", tolerance=0.01), 0.48, 0.5, False),
        (Rule("loss", compare="not_worse", tolerance=0.1, higher_is_better=False), 0.5, 0.4, True),
        (Rule("auc", compare="absolute", threshold=0.9), 0.9, 0.99, True),
        (Rule("auc", compare="absolute", threshold=0.9), 0.89, None, False),
        (Rule("auc", threshold=0.9), 0.8, 0.7, False),
        (Rule("auc", threshold=0.9), 0.95, 0.96, False),
        (Rule("auc", threshold=0.9), 0.95, 0.94, True),
    ],
)
def test_rules(rule, value, current, is_good):
    """Better by a margin, not worse than, absolute: each in both directions, with and without a current model."""
    rule.check()
    decision = decide(rule, value, current)
    assert decision.is_good is is_good
    assert f"{value:.6g}" in decision.reason


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule("auc", compare="beter"), "is none of better"),
        (Rule("auc", compare="absolute"), "needs a threshold"),
        (Rule("auc", min_gain=-1.0), "must be >= 0"),
        (Rule("auc", tolerance=-1.0), "must be >= 0"),
    ],
)
def test_senseless_rules_are_refused(rule, words):
    """A rule that makes no sense is refused with a reason."""
    with pytest.raises(ProtocolError, match=words):
        rule.check()


# --- a directory ----------------------------------------------------------------------------------------------------


class Shop:
    """A model directory, and exports for it."""

    def __init__(self, folder: Path) -> None:
        self.directory = ModelDirectory(str(folder / "ctr"))
        self.path = folder / "ctr"

    def export(self, id_: str, text: str, compared: Compared | None = None) -> Path:
        staging = Path(self.directory.staging(id_))
        (staging / "model").mkdir(parents=True)
        (staging / "model" / "saved_model.pb").write_text(text)
        current = self.directory.current
        if compared is None:
            metrics = {} if current is None else self.directory.record(current).get("metrics", {})
            compared = Compared(current, metrics)
        (staging / "compared.json").write_text(compared.dumps())
        return staging

    def promote(self, id_: str, auc: float, **more) -> dict:
        return promote(PromoteRequest(str(self.path), id_, more.pop("rule", BETTER), {"auc": auc}, **more))

    def add(self, id_: str, auc: float, **more) -> dict:
        self.export(id_, id_)
        return self.promote(id_, auc, **more)

    @property
    def served(self) -> str:
        return (self.path / "current" / "saved_model.pb").read_text()


@pytest.fixture
def shop(tmp_path) -> Shop:
    return Shop(tmp_path)


def test_the_first_is_promoted_and_a_worse_one_refused(shop):
    """The first model becomes version 1; a worse one changes nothing but the history; a better one becomes version 2."""
    first = shop.add("monday", 0.8, provenance={"dag_id": "nightly"})
    assert (first["promoted"], first["version"], first["path"]) == (True, 1, str(shop.path / "1"))
    assert shop.served == "monday"
    worse = shop.add("tuesday", 0.7)
    assert (worse["promoted"], worse["version"]) == (False, None)
    assert worse["reason"] == "auc 0.7 is not better than the current model's 0.8"
    assert shop.served == "monday"
    better = shop.add("wednesday", 0.9)
    assert (better["promoted"], better["version"], better["former"]) == (True, 2, 1)
    assert shop.served == "wednesday"

    assert os.readlink(shop.path / "current") == "2"
    history = shop.directory.history
    assert [(e["action"], e["version"], e["former"]) for e in history] == [
        ("promoted", 1, None),
        ("refused", None, 1),
        ("promoted", 2, 1),
    ]
    assert history[0]["provenance"] == {"dag_id": "nightly"}
    assert history[2]["former_value"] == 0.8
    assert sorted(p.name for p in shop.path.iterdir()) == [".lock", "1", "2", "current", "history.jsonl"]


def test_a_decision_is_carried_out_once(shop):
    """A retry of a promotion gives the same answer and changes nothing."""
    first = shop.add("monday", 0.8)
    again = shop.promote("monday", 0.8)
    assert again == first
    assert len(shop.directory.history) == 1


def test_the_model_it_was_compared_with_must_still_be_the_current_one(shop):
    """A promotion that was compared with a model that is current no more is refused, transiently; it can be made anew."""
    shop.add("monday", 0.8)
    shop.export("slow", "slow")
    shop.add("quick", 0.85)
    with pytest.raises(RefusedError, match="version 2 became the current model") as caught:
        shop.promote("slow", 0.84)
    assert (caught.value.code, caught.value.transient) == ("model_changed", True)
    assert shop.served == "quick"


def test_rollback_goes_back_step_by_step(shop):
    """Rolling back makes the former the current one, once for each id; further back with another id, and no further."""
    for id_, auc in (("a", 0.7), ("b", 0.8), ("c", 0.9)):
        shop.add(id_, auc)
    first = rollback(RollbackRequest(str(shop.path), "r1", reason="it was bad"))
    assert (first["version"], first["former"], first["path"]) == (2, 3, str(shop.path / "2"))
    assert rollback(RollbackRequest(str(shop.path), "r1")) == first
    assert shop.served == "b"
    assert rollback(RollbackRequest(str(shop.path), "r2"))["version"] == 1
    with pytest.raises(RefusedError, match=r"there is not a version before it \(there are: 1, 2, 3\)"):
        rollback(RollbackRequest(str(shop.path), "r3"))
    assert shop.served == "a"
    assert rollback(RollbackRequest(str(shop.path), "r4", to=3))["version"] == 3
    assert [e["action"] for e in shop.directory.history] == ["promoted"] * 3 + ["rolled_back"] * 3
    # The next promotion has a number of its own, and goes back to where it came from.
    rollback(RollbackRequest(str(shop.path), "r5", to=1))
    assert shop.add("d", 0.95)["version"] == 4
    assert rollback(RollbackRequest(str(shop.path), "r6"))["version"] == 1


def test_a_withdrawn_version_is_hidden(shop):
    """With `withdraw` a server that takes the highest number finds the former version, too; its number is not used again."""
    shop.add("a", 0.7)
    shop.add("b", 0.8)
    rollback(RollbackRequest(str(shop.path), "r", withdraw=True))
    assert shop.directory.versions == [1]
    assert (shop.path / ".withdrawn-2" / "saved_model.pb").read_text() == "b"
    assert shop.add("c", 0.9)["version"] == 3


def test_old_versions_go_but_never_the_two_that_matter(shop):
    """`keep` versions stay, the current one and the one before it always among them."""
    for number in range(1, 6):
        found = shop.add(f"m{number}", number / 10, keep=3)
    assert found["removed"] == [2]
    assert shop.directory.versions == [3, 4, 5]
    rollback(RollbackRequest(str(shop.path), "r", to=3))
    shop.add("m6", 0.9, keep=1)
    assert shop.directory.versions == [3, 6]
    assert shop.served == "m6"


def test_a_missing_metric_names_those_that_are_there(shop):
    """A metric that the evaluation lacks is an error with the names of those it has; so is one that the current lacks."""
    shop.export("a", "a")
    with pytest.raises(ProtocolError, match="has no metric 'f1'; there are: auc"):
        promote(PromoteRequest(str(shop.path), "a", Rule("f1"), {"auc": 0.5}))
    shop.promote("a", 0.5)
    shop.export("b", "b", Compared(1, {"loss": 1.0}))
    with pytest.raises(ProtocolError, match="version 1, has no metric 'auc'"):
        shop.promote("b", 0.6)
    assert shop.served == "a"


def test_the_note_about_the_comparison_is_in_the_reason(shop):
    """When the current model could not be evaluated again, the reason says so."""
    shop.add("a", 0.5)
    shop.export("b", "b", Compared(1, {"auc": 0.5}, "as at its promotion: no such input"))
    assert shop.promote("b", 0.6)["reason"].endswith("(as at its promotion: no such input)")


def test_without_an_export_nothing_is_promoted(shop):
    """No export, or an empty one, is an error, and nothing is switched."""
    with pytest.raises(RefusedError, match="there is no export"):
        shop.promote("a", 0.5)
    staging = shop.export("b", "b")
    (staging / "model" / "saved_model.pb").unlink()
    with pytest.raises(RefusedError, match="there is no exported model"):
        shop.promote("b", 0.5)
    assert shop.directory.current is None


@pytest.mark.parametrize("kind", ["directory", "elsewhere"])
def test_a_current_that_is_not_ours_is_left_alone(shop, kind):
    """A `current` that is no link to a version is an error and stays as it is."""
    shop.path.mkdir()
    link = shop.path / "current"
    if kind == "directory":
        link.mkdir()
    else:
        link.symlink_to("elsewhere")
    with pytest.raises(RefusedError, match="current") as caught:
        rollback(RollbackRequest(str(shop.path), "r"))
    assert caught.value.code == "model"
    assert link.is_dir() or os.readlink(link) == "elsewhere"


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_done", range(4))
def test_whoever_comes_next_completes_a_crash(shop, steps_done):
    """A promotion that was cut off after any step is completed by the next look with the lock, and answered once more."""
    shop.add("a", 0.5)
    staging = shop.export("b", "b")
    entry = {
        "action": "promoted", "id": "b", "time": 1.0, "version": 2, "former": 1, "metric": "auc", "value": 0.6,
        "former_value": 0.5, "reason": "x", "metrics": {"auc": 0.6}, "provenance": {},
    }  # fmt: skip
    (staging / "model" / "assets.extra").mkdir()
    (staging / "model" / "assets.extra" / "tfps.json").write_text(json.dumps(entry))
    (shop.path / ".pending.json").write_text(json.dumps({**entry, "staging": staging.name}))
    if steps_done >= 1:
        (staging / "model").rename(shop.path / "2")
    if steps_done >= 2:
        shop.directory._switch(2)
    if steps_done >= 3:
        shop.directory.note(entry)
    assert shop.served == ("b" if steps_done >= 2 else "a")

    answer = shop.promote("b", 0.6)
    assert (answer["promoted"], answer["version"]) == (True, 2)
    assert shop.served == "b"
    assert [e["version"] for e in shop.directory.history] == [1, 2]
    assert sorted(p.name for p in shop.path.iterdir()) == [".lock", "1", "2", "current", "history.jsonl"]


def test_a_line_that_was_cut_off_is_dropped(shop):
    """Half a line at the end of the history, from a crash, neither is read nor spoils the next one."""
    shop.add("a", 0.5)
    with (shop.path / "history.jsonl").open("a") as file:
        file.write('{"action": "prom')
    assert len(shop.directory.history) == 1
    shop.add("b", 0.6)
    lines = (shop.path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [1, 2]


def test_abandoned_exports_are_removed(shop):
    """An export that nobody decided about for a day goes at the next promotion; a young one stays."""
    old, young = shop.export("old", "old"), shop.export("young", "young")
    os.utime(old, (1.0, 1.0))
    shop.add("a", 0.5)
    assert not old.exists()
    assert young.exists()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_held_checkpoint_outlives_its_removal(tmp_path):
    """What is held is linked: the trainer may remove its own files."""
    for suffix in (".index", ".data-00000-of-00002", ".data-00001-of-00002"):
        (tmp_path / f"model.ckpt-7{suffix}").write_text(suffix)
    (tmp_path / "model.ckpt-70.index").write_text("another")
    held = hold_checkpoint(str(tmp_path / "model.ckpt-7"), str(tmp_path / "held"))
    again = hold_checkpoint(str(tmp_path / "model.ckpt-7"), str(tmp_path / "held"))
    for path in tmp_path.glob("model.ckpt-7.*"):
        path.unlink()
    assert held == again == str(tmp_path / "held" / "model.ckpt-7")
    assert sorted(p.name for p in (tmp_path / "held").iterdir()) == [
        "model.ckpt-7.data-00000-of-00002",
        "model.ckpt-7.data-00001-of-00002",
        "model.ckpt-7.index",
    ]
    with pytest.raises(RefusedError, match="there is no checkpoint"):
        hold_checkpoint(str(tmp_path / "model.ckpt-7"), str(tmp_path / "again"))


def test_metrics_are_written_beside_the_checkpoint(tmp_path):
    """An evaluation leaves `<prefix>.metrics.json`, whole; without the directory it is an error."""
    prefix = str(tmp_path / "model.ckpt-7")
    answer = note_metrics({"checkpoint": prefix, "evaluation": {"metrics": {"auc": 0.5}}})
    assert answer == {"type": "noted", "path": f"{prefix}.metrics.json"}
    assert json.loads(Path(answer["path"]).read_text()) == {"metrics": {"auc": 0.5}}
    with pytest.raises(RefusedError, match="directory is gone"):
        note_metrics({"checkpoint": str(tmp_path / "gone" / "x-1"), "evaluation": {}})


def test_describe_shows_all(shop):
    """`models` tells versions, the current one, the one before, and the last decisions; an absent directory is empty."""
    shop.add("a", 0.5)
    shop.add("b", 0.4)
    shop.add("c", 0.6)
    found = models.describe(str(shop.path), lines=2)
    assert (found["current"], found["former"]) == (2, 1)
    assert [v["version"] for v in found["versions"]] == [1, 2]
    assert [e["action"] for e in found["history"]] == ["refused", "promoted"]
    assert models.describe(str(shop.path / "none"))["versions"] == []
