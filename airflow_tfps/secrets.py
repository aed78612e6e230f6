"""Values of a job's `secrets`, from Airflow's connections and variables, at the moment they are needed.

They travel on standard input to the hosts and into the TF tasks' environment; every value is masked in Airflow's logs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_tfps.errors import SpecError
from airflow_tfps.spec import SecretRef

if TYPE_CHECKING:
    from collections.abc import Mapping


def resolve_secrets(secrets: Mapping[str, str]) -> dict[str, str]:
    """Look up every reference. Blocks. Raises SpecError naming all that cannot be resolved, never a value."""
    from airflow.sdk import BaseHook, Variable
    from airflow.sdk.exceptions import AirflowException
    from airflow.sdk.log import mask_secret

    values, faults = {}, []
    for name, text in secrets.items():
        reference = SecretRef.parse(text)
        value = None
        try:
            if reference.kind == "var":
                value = Variable.get(reference.id)
            else:
                connection = BaseHook.get_connection(reference.id)
                if reference.attribute.startswith("extra."):
                    value = connection.extra_dejson.get(reference.attribute.removeprefix("extra."))
                else:
                    value = getattr(connection, reference.attribute)
        except (AirflowException, KeyError) as error:
            faults.append(f"secrets.{name}: {text} cannot be read ({type(error).__name__})")
            continue
        if value is None:
            faults.append(f"secrets.{name}: {text} holds no value")
            continue
        mask_secret(str(value))
        values[name] = str(value)
    if faults:
        raise SpecError("job", faults)
    return values
