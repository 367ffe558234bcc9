"""Ranks of a later stage and of another dp rank die or hang, with streams in flight."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from chaos import Chaos, model_of
from chaos_server import ChaosServer, Member
from leftovers import left_over
from models import LAYOUTS, Case, Model, build_repository, make_cases, with_answers
from token_stream import TokenStream

STAGES, DP_RANKS = LAYOUTS
HANG_TIMEOUT_S = 5.0
NOTICED_S = 2 * HANG_TIMEOUT_S
READY_S, GONE_S = 120.0, 30.0
NUM_STREAMS = 4
NUM_TOKENS = 300
EXACT = ("--dtype", "float32", "--num-threads", "1")
# A short window: the pause before a restart does not grow from test to test.
RESTARTS = ("--max-restarts", "99", "--restart-window", "5")
EXPLICIT = (
    "--model-control-mode", "explicit",
    "--load-model", STAGES.name, "--load-model", DP_RANKS.name,
)  # fmt: skip
STARTS = {
    "leader": (),
    "spawned": ("--worker-launch", "spawn"),
    "by mpirun": ("--worker-launch", "mpirun"),
}

BOTH_MODELS = pytest.mark.parametrize("servers", list(STARTS)[1:], indirect=True)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of repositories: of each model alone, and of both."""
    folder = tmp_path_factory.mktemp("layouts")
    for models in ((STAGES,), (DP_RANKS,), LAYOUTS):
        build_repository(folder / "-".join(model.name for model in models), models)
    return folder


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Case]]:
    """Long requests for each model, and what one rank answers."""
    alone = tuple(replace(model, pp_size=1, num_dp_ranks=1) for model in LAYOUTS)
    asked = [
        replace(case, prompt=case.prompt[:100], num_tokens=NUM_TOKENS)
        for case in make_cases(alone, NUM_STREAMS, longest=100)
    ]
    folder = tmp_path_factory.mktemp("alone")
    with ChaosServer(build_repository(folder, alone), flags=EXACT, folder=folder) as server:
        answered = with_answers(asked, server)
    return {model.name: [c for c in answered if c.model == model.name] for model in LAYOUTS}


@pytest.fixture(scope="module", params=STARTS)
def servers(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Model], ChaosServer]]:
    """Servers with one starter, shared by tests: one server with both models, or in leader
    mode a server for each model. The servers must leave nothing behind."""
    running: dict[str, ChaosServer] = {}

    def server_of(model: Model) -> ChaosServer:
        models = (model,) if request.param == "leader" else LAYOUTS
        name = "-".join(each.name for each in models)
        if name not in running:
            flags = (*STARTS[request.param], *(EXPLICIT if len(models) > 1 else ()))
            log = tmp_path_factory.mktemp("log")
            running[name] = serve(folder / name / "models", models, log, *RESTARTS, *flags)
            running[name].start()
            running[name].wait_ready()
        return running[name]

    yield server_of
    try:
        for server in running.values():
            assert server.end() == 0
            assert left_over(server) == []
    finally:
        for server in running.values():
            server.kill()


def serve(
    repository: Path, models: tuple[Model, ...], folder: Path, *flags: str
) -> ChaosServer:
    """A server of one model in leader mode or of several, not yet started."""
    return ChaosServer(
        repository,
        models[0].num_ranks,
        (*EXACT, "--hang-timeout", str(HANG_TIMEOUT_S), *flags),
        multi_model=len(models) > 1,
        folder=folder,
    )


def streams_of(server: ChaosServer, cases: list[Case]) -> list[TokenStream]:
    """Streams that are under way side by side, so that every stage and dp rank has some."""
    return [TokenStream(server, c.model, c.prompt, c.num_tokens) for c in cases]


def is_of(member: Member, model: Model) -> bool:
    return model_of(member.group) == model.name


def members_of(server: ChaosServer, model: Model) -> list[Member]:
    """Its ranks of every generation."""
    return [member for member in server.find("rank") if is_of(member, model)]


def ranks_of(server: ChaosServer, model: Model) -> dict[int, Member]:
    """The ranks of a model that has one generation, by number."""
    members = members_of(server, model)
    return {int(m.process.environ()["OMPI_COMM_WORLD_RANK"]): m for m in members}


def pids_of(server: ChaosServer, model: Model) -> set[int]:
    return {member.pid for member in members_of(server, model)}


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)


def load_changed(server: ChaosServer, model: Model) -> tuple[int, object]:
    """Load a model whose files are newer than the serving version; returns status and reply."""
    (server.repository / model.name / "config.pbtxt").touch()
    return server.post(f"/v2/repository/models/{model.name}/load", {}, timeout_s=READY_S)


def load(server: ChaosServer, model: Model) -> None:
    """Load the model, which replaces the serving version."""
    status, body = load_changed(server, model)
    assert status == 200, body


def unload(server: ChaosServer, model: Model) -> None:
    """Unload the model: running requests continue."""
    status, body = server.post(f"/v2/repository/models/{model.name}/unload", {})
    assert status == 200, body


def wait_whole(server: ChaosServer, model: Model) -> None:
    chaos = Chaos(server, LAYOUTS)
    wait_until(lambda: chaos.is_whole([model.name]), READY_S, "up with all ranks")


def assert_right(streams: list[TokenStream], cases: list[Case]) -> None:
    assert [tuple(stream.finish()) for stream in streams] == [case.answer for case in cases]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model", LAYOUTS, ids=lambda model: model.name)
def test_a_rank_that_is_lost_costs_no_stream(servers, cases, model, rank, number):
    server = servers(model)
    wait_whole(server, model)
    num_restarts = server.metric("trimaran_group_restarts", model=model.name)
    others = [m for m in server.find("rank") if not is_of(m, model)]
    before = ranks_of(server, model)
    streams = streams_of(server, cases[model.name])
    os.kill(before[rank].pid, number)
    wait_until(lambda: not server.is_model_ready(model.name), NOTICED_S, "noticed")
    assert not server.is_ready()
    assert server.metric("trimaran_group_up", model=model.name) == 0
    assert server.is_live()
    assert_right(streams, cases[model.name])
    assert not any(member.process.is_running() for member in before.values())
    wait_whole(server, model)
    assert server.metric("trimaran_group_restarts", model=model.name) == num_restarts + 1
    assert [m for m in server.find("rank") if not is_of(m, model)] == others
    server.wait_ready()


@BOTH_MODELS
@pytest.mark.parametrize("model", LAYOUTS, ids=lambda model: model.name)
def test_a_model_is_reloaded_and_unloaded_during_streams(servers, cases, model):
    server = servers(model)
    before = pids_of(server, model)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load, server, model)
        while not loading.done():
            assert_right(streams_of(server, cases[model.name]), cases[model.name])
        loading.result()
    wait_until(lambda: not before & pids_of(server, model), GONE_S, "its ranks have ended")
    streams = streams_of(server, cases[model.name])
    unload(server, model)
    wait_until(lambda: not server.is_model_ready(model.name), NOTICED_S, "unloaded")
    assert_right(streams, cases[model.name])
    wait_until(lambda: not members_of(server, model), GONE_S, "its ranks have ended")
    load(server, model)
    assert_right(streams_of(server, cases[model.name]), cases[model.name])


@BOTH_MODELS
@pytest.mark.parametrize("model", LAYOUTS, ids=lambda model: model.name)
def test_a_rank_death_during_a_load_keeps_the_serving_version(servers, cases, model):
    server = servers(model)
    before = pids_of(server, model)
    streams = streams_of(server, cases[model.name])

    def newcomers() -> list[Member]:
        return [member for member in members_of(server, model) if member.pid not in before]

    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load_changed, server, model)
        wait_until(lambda: len(newcomers()) == model.num_ranks, READY_S, "both ranks start")
        newcomers()[-1].process.kill()
        status, body = loading.result()
    assert status == 500
    assert f"failed to load '{model.name}'" in body["error"]
    assert_right(streams, cases[model.name])
    wait_until(lambda: not newcomers(), GONE_S, "the new ranks have ended")
    assert pids_of(server, model) == before
    load(server, model)


@BOTH_MODELS
@pytest.mark.parametrize("model", LAYOUTS, ids=lambda model: model.name)
def test_a_rank_death_during_an_unload_ends_streams_with_errors(servers, cases, model):
    server = servers(model)
    before, streams = ranks_of(server, model), streams_of(server, cases[model.name])
    unload(server, model)
    before[1].process.kill()
    for stream, case in zip(streams, cases[model.name], strict=True):
        stream.join(READY_S)
        assert not stream.is_alive()
        ids = tuple(stream.tokens)
        assert ids == case.answer[: len(ids)]
        assert f"the engine of model '{model.name}' is gone" in stream.error or not stream.error
        assert stream.error or ids == case.answer
    wait_until(lambda: not members_of(server, model), GONE_S, "its ranks have ended")
    load(server, model)
    assert_right(streams_of(server, cases[model.name]), cases[model.name])


@pytest.mark.parametrize("model", LAYOUTS, ids=lambda model: model.name)
def test_a_signal_lets_streams_end(folder, cases, tmp_path, model):
    with serve(folder / model.name / "models", (model,), tmp_path) as server:
        streams = streams_of(server, cases[model.name])
        assert server.end() == 0
        assert_right(streams, cases[model.name])
        assert left_over(server) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("model", LAYOUTS, ids=lambda model: model.name)
def test_without_restarts_streams_end_by_an_error_and_every_process_ends(
    folder, cases, tmp_path, model, number
):
    repository = folder / model.name / "models"
    with serve(repository, (model,), tmp_path, "--restart", "never") as server:
        victim = ranks_of(server, model)[1].pid
        streams = streams_of(server, cases[model.name])
        os.kill(victim, number)
        for stream, case in zip(streams, cases[model.name], strict=True):
            stream.join(NOTICED_S + GONE_S)
            assert f"the engine of model '{model.name}' is gone" in stream.error
            ids = tuple(stream.tokens)
            assert ids == case.answer[: len(ids)]
        assert server.process.wait(GONE_S) == 1
        assert left_over(server) == []
