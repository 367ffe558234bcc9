"""A group of ranks lives and dies as the supervisor and the front ends are promised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_group import BIN, RankGroup, finish, submit, tokens_of

from trimaran.comm.messages.messages import Cancel, FinishReason, Ping, Pong, RequestFailed

LONG = 400


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One group for several tests; the last test shuts the group down."""
    with RankGroup(tmp_path_factory.mktemp("group"), 2) as group:
        yield group, group.wait_ready()


@pytest.fixture
def busy(tmp_path):
    """A group of the test's own, in the middle of a long request."""
    with RankGroup(tmp_path, 2) as group:
        engine = group.wait_ready()
        engine.send(submit(1, [5, 6, 7], LONG))
        engine.wait_until(lambda: len(tokens_of(engine, 1)[0]) > 3, "first tokens")
        yield group, engine


def test_the_ready_state_names_the_transport_of_each_connection(served):
    group, _ = served

    (ready,) = [state for state in group.states(0) if state.state == "ready"]

    assert ready.facts["transports"]["all_reduce"] == "shared_memory"
    assert ready.facts["transports"]["control"] == "shm_ring"
    assert ready.facts["start_method"] == "mpirun"
    assert ready.facts["mpi"].startswith(("Open MPI", "MPICH"))
    assert ready.facts["world_size"] == 2


def test_a_request_runs_to_its_length(served):
    _, engine = served

    engine.send(submit(10, [1, 2, 3], 20))
    ids, reason = finish(engine, 10)

    assert (len(ids), reason) == (20, FinishReason.LENGTH)


def test_concurrent_requests_get_the_tokens_of_single_requests(served):
    _, engine = served
    for request_id in (20, 21, 22):
        engine.send(submit(request_id, [request_id, 3, 4], 30))
    together = [finish(engine, request_id)[0] for request_id in (20, 21, 22)]

    alone = []
    for request_id in (30, 31, 32):
        engine.send(submit(request_id, [request_id - 10, 3, 4], 30))
        alone.append(finish(engine, request_id)[0])

    assert together == alone


def test_a_cancelled_request_ends_early(served):
    _, engine = served
    engine.send(submit(40, [1, 2, 3], LONG))
    engine.wait_until(lambda: len(tokens_of(engine, 40)[0]) > 2, "first tokens")

    engine.send(Cancel(request_ids=[40]))
    ids, reason = finish(engine, 40)

    assert reason == FinishReason.CANCELLED
    assert len(ids) < LONG


def test_a_refused_request_does_not_disturb_other_requests(served):
    _, engine = served

    engine.send(submit(50, [1] * 5000, 5))
    engine.send(submit(51, [1, 2], 5))

    failed = engine.wait_for(RequestFailed)
    assert failed.request_id == 50
    assert len(finish(engine, 51)[0]) == 5


def test_a_ping_is_answered(served):
    _, engine = served

    engine.send(Ping(payload=77))

    assert engine.wait_for(Pong) == Pong(payload=77)


def test_an_idle_group_uses_less_than_two_percent_of_a_core(served):
    group, _ = served
    processes = group.processes()
    time.sleep(0.5)

    used: list[float] = []
    while len(used) < 3 and min(used, default=1.0) > 0.06:
        before = sum(sum(p.cpu_times()[:2]) for p in processes)
        time.sleep(3.0)
        used.append(sum(sum(p.cpu_times()[:2]) for p in processes) - before)

    assert min(used) <= 0.06, used


def test_ranks_ignore_the_signals_of_a_drain(served):
    group, engine = served
    for rank in range(2):
        os.kill(group.pid(rank), signal.SIGTERM)
        os.kill(group.pid(rank), signal.SIGINT)

    engine.send(submit(60, [1, 2], 5))

    assert len(finish(engine, 60)[0]) == 5


def test_a_lost_front_end_is_reconnected_and_its_requests_end(served):
    group, engine = served
    engine.send(submit(70, [5, 6], LONG))
    engine.wait_until(lambda: len(tokens_of(engine, 70)[0]) > 2, "first tokens")
    engine.close()

    again = group.accept_engine()
    again.send(submit(70, [7, 8], 5))

    assert len(finish(again, 70)[0]) == 5


def test_a_shutdown_ends_every_rank_in_order(served):
    group, _ = served

    assert group.shut_down() == 0
    group.wait_gone()
    assert "Traceback" not in group.log()


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_group(busy, rank):
    group, _ = busy

    os.kill(group.pid(rank), signal.SIGKILL)

    assert group.wait_gone(30.0) != 0


def test_a_stopped_follower_is_named(busy):
    group, _ = busy

    os.kill(group.pid(1), signal.SIGSTOP)

    assert group.wait_gone(30.0) != 0
    assert "rank(s) [1] did not reach phase" in group.log()
    assert "rank fails after step" in group.log()


def test_a_stopped_leader_is_noticed_by_its_followers(busy):
    group, _ = busy

    os.kill(group.pid(0), signal.SIGSTOP)

    assert group.wait_gone(30.0) != 0
    assert "rank 0 sent no decision" in group.log() or "rank(s) [0]" in group.log()


def test_ranks_end_with_their_supervisor(busy):
    group, _ = busy

    for connection in group.ranks.values():
        connection.close()

    group.wait_gone(30.0)
    assert "the supervisor is gone" in group.log()


def test_a_world_size_that_contradicts_the_layout_is_a_configuration_error(tmp_path):
    with RankGroup(tmp_path, 2, tp_size=4) as group:
        group.wait_until(lambda: len(group.ranks) > 0, "a rank")
        group.wait_gone(60.0)
        failed = [s for r in group.ranks for s in group.states(r) if s.state == "failed"]

    assert failed
    assert all(state.is_config_error for state in failed)
    assert "2 rank(s) were started but tp_size 4" in failed[0].text


def test_a_folder_that_holds_no_model_is_a_configuration_error(tmp_path):
    with RankGroup(tmp_path, 1, engine_dir=tmp_path) as group:
        group.wait_until(lambda: len(group.ranks) > 0, "a rank")
        assert group.wait_gone(60.0) != 0
        (failed,) = [state for state in group.states(0) if state.state == "failed"]

    assert failed.is_config_error
    assert str(tmp_path) in failed.text


@pytest.mark.matrix(keep=0)
def test_without_a_hang_timeout_a_stopped_rank_delays_but_does_not_end_the_group(tmp_path):
    with RankGroup(tmp_path, 2, hang_timeout_s=0.0) as group:
        engine = group.wait_ready()
        engine.send(submit(1, [5, 6, 7], LONG))
        engine.wait_until(lambda: len(tokens_of(engine, 1)[0]) > 3, "first tokens")

        os.kill(group.pid(1), signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(group.pid(1), signal.SIGCONT)

        assert finish(engine, 1)[1] == FinishReason.LENGTH
        assert group.shut_down() == 0


def test_a_rank_started_by_hand_names_the_command_that_starts_ranks():
    done = subprocess.run(
        [str(BIN / "trimaran-rank")], capture_output=True, text=True, cwd="/", timeout=60
    )

    assert done.returncode == 2
    assert "started by `trimaran serve`" in done.stderr


def test_a_group_killed_as_a_whole_leaves_nothing(busy):
    group, _ = busy
    processes = group.processes()

    for process in processes:
        process.kill()

    _, alive = psutil.wait_procs(processes, timeout=120.0)
    assert not alive
    # Folders there belong to servers that run.
    files = [entry.name for entry in os.scandir("/dev/shm") if entry.is_file()]
    assert not [name for name in files if "trimaran" in name]
