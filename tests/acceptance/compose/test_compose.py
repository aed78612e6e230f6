"""The compose stack as a team gets it: what its images and containers are, what it trains, and what may die under it.

In the order of this file; all share one stack. Programs, hosts, sshd, TensorFlow, Airflow and its executor are real.
"""

from __future__ import annotations

import json
import re
import time

import pytest
from compose_stack import REPORT, Run, Stack, docker

pytestmark = pytest.mark.compose

MIB = 2**20
AIRFLOW = ("api-server", "scheduler", "dag-processor", "triggerer", "worker")
HOSTS = ("gpu-a", "gpu-b", "gpu-c")
LIMITS = {"airflow": 1500 * 10**6, "host": 2500 * 10**6}
"""Bytes of an image."""
IDLE_MIB = 4096
START_SECS = 300.0
"""From the trigger until it trains; the machine may have two cores and much else to do."""
RUN_SECS = 600.0
PORTS = (22, 2222, 5432, 6379, 8080, 8793, 8794, 20000)
"""Whatever listens in the stack, Airflow's log servers, which are off, and a TF task."""


def image(stack: Stack, name: str) -> str:
    return f"airflow-tfps/{name}:{stack.project}"


# --- what it is -----------------------------------------------------------------------------------------------------


def test_images_hold_what_they_need_and_no_key(stack: Stack) -> None:
    """TensorFlow only on hosts, Airflow only in Airflow's, no private key anywhere, and the sizes that were promised."""
    has = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is not None)"
    docker("run", "--rm", image(stack, "airflow"), "python", "-c", has, "tensorflow")
    for module in ("airflow", "airflow_tfps", "tfps_runtime"):
        docker("run", "--rm", image(stack, "host"), "/opt/tf/bin/python", "-c", has, module)
    with pytest.raises(AssertionError):
        docker("run", "--rm", image(stack, "airflow"), "python", "-c", has, "airflow_tfps")
    for name in ("airflow", "host", "postgres", "redis"):
        find = "grep -rlE --include=* 'BEGIN (OPENSSH|RSA|EC) PRIVATE KEY' /etc /home /root /run /opt/airflow /opt/stack || true"
        assert docker("run", "--rm", "--user", "root", image(stack, name), "sh", "-c", find).strip() == ""
        size = int(docker("image", "inspect", "--format", "{{.Size}}", image(stack, name)))
        REPORT.add(f"image {name}", f"{size / 10**6:.0f} MB")
        assert size <= LIMITS.get(name, size)


def test_idle_it_takes_little_memory(stack: Stack) -> None:
    """After the start, before anything was trained."""
    names = {c.id[:12]: c.service for c in stack.running()}
    rows = docker("stats", "--no-stream", "--format", "{{.ID}} {{.MemUsage}}", *names).splitlines()
    used: dict[str, float] = {}
    for row in rows:
        container, usage = row.split()[:2]
        number, unit = re.fullmatch(r"([\d.]+)([KMG]iB|B)", usage).groups()
        size = float(number) * {"B": 1 / MIB, "KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[unit]
        service = names[container[:12]]
        used[service] = used.get(service, 0) + size
    for service, size in sorted(used.items()):
        REPORT.add(f"idle memory of {service}", f"{size:.0f} MiB")
    REPORT.add("idle memory in all", f"{sum(used.values()):.0f} MiB")
    assert sum(used.values()) <= IDLE_MIB


def test_services_are_many_and_not_root(stack: Stack) -> None:
    """Two triggerers, two workers, three hosts; nothing that runs is root, may become so, or writes its own files."""
    running = stack.running()
    services = [c.service for c in running]
    assert {name: services.count(name) for name in set(services)} == {
        **dict.fromkeys(("postgres", "redis", "api-server", "scheduler", "dag-processor", *HOSTS), 1),
        **dict.fromkeys(("triggerer", "worker"), 2),
    }
    for container in running:
        found = container.inspect()
        assert container.health == "healthy", container
        assert container.exec("id", "-u").strip() != "0", container
        owners = [line.split()[0] for line in docker("top", container.id, "-eo", "uid,pid").splitlines()[1:]]
        assert owners, container
        assert "0" not in owners, container
        host = found["HostConfig"]
        assert (host["CapDrop"], host["CapAdd"] or []) == (["ALL"], []), container
        assert host["SecurityOpt"] == ["no-new-privileges:true"], container
        assert host["ReadonlyRootfs"], container
        assert host["RestartPolicy"]["Name"] == "unless-stopped", container
        assert min(host["Memory"], host["NanoCpus"], host["PidsLimit"]) > 0, container


def test_from_outside_only_the_ui_answers_on_loopback(stack: Stack) -> None:
    """One port is published, on loopback; a container of another network reaches nothing."""
    addresses = []
    for container in stack.running():
        found = container.inspect()
        bindings = {k: v for k, v in (found["HostConfig"]["PortBindings"] or {}).items() if v}
        expected = {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(stack.port)}]}
        assert bindings == (expected if container.service == "api-server" else {}), container
        addresses += [network["IPAddress"] for network in found["NetworkSettings"]["Networks"].values()]
    assert len(addresses) > len(AIRFLOW)
    look = """
import asyncio, json, sys
async def opens(address, port):
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 5)
    except (OSError, TimeoutError):
        return []
    writer.close()
    return [(address, port)]
async def main(addresses, ports):
    found = await asyncio.gather(*(opens(a, p) for a in addresses for p in ports))
    print(json.dumps(sum(found, [])))
asyncio.run(main(*json.loads(sys.argv[1])))
"""
    where = json.dumps([addresses, PORTS])
    network = f"{stack.project}-stranger"
    docker("network", "create", network)
    try:
        stranger = docker(
            "run", "--rm", "--network", network, image(stack, "airflow"), "python", "-c", look, where
        )
        assert json.loads(stranger) == []
        insider = json.loads(stack.running("worker")[0].exec("python", "-c", look, where))
    finally:
        docker("network", "rm", network)
    assert {port for _, port in insider} == {2222, 5432, 6379, 8080}, "the look would see an open port"


def test_hosts_and_strangers_are_kept_apart(stack: Stack) -> None:
    """A host reaches neither database nor broker nor UI, and has its own keys and no other's."""
    look = "for n in postgres redis api-server; do getent hosts $n && exit 1; done; ls /run/keys"
    for name in HOSTS:
        found = stack.one(name).exec("bash", "-c", look).split()
        assert found == ["authorized_keys", "ssh_host_ed25519_key"]


def test_sshd_lets_in_the_key_and_nothing_else(stack: Stack) -> None:
    """`train` with the key; not with a password, not as root; only ed25519 host key of the stack's own making."""
    script = """
import asyncio, asyncssh, json
conn = json.load(open("/run/keys/connections.json"))["gpu-a"]
key = asyncssh.import_private_key(conn["extra"]["private_key"])
host_key = asyncssh.import_public_key(conn["extra"]["host_key"])
known = ([host_key], [], [])
async def tries(**how):
    try:
        async with asyncssh.connect("gpu-a", 2222, known_hosts=known, config=None, agent_path=None, **how) as c:
            return (await c.run("id -un")).stdout.strip()
    except asyncssh.Error as error:
        return type(error).__name__
async def main():
    print(json.dumps([
        await tries(username="train", client_keys=[key]),
        await tries(username="root", client_keys=[key]),
        await tries(username="train", client_keys=None, password="train"),
        await tries(username="train", client_keys=[asyncssh.generate_private_key("ssh-ed25519")]),
    ]))
asyncio.run(main())
"""
    found = json.loads(stack.running("worker")[0].exec("python", "-c", script))
    assert found == ["train", "PermissionDenied", "PermissionDenied", "PermissionDenied"]


def test_secrets_are_in_no_environment_and_stay_the_same(stack: Stack) -> None:
    """Nothing that was generated can be read by `docker inspect`; a second start keeps all of it."""
    config, keys = secrets_of(stack)
    assert len(config) == 7
    described = json.dumps([container.inspect() for container in stack.containers()])
    assert not [value for value in [*config, *keys] if value in described]
    stack.compose("run", "--rm", "--no-deps", "secrets")
    assert secrets_of(stack) == (config, keys)


def secrets_of(stack: Stack) -> tuple[list[str], list[str]]:
    """The values in Airflow's configuration and passwords; lines of the SSH keys."""
    api = stack.one("api-server")
    values = re.findall(r" = (.+)", api.exec("cat", "/run/keys/airflow.cfg"))
    values += json.loads(api.exec("cat", "/run/keys/passwords.json")).values()
    connections = json.loads(api.exec("cat", "/run/keys/connections.json"))
    keys = connections["gpu-a"]["extra"]["private_key"].splitlines()[1:4]
    keys += stack.one("gpu-a").exec("cat", "/run/keys/ssh_host_ed25519_key").splitlines()[1:4]
    return values, keys


# --- what it trains -------------------------------------------------------------------------------------------------


def test_linear_regression(stack: Stack) -> None:
    run = stack.trigger("linear_regression")
    run.until_success(RUN_SECS)
    result = run.xcom("training.train")
    assert result["global_step"] >= 400
    assert abs(result["metrics"]["weight"] - 2) < 0.2
    assert abs(result["metrics"]["bias"] - 10) < 0.5
    assert len(set(run.hosts().values())) > 1
    checkpoint = stack.one(result["host"]).exec("ls", f"{result['checkpoint']}.index")
    assert checkpoint.strip().startswith("/home/train/")


def test_nightly_digits(stack: Stack) -> None:
    """Prepared, trained, judged, evaluated and promoted, with inputs that any worker can read.

    Twice: with the DAG unpaused, last night's run goes first; the model of the second is promoted if it is better.
    """
    check_nightly_digits(stack, stack.trigger("nightly_digits"))


def check_nightly_digits(stack: Stack, run: Run) -> None:
    run.until_success(RUN_SECS)
    judged = run.xcom("judge")
    assert judged["accuracy"] >= 0.93
    found = stack.api.get("/dags/nightly_digits/dagRuns")["dag_runs"]
    promotions = [Run(stack, run.dag_id, one["dag_run_id"]).xcom("promote") for one in found]
    promoted = next(promotion for promotion in promotions if promotion is not None)
    assert promoted["value"] >= 0.93
    assert promoted["host"] == judged["host"]
    served = stack.one(promoted["host"]).exec("ls", "/home/train/models/digits/current/saved_model.pb")
    assert served.strip()
    names = ("prepare", "training.provision", "training.train", "judge", "evaluate", "promote")
    REPORT.add("nightly_digits ran on", f"{len({run.task(name)['hostname'] for name in names})} worker(s)")


# --- what may die ---------------------------------------------------------------------------------------------------


def started(stack: Stack, **conf: int) -> Run:
    """A slow training, deferred and followed, with steps in Airflow's log."""
    run = stack.trigger("slow_regression", **conf)
    run.until(lambda: run.task()["state"] == "deferred" and run.step() > 0, START_SECS, "it trains")
    return run


def repeated(lines: list[str]) -> list[str]:
    """Lines of the chief that stand there more than once."""
    said = [line for line in lines if "worker:0@" in line and "step" in line]
    return [line for line in set(said) if said.count(line) > 1]


def test_worker_that_ran_execute_stops(stack: Stack) -> None:
    """The task is deferred and needs no worker; what resumes it is the other."""
    run = started(stack, steps=700)
    first = run.task()["hostname"]
    worker = stack.of_host_name(first)
    assert worker.service == "worker"
    docker("stop", "--time", "60", worker.id, secs=90)
    try:
        assert run.task()["state"] == "deferred"
        run.until_success(RUN_SECS)
        resumed = run.task()
        assert resumed["hostname"] != first
        assert stack.of_host_name(resumed["hostname"]).service == "worker"
        assert resumed["try_number"] == 1
        REPORT.add("worker stopped while its task was deferred", "resumed on the other, same try")
    finally:
        docker("start", worker.id)


def test_host_of_a_worker_and_the_triggerer_die(stack: Stack) -> None:
    """Asynchronous training goes on without a worker's host; another triggerer goes on, and repeats no line."""
    run = started(stack, steps=3000)
    hosts = run.hosts()
    lost = hosts["worker:1"]
    assert lost not in (hosts["worker:0"], hosts["ps:0"])
    docker("kill", stack.one(lost).id)
    began = time.monotonic()
    run.until(
        lambda: any(f"{lost}: connection lost" in line for line in run.log()), 120, "the log names the host"
    )
    noticed = time.monotonic() - began
    REPORT.add("host killed: noticed in Airflow's log after", f"{noticed:.0f} s")
    step = run.step()
    run.until(lambda: run.step() > step + 20, 120, "training goes on without it")

    former = run.task()["triggerer_job"]["hostname"]
    triggerer = stack.of_host_name(former)
    assert triggerer.service == "triggerer"
    docker("kill", triggerer.id)
    began = time.monotonic()
    try:
        run.until(
            lambda: (run.task()["triggerer_job"] or {}).get("hostname") not in (None, former),
            180,
            "the other triggerer takes over",
        )
        REPORT.add("triggerer killed: the other took over after", f"{time.monotonic() - began:.0f} s")
        step = run.step()
        run.until(lambda: run.step() > step + 20, 120, "it is followed again")
        docker("start", stack.one(lost).id)
        run.until_success(RUN_SECS)
    finally:
        docker("start", triggerer.id, stack.one(lost).id)
    assert run.task()["try_number"] == 1
    assert run.xcom("training.train")["global_step"] >= 3000
    lines = run.log()
    assert [line for line in lines if "worker:0@" in line]
    assert repeated(lines) == []


def test_host_of_the_chief_dies_and_comes_back(stack: Stack) -> None:
    """The try fails after `unreachable_secs`; the retry continues from the last complete checkpoint there."""
    wait_healthy(stack)
    run = started(stack, steps=1500)
    chief = stack.one(run.hosts()["worker:0"])
    run.until(lambda: run.step() > 200, 90, "a checkpoint is written")
    docker("kill", chief.id)
    try:
        run.until(lambda: run.task()["state"] == "up_for_retry", 240, "the try fails")
    finally:
        docker("start", chief.id)
    run.until_success(RUN_SECS)
    assert run.task()["try_number"] > 1
    assert any("worker:0@" in line and "no connection" in line for line in run.log(attempt=1))
    restored = [
        int(found[1]) for line in run.log(attempt=2) if (found := re.search(r"restored .*ckpt-(\d+)", line))
    ]
    assert 0 < restored[0] <= 1500
    REPORT.add("host of the chief killed and started", f"the retry continued from step {restored[0]}")


def wait_healthy(stack: Stack) -> None:
    def is_healthy() -> bool:
        return all(container.health == "healthy" for container in stack.running())

    until = time.monotonic() + 300
    while not is_healthy():
        assert time.monotonic() < until, stack.compose("ps")
        time.sleep(1)


def test_everything_is_healthy_in_the_end(stack: Stack) -> None:
    """After all that, every service is up again and no training is left on any host."""
    wait_healthy(stack)
    for name in HOSTS:
        running = stack.one(name).exec("bash", "-c", "cat /proc/[0-9]*/comm").split()
        assert "sshd" in running
        assert not [command for command in running if command.startswith("python")], (name, running)
    assert len(stack.running()) == 12
