"""How a command of the on-host runtime is called, and how its answer is read. For workers and triggers alike.

Pure: builds argument lists and bytes, reads bytes; `hook` and `follow` do the talking. An answer is treated as hostile:
bounded lines, JSON objects only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfps_runtime.protocol import Kind, ProtocolError, dump, load, runtime_path

from airflow_tfps.deploy import INSTALL, build_runtime
from airflow_tfps.errors import BusyError, CommandError, HostError, HostNotReadyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_tfps.inventory import HostSpec
    from airflow_tfps.ssh import Completed, Endpoint


def endpoint(spec: HostSpec) -> Endpoint:
    from airflow_tfps.ssh import Endpoint

    return Endpoint(host=spec.name, ssh_conn_id=spec.ssh_conn_id)


def from_home(path: str) -> str:
    """A path on a host, as an argument: `~/x` becomes `x`, since commands run in the user's home directory.

    What begins with a dash becomes `./-x`: it is no option.
    """
    if not path.startswith("~/"):
        return path
    relative = path.removeprefix("~/").lstrip("/")
    return f"./{relative}" if relative.startswith("-") else relative


def python(spec: HostSpec) -> str:
    """The interpreter as an argument. A relative path must hold a slash, or a shell would search for it."""
    return from_home(spec.python) if "/" in spec.python else spec.python


def argv(spec: HostSpec, command: str) -> list[str]:
    """The command line of a runtime command on a host."""
    return [python(spec), from_home(runtime_path(spec.workdir, build_runtime().hash)), command]


def install_argv(spec: HostSpec) -> list[str]:
    """The command line that stores its standard input as the runtime's `.pyz`."""
    runtime = build_runtime()
    path = runtime_path(spec.workdir, runtime.hash)
    return [python(spec), "-c", INSTALL, path, str(len(runtime.content))]


def request_line(request: Mapping[str, Any]) -> bytes:
    return dump(dict(request)).encode() + b"\n"


def lacks_runtime(completed: Completed) -> bool:
    """Whether the interpreter ran and did not find the `.pyz`."""
    return completed.returncode == 2 and b"can't open file" in completed.stderr


def answers(host: str, command: str, completed: Completed) -> list[dict[str, Any]]:
    """The lines a command answered with.

    Raises CommandError or BusyError with what the host said, HostNotReadyError when it was not our runtime that
    answered.
    """
    found = []
    for line in completed.stdout.decode("utf-8", "replace").splitlines():
        message = read_line(host, line)
        if message is not None:
            found.append(message)
    if completed.returncode != 0 and not found:
        raise not_ready(host, command, completed)
    return found


def read_line(host: str, line: str) -> dict[str, Any] | None:
    """One line of an answer. None for what a login script printed. Raises CommandError or BusyError for a refusal."""
    try:
        message = load(line)
    except ProtocolError:
        return None
    if not isinstance(message, dict) or not isinstance(message.get("type", ""), str):
        return None
    if message.get("type") == Kind.ERROR:
        code, text = str(message.get("code"))[:40], str(message.get("message"))[:4000]
        if code == "busy":
            raise BusyError(f"{host}: {text}")
        raise CommandError(host, text, code=code, transient=message.get("transient") is True)
    return message


def not_ready(host: str, command: str, completed: Completed) -> HostError:
    """What to say when something else than the runtime answered."""
    said = completed.stderr.decode("utf-8", "replace").strip()[-1000:]
    if completed.returncode in (126, 127):
        return HostNotReadyError(
            host, f"{said or 'the interpreter was not found'} (set `python` of this host)"
        )
    if completed.returncode < 0:
        return CommandError(host, f"{command} was killed by signal {-completed.returncode}", transient=True)
    return HostNotReadyError(host, f"{command} ended with exit code {completed.returncode}: {said}")
