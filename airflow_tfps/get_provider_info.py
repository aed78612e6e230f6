"""What Airflow learns about this provider without importing any of it."""

from __future__ import annotations

from typing import Any

_HOSTS_HELP = (
    "The inventory, as YAML or JSON. Short form: {gpu-a: 4, gpu-b: 4} - name = ssh connection id, value = GPUs; "
    "spelled out: {gpu-a: {ssh_conn_id: gpu_a, address: 10.11.2.31, gpus: 4, python: /opt/tf/bin/python}}."
)
_DEFAULTS_HELP = (
    "For hosts that do not say otherwise, as YAML or JSON: {python: /opt/tf/bin/python, ports: 20000-29999}."
)


def get_provider_info() -> dict[str, Any]:
    """Airflow's provider metadata (entry point `apache_airflow_provider`)."""
    name = "TensorFlow parameter servers"
    return {
        "package-name": "airflow-tfps",
        "name": name,
        "description": "TensorFlow parameter-server training on plain SSH hosts.",
        "integrations": [
            {
                "integration-name": name,
                "external-doc-url": "https://www.tensorflow.org/guide/distributed_training",
                "tags": ["software"],
            }
        ],
        "operators": [
            {"integration-name": name, "python-modules": ["airflow_tfps.operators", "airflow_tfps.models"]}
        ],
        "sensors": [{"integration-name": name, "python-modules": ["airflow_tfps.sensors"]}],
        "hooks": [{"integration-name": name, "python-modules": ["airflow_tfps.hook"]}],
        "cli": ["airflow_tfps.cli.definition.get_cli_commands"],
        "triggers": [
            {
                "integration-name": name,
                "python-modules": ["airflow_tfps.triggers", "airflow_tfps.asset_triggers"],
            }
        ],
        "asset-uris": [{"schemes": ["tfps"], "handler": "airflow_tfps.assets.sanitize_uri"}],
        "connection-types": [
            {
                "connection-type": "tfps",
                "hook-class-name": "airflow_tfps.hook.ClusterHook",
                "hook-name": name,
                "ui-field-behaviour": {
                    "hidden-fields": ["host", "port", "login", "password", "schema"],
                    "relabeling": {},
                    "placeholders": {"hosts": "{gpu-a: 4, gpu-b: 4}"},
                },
                "conn-fields": {
                    "hosts": {
                        "label": "Hosts",
                        "description": _HOSTS_HELP,
                        "schema": {"type": ["string", "null"], "format": "multiline"},
                    },
                    "defaults": {
                        "label": "Defaults",
                        "description": _DEFAULTS_HELP,
                        "schema": {"type": ["string", "null"], "format": "multiline"},
                    },
                },
            }
        ],
    }
