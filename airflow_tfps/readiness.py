"""Readiness: what every host is asked, and what the answers mean. Pure; for the hook and for triggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_tfps.errors import NotReadyError
from airflow_tfps.judge import says_wrong_program

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow_tfps.handle import Handle


def probe_request(
    handle: Handle, host: str, timeout_secs: float, through: Collection[str] = ()
) -> dict[str, Any]:
    """The request that waits on `host` until every TF task but the chief, and those `through`, can be reached."""
    wanted = [
        t for t in handle.tasks if not (t.task == handle.chief or t.port is None or str(t.task) in through)
    ]
    return {
        **handle.request(host),
        "addresses": {str(t.task): handle.address(t) for t in wanted},
        "timeout_secs": timeout_secs,
    }


def check_probes(handle: Handle, probes: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises NotReadyError unless all hosts reached every TF task."""
    failed = sorted(
        (p for p in probes.values() if p.get("failed")), key=lambda p: float(p.get("time") or "inf")
    )
    if failed:
        exits_are_final = handle.job.program is not None
        is_final = exits_are_final and any(says_wrong_program(p.get("exit") or {}) for p in failed)
        raise NotReadyError("\n".join(str(p["failed"]) for p in failed), transient=not is_final)
    missing = []
    labels = {str(placed.task): placed.label for placed in handle.tasks}
    for host, found in sorted(probes.items()):
        for task, why in sorted(found.get("missing", {}).items()):
            label = labels.get(task, task[:80])
            missing.append(f"{label} cannot be reached from {host}: {why}")
    if missing:
        raise NotReadyError("the cluster is not ready:\n  " + "\n  ".join(missing))
