"""Plans: where TF tasks go, how they are started, and what is refused before any host is touched."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st
from tfps_runtime.protocol import Task

from airflow_tfps.errors import SpecError
from airflow_tfps.inventory import HostSpec, Inventory
from airflow_tfps.plan import chief_of, make_plan
from airflow_tfps.spec import JobSpec


def inventory(**gpus):
    """Hosts `a`, `b`, ... with so many GPUs; None: unknown."""
    return Inventory(
        hosts={name: HostSpec(name=name, address=f"{name}.lan", gpus=number) for name, number in gpus.items()}
    )


def job(roles, **keys):
    program = {} if {"script", "command"} & set(keys) else {"program": "ctr.py"}
    return JobSpec.from_dict({**program, "roles": roles, **keys})


def places(plan):
    return [str(planned) for planned in plan.tasks]


def faults(*arguments, **keywords):
    with pytest.raises(SpecError) as caught:
        make_plan(*arguments, **keywords)
    return list(caught.value.faults)


# --- where TF tasks go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "hosts", "expected"),
    [
        # ps first and spread, then the worker that is the chief where the least is.
        ({"ps": 1, "worker": 2}, {"a": 0, "b": 0}, ["ps:0@a", "worker:0@b", "worker:1@a"]),
        ({"ps": 3, "worker": 1}, {"a": 0, "b": 0}, ["ps:0@a", "ps:1@b", "ps:2@a", "worker:0@b"]),
        ({"worker": 2, "ps": 2}, {"a": 0, "b": 0}, ["worker:0@a", "worker:1@b", "ps:0@a", "ps:1@b"]),
        # GPUs: the host with the most free ones, then the one with the fewest workers.
        (
            {"ps": 1, "worker": {"count": 4, "gpus": 1}},
            {"a": 2, "b": 4},
            ["ps:0@a", "worker:0@b", "worker:1@b", "worker:2@a", "worker:3@b"],
        ),
        (
            {"ps": 1, "worker": {"count": 2, "gpus": 1}},
            {"a": None, "b": None},
            ["ps:0@a", "worker:0@b", "worker:1@a"],
        ),
        # The chief is chosen before the workers, the evaluator goes with it.
        (
            {"ps": 1, "worker": {"count": 2, "gpus": 1}, "chief": {"gpus": 1}, "evaluator": {"gpus": 1}},
            {"a": 3, "b": 2},
            ["ps:0@a", "worker:0@b", "worker:1@b", "chief:0@a", "evaluator:0@a"],
        ),
        # Roles keep to their hosts.
        (
            {"ps": {"count": 2, "hosts": ["c"]}, "worker": {"count": 2, "hosts": ["b", "c"]}},
            {"a": 0, "b": 0, "c": 0},
            ["ps:0@c", "ps:1@c", "worker:0@b", "worker:1@c"],
        ),
    ],
)
def test_placement(roles, hosts, expected):
    """ps are spread first, then chief and evaluator, then workers by free GPUs; ties go by the inventory."""
    assert places(make_plan(job(roles), inventory(**hosts))) == expected


def test_names_of_their_own_are_spread_too():
    """An in-graph program or a script may have any roles; its first TF task is the chief."""
    plan = make_plan(job({"local": 3}, script="a.py"), inventory(a=0, b=0))
    assert places(plan) == ["local:0@a", "local:1@b", "local:2@a"]
    assert plan.chief.task == Task("local", 0)


@pytest.mark.parametrize(
    ("roles", "chief"),
    [
        ({"ps": 1, "worker": 2}, Task("worker", 0)),
        ({"ps": 1, "worker": 2, "chief": 1}, Task("chief", 0)),
        ({"evaluator": 1, "ps": 1, "left": 1, "right": 1}, Task("left", 0)),
    ],
)
def test_who_is_chief(roles, chief):
    """The role chief, else worker:0, else the first that may train."""
    assert chief_of(job(roles, script="a.py")) == chief


def test_largest_first_where_spreading_would_paint_itself_into_a_corner():
    """A small chief leaves the only host that is large enough to the large worker."""
    roles = {"ps": 1, "chief": {"gpus": 1}, "worker": {"count": 1, "gpus": 4}}
    assert places(make_plan(job(roles), inventory(a=4, b=1)))[1:] == ["chief:0@b", "worker:0@a"]


def test_avoided_hosts_are_the_last_resort():
    """A host that was just unreachable gets only what fits nowhere else."""
    roles = {"ps": 1, "worker": {"count": 3, "gpus": 1}}
    plan = make_plan(job(roles), inventory(a=8, b=2), avoid=["a", "gone"])
    assert Counter(planned.host for planned in plan.tasks) == {"b": 3, "a": 1}


def test_a_training_that_goes_on_keeps_its_chief_where_its_checkpoints_are():
    """`chief_host` wins over spreading, and a host that is gone is a fault."""
    roles = {"ps": 1, "worker": 2}
    assert make_plan(job(roles), inventory(a=0, b=0, c=0), chief_host="c").chief.host == "c"
    (found,) = faults(job(roles), inventory(a=0), chief_host="c")
    assert found.startswith("hosts: c, where the checkpoints of this training are, is not in the inventory")
    (found,) = faults(job({"ps": 1, "worker": {"hosts": ["a"]}}), inventory(a=0, c=0), chief_host="c")
    assert found.startswith("roles.worker: worker:0 must run on c, where the checkpoints are, and do not fit")


def test_measured_gpus_fill_in_what_the_inventory_leaves_open():
    """A number in the inventory stands; an unknown one is taken from the hosts, else assumed to be enough."""
    roles = {"ps": 1, "worker": {"count": 3, "gpus": 1}}
    make_plan(job(roles), inventory(a=None))
    make_plan(job(roles), inventory(a=3), gpus={"a": 0})
    (found,) = faults(job(roles), inventory(a=None), gpus={"a": 2})
    assert found.startswith(
        "roles.worker: 3 TF tasks with 1 GPU each are wanted, there is room for 2 (GPUs: a: 2)"
    )


# --- what a plan tells ----------------------------------------------------------------------------------------


def test_an_evaluator_is_no_member_of_the_cluster():
    """Everyone would wait for it; it is planned, and has no port."""
    plan = make_plan(job({"ps": 1, "worker": 2, "evaluator": 1}), inventory(a=0))
    assert {role: [str(p.task) for p in tasks] for role, tasks in plan.cluster.items()} == {
        "ps": ["ps:0"],
        "worker": ["worker:0", "worker:1"],
    }
    assert [planned.has_port for planned in plan.tasks] == [True, True, True, False]


@pytest.mark.parametrize(
    ("keys", "env", "reason"),
    [
        ({}, {}, None),
        ({}, {"NCCL_DEBUG": "INFO"}, None),
        ({"env": {"TF_CPP_MIN_LOG_LEVEL": 1}}, {}, None),
        ({"launch": "spawn"}, {}, "launch: spawn"),
        ({"command": ["x"]}, {}, "a command is always started afresh"),
        (
            {},
            {"A": "1", "OMP_NUM_THREADS": 1},
            "roles.worker.env sets OMP_NUM_THREADS, which is read at the start",
        ),
    ],
)
def test_a_plan_says_why_a_task_is_not_forked(keys, env, reason):
    """Only what a forked process would see too late needs a process of its own."""
    plan = make_plan(job({"ps": 1, "worker": {"env": env}}, **keys), inventory(a=0))
    worker = plan.tasks[1]
    assert (worker.spawn_reason, worker.warm) == (reason, reason is None)
    assert (reason or "warm") in str(plan)


def test_a_plan_prints_as_a_table():
    """People see TF tasks as they are written everywhere, with GPUs, restarts and the chief."""
    roles = {"ps": {"restarts": 0}, "worker": {"count": 2, "gpus": 1, "env": {"XLA_FLAGS": "x"}}}
    assert str(make_plan(job(roles), inventory(a=1, b=1))).splitlines() == [
        "ctr: 3 TF tasks on 2 hosts, 2 GPUs",
        "TF TASK     GPUS  RESTARTS  START",
        "ps:0@a      -     0         warm",
        "worker:0@b  1     3         spawn (roles.worker.env sets XLA_FLAGS, which is read at the start)  chief",
        "worker:1@a  1     3         spawn (roles.worker.env sets XLA_FLAGS, which is read at the start)",
    ]


def test_a_planned_task_is_what_its_host_is_asked_for():
    """The request to a host carries everything that the plan decided."""
    roles = {"ps": 1, "worker": {"gpus": 1, "restarts": 7, "env": {"TF_X": "1"}}, "evaluator": 1}
    plan = make_plan(job(roles), inventory(a=1))
    assert [planned.to_spec().to_json() for planned in plan.on("a")][1:] == [
        {
            "task": "worker:0",
            "gpus": 1,
            "restarts": 7,
            "has_port": True,
            "is_chief": True,
            "warm": False,
            "env": {"TF_X": "1"},
        },
        {
            "task": "evaluator:0",
            "gpus": 0,
            "restarts": 3,
            "has_port": False,
            "is_chief": False,
            "warm": True,
            "env": {},
        },
    ]


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "hosts", "expected"),
    [
        (
            {"ps": 1, "worker": {"count": 5, "gpus": 2}},
            {"a": 4, "b": 5},
            "roles.worker: 5 TF tasks with 2 GPUs each are wanted, there is room for 4 (GPUs: a: 4, b: 5)",
        ),
        (
            {"ps": 1, "chief": {"gpus": 1}, "worker": {"count": 4, "gpus": 1}},
            {"a": 4},
            "roles: 5 GPUs are wanted, more than there are (GPUs: a: 4)",
        ),
        (
            {"ps": 1, "worker": {"gpus": 1, "hosts": ["b"]}},
            {"a": 4, "b": 0},
            "roles.worker: 1 TF tasks with 1 GPU each are wanted, there is room for 0 (GPUs: b: 0)",
        ),
        (
            {"ps": 1, "worker": {"hosts": ["gpu-a", "x"]}},
            {"a": 0, "gpu-b": 0},
            "roles.worker.hosts[0]: gpu-a is not in the inventory; did you mean gpu-b?",
        ),
        (
            {
                "ps": 1,
                "chief": {"gpus": 2, "hosts": ["a"]},
                "worker": {"count": 2, "gpus": 1, "hosts": ["a"]},
            },
            {"a": 3, "b": 3},
            "roles: the TF tasks do not fit together on the hosts that their roles allow (GPUs: a: 3, b: 3)",
        ),
        (
            {"ps": 1, "worker": {"hosts": ["a"]}, "evaluator": {"hosts": ["b"]}},
            {"a": 0, "b": 0},
            "roles.worker: worker:0 and evaluator:0 must run on one host, for the checkpoints, and do not fit",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_any_host_is_touched(roles, hosts, expected):
    """More GPUs than exist, unknown hosts and impossible wishes are faults with numbers."""
    assert faults(job(roles), inventory(**hosts))[0].startswith(expected)


def test_an_evaluator_may_be_elsewhere_if_every_host_sees_the_checkpoints():
    """With a shared directory the evaluator's host is free."""
    roles = {"ps": 1, "worker": {"hosts": ["a"]}, "evaluator": {"hosts": ["b"]}}
    plan = make_plan(job(roles, checkpoint={"shared": True}), inventory(a=0, b=0))
    assert places(plan) == ["ps:0@a", "worker:0@a", "evaluator:0@b"]


def test_shards_on_several_disks_are_refused():
    """A sharded checkpoint without a shared directory would be in pieces."""
    checkpoint = {"sharded": True}
    roles = {"ps": 2, "worker": 1}
    make_plan(job(roles, checkpoint=checkpoint), inventory(a=0))
    make_plan(job(roles, checkpoint={**checkpoint, "shared": True}), inventory(a=0, b=0))
    (found,) = faults(job(roles, checkpoint=checkpoint), inventory(a=0, b=0))
    assert found.startswith("checkpoint.sharded: ps and chief are on a, b")


def test_a_loopback_address_among_others_is_refused():
    """127.0.0.1 is another machine on every other host; alone, or for all hosts, it is fine."""
    near = {"x": HostSpec(name="x", address="127.0.0.1"), "y": HostSpec(name="y", address="localhost")}
    far = {"z": HostSpec(name="z", address="10.0.0.1")}
    wanted = job({"ps": 1, "worker": 2})
    make_plan(wanted, Inventory(hosts=near))
    (found,) = faults(wanted, Inventory(hosts={"x": near["x"], **far}))
    assert found.startswith("hosts.x.address: 127.0.0.1 means another machine on every other host")


def test_a_templated_job_has_no_plan():
    """How many workers there are is known only after rendering."""
    templated = JobSpec.from_dict(
        {"program": "a.py", "roles": {"ps": 1, "worker": "{{ n }}"}}, templated=True
    )
    assert "templates" in faults(templated, inventory(a=0))[0]


# --- any job on any inventory ---------------------------------------------------------------------------------

HOSTS = st.dictionaries(
    st.sampled_from("abcdef"), st.one_of(st.none(), st.integers(0, 8)), min_size=1, max_size=6
)
ALLOWED = st.lists(st.sampled_from("abcdef"), max_size=3, unique=True)


def role(largest, gpus=4):
    return st.fixed_dictionaries(
        {"count": st.integers(1, largest), "gpus": st.integers(0, gpus)}, optional={"hosts": ALLOWED}
    )


ROLES = st.fixed_dictionaries(
    {"ps": role(4, 0), "worker": role(6)}, optional={"chief": role(1), "evaluator": role(1)}
)


@given(
    roles=ROLES, hosts=HOSTS, measured=HOSTS, avoid=st.sets(st.sampled_from("abcdef")), shared=st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_a_plan_never_gives_out_what_is_not_there(roles, hosts, measured, avoid, shared):
    """Any plan places every TF task once, on an allowed host, within its GPUs, the same way each time."""
    wanted, floor = job(roles, checkpoint={"shared": shared}), inventory(**hosts)
    gpus = {name: number for name, number in measured.items() if number is not None}

    def once():
        try:
            return make_plan(wanted, floor, gpus=gpus, avoid=avoid)
        except SpecError as error:
            return error.faults

    plan = once()
    assert once() == plan
    if isinstance(plan, tuple):
        return
    names = [str(planned.task) for planned in plan.tasks]
    assert names == [f"{name}:{i}" for name, spec in wanted.roles.items() for i in range(spec.count)]
    assert sum(planned.is_chief for planned in plan.tasks) == 1
    for host in plan.hosts:
        given_out = sum(planned.gpus for planned in plan.on(host))
        known = hosts[host] if hosts[host] is not None else gpus.get(host)
        assert known is None or given_out <= known
    for planned in plan.tasks:
        allowed = wanted.roles[planned.task.role].hosts
        assert planned.host in (allowed or hosts)
    if "evaluator" in roles and not shared:
        assert plan.tasks[names.index("evaluator:0")].host == plan.chief.host


@given(
    hosts=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    gpus=st.integers(1, 4),
    count=st.integers(1, 12),
)
@settings(max_examples=50, deadline=None)
def test_what_fits_is_placed(hosts, gpus, count):
    """Equal workers are placed exactly when the hosts have room for them."""
    floor = inventory(**{f"h{i}": number for i, number in enumerate(hosts)})
    wanted = job({"ps": 1, "worker": {"count": count, "gpus": gpus}})
    if count <= sum(number // gpus for number in hosts):
        assert len(make_plan(wanted, floor).tasks) == count + 1
    else:
        assert faults(wanted, floor)[0].startswith(f"roles.worker: {count} TF tasks with")
