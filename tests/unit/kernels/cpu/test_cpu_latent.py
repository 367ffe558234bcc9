"""Latent attention of the CPU kernels equals that of the torch twins for any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, LatentHeads
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Cached tokens and queries of each sequence.
MIXED = [(0, 1), (30, 1), (0, 8), (5, 20), (150, 3)]


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


def _random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _batch(dtype, latent: int, rotated: int, block: int):
    """The cache of a layer, NaN where no token is, and the metadata of a step."""
    lens = torch.tensor([past + queries for past, queries in MIXED]).int()
    most = -(-int(lens.max()) // block)
    order = torch.randperm(most * len(MIXED), generator=torch.Generator().manual_seed(5))
    tables = order.int().view(len(MIXED), most)
    cache = _random(len(order), 2, 1, block, 1, latent + rotated, dtype=dtype, seed=1)[:, 1]
    for row, length in zip(tables.tolist(), lens.tolist(), strict=True):
        for number, place in enumerate(row):
            cache[place, :, max(0, length - number * block) :] = float("nan")
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *(q for _, q in MIXED)]).cumsum(0).int(),
        seq_lens=lens,
        block_tables=tables,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=20,
        max_seq_len=int(lens.max()),
    )
    return cache, metadata


@pytest.mark.parametrize("options", [{}, {"window": 9, "num_sinks": 3, "soft_cap": 2.0}])
@pytest.mark.parametrize(
    ("heads", "latent", "rotated"), [(3, 36, 8), (16, 512, 64), (40, 24, 7)]
)
def test_attention_over_latent_vectors_is_that_of_the_reference(
    dtype, heads, latent, rotated, options
):
    cache, metadata = _batch(dtype, latent, rotated, 16)
    tokens = int(metadata.query_start_loc[-1])
    query = _random(tokens, heads, latent + rotated, dtype=dtype, seed=2)
    spec = AttentionSpec(scale=(latent + rotated) ** -0.5, latent_size=latent, **options)
    ops = CpuOps(load_library(), dtype, 2)

    actual = ops.paged_attention(query, cache, metadata, spec)

    expected = reference.paged_attention(query, cache, metadata, spec)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, atol=limit, rtol=limit)
    CpuOps(load_library(), dtype, 1)


def test_a_tokens_result_does_not_depend_on_the_tokens_beside_it(dtype):
    cache, metadata = _batch(dtype, 36, 8, 4)
    ops, spec = CpuOps(load_library(), dtype, 1), AttentionSpec(scale=0.2, latent_size=36)
    query = _random(int(metadata.query_start_loc[-1]), 5, 20 + 8, dtype=dtype, seed=2)
    heads = LatentHeads(
        _random(5, 36, 20, dtype=dtype, seed=3), _random(5, 12, 36, dtype=dtype, seed=4)
    )
    own = query[:, 0]

    together = ops.latent_attention(query, own, own, cache, metadata, spec, heads)

    for first in range(len(MIXED)):
        start, end = metadata.query_start_loc[first : first + 2].tolist()
        one = replace(
            metadata,
            query_start_loc=torch.tensor([0, end - start]).int(),
            seq_lens=metadata.seq_lens[first : first + 1],
            block_tables=metadata.block_tables[first : first + 1],
        )
        alone = ops.latent_attention(query[start:end], own, own, cache, one, spec, heads)
        assert alone.equal(together[start:end])
