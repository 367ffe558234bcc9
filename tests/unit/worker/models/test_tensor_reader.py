"""Tensors of a file, read by several threads into host memory."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimaran.comm.errors import ConfigError
from trimaran.worker.models.weights.tensor_reader import TensorReader

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path):
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "half": torch.randn(37, 61, generator=generator).half(),
        "bfloat": torch.randn(129, generator=generator).bfloat16(),
        "float": torch.randn(5, 7, 11, generator=generator),
        "ids": torch.randint(0, 1 << 40, (9,), generator=generator),
        "nothing": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("chunk_bytes", [8, 100, 1 << 20])
@pytest.mark.parametrize("max_ahead_bytes", [1, 5000, 1 << 30])
def test_every_tensor_has_the_values_of_the_file(path, chunk_bytes, max_ahead_bytes):
    expected = load_file(path)
    reader = TensorReader(CPU, chunk_bytes=chunk_bytes, max_ahead_bytes=max_ahead_bytes)
    found = dict(reader.read(path, expected))
    reader.close()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


def test_only_named_tensors_are_read(path):
    reader = TensorReader(CPU)
    assert {name for name, _ in reader.read(path, ["ids", "half"])} == {"ids", "half"}
    reader.close()


def test_reading_may_stop_within_a_file_and_continue_with_another_file(path):
    reader = TensorReader(CPU, num_threads=2, chunk_bytes=16)
    reading = reader.read(path, load_file(path))
    next(reading)
    reading.close()
    ((_, tensor),) = reader.read(path, ["float"])
    assert torch.equal(tensor, load_file(path)["float"])
    reader.close()


def write(path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_file_that_is_cut_short_is_refused(path):
    path.write_bytes(path.read_bytes()[:-1])
    reader = TensorReader(CPU)
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        list(reader.read(path, ["half"]))
    reader.close()


def test_a_file_that_shrinks_while_it_is_read_is_refused(path):
    reader = TensorReader(CPU, num_threads=1, max_ahead_bytes=1)
    reading = reader.read(path, load_file(path))
    next(reading)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"the file ends \d+ bytes early"):
        list(reading)
    reader.close()


def test_an_unknown_dtype_is_refused_by_name(tmp_path):
    path = tmp_path / "b.safetensors"
    write(path, {"w": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8))
    reader = TensorReader(CPU)
    with pytest.raises(ConfigError, match="'w' holds C64, which is not served"):
        list(reader.read(path, ["w"]))
    reader.close()
