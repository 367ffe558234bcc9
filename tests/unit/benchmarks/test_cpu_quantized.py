"""`benchmarks/cpu_quantized.py` and the engines beside ours, `cpu_peers.py`."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from trimaran.worker.models.weights.gguf_tensors import gguf_entries, gguf_reader

FOLDER = Path(__file__).parents[3] / "benchmarks"
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 128


def test_a_peer_that_is_not_installed_is_refused_with_the_command_that_installs_it(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)

    done = subprocess.run(
        [sys.executable, FOLDER / "cpu_quantized.py", "--peer", "llama-cpp",
         "--peer-python", python],
        # Programs import what lies beside them.
        env={**os.environ, "PYTHONSAFEPATH": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert "cannot import llama_cpp (ModuleNotFoundError" in done.stderr
    assert f"{python} -m pip install llama-cpp-python gguf" in done.stderr


def write_llama(folder):
    """A small checkpoint; returns its tensors."""
    folder.mkdir()
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        f"{layer}input_layernorm": (HIDDEN,),
        f"{layer}self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}post_attention_layernorm": (HIDDEN,),
        f"{layer}mlp.gate_proj": (INNER, HIDDEN),
        f"{layer}mlp.up_proj": (INNER, HIDDEN),
        f"{layer}mlp.down_proj": (HIDDEN, INNER),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCAB, HIDDEN),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "num_hidden_layers": 1, "max_position_embeddings": 256, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS, "rope_theta": 1e4, "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_the_gguf_file_for_llama_cpp_holds_the_models_tensors(tmp_path):
    tensors = write_llama(tmp_path / "model")
    peers = runpy.run_path(str(FOLDER / "cpu_peers.py"))

    peers["convert_llama_cpp"](tmp_path / "model", tmp_path / "gguf")

    (path,) = (tmp_path / "gguf").iterdir()
    assert gguf_entries(path).keys() == tensors.keys()
    read = gguf_reader(path)
    for name, tensor in tensors.items():
        # Half a step of the largest of 32 numbers, and the rounding of its scale.
        most = tensor.float().abs().max() / 127 * 0.51 if tensor.ndim > 1 else 0.0
        assert (read(name) - tensor.float()).abs().max() <= most, name
