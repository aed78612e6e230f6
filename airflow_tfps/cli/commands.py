"""The commands of `airflow tfps`, one function each. They read arguments and print; `hook` does the work."""

from __future__ import annotations

import getpass
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfps_runtime.protocol import Kind, ProtocolError, Task

from airflow_tfps.cli import trainings
from airflow_tfps.cli.terminal import audited, command, complain, plain, say, show, size
from airflow_tfps.cli.trainings import Selection, each, reading
from airflow_tfps.errors import SpecError, TfpsError
from airflow_tfps.hook import ClusterHook
from airflow_tfps.inventory import Inventory
from airflow_tfps.plan import make_plan
from airflow_tfps.spec import JobSpec

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from airflow_tfps.plan import Plan

NO_EVENTS = 2**53
"""More events than a training can have: a follower who asks for those after it hears of none before its time."""


def inventory_of(args: Namespace) -> Inventory:
    """What `--hosts` names. Raises SpecError."""
    hosts: list[str] = args.hosts
    return Inventory.load(hosts[0] if len(hosts) == 1 else hosts, base_dir=Path.cwd())


def selection_of(args: Namespace) -> Selection:
    return Selection(
        training=args.training,
        dag_id=args.dag_id,
        run_id=args.run_id,
        group_id=args.group_id,
        map_index=args.map_index,
    )


def job_of(args: Namespace) -> JobSpec:
    """The job of a file, with what the command line says instead. Raises SpecError."""
    job = JobSpec.load(args.job, base_dir=Path.cwd(), templated=True)
    given = {key: value for key in ("mode", "steps") if (value := getattr(args, key, None)) is not None}
    if given.get("steps", "").isdigit():
        given["steps"] = int(given["steps"])
    return job.override(**given) if given else job


def report(errors: Sequence[TfpsError]) -> int:
    """Tell what failed; the exit code."""
    for error in errors:
        complain(str(error))
    return 1 if errors else 0


# --- before -------------------------------------------------------------------------------------------------------


@command
def plan(args: Namespace) -> int | None:
    """`airflow tfps plan JOB`."""
    job = job_of(args)
    found = make_plan(job, inventory_of(args))
    if args.output == "table":
        for line in str(found).splitlines():
            say(line)
    else:
        show([_planned(found, task) for task in found.tasks], args.output)
    for hint in job.hints():
        complain(f"hint: {hint}")
    for fault in job.missing_files():
        complain(f"warning: {fault}")
    return 0


def _planned(found: Plan, task: Any) -> dict[str, Any]:
    return {
        "task": str(task.task),
        "host": task.host,
        "gpus": task.gpus,
        "restarts": task.restarts,
        "start": "warm" if task.spawn_reason is None else f"spawn ({task.spawn_reason})",
        "is_chief": task == found.chief,
    }


@command
def preflight(args: Namespace) -> int | None:
    """`airflow tfps preflight`."""
    hosts = inventory_of(args)
    preload: Sequence[str] = ("tensorflow",)
    gpus: dict[str, int] = {}
    if args.job is not None:
        job = job_of(args)
        preload = job.preload
        found = make_plan(job, hosts)
        gpus = {host: sum(task.gpus for task in found.on(host)) for host in found.hosts}

    with ClusterHook(inventory=hosts) as hook:

        def look(host: str) -> tuple[dict[str, Any], list[str]]:
            spec = hosts[host]
            request = {
                "workdir": spec.workdir,
                "preload": list(preload),
                "gpus": gpus.get(host, spec.gpus or 0),
                "versions": ["tensorflow"],
                "address": spec.address,
            }
            answer = hook.call(host, "preflight", request)
            return reading(host, lambda: _looked_at(hosts, host, hook.host_key(host), answer))

        reports, errors = each(hosts.names, look)
    show([row for row, _ in reports.values()], args.output)
    for host, (_, remarks) in reports.items():
        for remark in remarks:
            complain(f"{host}: {remark}")
    return report(errors) or int(any(row["state"] != "ready" for row, _ in reports.values()))


def _looked_at(
    hosts: Inventory, host: str, host_key: str | None, answer: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """A row, and what is to be said about the host."""
    spec, gpus, free = hosts[host], answer.get("gpus"), answer.get("disk_free")
    faults = [str(fault) for fault in answer["faults"]]
    row = {
        "host": host,
        "state": "faults" if faults else "ready",
        "address": spec.address,
        "host_key": host_key or "this machine",
        "python": str(answer["python"]),
        "tensorflow": (answer.get("versions") or {}).get("tensorflow"),
        "gpus": None if gpus is None else len(gpus),
        "cpus": answer.get("cpus"),
        "disk_free": None if free is None else size(float(free)),
        "trainings": len(answer.get("trainings") or ()),
    }
    if answer.get("public"):
        addresses = ", ".join(map(str, answer["public"]))
        faults.append(
            f"warning: its address {spec.address} is public ({addresses}): whoever reaches its ports can run code "
            "there; see docs/hosts.md, Fencing gRPC"
        )
    return row, faults


# --- while it runs ------------------------------------------------------------------------------------------------


@command
def status(args: Namespace) -> int | None:
    """`airflow tfps status`."""
    with ClusterHook(inventory=inventory_of(args)) as hook:
        found, errors = trainings.find(hook, selection_of(args), ended=args.ended)
    none: tuple[dict[str, Any], ...] = ({},)
    rows = [
        _task(str(one.training), host, state, task)
        for one in found
        for host, state in one.hosts.items()
        for task in state["tasks"] or none
    ]
    show(rows, args.output, nothing="" if errors else "no training was found on these hosts")
    for one in found:
        for host, state in one.hosts.items():
            if state["reason"] and not state["is_alive"]:
                complain(f"{one.training} on {host}: {state['reason']}")
    return report(errors)


def _task(training: str, host: str, state: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "training": training,
        "training_state": state["state"],
        "task": task.get("task"),
        "host": host,
        "state": task.get("state"),
        "gpus": ",".join(map(str, task.get("gpus", ()))) or None,
        "restarts": task.get("restarts"),
        "global_step": task.get("global_step"),
        "lease_secs": state["lease_secs"],
    }


@command
def logs(args: Namespace) -> int | None:
    """`airflow tfps logs TASK`."""
    name, _, host = args.task.partition("@")
    try:
        task = Task.parse(name)
    except ProtocolError as error:
        raise SpecError("logs", [f"TASK: {error}"]) from None
    with ClusterHook(inventory=inventory_of(args)) as hook:
        candidates, errors = trainings.find(hook, selection_of(args), ended=True)
        try:
            found, host = trainings.the_one(candidates, task, host or None)
        except SpecError:
            report(errors)
            raise
        request = {
            "training": str(found.training),
            "host": host,
            "workdir": hook.inventory[host].workdir,
        }
        tail = hook.call(host, "logs", {**request, "task": str(task), "lines": args.lines})
        lines, offset = reading(host, lambda: (list(map(str, tail["lines"])), int(tail["offset"])))
        complain(f"{found.training}: {task.at(host)}")
        for line in lines:
            say(line)
        sys.stdout.flush()
        if args.follow and found.hosts[host]["is_alive"]:
            _follow(hook, host, {**request, "logs": [str(task)], "told": {str(task): offset}})
    return 0


def _follow(hook: ClusterHook, host: str, request: Mapping[str, Any]) -> None:
    """Print lines as they come, until the training has ended there. Renews nothing and acknowledges nothing."""
    with hook.stream(host, "follow", {**request, "from_seq": NO_EVENTS}) as messages:
        for message in messages:
            if message.get("type") == Kind.LOG:
                for line in reading(host, lambda: list(message["lines"])):  # noqa: B023  called at once
                    say(line)
                sys.stdout.flush()
            elif message.get("last") is True or message.get("type") == Kind.GONE:
                complain(
                    f"{host}: the training is {message.get('state')}: {message.get('reason') or 'ended'}"
                )
                return


# --- ending -------------------------------------------------------------------------------------------------------


@audited
@command
def stop(args: Namespace) -> int | None:
    """`airflow tfps stop`."""
    selection = selection_of(args)
    if selection.is_all != args.all:
        chosen = (
            "say which trainings, or --all"
            if selection.is_all
            else "--all and a choice contradict each other"
        )
        raise SpecError("stop", [chosen])
    with ClusterHook(inventory=inventory_of(args)) as hook:
        found, errors = trainings.find(hook, selection)
        rows = []
        for one in found:
            reason = f"stopped from the command line by {getpass.getuser()}"
            states, more = trainings.stop(hook, one, reason, grace_secs=args.grace_secs)
            rows += [{"training": str(one.training), "host": h, "state": s} for h, s in states.items()]
            errors += more
    show(rows, args.output, nothing="" if errors else f"no such training lives on these hosts ({selection})")
    return report(errors)


@audited
@command
def sweep(args: Namespace) -> int | None:
    """`airflow tfps sweep`."""
    names = ("training_days", "unused_days", "upload_hours")
    limits = {name: value for name in names if (value := getattr(args, name)) is not None}
    with ClusterHook(inventory=inventory_of(args)) as hook:

        def one(host: str) -> tuple[list[dict[str, Any]], str, list[str]]:
            answer = hook.sweep([host], dry_run=args.dry_run, **limits)[host]
            return reading(
                host, lambda: _swept(host, answer, "would be removed" if args.dry_run else "removed")
            )

        answers, errors = each(hook.inventory.names, one)
    show([row for rows, _, _ in answers.values() for row in rows], args.output)
    for host, (_, total, faults) in answers.items():
        complain(f"{host}: {total}")
        for fault in faults:
            complain(f"{host}: not removed: {fault}")
    return report(errors) or int(any(faults for _, _, faults in answers.values()))


def _swept(host: str, answer: Mapping[str, Any], done: str) -> tuple[list[dict[str, Any]], str, list[str]]:
    """Rows, a sentence with the total, and what could not be removed."""
    rows = [
        {"host": host, "what": str(one["what"]), "name": str(one["name"]), "bytes": int(one["bytes"])}
        for one in answer["removed"]
    ]
    rest = "" if answer["is_complete"] else "; there is more, the time was up"
    total = f"{int(answer['count'])} {done}, {size(float(answer['bytes']))}{rest}"
    return rows, total, [str(fault) for fault in answer["faults"]]


@command
def checkpoints(args: Namespace) -> int | None:
    """`airflow tfps checkpoints DIR`."""
    hosts = inventory_of(args)
    if args.host is None and len(hosts) > 1:
        raise SpecError("checkpoints", [f"--host: say which of {', '.join(hosts.names)}"])
    host = args.host or hosts.names[0]
    if host not in hosts.names:
        raise SpecError("checkpoints", [f"--host: {host} is not one of {', '.join(hosts.names)}"])
    with ClusterHook(inventory=hosts) as hook:
        lines = hook.call_for_all(host, "checkpoints", {"directory": args.directory})
    rows = reading(host, lambda: _listed(lines, is_for_people=args.output == "table"))
    show(rows, args.output, nothing=f"{host}: no complete checkpoint in {plain(args.directory)}")
    return 0


def _listed(lines: Sequence[Mapping[str, Any]], *, is_for_people: bool) -> list[dict[str, Any]]:
    """Rows by global step; the newest is told twice."""
    found = {one["checkpoint"]["prefix"]: one["checkpoint"] for one in lines if one["type"] == "checkpoint"}
    return [
        {
            "global_step": int(one["global_step"]),
            "checkpoint": str(one["prefix"]),
            "size": size(float(one["size"])) if is_for_people else int(one["size"]),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(float(one["time"]))),
        }
        for one in sorted(found.values(), key=lambda one: int(one["global_step"]))
    ]


# --- beginning ----------------------------------------------------------------------------------------------------


@command
def init(args: Namespace) -> int | None:
    """`airflow tfps init FOLDER`."""
    from airflow_tfps.cli.starter import write

    hosts: str | list[str] = args.hosts[0] if len(args.hosts) == 1 else args.hosts
    for path in write(Path(args.folder), hosts):
        say(str(path))
    return 0


@command
def demo(args: Namespace) -> int | None:
    """`airflow tfps demo`."""
    from airflow_tfps.demo import example_dags
    from airflow_tfps.demo.run import DAG, main

    dags = Path(args.dags) if args.dags else example_dags()
    if not (dags / f"{DAG}.py").is_file():
        raise SpecError(
            "demo",
            [f"there is no {DAG}.py in {dags}; leave --dags away for the example DAGs"],
        )
    given = {
        "home": args.home or ".demo",
        "out": args.out or "result.json",
        "dags": dags,
        "steps": args.steps,
    }
    given["mode"] = args.mode
    words = [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]
    return main([*words, "--exit"] if args.exit else words)
