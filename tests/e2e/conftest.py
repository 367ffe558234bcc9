"""Engines, repositories and servers that the end-to-end tests share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from adapters import write_peft
from multi_model import NUM_TOKENS, PAIR, PROMPTS
from served import DEMO_MODEL, Served, init_repo, run_trimaran
from token_stream import TokenStream
from waiting import started

LOG_CHARACTERS = 20_000
"""Log lines that are shown with a failure."""
LONGEST = (
    "test_processes", "test_spawn", "test_greedy_parity", "test_rank_group",
    "test_multi_model", "test_online_benchmark", "test_frontends", "test_placement",
)  # fmt: skip
"""Files that take longest, longest first."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: processes of pytest-xdist then end together."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the current logs of the test's servers beside a failure."""
    report = yield
    if report.failed:
        for each in started:
            code = each.process.poll()
            state = "runs" if code is None else f"ended with {code}"
            report.sections.append((f"{each.log_path} ({state})", each.log()[-LOG_CHARACTERS:]))
    if report.when == "teardown":
        started[:] = [each for each in started if each.process.poll() is None]
    return report


@pytest.fixture(scope="session")
def build_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build an engine once for each set of arguments."""
    built: dict[tuple[str, ...], Path] = {}

    def build(checkpoint: Path, *flags: str) -> Path:
        key = (str(checkpoint), *flags)
        if key not in built:
            output = tmp_path_factory.mktemp("engine") / "engine"
            done = run_trimaran(
                "build", "--checkpoint", str(checkpoint), "--output", str(output), *flags
            )
            assert done.returncode == 0, done.stderr
            built[key] = output
        return built[key]

    return build


@pytest.fixture(scope="session")
def make_repository(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write and fill a model repository for an engine."""

    def make(engine: Path, tokenizer: Path = DEMO_MODEL, **values: str) -> Path:
        folder = tmp_path_factory.mktemp("repository") / "models"
        fill = {
            "tokenizer_dir": str(tokenizer), "engine_dir": str(engine), **values,
        }  # fmt: skip
        text = ",".join(f"{key}:{value}" for key, value in fill.items())
        init_repo(str(folder), "--defaults", "--fill", text)
        return folder

    return make


@pytest.fixture(scope="session")
def demo_engine(build_engine: Callable[..., Path]) -> Callable[[int], Path]:
    """The demo model's engine for a number of ranks, in its own dtype."""

    def engine(world_size: int) -> Path:
        return build_engine(
            DEMO_MODEL, "--tp-size", str(world_size), "--max-batch-size", "256",
            "--max-num-tokens", "1024", "--max-input-len", "896", "--max-beam-width", "4",
        )  # fmt: skip

    return engine


@pytest.fixture(scope="session")
def demo_servers(
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Served]]:
    """Two servers of the demo model, which start side by side and serve all tests.

    ``decoupled``: what `make serve` runs, on two ranks, with two adapters and guides;
    ``plain``: on one rank, not decoupled.
    """
    adapters = tmp_path_factory.mktemp("adapters")
    write_peft(adapters / "north", seed=3)
    write_peft(adapters / "81", seed=4)
    values = {
        "decoupled": {
            "lora_prefetch_dir": str(adapters), "guided_decoding_backend": "xgrammar",
        },
        "plain": {"decoupled_mode": "False"},
    }  # fmt: skip
    world_sizes = {"decoupled": 2, "plain": 1}
    with ThreadPoolExecutor(2) as pool:
        engines = dict(zip(values, pool.map(demo_engine, world_sizes.values()), strict=True))
    servers = {}
    with contextlib.ExitStack() as running:
        for name, engine in engines.items():
            repository = make_repository(engine, **values[name])
            log = tmp_path_factory.mktemp("log") / "serve.log"
            servers[name] = Served(repository, world_sizes[name], log_path=log)
            servers[name].start()
            running.callback(servers[name].stop)
        for server in servers.values():
            server.wait_ready()
        yield servers


@pytest.fixture(scope="session")
def decoupled_server(demo_servers: dict[str, Served]) -> Served:
    """The demo model on two ranks, decoupled, with two adapters and guides."""
    return demo_servers["decoupled"]


@pytest.fixture(scope="session")
def plain_server(demo_servers: dict[str, Served]) -> Served:
    """The demo model on one rank, not decoupled."""
    return demo_servers["plain"]


@pytest.fixture(scope="session")
def exact_server(
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """The demo model on two ranks in float32, in leader mode, for tests that kill its
    processes.

    Tests with this fixture also use `leader_tokens`: the last fault test ends the server.
    """
    log = tmp_path_factory.mktemp("log") / "serve.log"
    # A short window: the pause before a restart does not grow from test to test.
    flags = ("--max-restarts", "9", "--restart-window", "1", "--hang-timeout", "4")
    repository = make_repository(demo_engine(2))
    with Served(repository, 2, ("--dtype", "float32", *flags), log) as server:
        yield server


@pytest.fixture(scope="session")
def leader_tokens(exact_server: Served) -> list[int]:
    """The answer of the model ``pair`` in leader mode, in float32 and without other
    requests.
    """
    return TokenStream(exact_server, "tensorrt_llm", PROMPTS[PAIR], NUM_TOKENS).finish()
