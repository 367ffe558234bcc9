"""The broadcast of rank 0's decisions to every other rank."""

from __future__ import annotations

import hashlib
import random
import time

import pytest

from trimaran.comm.control.control_plane import ControlPlane, connect_control
from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World


@pytest.fixture(params=["one_host", "two_hosts"])
def place(request, world, two_host_world) -> World:
    return world if request.param == "one_host" else two_host_world


@pytest.fixture
def connect(place):
    """Connects control planes that end with the test."""
    planes = []

    def connect(timeout_s: float) -> ControlPlane:
        planes.append(connect_control(place, timeout_s))
        return planes[-1]

    yield connect
    for plane in planes:
        plane.close()


def follow(control: ControlPlane) -> list[bytes]:
    """All decisions until the leader closes."""
    received = []
    while (payload := control.receive()) is not None:
        received.append(payload)
    return received


def digest(payloads: list[bytes]) -> str:
    """One fingerprint of contents, lengths and order."""
    state = hashlib.sha256()
    for payload in payloads:
        state.update(len(payload).to_bytes(8, "little") + payload)
    return state.hexdigest()


def test_every_follower_gets_every_decision_whole_and_in_order(place, connect):
    rng = random.Random(5)
    sizes = [0, 1, 100, 16 << 10, (16 << 10) + 1, 3 << 20] + [rng.randrange(2000)] * 300
    payloads = [rng.randbytes(size) for size in sizes]
    control = connect(timeout_s=30.0)

    if place.rank == 0:
        for payload in payloads:
            control.broadcast(payload)
        control.close()
        received = payloads
    else:
        received = follow(control)

    assert place.comm.allgather(digest(received)) == [digest(payloads)] * place.size


@pytest.mark.ranks(2)
def test_an_idle_group_waits_longer_than_the_hang_timeout(place, connect):
    control = connect(timeout_s=1.0)

    if place.rank == 0:
        control.broadcast(b"work")
        control.mark_idle()
        time.sleep(1.5)
        control.broadcast(b"more")
        control.close()
        return
    assert follow(control) == [b"work", b"more"]


@pytest.mark.ranks(2)
def test_a_busy_leader_that_stops_sending_is_noticed(place, connect):
    control = connect(timeout_s=0.2)

    if place.rank == 0:
        control.broadcast(b"work")
    else:
        assert control.receive() == b"work"
        with pytest.raises(PeerLostError, match=r"rank 0 sent no decision for 0\.2 s"):
            control.receive()
    place.barrier(60.0, "all noticed")


@pytest.mark.ranks(2)
def test_followers_wait_for_a_leader_that_sends_heartbeats(place, connect):
    control = connect(timeout_s=1.2)

    if place.rank == 0:
        control.broadcast(b"work")
        for _ in range(4):
            time.sleep(0.4)
            control.keep_alive()
        control.close()
        return
    assert follow(control) == [b"work"]


@pytest.mark.ranks(4)
def test_waiting_followers_use_next_to_no_processor_time(place, connect):
    control = connect(timeout_s=30.0)
    place.barrier(60.0, "all connected")

    used = []
    for _ in range(3):
        before = time.process_time()
        if place.rank == 0:
            time.sleep(0.5)
            control.broadcast(b"wake up")
        else:
            assert control.receive() == b"wake up"
            used.append(time.process_time() - before)
    # 2 % of a core over half a second, for all ranks together; something else may run in one.
    assert place.rank == 0 or min(used) < 0.01 / (place.size - 1) + 0.01


@pytest.mark.ranks(4)
def test_changes_between_idle_and_busy_lose_no_decision(place, connect):
    control = connect(timeout_s=30.0)
    payloads = [index.to_bytes(2, "little") for index in range(2000)]

    if place.rank == 0:
        for index, payload in enumerate(payloads):
            control.broadcast(payload)
            if index % 3:
                control.mark_idle()
            if index % 50 == 0:
                time.sleep(0.001)
        control.close()
    received = payloads if place.rank == 0 else follow(control)

    assert received == payloads


def test_the_transport_is_named(place, connect):
    control = connect(timeout_s=30.0)

    if place.rank == 0:
        has_mpi = len(set(place.hosts)) > 1
        expected = {(2, False): "shm_ring", (2, True): "mpi"}.get(
            (place.size, has_mpi), "shm_ring+mpi" if has_mpi else "shm_ring"
        )
        assert control.transport == expected
    place.barrier(60.0, "named")
