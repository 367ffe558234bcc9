"""The CPU's attention over a KV cache of one byte a number, and the plain twin's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trimaran.kernels import build, reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.kv_quantization import (
    KV_DTYPES,
    LARGEST,
    head_scales,
    quantize_heads,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SIZE, BLOCK, NUM_KV = 24, 5, 2
LENGTHS = [(0, 1), (9, 1), (30, 1), (0, 8), (5, 20)]
"""Cached tokens and queries of each sequence."""


@pytest.fixture(params=KV_DTYPES)
def kind(request):
    return KV_DTYPES[request.param]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Batch:
    """Sequences over a quantized pool, and their keys and values in float32."""

    def __init__(self, kind, dtype, ops):
        self.scales = head_scales(torch.tensor([0.01, 0.06]), torch.tensor([0.05, 0.02]))
        lens = [past + queries for past, queries in LENGTHS]
        most = -(-max(lens) // BLOCK)
        tables = torch.randperm(most * len(lens), generator=torch.Generator().manual_seed(5))
        tables = tables.int().view(len(lens), most)
        shape = (tables.numel(), 2, BLOCK, NUM_KV, SIZE)
        self.cache = torch.full(shape, 255, dtype=torch.uint8).view(kind)
        self.exact = torch.zeros(shape)
        for number, count in enumerate(lens):
            slots = (tables[number].long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
            key, value = (
                draw(count, NUM_KV, SIZE, seed=9 * number + k).to(dtype) for k in (1, 2)
            )
            ops.write_kv(key, value, self.cache, slots[:count], self.scales)
            stored = [
                quantize_heads(x, self.scales[2 + each], kind).float()
                * self.scales[each][:, None]
                for each, x in enumerate((key, value))
            ]
            reference.write_kv(*stored, self.exact, slots[:count])
        chunks = [queries for _, queries in LENGTHS]
        self.query = draw(sum(chunks), 6, SIZE, seed=4).to(dtype)
        self.metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *chunks]).cumsum(0).int(),
            seq_lens=torch.tensor(lens).int(),
            block_tables=tables,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=max(chunks),
            max_seq_len=max(lens),
            num_decodes=3,
        )


SPECS = [
    AttentionSpec(scale=0.2),
    AttentionSpec(scale=0.2, window=7, num_sinks=3),
    AttentionSpec(scale=2.0, soft_cap=1.5),
    AttentionSpec(scale=0.2, position_bias=draw(6, 60, seed=3)),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("features", [None, {"avx2", "fma", "f16c"}], ids=["native", "avx2"])
def test_attention_is_that_over_the_scaled_numbers(kind, dtype, spec, features, monkeypatch):
    if features:
        monkeypatch.setattr(build, "cpu_features", lambda: frozenset(features))
    ops = CpuOps(load_library(), dtype, 1)
    batch = Batch(kind, dtype, ops)

    with_scales = replace(spec, kv_scales=batch.scales)
    found = ops.paged_attention(batch.query, batch.cache, batch.metadata, with_scales)
    twin = reference.paged_attention(batch.query, batch.cache, batch.metadata, with_scales)

    expected = reference.paged_attention(
        batch.query.float(), batch.exact, batch.metadata, spec
    ).to(dtype)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(twin, expected, atol=limit * 4, rtol=limit)
    torch.testing.assert_close(found, expected, atol=limit * 4, rtol=limit)


def test_numbers_are_rounded_to_even_and_clamped(kind):
    most = LARGEST[kind]
    x = torch.tensor([[[1e6, -1e6, 1.0, 0.5, 1.5, 2.5, 17.0, 19.0, 0.0]]])
    found = quantize_heads(x, torch.ones(1), kind).float().flatten().tolist()
    rounded = [0.0, 2.0, 2.0, 17.0, 19.0] if kind is torch.int8 else [0.5, 1.5, 2.5, 16.0, 20.0]
    assert found == [most, -most, 1.0, *rounded, 0.0]


def test_scales_of_latent_vectors_are_refused():
    with pytest.raises(ValueError, match="latent_size"):
        AttentionSpec(scale=1.0, latent_size=16, kv_scales=torch.ones(4, 1))
