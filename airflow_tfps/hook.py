"""The only door to hosts, for code that may block: workers and the command line. Triggers use `follow`.

    with ClusterHook(inventory=inventory) as hook:
        handle = hook.ensure(job, TrainingId(key, incarnation))
        hook.launch(handle)
        ...
        hook.stop(handle, "done")

One connection per host serves all calls of a hook; hosts are asked side by side.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tfps_runtime.protocol import (
    CheckpointOptions,
    Paths,
    Program,
    ReserveRequest,
    StartRequest,
    Task,
    TaskState,
    TrainingId,
    key_directory,
)

from airflow_tfps import deploy, forms
from airflow_tfps.calls import COMMAND_SECS, HostsHook, raise_all
from airflow_tfps.errors import (
    SpecError,
    TfpsError,
)
from airflow_tfps.handle import EVALUATOR, Handle, PlacedTask
from airflow_tfps.plan import Plan, PlannedTask, make_plan
from airflow_tfps.readiness import check_probes, probe_request
from airflow_tfps.secrets import resolve_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_tfps.spec import JobSpec

log = logging.getLogger(__name__)
T = TypeVar("T")

ENSURE_LEASE_SECS = 120.0
"""What a killed `ensure` had reserved and started by then ends by itself after this long."""
PROBE_SECS = 3.0
SWEEP_SECS = 5.0
"""What an `ensure` may spend on removing what others left."""


class ClusterHook(HostsHook):
    """Everything that is done to the hosts of an inventory.

    Without `inventory`, that of the Airflow connection `tfps_conn_id` (type `tfps`). Methods block; all are idempotent.
    They raise what `errors` holds; HostError names its host.
    """

    def ensure(
        self,
        job: JobSpec,
        training: TrainingId,
        *,
        wait: bool = True,
        lease_secs: float | None = None,
        chief_host: str | None = None,
    ) -> Handle:
        """Bring a training's cluster up, all but the chief, or find it up already; returns its handle.

        Plans, looks at the hosts, uploads what is not there, reserves ports and GPUs (hosts in sorted order, the
        first refusal releases the rest), starts ps and non-chief workers. With `wait`, returns when every TF task
        listens and can be reached from every host. What fails leaves nothing behind.

        Args:
            job: The job, with nothing left to render.
            training: Key and incarnation; the same ones find the same cluster again.
            wait: Whether to wait until the cluster is ready, for at most the job's `ready_secs`.
            lease_secs: How long the hosts go on without word; default: the job's.
            chief_host: Where the chief must run, because its checkpoints are there and only there.

        Raises:
            SpecError: The job or the plan is wrong; no host was touched.
            BusyError: Ports or GPUs are taken; nothing is held.
            NotReadyError: With `wait`: TF tasks that did not come up within `ready_secs`, and why.
        """
        job.check_runnable()
        if job.start_from == "previous":
            raise SpecError(
                f"job {job.name}",
                ["start_from: `previous` is found by ProvisionClusterOperator; name a checkpoint's path"],
            )
        blobs = list(deploy.blobs_of(job))
        secrets = resolve_secrets(job.secrets)
        plan, clocks = self._plan(job, None if job.checkpoint.shared else chief_host)
        since = clocks[plan.chief.host] if job.checkpoint.dir is not None else None
        # Before anything is held: a large upload would keep GPUs idle and outlast the reservation's lease.
        paths = self._upload(plan, blobs)
        try:
            reservations = self._reserve(plan, job, training)
            job = self._resolve_steps(job, plan, reservations)
            handle = replace(self._handle(plan, job, training, reservations, blobs), since=since)
            self._start(handle, paths, secrets)
            # Only now: were this worker killed before, nobody would know of what had been started by then.
            self.renew(handle, lease_secs or job.timeouts.lease_secs)
            if wait:
                self.wait_ready(handle)
        except BaseException:
            self._clear_away(plan.hosts, training)
            raise
        return handle

    def _plan(self, job: JobSpec, chief_host: str | None) -> tuple[Plan, dict[str, float | None]]:
        """Plan, look at the hosts of the plan, and plan again if they have fewer GPUs than was assumed.

        The plan, and the hosts' clocks at that look.
        """
        plan = make_plan(job, self.inventory, chief_host=chief_host)
        gpus = {host: sum(t.gpus for t in plan.on(host)) for host in plan.hosts}
        asked = [n for n, h in self.inventory.hosts.items() if h.gpus is None] if any(gpus.values()) else []
        reports = self.preflight({*plan.hosts, *asked}, preload=job.preload, gpus=gpus, sweep_secs=SWEEP_SECS)
        for host, report in sorted(reports.items()):
            if report["proxies"]:
                log.info("%s: leaving out %s for TF tasks", host, ", ".join(report["proxies"]))
        clocks = {host: report.get("time") for host, report in reports.items()}
        if not asked:
            return plan, clocks
        found = {h: len(reports[h]["gpus"] or ()) for h in asked}
        return make_plan(job, self.inventory, gpus=found, chief_host=chief_host), clocks

    def _reserve(self, plan: Plan, job: JobSpec, training: TrainingId) -> dict[str, dict[str, Any]]:
        log.info("%s\n%s", training, plan)
        found = {}
        trains = plan.chief.task.role != EVALUATOR
        for host in plan.hosts:  # sorted: two trainings that want the same hosts cannot hold half each
            spec = self.inventory[host]
            tasks = plan.on(host)
            is_chiefs = any(t.is_chief for t in tasks)
            request = ReserveRequest(
                training=str(training),
                host=host,
                workdir=spec.workdir,
                tasks=tuple(t.to_spec() for t in tasks),
                ports=spec.ports,
                preload=(*job.preload, *_harness(job)),
                env={k: str(v) for k, v in job.env.items()},
                compat=job.compat,
                checkpoint_dir=_checkpoint_dir(job, spec.workdir, training) if is_chiefs and trains else None,
                checkpoint_dir_is_fixed=job.checkpoint.dir is not None,
                lease_secs=ENSURE_LEASE_SECS,
                grace_secs=job.timeouts.grace_secs,
                stall_secs=job.timeouts.stall_secs,
                seed=job.seed,
            )
            found[host] = self.call(host, "reserve", request.to_json())
        return found

    def _resolve_steps(
        self, job: JobSpec, plan: Plan, reservations: Mapping[str, Mapping[str, Any]]
    ) -> JobSpec:
        """Make a number of `steps: +N`: N more than the newest checkpoint in the fixed directory has."""
        if not isinstance(job.steps, str):
            return job
        host = plan.chief.host
        request = {"directory": reservations[host]["checkpoint_dir"], "newest": True}
        newest = forms.checkpoint_of(host, self.call(host, "checkpoints", request))
        there = 0 if newest is None else newest.global_step
        log.info("%s: %d steps more than the %d of the newest checkpoint", job.name, int(job.steps), there)
        return job.override(steps=there + int(job.steps))

    def _handle(
        self,
        plan: Plan,
        job: JobSpec,
        training: TrainingId,
        reservations: Mapping[str, Mapping[str, Any]],
        blobs: Sequence[deploy.Blob],
    ) -> Handle:
        tasks = []
        for planned in plan.tasks:
            reservation = reservations[planned.host]
            name = str(planned.task)
            tasks.append(
                PlacedTask(
                    task=planned.task,
                    host=planned.host,
                    port=reservation["ports"].get(name),
                    gpus=tuple(reservation["gpus"].get(name, ())),
                )
            )
        chief = plan.chief
        return Handle(
            training=training,
            job=job,
            inventory=self.inventory,
            tasks=tuple(tasks),
            chief=chief.task,
            checkpoint_dir=self._directory(chief, training, reservations[chief.host]),
            blobs={b.key: (b.sha256, b.name) for b in blobs},
        )

    def _directory(self, chief: PlannedTask, training: TrainingId, reservation: Mapping[str, Any]) -> str:
        """Where the chief writes; of an evaluation, which has no checkpoint directory, its working directory."""
        if reservation["checkpoint_dir"] is not None:
            return str(reservation["checkpoint_dir"])
        return Paths(str(reservation["workdir"]), training, chief.host).task_dir(chief.task)

    def _upload(self, plan: Plan, blobs: Sequence[deploy.Blob]) -> dict[str, dict[str, str]]:
        """Bring programs to all hosts and inputs to those that train; host -> blob's key -> path there."""

        def bring(host: str) -> dict[str, str]:
            trains = any(t.task.role != "ps" for t in plan.on(host))
            paths = {}
            for blob in blobs:
                if trains or blob.key in ("program", "script"):
                    paths[blob.key] = self.put(host, blob)
            return paths

        return self.on_each(plan.hosts, bring)

    def _start(
        self,
        handle: Handle,
        paths: Mapping[str, Mapping[str, str]],
        secrets: Mapping[str, str],
    ) -> None:
        job, saving = handle.job, handle.job.checkpoint
        on_hosts = {n: v.removeprefix("host:") for n, v in job.inputs.items() if v.startswith("host:")}

        def begin(host: str) -> None:
            there = paths[host]
            request = StartRequest(
                training=str(handle.training),
                cluster=handle.cluster,
                chief=str(handle.chief),
                program=Program(
                    module=there.get("program"),
                    script=there.get("script"),
                    command=None if job.command is None else tuple(map(str, job.command)),
                    args=tuple(map(str, job.args)),
                    progress=job.progress,
                ),
                checkpoint=CheckpointOptions(
                    directory=handle.checkpoint_dir,
                    save_checkpoint_secs=saving.save_checkpoint_secs,
                    save_summaries_secs=saving.save_summaries_secs,
                    max_to_keep=saving.max_to_keep,
                    sharded=saving.sharded,
                ),
                mode=job.mode,
                replication=job.replication,
                replicas_to_aggregate=job.replicas_to_aggregate,
                steps=job.steps if isinstance(job.steps, int) else None,
                hparams=dict(job.hparams),
                inputs={
                    **on_hosts,
                    **{n: there[f"inputs.{n}"] for n in job.inputs if f"inputs.{n}" in there},
                },
                session=dict(job.session),
                start_from=None if job.start_from == "none" else job.start_from,
                secrets=dict(secrets),
            )
            self.call(
                host,
                "start",
                {**handle.request(host), "request": request.to_json(), "lease_secs": ENSURE_LEASE_SECS},
            )

        self.on_each(handle.hosts, begin)

    def wait_ready(self, handle: Handle, timeout: float | None = None) -> None:
        """Wait until every TF task but the chief listens and can be reached from every host. Blocks.

        A TF task that has ended well is not waited for: a training may be found when some workers are through.
        Raises NotReadyError naming what is missing and why; with `timeout` 0 it only looks.
        """
        secs = handle.job.timeouts.ready_secs if timeout is None else timeout
        tasks = (task for status in self.status(handle).values() for task in status["tasks"])
        through = {str(t["task"]) for t in tasks if t["state"] == TaskState.SUCCEEDED.value}

        until = time.monotonic() + secs
        while True:  # in rounds: a host where nothing has failed does not know that it waits in vain
            left = max(until - time.monotonic(), 0.0)
            round_secs = min(left, PROBE_SECS)

            def probe(host: str, round_secs: float = round_secs) -> dict[str, Any]:
                request = probe_request(handle, host, round_secs, through)
                return self.call(host, "probe", request, timeout=round_secs + COMMAND_SECS)

            found = self.on_each(handle.hosts, probe)
            if left <= PROBE_SECS or not any(p["missing"] for p in found.values()):
                break
            if any(p.get("failed") for p in found.values()):
                break
        check_probes(handle, found)

    # --- while it runs ------------------------------------------------------------------------------------------

    def launch(self, handle: Handle) -> None:
        """Start the chief; nothing happens when it was started already."""
        self.call(
            handle.chief_host, "launch", {**handle.request(handle.chief_host), "task": str(handle.chief)}
        )

    def status(self, handle: Handle) -> dict[str, dict[str, Any]]:
        """How the training stands on each of its hosts, alive or not."""
        self.connect(handle.hosts)
        return self.on_each(handle.hosts, lambda host: self.call(host, "status", handle.request(host)))

    def renew(self, handle: Handle, lease_secs: float) -> None:
        """Let the training's leases run for another `lease_secs`."""

        def one(host: str) -> None:
            self.call(host, "renew", {**handle.request(host), "lease_secs": lease_secs})

        self.on_each(handle.hosts, one)

    def result(self, handle: Handle) -> dict[str, Any]:
        """What the chief left when it ended well (`protocol.Result`); empty if it left nothing."""
        host = handle.chief_host
        status = self.call(host, "status", handle.request(host))
        return dict(status.get("result") or {})

    def has_checkpoint(self, host: str, prefix: str) -> bool:
        """Whether a complete checkpoint of this prefix lies on a host."""
        directory, _, name = prefix.rpartition("/")
        request = {"directory": directory, "after_step": checkpoint_step(name) - 1, "newest": True}
        found = forms.checkpoint_of(host, self.call(host, "checkpoints", request))
        return found is not None and found.prefix.rpartition("/")[2] == name

    def log_tail(self, handle: Handle, task: Task, lines: int = 30) -> list[str]:
        """The last lines of a TF task's log."""
        host = handle.of(task).host
        answer = self.call(host, "logs", {**handle.request(host), "task": str(task), "lines": lines})
        return list(answer["lines"])

    # --- ending -------------------------------------------------------------------------------------------------

    def stop(self, handle: Handle, reason: str, *, grace_secs: float | None = None) -> dict[str, str]:
        """End the training on all its hosts and wait until nothing is left of it there; host -> its last state.

        The chief's host is asked first, since the chief may save and needs its ps for that. Hosts that cannot be
        reached are tried like the others; one HostUnreachableError names them, after all others were stopped.
        """
        grace = handle.job.timeouts.grace_secs if grace_secs is None else grace_secs
        states: dict[str, str] = {}
        errors: list[TfpsError] = []

        def end(host: str) -> None:
            request = {**handle.request(host), "reason": reason, "grace_secs": grace_secs}
            try:
                answer = self.call(host, "stop", request, timeout=2 * grace + COMMAND_SECS)
                states[host] = answer["stopped"].get(str(handle.training), "UNKNOWN")
            except TfpsError as error:
                errors.append(error)

        end(handle.chief_host)
        self.on_each([h for h in handle.hosts if h != handle.chief_host], end)
        raise_all(errors)
        return states

    def stop_key(self, key: str, reason: str, *, grace_secs: float = 30.0) -> dict[str, dict[str, str]]:
        """End every incarnation of a key on all hosts of the inventory; host -> training id -> state.

        Hosts that cannot be reached are named in one error after all others were stopped.
        """
        found: dict[str, dict[str, str]] = {}
        errors: list[TfpsError] = []

        def end(host: str) -> None:
            request = {"key": key, "host": host, "reason": reason, "grace_secs": grace_secs}
            try:
                answer = self.call(host, "stop", request, timeout=2 * grace_secs + COMMAND_SECS)
                found[host] = answer["stopped"]
            except TfpsError as error:
                errors.append(error)

        self.on_each(self.inventory.names, end)
        raise_all(errors)
        return found

    # --- pins ---------------------------------------------------------------------------------------------------

    def pin(self, host: str, directory: str, owner: str, *, step: int | None = None) -> dict[str, Any]:
        """Keep a complete checkpoint of `directory` on a host for `owner`, the newest or that of a global step.

        Returns `{"prefix", "global_step", "size", "time", "source", "owner", "until"}`; `prefix` is what to restore.
        Raises CommandError, code `not_found` when there is none, `pins` when the owner has 20.
        """
        request = {"directory": directory, "owner": owner, "action": "pin", "step": step}
        [found] = self.call(host, "pin", request)["pins"]
        return dict(found)

    def pins(self, host: str, directory: str, owner: str | None = None) -> list[dict[str, Any]]:
        """The pins of a checkpoint directory, an owner's or all, by global step."""
        return list(
            self.call(host, "pin", {"directory": directory, "owner": owner, "action": "list"})["pins"]
        )

    def release_pins(
        self, host: str, directory: str, owner: str, *, step: int | None = None
    ) -> list[dict[str, Any]]:
        """Let go of an owner's pins, or of the one of a global step; returns those that went, none being no error."""
        request = {"directory": directory, "owner": owner, "action": "release", "step": step}
        return list(self.call(host, "pin", request)["pins"])

    def _clear_away(self, hosts: Sequence[str], training: TrainingId) -> None:
        """After a failed `ensure`: take back what was reserved and started. Best effort; the lease does the rest."""

        def release(host: str) -> None:
            request = {
                "training": str(training),
                "host": host,
                "workdir": self.inventory[host].workdir,
                "reason": "could not be brought up",
                "grace_secs": 0,
            }
            try:
                self.call(host, "release", request)
            except TfpsError as error:
                log.warning(
                    "could not release %s (its lease ends within %.0f s): %s", host, ENSURE_LEASE_SECS, error
                )

        self.on_each(hosts, release)


def checkpoint_step(prefix: str) -> int:
    """The global step in a checkpoint's name; 0 without one."""
    step = prefix.rpartition("-")[2]
    return int(step) if step.isdecimal() else 0


def _harness(job: JobSpec) -> tuple[str, ...]:
    """What the nursery imports beside `preload`, for a harness program."""
    return ("tfps_runtime.training",) if job.program is not None else ()


def _checkpoint_dir(job: JobSpec, workdir: str, training: TrainingId) -> str:
    if job.checkpoint.dir is not None:
        return job.checkpoint.dir
    base = job.checkpoint.base_dir or f"{workdir}/checkpoints"
    return f"{base.rstrip('/')}/{key_directory(training.key)}"
