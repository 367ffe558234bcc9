"""`trimaran verify` finds a changed tensor."""

from __future__ import annotations

import json

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.shard_file import read_header

# The command forks before it starts threads, but a test process has threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def engine(llama, trimaran, tmp_path):
    """An engine folder for two ranks."""
    output = tmp_path / "engine"
    done = trimaran("build", "--checkpoint", llama().folder, "--output", output, "--tp-size", 2)
    assert done.code == 0, done.err
    return output


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_unchanged_folder_is_verified(num_workers, engine, trimaran):
    done = trimaran("verify", "--engine", engine, "--workers", num_workers)
    assert done.code == 0, done.err
    assert "as it was built: 2 file(s), 42 tensors" in done.out


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_flipped_bit_is_found_and_its_tensor_named(num_workers, engine, trimaran):
    path = engine / "rank1.safetensors"
    place = read_header(path).entries["layers.2.mlp.down_proj.weight"].start + 100
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    done = trimaran("verify", "--engine", engine, "--workers", num_workers)
    assert done.code == 2
    assert "1 of 42 tensors" in done.err
    assert "rank1.safetensors layers.2.mlp.down_proj.weight" in done.err


def test_a_file_of_another_build_with_the_same_shapes_is_refused_at_once(
    engine, llama, trimaran, tmp_path
):
    checkpoint = tmp_path / "llama"
    values = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 1e-6}))
    raw = bytearray((checkpoint / "model.safetensors").read_bytes())
    raw[-100] ^= 1
    (checkpoint / "model.safetensors").write_bytes(raw)
    other = tmp_path / "other"
    trimaran("build", "--checkpoint", checkpoint, "--output", other, "--tp-size", 2)
    for name in ("rank0.safetensors", "rank1.safetensors"):
        (engine / name).write_bytes((other / name).read_bytes())
    with pytest.raises(ConfigError, match=r"header_sha256 .* another build"):
        EngineFolder.load(engine)


def test_a_hugging_face_folder_cannot_be_verified(llama, trimaran):
    done = trimaran("verify", "--engine", llama().folder)
    assert done.code == 2 and "has no checksums" in done.err
