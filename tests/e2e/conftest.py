"""Engines, repositories and servers that the end-to-end tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from adapters import write_peft
from multi_model import PAIR, WORLD_SIZES, MultiModel, write_models
from served import DEMO_MODEL, Served, run_trimaran


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
        done = run_trimaran("init-repo", str(folder), "--defaults", "--fill", text)
        assert done.returncode == 0, done.stderr
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
def decoupled_server(
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """The demo model on two ranks, decoupled: what `make serve` runs, with two adapters
    and guides."""
    adapters = tmp_path_factory.mktemp("adapters")
    write_peft(adapters / "north", seed=3)
    write_peft(adapters / "81", seed=4)
    repository = make_repository(
        demo_engine(2), lora_prefetch_dir=str(adapters), guided_decoding_backend="xgrammar"
    )
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Served(repository, world_size=2, log_path=log) as server:
        yield server


@pytest.fixture(scope="session")
def plain_server(
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """The demo model on one rank, not decoupled."""
    repository = make_repository(demo_engine(1), decoupled_mode="False")
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Served(repository, world_size=1, log_path=log) as server:
        yield server


@pytest.fixture(scope="session")
def leader_tokens(
    demo_engine: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[int]:
    """What the model ``pair`` says in leader mode, in float32 and with nothing beside it."""
    folder = tmp_path_factory.mktemp("leader")
    repository = write_models(folder, demo_engine, (PAIR,))
    flags = ("--dtype", "float32")
    with MultiModel(repository, WORLD_SIZES[PAIR], flags, folder / "serve.log") as leader:
        tokens = leader.stream(PAIR).finish()
        assert leader.stop() == 0
    return tokens
