"""The command that turns a PEFT adapter into the files that requests carry."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def adapter(tmp_path):
    """A PEFT folder: queries of layer 2 and the MLP of layer 0, of size 2."""
    torch.manual_seed(0)
    layers = "base_model.model.model.layers"
    shapes = {
        f"{layers}.2.self_attn.q_proj": (64, 32),
        f"{layers}.0.mlp.gate_proj": (48, 32),
        f"{layers}.0.mlp.down_proj": (32, 48),
    }
    tensors = {}
    for path, (outputs, inputs) in shapes.items():
        tensors[f"{path}.lora_A.weight"] = torch.randn(2, inputs)
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, 2)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, tensors


@pytest.mark.parametrize("storage", [None, "float32"])
def test_rows_are_module_layer_and_size_beside_both_matrices(
    adapter, trimaran, tmp_path, storage
):
    folder, tensors = adapter
    flags = () if storage is None else ("--storage-type", storage)

    done = trimaran("convert-lora", "-i", folder, "-o", tmp_path / "out", "-v", *flags)

    assert done.code == 0, done.err
    assert "3 modules of size 2" in done.out and "layer 2 attn_q: size 2, 32" in done.out
    config = np.load(tmp_path / "out" / "model.lora_config.npy")
    weights = np.load(tmp_path / "out" / "model.lora_weights.npy")
    # The gate projection of an MLP is module 5 under any name, and the down projection module
    # 6.
    assert config.tolist() == [[[5, 0, 2], [6, 0, 2], [1, 2, 2]]]
    assert weights.shape == (1, 3, 2 * (64 + 32))
    assert weights.dtype == (np.float16 if storage is None else np.float32)
    path = "base_model.model.model.layers.0.mlp.gate_proj"
    a, b = tensors[f"{path}.lora_A.weight"], 3 * tensors[f"{path}.lora_B.weight"]
    expected = torch.cat([a.flatten(), b.flatten()]).numpy()
    np.testing.assert_allclose(weights[0, 0, : len(expected)], expected, rtol=1e-3, atol=1e-3)
    assert not weights[0, 0, len(expected) :].any()


def test_weights_that_float16_cannot_hold_are_refused(adapter, trimaran, tmp_path):
    folder, tensors = adapter
    next(iter(tensors.values()))[0, 0] = 1e5
    save_file(tensors, folder / "adapter_model.safetensors")
    words = ("convert-lora", "-i", folder, "-o", tmp_path / "out")

    done = trimaran(*words)

    assert done.code == 2
    assert (
        "largest weight is 100000 but float16 ends at 65504. Choose --storage-type float32"
        in (done.err)
    )
    assert not (tmp_path / "out").exists()
    assert trimaran(*words, "--storage-type", "float32").code == 0


def test_a_folder_without_an_adapter_is_refused_by_file(trimaran, tmp_path):
    done = trimaran("convert-lora", "-i", tmp_path, "-o", tmp_path / "out")

    assert done.code == 2
    assert f"{tmp_path}/adapter_config.json: No such file or directory" in done.err


def test_an_engine_folder_records_the_largest_adapter(llama, trimaran, tmp_path):
    flags = ("--max_lora_rank", "16", "--lora_plugin", "auto")
    done = trimaran("build", "--checkpoint", llama().folder, "--output", tmp_path / "e", *flags)

    assert done.code == 0, done.err
    build = json.loads((tmp_path / "e" / "config.json").read_text())["build_config"]
    assert build["max_lora_rank"] == build["lora_config"]["max_lora_rank"] == 16


_QUERIES = "base_model.model.model.layers.2.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({f"{_QUERIES}.lora_B.weight": torch.ones(64, 3)}, "has shape [2, 32] and"),
        ({f"{_QUERIES}.lora_A.weight": torch.ones(3, 32)}, "has shape [3, 32] and"),
        ({f"{_QUERIES}.lora_B.weight": torch.ones(0, 2)}, "[0, 2], but they must be matrices"),
        ({f"{_QUERIES}.lora_A.weight": torch.full((2, 32), torch.nan)}, "holds nan, which is"),
        (
            {"layers.2.q_proj.lora_A.weight": torch.ones(2, 32),
             "layers.2.q_proj.lora_B.weight": torch.ones(64, 2)},
            "both adapt module 1 (attn_q) of layer 2",
        ),
        (
            {"layers.3.gate_up_proj.lora_A.weight": torch.ones(2, 32),
             "layers.3.gate_up_proj.lora_B.weight": torch.ones(15, 2)},
            "[outputs, size], of 2 modules as large",
        ),
        (
            {"layers.99999999999.q_proj.lora_A.weight": torch.ones(2, 32),
             "layers.99999999999.q_proj.lora_B.weight": torch.ones(64, 2)},
            "adapts 'layers.99999999999.q_proj', which is none of the layers",
        ),
    ],
)  # fmt: skip
def test_incompatible_matrices_are_refused(adapter, trimaran, tmp_path, changes, complaint):
    folder, tensors = adapter
    save_file({**tensors, **changes}, folder / "adapter_model.safetensors")

    done = trimaran("convert-lora", "-i", folder, "-o", tmp_path / "out")

    assert done.code == 2
    assert complaint in done.err and str(folder) in done.err
    assert not (tmp_path / "out").exists()


def test_an_obstacle_at_an_output_path_leaves_the_older_adapter_unchanged(
    adapter, trimaran, tmp_path
):
    folder, _ = adapter
    output = tmp_path / "out"
    assert trimaran("convert-lora", "-i", folder, "-o", output).code == 0
    before = (output / "model.lora_weights.npy").read_bytes()
    (output / "model.lora_config.npy").unlink()
    os.mkfifo(output / "model.lora_config.npy")

    flags = ("--storage-type", "float32")
    done = trimaran("convert-lora", "-i", folder, "-o", output, *flags)

    assert done.code == 2
    assert "model.lora_config.npy: it is a FIFO, not a file" in done.err
    assert (output / "model.lora_weights.npy").read_bytes() == before
    assert len(list(output.iterdir())) == 2


def test_json_nested_deeper_than_can_be_read_is_refused(adapter, trimaran, tmp_path):
    folder, _ = adapter
    (folder / "adapter_config.json").write_text("[" * 100_000)
    done = trimaran("convert-lora", "-i", folder, "-o", tmp_path / "out")
    assert done.code == 2
    assert "adapter_config.json: is not JSON: it is nested too deep" in done.err
