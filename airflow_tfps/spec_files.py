"""Jobs and inventories as operators hold them: files beside the DAG, rendered values, overrides.

Used when a DAG is parsed (by the group) and when its tasks run; both times on the machine that has the DAG bundle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_tfps.inventory import Inventory
from airflow_tfps.spec import JobSpec
from airflow_tfps.templates import mark_rendered

if TYPE_CHECKING:
    from airflow_tfps.operators import ProvisionClusterOperator, TeardownClusterOperator


def folder_of(operator: Any) -> Path:
    """What an operator's relative paths are relative to: `base_dir`, else the folder of its DAG's file."""
    if operator.base_dir is not None:
        return Path(operator.base_dir)
    dag = operator.get_dag() if hasattr(operator, "get_dag") else operator.dag
    return Path(dag.fileloc).parent if dag is not None and dag.fileloc else Path()


def rendered_job(operator: ProvisionClusterOperator, unrendered: Mapping[str, Any]) -> JobSpec:
    """The job of an operator whose fields Airflow has rendered, with the overrides.

    `unrendered` are the fields as they were before. Raises SpecError with every fault.
    """

    def field(name: str) -> Any:
        value = getattr(operator, name)
        return mark_rendered(unrendered[name], value) if name in unrendered else value

    base_dir = folder_of(operator)
    job = operator.job
    if isinstance(job, Mapping):
        spec = JobSpec.from_dict(job, base_dir=base_dir, template=unrendered.get("job"))
    else:
        spec = JobSpec.load(job, base_dir=base_dir)
    return spec.override(
        hparams=field("hparams"), inputs=field("inputs"), steps=field("steps"), mode=field("mode")
    )


def load_inventory(operator: ProvisionClusterOperator | TeardownClusterOperator) -> Inventory:
    """The inventory an operator names. Looks up Airflow connections. Raises SpecError."""
    assert operator.hosts is not None
    return Inventory.load(operator.hosts, base_dir=folder_of(operator))
