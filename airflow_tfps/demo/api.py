"""Airflow's REST API as far as the demo and the tests need it.

api = Api("http://127.0.0.1:8080", "admin", password)
run_id = api.trigger("nightly_digits")
api.wait(lambda: api.run_state("nightly_digits", run_id) == "success", 120, "the run")
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from airflow_tfps.errors import TfpsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")
POLL_SECS = 0.2
LOCKED_SECS = 30.0


class StackError(TfpsError):
    """Airflow did not do what it was asked to; the message holds what it said."""


class Api:
    """A logged-in client. Blocks. Raises StackError with what the server said."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        answer = self._client.post("/auth/token", json={"username": user, "password": password})
        if answer.status_code != 201:
            raise StackError(f"cannot log in: {answer.status_code} {answer.text[:500]}")
        self._client.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def close(self) -> None:
        self._client.close()

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """One call below /api/v2; the parsed answer, None when there is none."""
        answer = self._send(method, path, body)
        if answer.is_error:
            raise StackError(f"{method} {path}: {answer.status_code} {answer.text[:1000]}")
        return answer.json() if answer.content else None

    def _send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """One request; again while SQLite, which has one writer, is locked: what was refused has been undone."""
        until = time.monotonic() + LOCKED_SECS
        while True:
            try:
                answer = self._client.request(method, f"/api/v2{path}", json=body)
            except httpx.HTTPError as error:
                raise StackError(f"{method} {path}: no answer ({type(error).__name__}: {error})") from error
            is_locked = answer.status_code == 503 or (
                answer.status_code == 500 and "Database error" in answer.text
            )
            if not is_locked or time.monotonic() >= until:
                return answer

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def trigger(
        self, dag_id: str, conf: Mapping[str, Any] | None = None, logical_date: str | None = None
    ) -> str:
        """Start a run of a DAG; returns its id."""
        body = {"logical_date": logical_date, "conf": dict(conf or {})}
        return str(self.request("POST", f"/dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self.get(f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def tasks(self, dag_id: str, run_id: str) -> dict[tuple[str, int], dict[str, Any]]:
        """(task id, map index) to the task instance, as Airflow describes it."""
        found = self.get(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances?limit=100")["task_instances"]
        return {(ti["task_id"], ti["map_index"]): ti for ti in found}

    def task_states(self, dag_id: str, run_id: str) -> dict[tuple[str, int], str | None]:
        """(task id, map index) to state; -1 for what is not mapped."""
        return {key: ti["state"] for key, ti in self.tasks(dag_id, run_id).items()}

    def xcom(
        self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1
    ) -> Any:
        """A task's XCom, None if there is none."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        answer = self._send("GET", f"{path}?map_index={map_index}&deserialize=true")
        if answer.status_code == 404:
            return None
        if answer.is_error:
            raise StackError(f"GET {path}: {answer.status_code} {answer.text[:1000]}")
        return answer.json()["value"]

    def clear(
        self,
        dag_id: str,
        run_id: str,
        tasks: Sequence[str | tuple[str, int]],
        *,
        only_failed: bool = False,
        downstream: bool = False,
    ) -> list[tuple[str, int]]:
        """Clear tasks as the UI does; returns what will run again."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": list(tasks),
            "only_failed": only_failed,
            "include_downstream": downstream,
        }
        found = self.request("POST", f"/dags/{dag_id}/clearTaskInstances", body)["task_instances"]
        return [(ti["task_id"], ti["map_index"]) for ti in found]

    def set_task_state(self, dag_id: str, run_id: str, task_id: str, state: str, map_index: int = -1) -> None:
        """Mark a task `success`, `failed` or `skipped`."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        self.request("PATCH", path if map_index < 0 else f"{path}/{map_index}", {"new_state": state})

    def set_run_state(self, dag_id: str, run_id: str, state: str) -> None:
        """Mark a run `success`, `failed` or `queued`."""
        self.request("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", {"state": state})

    def delete_run(self, dag_id: str, run_id: str) -> None:
        """Delete a run; Airflow refuses it for one that is running: mark it first."""
        self.request("DELETE", f"/dags/{dag_id}/dagRuns/{run_id}")

    def log(
        self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1
    ) -> list[str]:
        """The messages of a task's log, errors and its triggers' among them, without Airflow's header."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        content = self.get(f"{path}?full_content=true&map_index={map_index}")["content"]
        lines = [message for line in content for message in _messages(line)]
        end = lines.index("::endgroup::") + 1 if "::endgroup::" in lines else 0
        return lines[end:]

    def wait(self, condition: Callable[[], T], secs: float, what: str = "") -> T:
        """See `wait`."""
        return wait(condition, secs, what)


def _messages(line: Any) -> Iterator[str]:
    """What a line of a log says; an exception stands beside the message."""
    if not isinstance(line, dict):
        yield str(line)
        return
    yield str(line["event"])
    for error in line.get("error_detail") or ():
        yield from f"{error['exc_type']}: {error['exc_value']}".splitlines()


def wait(condition: Callable[[], T], secs: float, what: str = "") -> T:
    """Look until `condition` holds and return what it said. Raises TimeoutError naming `what` and the last answer."""
    until = time.monotonic() + secs
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= until:
            raise TimeoutError(f"waited {secs:.0f} s for {what or condition}; last seen: {found!r}")
        time.sleep(POLL_SECS)
