"""Angles and rotations against those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rotation
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotation
from transformers.models.stablelm.modeling_stablelm import (
    apply_rotary_pos_emb as stablelm_rotation,
)

from trimaran.kernels import reference
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.layers.rotary import RotaryEmbedding, amplitude, inverse_frequencies
from trimaran.worker.parallel.tensor_parallel import ShardPosition

# The values are those of published checkpoints.
SCALINGS = {
    "llama 3.1": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama 3.2": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
    },
    "yarn of a mixture": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707,
    },
    "yarn with a factor of attention": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192,
        "attention_factor": 0.8, "truncate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("name", list(SCALINGS))
def test_frequencies_are_those_of_transformers(name, head_size):
    scaling = SCALINGS[name]
    config = LlamaConfig(
        head_dim=head_size,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": 500000.0},
    )

    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")

    ours = inverse_frequencies(head_size, 500000.0, scaling)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-6)
    assert amplitude(scaling) == pytest.approx(factor)


def test_a_factor_of_yarn_that_is_null_is_that_of_the_lengths():
    rotation = {**SCALINGS["yarn"], "factor": None, "rope_theta": 500000.0}
    config = LlamaConfig(
        head_dim=64, max_position_embeddings=131072, rope_parameters=dict(rotation)
    )
    values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}

    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")

    scaling = PretrainedConfig.from_huggingface(values, "config.json").rope_scaling
    ours = inverse_frequencies(64, 500000.0, scaling)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-6)
    assert amplitude(scaling) == pytest.approx(factor) != 1.0


def _stablelm(query, key, cos, sin):
    size = cos.shape[-1]
    turned = stablelm_rotation(query[..., :size], key[..., :size], cos, sin)
    return [
        torch.cat((part, x[..., size:]), -1)
        for part, x in zip(turned, (query, key), strict=True)
    ]


def _gptj(query, key, cos, sin):
    size, half = cos.shape[-1], cos.shape[-1] // 2
    parts = []
    for x in (query, key):
        heads = x.transpose(1, 2)
        turned = gptj_rotation(heads[..., :size], sin[..., :half], cos[..., :half])
        parts.append(torch.cat((turned, heads[..., size:]), -1).transpose(1, 2))
    return parts


# Each takes [1, heads, T, H] and angles [1, T, R], repeated as halves.
PEERS = {"glm": (glm_rotation, False), "gptj": (_gptj, False), "stablelm": (_stablelm, True)}
OPS = {"torch": TorchOps, "cpu kernels": lambda: CpuOps(load_library(), torch.float32, 1)}


@pytest.mark.parametrize("ops", list(OPS))
@pytest.mark.parametrize("rotated", [8, 16])
@pytest.mark.parametrize("peer", list(PEERS))
def test_rotations_are_those_of_transformers(peer, rotated, ops):
    rotate, is_neox = PEERS[peer]
    context = LayerContext(ShardPosition(), OPS[ops](), torch.float32, torch.device("cpu"))
    rotary = RotaryEmbedding(context, rotated, 64, 10000.0, None, is_neox=is_neox)
    heads = torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(2))
    query, key = (part.transpose(0, 1)[None] for part in (heads[:, :4], heads[:, 4:6]))
    positions = torch.tensor([0, 1, 7, 40, 63])
    angles = positions[:, None].float() * inverse_frequencies(rotated, 10000.0, None)
    table = torch.cat((angles, angles), -1)[None]
    expected_query, expected_key = rotate(query, key, table.cos(), table.sin())
    cache = torch.zeros(2, 2, 4, 2, 16)
    slots = torch.tensor([5, 0, 1, 7, 3])
    ours = heads.clone()

    rotary.forward(ours, positions, cache, slots)

    torch.testing.assert_close(ours[:, :4], expected_query[0].transpose(0, 1))
    torch.testing.assert_close(ours[:, 4:6], expected_key[0].transpose(0, 1))
    expected = torch.zeros_like(cache)
    reference.write_kv(ours[:, 4:6], heads[:, 6:], expected, slots)
    assert cache.equal(expected)
