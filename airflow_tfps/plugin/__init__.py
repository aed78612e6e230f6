"""Airflow plugin: the *Training* tab on DAG runs and task instances.

Imported in every Airflow process, task workers included (entry point `airflow.plugins`), so it imports nothing but the
plugin's base class; the pages' app is built at the first request, which only the API server gets.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin


class LazyApp:
    """An ASGI app that is imported when it is first called. Gets no lifespan events."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            from airflow_tfps.plugin.app import app

            self._app = app
        await self._app(scope, receive, send)


class TfpsPlugin(AirflowPlugin):
    """Static pages below `/tfps`; what they show they read from Airflow's own REST API, with the user's cookie."""

    name = "airflow_tfps"
    fastapi_apps = [{"app": LazyApp(), "url_prefix": "/tfps", "name": "airflow-tfps"}]  # noqa: RUF012  Airflow's form
    external_views = [  # noqa: RUF012  Airflow's form
        {
            # Relative: an absolute path breaks below a base URL with a prefix.
            "name": "Training",
            "href": "tfps/training.html?dag_id={DAG_ID}&run_id={RUN_ID}",
            "destination": "dag_run",
            "url_route": "tfps_training",
        },
        {
            "name": "Training",
            "href": "tfps/training.html?dag_id={DAG_ID}&run_id={RUN_ID}&task_id={TASK_ID}&map_index={MAP_INDEX}",
            "destination": "task_instance",
            "url_route": "tfps_training",
        },
    ]
