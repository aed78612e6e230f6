"""Assets: one spelling for each, what events say, and which former training a new one starts from."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk import Asset

from airflow_tfps.assets import evaluation_asset, model_asset, previous_trainings, tell_assets, training_asset

NIGHT = datetime(2026, 3, 3, 2, tzinfo=UTC)


def test_uris_are_normalised():
    """Airflow, which finds the handler in the provider's info, gives each asset one spelling."""
    assert (
        Asset(name="x", uri="TFPS://Model/digits/").uri == model_asset("digits").uri == "tfps://model/digits"
    )
    assert training_asset("digits").uri == "tfps://training/digits"
    assert evaluation_asset("digits").uri == "tfps://evaluation/digits"
    assert len({a.name for a in (model_asset("a"), training_asset("a"), evaluation_asset("a"))}) == 3


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("tfps://modle/digits", "followed by one of training, evaluation, model"),
        ("tfps://model", "NAME is needed"),
        ("tfps://model/a/b", "NAME is needed"),
        ("tfps://model/a?b=c", "no query"),
    ],
)
def test_other_uris_are_refused(uri, words):
    """What is none of ours is an error when the DAG is parsed."""
    with pytest.raises(ValueError, match=words):
        Asset(name="x", uri=uri)


def operator(**lists: list) -> SimpleNamespace:
    group = SimpleNamespace(group_id="training")
    return SimpleNamespace(task_group=group, **{"inlets": [], "outlets": [], **lists})


def context(date: datetime | None = NIGHT, **more) -> dict:
    ti = SimpleNamespace(dag_id="nightly", run_id="now", map_index=-1)
    return {"ti": ti, "logical_date": date, **more}


def test_events_say_where_they_come_from():
    """The event of an outlet of ours has the result and its run; other outlets are left alone."""
    events: dict = defaultdict(lambda: SimpleNamespace(extra=None))
    ours, other = training_asset("digits"), Asset("other")
    tell_assets(operator(outlets=[ours, other]), context(outlet_events=events), {"global_step": 7})
    assert events[ours].extra == {
        "global_step": 7,
        "dag_id": "nightly",
        "run_id": "now",
        "group_id": "training",
        "map_index": -1,
        "logical_date": "2026-03-03T02:00:00+00:00",
    }
    assert events[other].extra is None


def event(day: int, *, has_date: bool = True, **changes) -> SimpleNamespace:
    """A training of a night of March, which ended a month later: a backfill."""
    night = datetime(2026, 3, day, 2, tzinfo=UTC)
    extra = {
        "checkpoint": f"/ckpt/{day}",
        "host": "gpu-a",
        "dag_id": "nightly",
        "group_id": "training",
        "map_index": -1,
        "training_id": f"nightly/{day}/training#00000000",
        "logical_date": night.isoformat() if has_date else None,
        **changes,
    }
    return SimpleNamespace(extra=extra, timestamp=night + timedelta(days=30) if has_date else night)


@pytest.mark.parametrize(
    ("events", "date", "found"),
    [
        ([], NIGHT, []),
        ([event(1), event(2)], NIGHT, ["/ckpt/2", "/ckpt/1"]),
        ([event(2), event(1)], NIGHT, ["/ckpt/2", "/ckpt/1"]),  # whichever ended last
        ([event(2), event(4)], NIGHT, ["/ckpt/2"]),  # a backfill of an older night
        ([event(2, training_id="nightly/now/training#11111111")], NIGHT, []),  # this run's own, cleared
        ([event(2, dag_id="other"), event(2, group_id="g"), event(2, map_index=1)], NIGHT, []),
        ([event(2, checkpoint=None), event(1)], NIGHT, ["/ckpt/1"]),
        ([event(2, has_date=False), event(1)], NIGHT, ["/ckpt/2", "/ckpt/1"]),  # by the time when it ended
        ([event(2)], None, ["/ckpt/2"]),  # triggered by hand
        ([SimpleNamespace(extra=None, timestamp=NIGHT)], NIGHT, []),
    ],
)
def test_previous_trainings(events, date, found):
    """The newest before this run comes first, by logical date; only those of the same DAG, group and map index."""
    asset = training_asset("digits")
    given = context(date, inlet_events={asset: events})
    former = previous_trainings(operator(inlets=[asset]), given, "nightly/now/training")
    assert [extra["checkpoint"] for extra in former] == found
