"""The addresses under which rank 0 is dialled, by what the environment says of interfaces."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from trimaran.comm.transport.sockets import listen_address, own_addresses

INTERFACES = {
    "lo": "127.0.0.1",
    "docker0": "172.17.0.1",
    "eth0": "10.0.0.1",
    "eth1": "10.1.0.1",
    "eth10": "10.2.0.1",
    "ib0": "192.168.0.1",
}


@pytest.fixture(autouse=True)
def interfaces(monkeypatch):
    """Interfaces of a host of a cluster, each with an IPv6 address too."""
    of = {
        name: [
            SimpleNamespace(family=socket.AF_INET6, address="fe80::1"),
            SimpleNamespace(family=socket.AF_INET, address=address),
        ]
        for name, address in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: of)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)


def test_without_a_setting_all_interfaces_are_tried_and_loopback_last():
    addresses = own_addresses()

    assert addresses[-1] == "127.0.0.1"
    assert set(addresses) == set(INTERFACES.values())


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth0", ["eth0"]),
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth", list(INTERFACES)),
        ("ib,eth0", ["eth0", "ib0"]),
        ("^docker0,lo", ["eth0", "eth1", "eth10", "ib0"]),
        ("^docker,lo,eth", ["ib0"]),
        ("^=eth1,lo", ["docker0", "eth0", "eth10", "ib0"]),
        ("wlan", list(INTERFACES)),
    ],
)
def test_the_interfaces_are_those_that_nccl_would_take(value, names, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)

    assert set(own_addresses()) == {INTERFACES[name] for name in names}


def test_interface_settings_of_gloo_are_full_names_and_override_those_of_nccl(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1,ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^ib")

    assert own_addresses() == ["10.1.0.1", "192.168.0.1"]


def test_ranks_listen_on_the_interface_that_leads_to_the_supervisor(monkeypatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(("127.0.0.1", 0))
        port = supervisor.getsockname()[1]
        monkeypatch.setenv("TRIMARAN_SUPERVISOR", f"tcp:127.0.0.1:{port}")

        assert listen_address() == "127.0.0.1"


@pytest.mark.parametrize("supervisor", ["", "unix:/run/s.sock", "tcp:127.0.0.1:1"])
def test_ranks_listen_on_the_configured_interface_regardless_of_the_route_to_the_supervisor(
    supervisor, monkeypatch
):
    monkeypatch.setenv("TRIMARAN_SUPERVISOR", supervisor)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")

    assert listen_address() == "192.168.0.1"
