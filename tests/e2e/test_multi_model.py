"""Several models in one server: an event of one model does not affect the others."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from multi_model import PAIR, SINGLE, WORLD_SIZES, MultiModel, write_models

GONE_S = 10
FLAGS = ("--multi-model", "--worker-launch", "mpirun", "--dtype", "float32")


@pytest.fixture(scope="module")
def repository(
    demo_engine: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The models."""
    return write_models(tmp_path_factory.mktemp("repository"), demo_engine)


def serve(repository: Path, log: Path, *flags: str) -> MultiModel:
    """A server of both models, not yet started."""
    return MultiModel(repository, 1, (*FLAGS, *flags), log)


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MultiModel]:
    """One server for the faults of several tests; the last test ends the server."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    # A short window: the pause before a restart does not grow from test to test.
    flags = ("--max-restarts", "9", "--restart-window", "1", "--hang-timeout", "4")
    with serve(repository, log, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server: MultiModel) -> dict[str, list[int]]:
    """The tokens of both streams without a fault."""
    streams = {model: server.stream(model) for model in WORLD_SIZES}
    return {model: stream.finish() for model, stream in streams.items()}


def test_tokens_are_the_same_as_in_leader_mode(leader_tokens, undisturbed):
    assert undisturbed[PAIR] == leader_tokens


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    "victims", [("rank 0",), ("rank 1",), ("mpirun",), ("rank 0", "rank 1")], ids=" and ".join
)
def test_a_killed_process_ends_only_its_own_group(server, undisturbed, victims):
    others, before = server.processes(SINGLE), server.processes(PAIR)
    num_faults = server.log().count("group pair: ready")
    doomed, other = server.stream(PAIR), server.stream(SINGLE)
    for name in victims:
        before[name].kill()
    while server.is_model_ready(PAIR):
        assert doomed.is_alive()
    assert server.is_model_ready(SINGLE)
    assert other.finish() == undisturbed[SINGLE]
    assert doomed.finish() == undisturbed[PAIR]
    assert server.processes(SINGLE) == others
    assert not any(process.is_running() for process in before.values())
    server.wait_log("group pair: ready", num_faults + 1)
    server.wait_ready()


def test_a_stopped_rank_is_noticed_and_only_its_group_restarted(server, undisturbed):
    others, before = server.processes(SINGLE), server.processes(PAIR)
    doomed, other = server.stream(PAIR), server.stream(SINGLE)
    before["rank 1"].suspend()
    assert other.finish() == undisturbed[SINGLE]
    assert doomed.finish() == undisturbed[PAIR]
    assert server.processes(SINGLE) == others
    assert not any(process.is_running() for process in before.values())
    server.wait_ready()


def test_a_restarted_front_end_reconnects_to_every_group(server, undisturbed):
    groups = {model: server.processes(model) for model in WORLD_SIZES}
    (frontend,) = server.processes(":frontend").values()
    frontend.kill()
    server.wait_log("front end: ready", 2)
    server.wait_ready()
    assert {model: server.processes(model) for model in WORLD_SIZES} == groups
    streams = {model: server.stream(model) for model in WORLD_SIZES}
    assert {m: stream.finish() for m, stream in streams.items()} == undisturbed


def test_a_signal_lets_the_streams_of_every_model_end(server, undisturbed):
    server.record_tree()
    streams = {model: server.stream(model) for model in WORLD_SIZES}
    server.process.send_signal(signal.SIGTERM)
    server.wait_log("draining")
    assert {m: stream.finish() for m, stream in streams.items()} == undisturbed
    assert server.wait_ended() == 0
    server.wait_gone(GONE_S)


@pytest.mark.matrix(keep=0)
def test_an_exhausted_restart_budget_lets_other_models_finish_and_ends_with_code_1(
    repository, tmp_path, undisturbed
):
    with serve(repository, tmp_path / "serve.log", "--restart", "never") as ending:
        victim = ending.processes(SINGLE)["rank 0"]
        # The stream that must not end by itself begins last.
        other, doomed = ending.stream(PAIR), ending.stream(SINGLE)
        victim.kill()
        assert other.finish() == undisturbed[PAIR]
        doomed.join(60)
        assert "the engine of model 'single' is gone" in doomed.error
        assert ending.wait_ended() == 1
        assert "group single" in ending.log() and "not started again" in ending.log()
        ending.wait_gone(GONE_S)


def test_no_process_of_any_model_outlives_a_killed_supervisor(repository, tmp_path):
    with serve(repository, tmp_path / "serve.log") as doomed:
        doomed.stream(PAIR)
        assert len(doomed.record_tree()) == 7
        doomed.process.kill()
        doomed.wait_gone(GONE_S)
