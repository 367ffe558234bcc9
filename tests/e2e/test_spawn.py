"""Groups that an orchestrator spawns through MPI: results and survived faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from multi_model import PAIR, SINGLE, WORLD_SIZES, MultiModel, write_models
from waiting import wait_until

GONE_S = 10
ORCHESTRATOR, FRONTEND = ":orchestrator", ":frontend"
# A short window: the pause before a restart does not grow from test to test.
FLAGS = (
    "--multi-model", "--worker-launch", "spawn", "--dtype", "float32",
    "--max-restarts", "9", "--restart-window", "1", "--hang-timeout", "4",
)  # fmt: skip


@pytest.fixture(scope="module")
def repository(
    demo_engine: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The models."""
    return write_models(tmp_path_factory.mktemp("repository"), demo_engine)


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MultiModel]:
    """One server that lives through the faults of several tests."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with MultiModel(repository, 1, FLAGS, log) as running:
        yield running
        assert running.stop() == 0
        running.wait_gone(GONE_S)


@pytest.fixture(scope="module")
def undisturbed(server: MultiModel) -> dict[str, list[int]]:
    """The tokens of both streams without a fault."""
    streams = {model: server.stream(model) for model in WORLD_SIZES}
    return {model: stream.finish() for model, stream in streams.items()}


def test_a_spawned_model_gives_the_tokens_of_leader_mode(leader_tokens, undisturbed):
    assert undisturbed[PAIR] == leader_tokens


def test_spawned_ranks_write_to_the_common_log(server):
    for model in WORLD_SIZES:
        server.wait_log(f"[{model} rank 0 pid ")


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    ("victim", "number"), [("rank 0", signal.SIGKILL), ("rank 1", signal.SIGSTOP)]
)
def test_a_crash_of_a_spawned_rank_ends_only_its_own_group(server, undisturbed, victim, number):
    others = server.processes(SINGLE) | server.processes(ORCHESTRATOR)
    before = server.processes(PAIR)
    doomed, other = server.stream(PAIR), server.stream(SINGLE)
    before[victim].send_signal(number)
    assert other.finish() == undisturbed[SINGLE]
    assert doomed.finish() == undisturbed[PAIR]
    assert server.processes(SINGLE) | server.processes(ORCHESTRATOR) == others
    assert not any(process.is_running() for process in before.values())
    server.wait_ready()


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("trimaran-orchestrator", signal.SIGKILL),
        ("prte", signal.SIGKILL),
        ("prte", signal.SIGSTOP),
    ],
)
def test_all_groups_restart_after_a_crash_of_the_orchestrator_or_prte(
    server, undisturbed, victim, number
):
    before = [*server.processes(PAIR).values(), *server.processes(SINGLE).values()]
    num_starts = {m: server.log().count(f"group {m}: ready") for m in WORLD_SIZES}
    doomed = server.processes(ORCHESTRATOR)[victim]
    streams = {model: server.stream(model) for model in WORLD_SIZES}
    doomed.send_signal(number)
    for model, count in num_starts.items():
        server.wait_log(f"group {model}: ready", count + 1)
    assert not any(process.is_running() for process in before)
    assert {m: stream.finish() for m, stream in streams.items()} == undisturbed
    server.wait_ready()


def test_repeatedly_spawned_groups_leave_nothing_behind(server):
    # The first one may still meet what earlier tests have left to be closed.
    _spawn_again(server)
    _spawn_again(server)
    before = _held(server)
    # Twice: a connection that the test has just closed may have been counted.
    _spawn_again(server)
    _spawn_again(server)
    wait_until(
        lambda: not _more_than(before, server),
        "no more is held than before",
        GONE_S,
        told=lambda: str(_more_than(before, server)),
    )


def _spawn_again(server: MultiModel) -> None:
    num_starts = server.log().count(f"group {SINGLE}: ready")
    server.processes(SINGLE)["rank 0"].kill()
    server.wait_log(f"group {SINGLE}: ready", num_starts + 1)
    server.wait_ready()


def _more_than(before: dict[str, int], server: MultiModel) -> dict[str, int]:
    """The resources that a server holds in addition."""
    return {what: count for what, count in _held(server).items() if count > before[what]}


def _held(server: MultiModel) -> dict[str, int]:
    """The resources of a server: open files of its lasting processes, processes, segments."""
    lasting = {**server.processes(ORCHESTRATOR), **server.processes(FRONTEND)}
    supervisor = psutil.Process(server.process.pid)
    counts = {name: process.num_fds() for name, process in lasting.items()}
    counts["supervisor"] = supervisor.num_fds()
    counts["processes"] = len(supervisor.children(recursive=True))
    group = server.processes(SINGLE)["rank 0"].environ()
    for variable in ("OMPI_MCA_btl_sm_backing_directory", "PRTE_MCA_prte_local_tmpdir_base"):
        folder = Path(group[variable]).parent
        counts[variable] = sum(len(files) for _, _, files in os.walk(folder))
    return counts


@pytest.fixture(scope="module")
def disturbed(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MultiModel]:
    """A server whose orchestrator dies before any spawned rank serves."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    starting = MultiModel(repository, 1, FLAGS, log)
    starting.start()
    try:
        starting.wait_log("orchestrator: ready")
        starting.processes(ORCHESTRATOR)["trimaran-orchestrator"].kill()
        yield starting
    finally:
        starting.kill()


def test_a_start_survives_the_death_of_the_orchestrator(disturbed, undisturbed):
    disturbed.wait_log("its orchestrator died; restart in", count=len(WORLD_SIZES))
    disturbed.wait_ready()
    assert disturbed.stream(PAIR).finish() == undisturbed[PAIR]


def test_a_stopped_rank_does_not_outlive_a_killed_supervisor(disturbed):
    disturbed.wait_ready()
    disturbed.processes(PAIR)["rank 1"].suspend()
    disturbed.process.kill()
    disturbed.wait_gone(GONE_S)
