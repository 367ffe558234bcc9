"""Inputs of timed attention over a paged cache: one step's heads, and alternating layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata

# Shapes: T tokens of the step, A heads of the product, N query heads, K key-value heads,
# B tokens of a block, H head size, M blocks of the cache.

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 32
"""Sizes of an 8B Llama's layer."""

_CACHE_BYTES = 200 << 20
"""Least total size of a case's caches: several times the largest L2."""

Lengths = list[tuple[int, int]]
"""Cached tokens and queries of each sequence."""


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """One step over a cache of several layers, whose blocks are in random order."""

    heads: Tensor
    """[T, A, H], output of a product: queries, keys and values."""

    layers: list[Tensor]
    """[M, 2, B, K, H] each; a head's tokens are contiguous in memory."""

    metadata: AttentionMetadata

    @property
    def query(self) -> Tensor:
        """[T, N, H], a view of the heads."""
        return self.heads[:, :HEADS]


def paged_inputs(
    device: torch.device,
    dtype: torch.dtype,
    lengths: Lengths,
    cache_dtype: torch.dtype | None = None,
) -> PagedInputs:
    """Random values for sequences of these lengths; the cache has ``dtype`` unless another is
    given."""
    cache_dtype = cache_dtype or dtype
    most = max(-(-(past + queries) // BLOCK) for past, queries in lengths)
    num_blocks = sum(-(-(past + queries) // BLOCK) for past, queries in lengths)
    layer_bytes = num_blocks * 2 * BLOCK * KV_HEADS * HEAD_SIZE * cache_dtype.itemsize
    num_layers = min(max(2, _CACHE_BYTES // layer_bytes), 64)
    shape = (num_blocks, num_layers, 2, KV_HEADS, BLOCK, HEAD_SIZE)
    pool = torch.randn(shape, device=device, dtype=dtype).to(cache_dtype).transpose(3, 4)
    blocks = torch.randperm(num_blocks).int()
    tables, first = torch.zeros(len(lengths), most, dtype=torch.int32), 0
    for row, (past, queries) in zip(tables, lengths, strict=True):
        count = -(-(past + queries) // BLOCK)
        row[:count] = blocks[first : first + count]
        first += count
    chunks = [queries for _, queries in lengths]
    lens = torch.tensor([past + queries for past, queries in lengths]).int()
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *chunks]).cumsum(0).int().to(device),
        seq_lens=lens.to(device),
        block_tables=tables.to(device),
        slot_mapping=lens,
        max_query_len=max(chunks),
        max_seq_len=int(lens.max()),
        num_decodes=len(chunks) if max(chunks) == 1 else 0,
    )
    all_heads = HEADS + 2 * KV_HEADS
    heads = torch.randn(sum(chunks), all_heads, HEAD_SIZE, device=device, dtype=dtype)
    return PagedInputs(heads, [pool[:, layer] for layer in range(num_layers)], metadata)
