"""Files of a model that are damaged: a clear error, and the rest of the server goes on."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bystander import Bystander
from repositories import build_engine, make_repository
from served import DEMO_MODEL, Served

from trimaran.worker.config.shard_file import read_header

EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "ensemble")
ENDS_S = 60.0
NUM_FLIPPED = 320


def flip(path: Path, count: int) -> None:
    """Flip bytes of tensors, as a failing disk does, in the file of one rank."""
    entries = read_header(path).entries.values()
    first, end = min(e.start for e in entries), max(e.start + e.num_bytes for e in entries)
    places = random.Random(7).sample(range(first, end), count)
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0xFF]))


@pytest.fixture(scope="module")
def whole_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine folder of one rank."""
    return build_engine(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def damaged_engine(whole_engine: Path, tmp_path: Path) -> Path:
    """The same with flipped bytes in its weights."""
    engine = tmp_path / "engine"
    shutil.copytree(whole_engine, engine)
    flip(engine / "rank0.safetensors", NUM_FLIPPED)
    return engine


def test_a_server_with_flipped_bits_in_its_weights_does_not_start(
    damaged_engine: Path, tmp_path: Path
) -> None:
    """The command ends; its log names file, tensor, bytes and remedy."""
    repository = make_repository(tmp_path, damaged_engine)
    server = Served(repository, 1, ("--restart", "never"), tmp_path / "serve.log")
    server.start()
    try:
        assert server.wait_ended(ENDS_S) != 0
    finally:
        server.kill()
    log = server.log()
    for text in (
        "rank0.safetensors: bytes ", " of the tensor ", "are not as they were built",
        "--skip-weight-verification",
    ):  # fmt: skip
        assert text in log, text


def test_a_flag_allows_weights_with_flipped_bits(damaged_engine: Path, tmp_path: Path) -> None:
    """The operator may want to inspect the damaged weights' output."""
    flags = ("--skip-weight-verification",)
    repository = make_repository(tmp_path, damaged_engine)
    with Served(repository, 1, flags, tmp_path / "serve.log") as server:
        status, answer = server.post(
            "/v2/models/ensemble/generate", {"text_input": "Once", "max_tokens": 3}
        )
    assert status == 200, answer


@pytest.fixture(scope="module")
def repository(whole_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which one model after another is damaged, each as a copy."""
    return make_repository(tmp_path_factory.mktemp("damaged"), whole_engine)


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server in explicit mode."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    flags = ("--dtype", "float32", "--num-threads", "1")
    with Served(repository, 1, (*EXPLICIT, *flags), log) as served:
        yield served


def _copy(repository: Path, name: str, copy: str, edit: Callable[[str], str]) -> Path:
    """A model of the repository under another name, with an edited config.pbtxt."""
    folder = repository / copy
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(repository / name, folder)
    path = folder / "config.pbtxt"
    text = path.read_text().replace(f'name: "{name}"', f'name: "{copy}"', 1)
    path.write_text(edit(text))
    return folder


def _cut(path: Path, share: float) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])


def _refused(server: Served, name: str) -> str:
    """The error of a load, beside which a stream and probes went on."""
    with Bystander(server) as bystander:
        status, answer = server.post(f"/v2/repository/models/{name}/load", {}, timeout_s=60)
    assert 400 <= status < 600, answer
    assert not bystander.gaps.errors
    assert bystander.gaps.probe_s < 1.0 and bystander.gaps.stream_s < 2.0, bystander.gaps
    print(f"\n{name}: {status} {answer} {bystander.gaps}")
    return str(answer["error"])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_a_truncated_config_is_refused_by_name(
    server: Served, repository: Path, share: float
) -> None:
    """Whatever is left of the text."""
    folder = _copy(repository, "postprocessing", "cut_config", str)
    _cut(folder / "config.pbtxt", share)
    assert "cut_config" in _refused(server, "cut_config")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_tokenizer_is_refused_by_name(
    server: Served, repository: Path, tmp_path: Path, share: float
) -> None:
    """The error names the file."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(DEMO_MODEL, tokenizer)
    _cut(tokenizer / "tokenizer.json", share)
    _copy(
        repository, "postprocessing", "cut_tokenizer",
        lambda text: text.replace(str(DEMO_MODEL), str(tokenizer)),
    )  # fmt: skip
    assert "tokenizer.json" in _refused(server, "cut_tokenizer")


@pytest.mark.parametrize("what", ["tokenizer.json", "config.pbtxt"])
def test_the_error_of_a_server_names_a_truncated_file(
    whole_engine: Path, tmp_path: Path, what: str
) -> None:
    """A server at its start has nothing else to serve."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(DEMO_MODEL, tokenizer)
    repository = make_repository(tmp_path, whole_engine, tokenizer)
    cut = tokenizer if what == "tokenizer.json" else repository / "preprocessing"
    _cut(cut / what, 0.6)
    server = Served(repository, 1, ("--restart", "never"), tmp_path / "serve.log")
    server.start()
    try:
        assert server.wait_ended(ENDS_S) != 0
    finally:
        server.kill()
    assert what in server.log()
    assert "Traceback" not in server.log()
