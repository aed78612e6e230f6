"""Looking at a host before anything is reserved there.

Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import time
from typing import Any, Optional

from tfps_runtime.launch import PROXY_VARIABLES
from tfps_runtime.processes import runtime_location
from tfps_runtime.protocol import RefusedError
from tfps_runtime.reserve import ensure_run_dir, list_gpus, living
from tfps_runtime.sweep import sweep
from tfps_runtime.uploads import note_use

BUILDS = ("cpu", "gpu", "rocm", "intel")
"""How distributions of TensorFlow are called after their module."""


def preflight(request: dict[str, Any]) -> dict[str, Any]:
    """What the host has, and what it lacks; with `sweep`, what was removed. Touches nothing but its own folders.

    `public` is which addresses behind the host's `address` are open to the internet.
    """
    workdir = os.path.expanduser(str(request.get("workdir", "~/.tfps")))
    faults = []
    swept: Optional[dict[str, Any]] = None
    note_use(runtime_location())
    try:
        os.makedirs(workdir, mode=0o700, exist_ok=True)
        if request.get("sweep") is not None:  # before the free space is measured; whatever comes of it
            swept = _swept(request["sweep"])
        if not os.access(workdir, os.W_OK | os.X_OK):
            faults.append(f"workdir {workdir} is not writable")
        status = os.stat(workdir)
        if status.st_uid != os.getuid():
            faults.append(f"workdir {workdir} belongs to another user, who could change programs in it")
        elif status.st_mode & 0o002:
            faults.append(f"workdir {workdir} can be written by everybody; run chmod o-w on it")
        free = shutil.disk_usage(workdir).free
    except OSError as error:
        faults.append(f"workdir {workdir}: {error.strerror}")
        free = None
    try:
        ensure_run_dir()
    except (OSError, RefusedError) as error:
        faults.append(str(error))
    for name in request.get("preload", []):
        try:
            is_there = importlib.util.find_spec(str(name)) is not None
        except (ImportError, ValueError):
            is_there = False
        if not is_there:
            faults.append(
                f"{sys.executable} has no module {name}; install it there, or name another `python`"
            )
    gpus: Optional[list[Any]] = None
    try:
        gpus = [{"bus": g.bus, "used_mib": g.used_mib} for g in list_gpus()]
    except RefusedError as error:
        if request.get("gpus"):
            faults.append(str(error))
    return {
        "type": "preflight",
        "python": platform.python_version(),
        "machine": platform.node(),
        "uid": os.getuid(),
        "cpus": os.cpu_count(),
        "disk_free": free,
        "time": time.time(),
        "gpus": gpus,
        "proxies": sorted(PROXY_VARIABLES & set(os.environ)),
        "public": public_addresses(str(request.get("address", ""))),
        "trainings": [record.training for _, record in living()],
        "versions": {str(name): version(str(name)) for name in request.get("versions", [])},
        "swept": swept,
        "faults": faults,
    }


def public_addresses(address: str) -> list[str]:
    """Of the IP addresses that `address` (one, or a name) stands for here, those that the whole internet sees."""
    if not address:
        return []
    import ipaddress  # of no use to other commands

    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # what cannot be resolved is for `ready` to find out
        return []
    addresses = {str(sockaddr[0]).partition("%")[0] for *_, sockaddr in found}
    return sorted(a for a in addresses if ipaddress.ip_address(a).is_global)


def version(module: str) -> Optional[str]:
    """The version of an installed package by the module's name, without importing it: TensorFlow takes ten seconds."""
    for name in (module, *(f"{module}-{build}" for build in BUILDS)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _swept(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of `sweep`; what that cannot do is told and is no error."""
    try:
        return sweep(request)
    except (OSError, ValueError) as error:
        return {"type": "swept", "faults": [str(error)]}
