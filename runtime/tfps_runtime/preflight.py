"""Looking at a host before anything is reserved there.

Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
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
    """What the host has, and what it lacks; with `sweep`, what was removed. Touches nothing but its own folders."""
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
        "trainings": [record.training for _, record in living()],
        "versions": {str(name): version(str(name)) for name in request.get("versions", [])},
        "swept": swept,
        "faults": faults,
    }


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
