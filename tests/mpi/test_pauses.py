"""Ranks wait for a rank that compiles a kernel, longer than for a rank that is lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from trimaran.comm.control.control_plane import connect_control
from trimaran.comm.control.pause_notices import PauseNotices
from trimaran.comm.deadlines import StepTimeouts, Watchdog
from trimaran.comm.errors import PeerLostError
from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.comm.stages.world_group import WorldGroup
from trimaran.comm.time_limit import pauses
from trimaran.comm.topology import ParallelLayout
from trimaran.kernels.compilations import hooks
from trimaran.worker.engine.compilations import Compilations

pytestmark = pytest.mark.ranks(2, only=True)

HANG_S, COMPILATION_S = 1.0, 2.5


@pytest.fixture(params=["one_host", "two_hosts"])
def place(request, world, two_host_world):
    return world if request.param == "one_host" else two_host_world


@pytest.fixture
def barked(place, monkeypatch):
    """An event that this rank's watchdog sets, with compilations told to the other rank."""
    monkeypatch.setattr(hooks, "_listener", None)
    monkeypatch.setattr(pauses, "ended_s", 0.0)
    barked = threading.Event()
    watchdog = Watchdog(HANG_S, barked.set)
    notices = PauseNotices.connect(place)
    pauses.connect(notices.state)
    Compilations().watch(watchdog, 60.0, notices)
    watchdog.watch(lambda: "a step")
    yield barked
    place.barrier(60.0, "end of a test")
    watchdog.stop()
    pauses.connect(None)


def compile_one(seconds=COMPILATION_S):
    with hooks.waiting("attention.cu"):
        time.sleep(seconds)
        hooks.compiled()


def links_of(world):
    layout = ParallelLayout(rank=world.rank, pp_size=2, hosts=world.hosts)
    everyone = WorldGroup.connect(
        world, layout, torch.device("cpu"), 60.0, shares_experts=False
    )
    links = PipelineLinks.connect(everyone, layout, torch.device("cpu"), (4, 8), torch.float32)
    links.set_timeouts(StepTimeouts.of(layout, HANG_S))
    return links


@pytest.mark.parametrize("place", ["one_host"], indirect=True)
def test_the_next_stage_and_its_watchdog_wait_for_a_stage_that_compiles(place, barked):
    links = links_of(place)
    hidden = torch.arange(16.0).view(2, 8)

    if place.rank == 0:
        compile_one()
        links.next.send(hidden)
        assert links.readers[1].read() == b"a token"
    else:
        assert torch.equal(links.previous.receive(2), hidden)
        links.writer.post(lambda: b"a token", is_ready=True)

    assert not barked.is_set()
    links.close()


def test_results_and_decisions_wait_for_a_rank_that_compiles(place, barked):
    control = connect_control(place, HANG_S)
    links = links_of(place)

    if place.rank == 0:
        control.broadcast(b"the first step")
        # The last stage compiles, then the first one.
        assert links.readers[1].read() == b"a token"
        compile_one()
        control.broadcast(b"the second step")
    else:
        assert control.receive() == b"the first step"
        compile_one()
        links.writer.post(lambda: b"a token", is_ready=True)
        assert control.receive() == b"the second step"

    assert not barked.is_set()
    control.close()
    links.close()


def test_time_after_a_compilation_counts_again(place, barked):
    links = links_of(place)

    if place.rank == 0:
        compile_one(2 * HANG_S)
        place.barrier(60.0, "a lost rank was named")
        assert barked.wait(60.0)
    else:
        began = time.monotonic()
        limit = links.previous if place.hosts[0] == place.hosts[1] else None
        if limit is not None:
            with pytest.raises(PeerLostError, match="rank 0, the stage before, sent no hidden"):
                limit.receive(2)
        assert barked.wait(60.0)
        assert time.monotonic() - began > 2 * HANG_S
        place.barrier(60.0, "a lost rank was named")
    links.close()
