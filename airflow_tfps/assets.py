"""Assets: finished trainings, evaluations and promoted models, named when a DAG is parsed.

    @dag(schedule=[model_asset("digits")])      # runs when a model of the job `digits` has been promoted
    def deploy(): ...

URIs are `tfps://training/NAME`, `tfps://evaluation/NAME` and `tfps://model/NAME`; NAME is the job's. An event's `extra`
is what the operator returned (checkpoint, global step, metrics, host; of a model version and path), with `dag_id`,
`run_id`, `group_id`, `map_index` and `logical_date`. Imported by DAG files: nothing heavy at import.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from urllib.parse import SplitResult

    from airflow.sdk import BaseOperator, Context

SCHEME = "tfps"
KINDS = ("training", "evaluation", "model")
_NAME = re.compile(r"/[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def training_asset(name: str) -> Asset:
    """The finished trainings of the job `name`."""
    return _asset("training", name)


def evaluation_asset(name: str) -> Asset:
    """The evaluations of the job `name`."""
    return _asset("evaluation", name)


def model_asset(name: str) -> Asset:
    """The promoted models called `name`: by default as the job that trains them."""
    return _asset("model", name)


def _asset(kind: str, name: str) -> Asset:
    return Asset(name=f"tfps-{kind}-{name}", uri=f"{SCHEME}://{kind}/{name}", group=SCHEME)


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Airflow's handler of `tfps://` URIs: one spelling for each asset. Raises ValueError."""
    kind, path = uri.netloc.lower(), uri.path.rstrip("/")
    if kind not in KINDS:
        raise ValueError(f"{uri.geturl()!r}: tfps:// is followed by one of {', '.join(KINDS)}")
    if not _NAME.fullmatch(path):
        raise ValueError(
            f"{uri.geturl()!r}: tfps://{kind}/NAME is needed, NAME of letters, digits, '.', '_', '-'"
        )
    if uri.query:
        raise ValueError(f"{uri.geturl()!r}: an asset of ours has no query")
    return uri._replace(netloc=kind, path=path)


def tell_assets(operator: BaseOperator, context: Context, extra: Mapping[str, Any]) -> None:
    """Give the events of the operator's own outlets their `extra`."""
    ti = context["ti"]
    group = operator.task_group
    date = context.get("logical_date")
    said = {
        **extra,
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "group_id": group.group_id if group is not None else None,
        "map_index": ti.map_index if ti.map_index is not None else -1,
        "logical_date": None if date is None else date.isoformat(),
    }
    for outlet in operator.outlets:
        if isinstance(outlet, Asset) and outlet.uri.startswith(f"{SCHEME}://"):
            context["outlet_events"][outlet].extra = said


def previous_trainings(operator: BaseOperator, context: Context, key: str) -> Iterator[Mapping[str, Any]]:
    """Finished trainings of the same DAG, group and map index before this run, the newest first.

    What is before is told by the logical dates; a run without one is of the time when it ended, or began. So a backfill
    goes on from the night before, whatever else has been trained since.
    """
    ti = context["ti"]
    group = operator.task_group
    mine = (
        ti.dag_id,
        group.group_id if group is not None else None,
        ti.map_index if ti.map_index is not None else -1,
    )
    now = context.get("logical_date") or datetime.now(UTC)
    found = []
    for inlet in operator.inlets:
        if isinstance(inlet, Asset):
            for event in context["inlet_events"][inlet]:
                extra = event.extra or {}
                if (extra.get("dag_id"), extra.get("group_id"), extra.get("map_index")) != mine:
                    continue
                if str(extra.get("training_id")).rpartition("#")[0] == key or not extra.get("checkpoint"):
                    continue
                date = extra.get("logical_date")
                when = datetime.fromisoformat(str(date)) if date else event.timestamp
                if when < now:
                    found.append((when, event.timestamp, extra))
    for _, _, extra in sorted(found, key=lambda row: row[:2], reverse=True):
        yield extra
