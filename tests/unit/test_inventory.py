"""Inventories: every way to name hosts, what is refused, and the compact form for XComs."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from airflow_tfps.errors import SpecError
from airflow_tfps.inventory import HostSpec, Inventory


@dataclass
class Connection:
    """An Airflow connection, as far as it matters."""

    conn_type: str = "ssh"
    host: str | None = None
    extra: str | None = None


CONNECTIONS = {
    "gpu-a": Connection(host="10.0.0.1"),
    "gpu-b": Connection(host="10.0.0.2"),
    "gpu_c": Connection(host="10.0.0.3"),
    "twin": Connection(host="10.0.0.1"),
    "hostless": Connection(),
    "odd": Connection(host="user@10.0.0.9"),
    "web": Connection(conn_type="http", host="10.0.0.9"),
    "lab": Connection(conn_type="tfps", extra=json.dumps({"hosts": {"gpu-a": 4, "gpu-b": None}})),
    "lab_text": Connection(
        conn_type="tfps",
        extra=json.dumps({"hosts": "gpu-a: 4\ngpu-b:\n", "defaults": "ports: 3000-3999", "other": 1}),
    ),
    "lab_list": Connection(conn_type="tfps", extra=json.dumps({"hosts": ["gpu-a", "gpu-b"]})),
    "lab_empty": Connection(conn_type="tfps"),
    "lab_json": Connection(conn_type="tfps", extra="{"),
    "lab_array": Connection(conn_type="tfps", extra="[]"),
    "lab_yaml": Connection(conn_type="tfps", extra=json.dumps({"hosts": "{", "defaults": "["})),
}


def load(hosts, **keywords):
    return Inventory.load(hosts, get_connection=CONNECTIONS.__getitem__, **keywords)


def faults(hosts, **keywords):
    with pytest.raises(SpecError) as caught:
        load(hosts, **keywords)
    return list(caught.value.faults)


def a(**changes):
    return HostSpec(name="gpu-a", ssh_conn_id="gpu-a", address="10.0.0.1", **changes)


def b(**changes):
    return HostSpec(name="gpu-b", ssh_conn_id="gpu-b", address="10.0.0.2", **changes)


# --- where it comes from --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ({"gpu-a": 4, "gpu-b": None}, [a(gpus=4), b()]),
        ({"hosts": {"gpu-a": 4, "gpu-b": 0}}, [a(gpus=4), b(gpus=0)]),
        (["gpu-a", "gpu-b"], [a(), b()]),
        ({"hosts": ["gpu-a"], "defaults": {"gpus": 2}}, [a(gpus=2)]),
        ("gpu-a", [a()]),
        ("lab", [a(gpus=4), b()]),
        ("lab_text", [a(gpus=4, ports=(3000, 3999)), b(ports=(3000, 3999))]),
        ("lab_list", [a(), b()]),
        ({"gpu-a": {"gpus": 1, "ports": [3000, 3001]}}, [a(gpus=1, ports=(3000, 3001))]),
    ],
)
def test_every_way_to_name_hosts(hosts, expected):
    """Mapping, list, ssh connection and tfps connection come to the same hosts, in the order written."""
    assert list(load(hosts).hosts.values()) == expected


def test_a_file_is_found_beside_the_dag_and_spelled_out(tmp_path):
    """A name ending in .yaml is a file; keys of a host win over defaults, and defaults over built-in values."""
    (tmp_path / "hosts.yaml").write_text(
        """
        hosts:
          trainer: {ssh_conn_id: gpu_c, address: 10.11.2.31, gpus: 4, python: /opt/tf/bin/python, workdir: /w}
          gpu-a:
        defaults: {ports: 20000-20099, workdir: ~/runs}
        """
    )
    inventory = load("hosts.yaml", base_dir=tmp_path)
    assert inventory["trainer"] == HostSpec(
        name="trainer",
        ssh_conn_id="gpu_c",
        address="10.11.2.31",
        gpus=4,
        python="/opt/tf/bin/python",
        workdir="/w",
        ports=(20000, 20099),
    )
    assert inventory["gpu-a"] == a(workdir="~/runs", ports=(20000, 20099))
    assert load(tmp_path / "hosts.yaml") == inventory


@pytest.mark.parametrize("hosts", ["local", ["local"], {"local": None}])
def test_local_is_this_machine_without_a_connection(hosts):
    """The name `local` needs no connection and has a loopback address."""
    host = load(hosts)["local"]
    assert (host.address, host.is_local, host.is_loopback) == ("127.0.0.1", True, True)


def test_an_inventory_is_taken_as_it_is():
    """What is loaded already is not looked up again."""
    inventory = load(["gpu-a"])
    assert Inventory.load(inventory) is inventory


def test_endpoints_are_what_tensorflow_parses():
    """An IPv6 address goes into brackets."""
    assert a().endpoint(2222) == "10.0.0.1:2222"
    assert HostSpec(name="x", address="fd00::1").endpoint(1) == "[fd00::1]:1"


def test_a_subset_keeps_the_order():
    """What a handle carries is the hosts in use, ordered like the inventory."""
    inventory = load({"gpu_c": 1, "gpu-b": 2, "gpu-a": 3})
    assert inventory.subset({"gpu-a", "gpu_c"}).names == ("gpu_c", "gpu-a")
    assert len(inventory) == 3


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "fault"),
    [
        ("nowhere", "hosts: there is no connection nowhere"),
        ({"gpu-x": 4}, "gpu-x.ssh_conn_id: there is no connection gpu-x; add one of type ssh"),
        ({"hosts": {"a": {"ssh_conn_id": "gpu-x"}}}, "hosts.a.ssh_conn_id: there is no connection gpu-x"),
        (["gpu-a", "gpu-x"], "hosts[1].ssh_conn_id: there is no connection gpu-x"),
        (["gpu-a", "gpu-a"], "hosts[1]: gpu-a is listed twice"),
        (["gpu-a", 3], "hosts[1]: must be an ssh connection id, is 3"),
        ("web", "the connection must be of type tfps or ssh, is 'http'"),
        (["web"], "hosts[0].ssh_conn_id: connection web must be of type ssh, is 'http'"),
        (["hostless"], "hosts[0].ssh_conn_id: connection hostless has no host"),
        (["odd"], "hosts[0].ssh_conn_id: the host of connection odd must be a host name or an IP address"),
        ("lab_empty", "hosts: must be a mapping or a list of ssh connection ids, is empty"),
        ("lab_json", "the connection's extra is not JSON"),
        ("lab_array", "the connection's extra must be a JSON object"),
        ({}, "hosts: must not be empty"),
        ([], "hosts: must not be empty"),
        ({"hosts": {}}, "hosts: must not be empty"),
        (7, "hosts: must be a mapping or a list of ssh connection ids, is 7"),
        ({"hosts": 4}, "hosts: must be a mapping or a list of ssh connection ids, is 4"),
        ({"hosts": {"gpu-a": 4}, "default": {}}, "default: unknown key; did you mean defaults?"),
        ({"gpu-a": {"gpu": 4}}, "gpu-a.gpu: unknown key; did you mean gpus?"),
        ({"gpu-a": "four"}, "gpu-a.gpus: must be an integer, is 'four'"),
        ({"gpu-a": -1}, "gpu-a.gpus: must be >= 0, is -1"),
        ({"gpu-a": [4]}, "gpu-a: must be a mapping or the number of GPUs, is a list"),
        ({"gpu-a": {"name": "b"}}, "gpu-a.name: unknown key"),
        ({"gpu-a": {"address": "10.0.0.1 x"}}, "gpu-a.address: must be a host name or an IP address"),
        ({"gpu-a": {"workdir": "runs"}}, "gpu-a.workdir: must be an absolute path, or begin with ~/"),
        ({"gpu-a": {"ports": "30000-20000"}}, "gpu-a.ports: must be a range of ports like 20000-29999"),
        ({"gpu-a": {"ports": "80-90"}}, "gpu-a.ports: must be a range of ports like 20000-29999, from 1024"),
        ({"gpu-a": {"ports": 3000}}, "gpu-a.ports: must be a range of ports"),
        ({"gpu-a": {"ports": [3000, True]}}, "gpu-a.ports: must be a range of ports"),
        ({"gpu/a": 4}, "gpu/a: the host's name must be letters, digits"),
        ({"-a": 4}, "-a: the host's name must be letters, digits"),
        ({"a" * 64: 4}, f"{'a' * 60}: the host's name must be letters, digits"),
        ({10: 4}, "10: the host's name must be text, is 10; put it into quotes"),
        ({"hosts": {"gpu-a": 4}, "defaults": 3}, "defaults: must be a mapping, is 3"),
        (
            {"hosts": {"gpu-a": 4}, "defaults": {"port": "1-2"}},
            "defaults.port: unknown key; did you mean ports?",
        ),
        ({"hosts": {"gpu-a": 4}, "defaults": {"address": "x"}}, "defaults.address: is each host's own"),
        ({"hosts": {"gpu-a": 4}, "defaults": {"ports": "x"}}, "defaults.ports: must be a range of ports"),
        (
            {"gpu-a": 4, "again": {"ssh_conn_id": "gpu-a"}},
            "again: is gpu-a once more (address 10.0.0.1, connection gpu-a)",
        ),
        ({"a": {"ssh_conn_id": "local"}, "local": 1}, "local: is a once more (address 127.0.0.1"),
    ],
)
def test_a_fault_names_its_place(hosts, fault):
    """Each fault is found, alone, under its path."""
    (found,) = faults(hosts)
    assert found.startswith(fault)


def test_all_faults_are_reported_at_once():
    """Unknown connections, unknown keys and bad values come in one error; faulty hosts hide none of them."""
    hosts = {"gpu-x": 1, "gpu-a": {"gpus": "x", "pyton": "p"}, "gpu-b": {"ports": "1"}, "web": 2}
    assert [fault.split(": ")[0] for fault in faults(hosts)] == [
        "gpu-a.pyton",
        "gpu-a.gpus",
        "gpu-b.ports",
        "gpu-x.ssh_conn_id",
        "web.ssh_conn_id",
    ]
    assert len(faults("lab_yaml")) == 2


def test_one_machine_may_be_two_hosts_on_purpose():
    """Another address or another connection makes another host; only both the same are a mistake."""
    inventory = load({"a": {"ssh_conn_id": "local"}, "b": {"ssh_conn_id": "local", "address": "127.0.0.2"}})
    assert [host.address for host in inventory.hosts.values()] == ["127.0.0.1", "127.0.0.2"]
    assert load(["gpu-a", "twin"]).names == ("gpu-a", "twin")


def test_a_broken_or_missing_file_is_a_fault(tmp_path):
    """The file is named, with the line; a missing one says so."""
    (tmp_path / "bad.yaml").write_text("gpu-a: 4\ngpu-a: 2\n")
    assert faults("bad.yaml", base_dir=tmp_path) == ["line 2, column 1: gpu-a is written twice"]
    assert faults("no.yml", base_dir=tmp_path) == ["the file cannot be read: No such file or directory"]


def test_airflow_answers_when_nobody_else_does(monkeypatch):
    """Without a function of the caller's own, connections are Airflow's, unknown ones among the faults."""
    ssh = json.dumps({"conn_type": "ssh", "host": "10.0.0.7"})
    monkeypatch.setenv("AIRFLOW_CONN_FROM_AIRFLOW", ssh)
    assert Inventory.load(["from_airflow"])["from_airflow"].address == "10.0.0.7"
    with pytest.raises(SpecError, match=r"hosts\[0\]\.ssh_conn_id: there is no connection not_there"):
        Inventory.load(["not_there"])


# --- the compact form -----------------------------------------------------------------------------------------


def test_a_hundred_hosts_take_little_room():
    """A default host costs at most 60 bytes in the handle, and reads back without any connection."""
    hosts = {
        f"gpu-{i:03}": HostSpec(
            name=f"gpu-{i:03}", ssh_conn_id=f"gpu-{i:03}", address=f"10.101.102.{i}", gpus=8
        )
        for i in range(100, 200)
    }
    inventory = Inventory(hosts=hosts)
    text = json.dumps(inventory.to_dict())
    assert len(text) <= 60 * 100
    assert Inventory.from_dict(json.loads(text)) == inventory


def test_every_value_survives_the_round_trip():
    """Also what is not default comes back as it was."""
    host = {
        "ssh_conn_id": "gpu_c",
        "address": "h",
        "gpus": 0,
        "python": "/p",
        "workdir": "~/x",
        "ports": "2000-2001",
    }
    inventory = load({"gpu-b": host, "gpu-a": None})
    assert inventory.to_dict() == {"hosts": {"gpu-b": host, "gpu-a": {"address": "10.0.0.1"}}}
    assert Inventory.from_dict(inventory.to_dict()) == inventory


def test_a_damaged_handle_is_a_fault():
    """What was written by something else is refused, with the path."""
    with pytest.raises(SpecError, match=r"hosts\.gpu-a\.address: is missing"):
        Inventory.from_dict({"hosts": {"gpu-a": {}}})


KEYS = st.sampled_from(["gpu-a", "gpu-b", "hosts", "defaults", "gpus", "ports", "address", "x", ""])
ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-1, 99), st.floats(), st.text(max_size=6), KEYS, st.just("1-2")
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(KEYS, st.integers()), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(data=ANYTHING)
@settings(max_examples=100, deadline=None)
def test_anything_is_either_an_inventory_or_a_spec_error(data):
    """Whatever a file may hold, reading ends in faults with words, or in hosts that survive JSON."""
    try:
        inventory = load(data)
    except SpecError:
        return
    assert Inventory.from_dict(json.loads(json.dumps(inventory.to_dict()))) == inventory
    assert yaml.safe_load(yaml.dump(inventory.to_dict())) == inventory.to_dict()
