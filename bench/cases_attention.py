"""Attention over a paged cache, in the shape of an 8B Llama's layer."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.bench.kernel_case import KernelCase, in_turn
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.decode_attention import DecodeAttention, select_decode_attention
from trimaran.kernels.prompt_attention import PromptAttention, select_prompt_attention

Attend = Callable[[Tensor, Tensor, AttentionMetadata], Tensor | None]
"""Of all heads of a product, over a layer's cache."""

_HEADS, _KV_HEADS, _HEAD_SIZE, _BLOCK = 32, 8, 128, 32
_CACHE_BYTES = 200 << 20
"""What the caches of a case together exceed: several times the largest L2."""

_SPEC = AttentionSpec(scale=_HEAD_SIZE**-0.5)
_DRAW = random.Random(1)

DECODES = {
    "1 of 256": [256],
    "64 of 256": [256] * 64,
    "256 of 150": [150] * 256,
    "256 of 128 to 384": _DRAW.choices(range(128, 385), k=256),
    "64 of 2048": [2048] * 64,
    "768 of 1500": [1500] * 768,
    "1 of 20000": [20_000],
    "1 of 20000, 255 of 128": [20_000] + [128] * 255,
}
"""Lengths of the sequences, one query each."""

ROTATED = ("1 of 256", "64 of 256", "256 of 150")
"""Of these, whose queries and keys are also rotated on the way, where that is one kernel."""

PROMPTS = {
    "4 x 2048": [(0, 2048)] * 4,
    "8 x 1000": [(0, 1000)] * 8,
    "64 x 128": [(0, 128)] * 64,
    "1 x 8192": [(0, 8192)],
    "2048 behind 6144": [(6144, 2048)],
}
"""Cached tokens and queries of each sequence."""


def cases(device: torch.device, dtype: torch.dtype) -> list[KernelCase]:
    """Decodes and prompts of many lengths."""
    decodes = [_decode(device, dtype, name) for name in DECODES]
    attend = select_decode_attention(device, dtype)
    if attend.backend == "cuda":
        decodes += [_rotated(device, dtype, name, attend) for name in ROTATED]
    return decodes + [_prompts(device, dtype, name) for name in PROMPTS]


def _decode(device: torch.device, dtype: torch.dtype, name: str) -> KernelCase:
    lengths = [(length - 1, 1) for length in DECODES[name]]
    attend = select_decode_attention(device, dtype)
    return KernelCase(
        name=f"attention of decodes ({attend.backend})",
        shape=name,
        dtype=str(dtype).removeprefix("torch."),
        run=_run(device, dtype, lengths, _of_queries(attend)),
        num_bytes=_num_bytes(lengths, dtype),
        flops=_flops(lengths),
    )


def _rotated(
    device: torch.device, dtype: torch.dtype, name: str, attend: DecodeAttention
) -> KernelCase:
    lengths = [(length - 1, 1) for length in DECODES[name]]
    table = torch.randn(max(DECODES[name]), _HEAD_SIZE, device=device)

    def run(heads: Tensor, layer: Tensor, metadata: AttentionMetadata) -> Tensor | None:
        return attend.rotated(heads, table, layer, metadata, _SPEC)

    return KernelCase(
        name=f"rotation and attention of decodes ({attend.backend})",
        shape=name,
        dtype=str(dtype).removeprefix("torch."),
        run=_run(device, dtype, lengths, run),
        num_bytes=_num_bytes(lengths, dtype) + 4 * table.shape[1] * len(lengths),
        flops=_flops(lengths),
    )


def _prompts(device: torch.device, dtype: torch.dtype, name: str) -> KernelCase:
    lengths = PROMPTS[name]
    attend = select_prompt_attention(device, dtype)
    return KernelCase(
        name=f"attention of prompts ({attend.backend})",
        shape=name,
        dtype=str(dtype).removeprefix("torch."),
        run=_run(device, dtype, lengths, _of_queries(attend)),
        num_bytes=_num_bytes(lengths, dtype),
        flops=_flops(lengths),
        peer=None if lengths[0][0] else _dense_peer(device, dtype, lengths),
    )


def _num_bytes(lengths: list[tuple[int, int]], dtype: torch.dtype) -> int:
    tokens = sum(past + queries for past, queries in lengths)
    rows = sum(queries for _, queries in lengths)
    return (2 * tokens * _KV_HEADS + 2 * rows * _HEADS) * _HEAD_SIZE * dtype.itemsize


def _flops(lengths: list[tuple[int, int]]) -> int:
    pairs = sum(past * queries + queries * (queries + 1) // 2 for past, queries in lengths)
    return 4 * pairs * _HEADS * _HEAD_SIZE


def _run(
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    attend: Attend,
) -> Callable[[], object]:
    """One layer's launch, by the plan of the step's first; the blocks lie in any order."""
    most = max(-(-(past + queries) // _BLOCK) for past, queries in lengths)
    num_blocks = sum(-(-(past + queries) // _BLOCK) for past, queries in lengths)
    layer_bytes = num_blocks * 2 * _BLOCK * _KV_HEADS * _HEAD_SIZE * dtype.itemsize
    num_layers = min(max(2, _CACHE_BYTES // layer_bytes), 64)
    shape = (num_blocks, num_layers, 2, _KV_HEADS, _BLOCK, _HEAD_SIZE)
    pool = torch.randn(shape, device=device, dtype=dtype).transpose(3, 4)
    blocks = torch.randperm(num_blocks).int()
    tables, first = torch.zeros(len(lengths), most, dtype=torch.int32), 0
    for row, (past, queries) in zip(tables, lengths, strict=True):
        count = -(-(past + queries) // _BLOCK)
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
    all_heads = _HEADS + 2 * _KV_HEADS
    heads = torch.randn(sum(chunks), all_heads, _HEAD_SIZE, device=device, dtype=dtype)
    layers = [pool[:, layer] for layer in range(num_layers)]
    return in_turn(lambda layer: attend(heads, layer, metadata), layers)


def _of_queries(attend: PromptAttention | DecodeAttention) -> Attend:
    """Of the queries among a product's heads, whose keys are in the cache."""

    def run(heads: Tensor, layer: Tensor, metadata: AttentionMetadata) -> Tensor:
        query = heads[:, :_HEADS]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        attend(query, layer, metadata, _SPEC, output)
        return output

    return run


def _dense_peer(
    device: torch.device, dtype: torch.dtype, lengths: list[tuple[int, int]]
) -> Callable[[], object]:
    """Torch's attention of prompts of one length, whose keys and values are dense."""
    count, size = len(lengths), lengths[0][1]

    def random_heads(heads: int) -> Tensor:
        return torch.randn(count, heads, size, _HEAD_SIZE, device=device, dtype=dtype)

    sets = [
        (random_heads(_HEADS), random_heads(_KV_HEADS), random_heads(_KV_HEADS))
        for _ in range(4)
    ]

    def run(inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    return in_turn(run, sets)
