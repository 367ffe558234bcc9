"""A server listens where its documentation says, and a stranger there costs little."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chaos_server import ChaosServer
from listeners import beyond_loopback, listeners
from models import Model, build_repository

from trimaran.comm.transport.greeting import DialerGreeting

PAIR = Model("pair", "base", tp_size=2)
FLAGS = ("--dtype", "float32", "--num-threads", "1")
NEAR = ("--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1")
ADVERTISED = "127.0.0.9"
"""An address of this machine at which no other program listens."""

GREETING_TIMEOUT_S = 10.0
SLACK_BYTES = 24 << 20
NUM_SILENT = 1200
"""Connections a port; more than a listener keeps of peers that have not greeted."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model of two ranks."""
    return build_repository(tmp_path_factory.mktemp("listeners"), (PAIR,))


@pytest.mark.parametrize(
    ("multi_model", "flags"),
    [
        (False, ()),
        (False, ("--frontend-processes", "2")),
        (True, ("--worker-launch", "spawn")),
        (True, ("--worker-launch", "mpirun")),
    ],
    ids=["leader", "front ends", "spawned", "by mpirun"],
)
def test_only_documented_ports_listen_beyond_loopback(repository, tmp_path, multi_model, flags):
    with ChaosServer(
        repository, 2, flags=(*FLAGS, *flags), multi_model=multi_model, folder=tmp_path
    ) as server:
        ports = {server.http_port, server.grpc_port, server.metrics_port}

        assert {port for _, port in beyond_loopback(server)} == ports, listeners(server)
        assert server.end() == 0


def test_a_server_on_loopback_is_not_reached_from_elsewhere(repository, tmp_path):
    with ChaosServer(
        repository, 2, flags=(*FLAGS, *NEAR), multi_model=False, folder=tmp_path
    ) as server:
        assert beyond_loopback(server) == {}


@pytest.fixture(scope="module")
def advertised(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChaosServer]:
    """A server with the ports for ranks of other hosts."""
    folder = tmp_path_factory.mktemp("advertised")
    flags = (*FLAGS, *NEAR, "--advertise-address", ADVERTISED, "--frontend-processes", "2")
    with ChaosServer(repository, 2, flags=flags, multi_model=False, folder=folder) as server:
        yield server


def control_ports(server: ChaosServer) -> dict[int, str]:
    """The ports for other hosts, and the owner of each port."""
    ours = {server.http_port, server.grpc_port, server.metrics_port}
    return {
        port: role
        for (ip, port), role in listeners(server).items()
        if ip == ADVERTISED and port not in ours
    }


def test_the_ports_for_other_hosts_are_on_the_advertised_address_alone(advertised):
    roles = sorted(control_ports(advertised).values())

    assert roles == ["front end", "front end", "supervisor"]
    assert beyond_loopback(advertised) == {}


def memory_of(server: ChaosServer, role: str) -> int:
    """The memory of the largest process of a role, in bytes."""
    return max(member.process.memory_info().rss for member in server.find(role))


def test_bytes_of_unauthenticated_connections_are_not_kept(advertised):
    before = {role: memory_of(advertised, role) for role in ("supervisor", "front end")}
    for port in control_ports(advertised):
        socks = [socket.create_connection((ADVERTISED, port)) for _ in range(20)]
        for sock in socks:
            sock.settimeout(10)
            with contextlib.suppress(OSError):
                sock.sendall(b"\xff\xff\xff\x7f")
                for _ in range(64):
                    sock.sendall(bytes(1 << 20))
        for sock in socks:
            assert is_closed(sock)

    for role, num_bytes in before.items():
        assert memory_of(advertised, role) < num_bytes + SLACK_BYTES, role
    assert advertised.is_ready()


def test_a_silent_unauthenticated_connection_is_closed_in_time(advertised):
    for port in control_ports(advertised):
        began = time.monotonic()
        with socket.create_connection((ADVERTISED, port)) as sock:
            sock.settimeout(2 * GREETING_TIMEOUT_S)
            assert is_closed(sock)
        assert time.monotonic() - began < GREETING_TIMEOUT_S + 2


def test_silent_unauthenticated_connections_block_no_rank(advertised):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    socks = [
        socket.create_connection((ADVERTISED, port))
        for port in control_ports(advertised)
        for _ in range(NUM_SILENT)
    ]
    before = {role: memory_of(advertised, role) for role in ("supervisor", "front end")}
    num_ready = advertised.log().count("group pair: ready")
    os.kill(advertised.find("rank")[0].pid, signal.SIGKILL)

    advertised.wait_log("group pair: ready", num_ready + 1)
    advertised.wait_ready()

    for role, num_bytes in before.items():
        assert memory_of(advertised, role) < num_bytes + SLACK_BYTES, role
    for sock in socks:
        sock.close()


def test_the_token_of_the_run_does_not_travel(advertised):
    rank = advertised.find("rank")[0]
    token = psutil.Process(rank.pid).environ()["TRIMARAN_TOKEN"].encode()
    (port,) = (p for p, role in control_ports(advertised).items() if role == "supervisor")
    greeting, travelled = DialerGreeting(token), b""
    with socket.create_connection((ADVERTISED, port), timeout=10) as sock:
        while not greeting.is_done:
            heard = sock.recv(greeting.num_missing)
            said = greeting.feed(heard)
            sock.sendall(said)
            travelled += heard + said
    assert token not in travelled
    with socket.create_connection((ADVERTISED, port), timeout=10) as sock:
        guessed = DialerGreeting(b"guessed")
        sock.sendall(guessed.feed(sock.recv(guessed.num_missing)))
        assert is_closed(sock)


def is_closed(sock: socket.socket) -> bool:
    """Whether the peer closes before the socket's time limit."""
    try:
        while sock.recv(4096):
            pass
    except (ConnectionResetError, BrokenPipeError):
        pass
    sock.close()
    return True
