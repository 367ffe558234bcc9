"""Weights that are not as they were built are found while they are loaded."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from tests.unit.worker.models import models
from trimaran.builder.shards import write_shards
from trimaran.comm.errors import ConfigError
from trimaran.worker.config import shard_file
from trimaran.worker.config.engine_folder import EngineFolder, RankMapping
from trimaran.worker.config.shard_file import CHUNK_BYTES, read_header
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.tensor_reader import TensorReader
from trimaran.worker.models.weights.verification import ShardVerifier
from trimaran.worker.models.weights.weight_loader import load_shard
from trimaran.worker.parallel.tensor_parallel import ShardPosition

# The builder forks before it starts threads, but a test process has threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

NAME = "embed_tokens.weight"
VOCAB_SIZE = 50_000


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A file of an engine folder with an embedding of two chunks, and an empty model for the
    file."""
    folder = tmp_path_factory.mktemp("model")
    models.save_huggingface(folder, models.llama_config(vocab_size=VOCAB_SIZE))
    found = EngineFolder.load(folder)
    output = tmp_path_factory.mktemp("engine")
    write_shards(found, found.config, RankMapping(), output, num_workers=1)
    path = output / "rank0.safetensors"
    assert CHUNK_BYTES < read_header(path).entries[NAME].num_bytes < 2 * CHUNK_BYTES
    return path, found.config


@pytest.fixture
def shard(built, tmp_path):
    """A copy of the file, to damage, and a function that loads it."""
    source, config = built
    path = tmp_path / "rank0.safetensors"
    path.write_bytes(source.read_bytes())

    def load(**options):
        stage = models.StageRange.of(config.num_hidden_layers, 0, 1)
        model = build_model(
            config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
        )
        load_shard(model, path, **options)
        return model

    return path, load


def flip(path, offset):
    """Flip a bit so many bytes into the embedding."""
    place = read_header(path).entries[NAME].start + offset
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def rewrite_metadata(path, edit):
    """Change the header's metadata and nothing else."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    edit(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])


def without(prefix):
    def edit(metadata):
        for key in [key for key in metadata if key.startswith(prefix)]:
            del metadata[key]

    return edit


def test_an_unchanged_file_is_loaded(shard, caplog):
    _, load = shard
    with caplog.at_level(logging.INFO):
        load()
    assert "as they were built (XXH3)" in caplog.text


@pytest.mark.parametrize("offset", [0, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 5000])
def test_a_flipped_bit_is_found_and_its_chunk_named(shard, offset):
    path, load = shard
    flip(path, offset)
    first = offset // CHUNK_BYTES * CHUNK_BYTES

    with pytest.raises(ConfigError) as raised:
        load()

    text = str(raised.value)
    assert str(path) in text and f"bytes {first} to" in text and f"tensor {NAME!r}" in text
    assert "trimaran verify" in text and "--skip-weight-verification" in text


def test_a_flag_disables_the_comparison(shard):
    path, load = shard
    flip(path, 0)
    assert load(is_verified=False)


def test_a_file_of_an_earlier_version_is_compared_by_tensor(shard, caplog):
    path, load = shard
    rewrite_metadata(path, without("xxh3"))
    with caplog.at_level(logging.INFO):
        load()
    assert "SHA-256: an earlier version built it" in caplog.text
    flip(path, 5)
    with pytest.raises(ConfigError, match=f"bytes 0 to .* of the tensor '{NAME}' are not as"):
        load()


def test_a_file_without_checksums_is_loaded_and_the_log_says_so(shard, caplog):
    path, load = shard
    rewrite_metadata(
        path, lambda metadata: (without("xxh3")(metadata), without("sha")(metadata))
    )
    flip(path, 0)
    load()
    assert "carries no checksums" in caplog.text


def test_a_header_with_too_few_checksums_is_refused(shard):
    path, load = shard
    key = shard_file.chunks_key(NAME)
    rewrite_metadata(path, lambda metadata: metadata.update({key: metadata[key][:-1]}))
    with pytest.raises(ConfigError, match="no checksum for each chunk"):
        load()


def test_checksums_are_compared_before_weights_go_to_a_device(shard):
    path, _ = shard
    reader = TensorReader(torch.device("cpu"))
    names = list(read_header(path).entries)
    whole = dict(reader.read(path, names, ShardVerifier(path)))
    assert whole.keys() == set(names)
    flip(path, CHUNK_BYTES)
    with pytest.raises(ConfigError, match=f"bytes {CHUNK_BYTES} to .* of the tensor '{NAME}'"):
        dict(reader.read(path, names, ShardVerifier(path)))
    reader.close()
