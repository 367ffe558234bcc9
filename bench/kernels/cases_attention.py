"""Attention over a paged cache, in the shape of an 8B Llama's layer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.bench.kernels import flashinfer_attention
from trimaran.bench.kernels.kernel_case import KernelCase, in_turn
from trimaran.bench.kernels.paged_inputs import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    Lengths,
    PagedInputs,
    paged_inputs,
)
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.decode_attention import DecodeAttention, select_decode_attention
from trimaran.kernels.kv_quantization import KV_DTYPES, head_scales
from trimaran.kernels.prompt_attention import PromptAttention, select_prompt_attention

Attend = Callable[[Tensor, Tensor, AttentionMetadata], Tensor | None]
"""Shapes of the heads in a product's output, and of a layer's cache."""

_SPEC = AttentionSpec(scale=HEAD_SIZE**-0.5)
_DRAW = random.Random(1)

DECODES = {
    "1 of 256": [256],
    "64 of 256": [256] * 64,
    "256 of 150": [150] * 256,
    "256 of 128 to 384": _DRAW.choices(range(128, 385), k=256),
    "64 of 2048": [2048] * 64,
    "64 of 4096": [4096] * 64,
    "256 of 1024": [1024] * 256,
    "768 of 1500": [1500] * 768,
    "1 of 20000": [20_000],
    "1 of 20000, 255 of 128": [20_000] + [128] * 255,
}
"""Cached lengths of the sequences of decode cases, one query each."""

QUANTIZED = {
    f"{count} of {length}": [length] * count
    for count, length in (
        (64, 256), (64, 400), (64, 2000), (64, 4096), (64, 8000), (256, 400), (256, 1024),
        (256, 2000), (256, 8000),
    )
}  # fmt: skip
"""Cached lengths of decodes over KV caches of one byte a number."""

ROTATED = ("1 of 256", "64 of 256", "256 of 150")
"""Lengths for which rotation is timed too, if one kernel rotates and attends."""

PROMPTS = {
    "4 x 2048": [(0, 2048)] * 4,
    "8 x 1000": [(0, 1000)] * 8,
    "64 x 128": [(0, 128)] * 64,
    "1 x 8192": [(0, 8192)],
    "2048 behind 6144": [(6144, 2048)],
}
"""Cached tokens and queries of each sequence."""


def cases(device: torch.device, dtype: torch.dtype) -> list[KernelCase]:
    """Decodes and prompts of several lengths."""
    decodes = [_decode(device, dtype, name) for name in DECODES]
    attend = select_decode_attention(device, dtype)
    if attend.backend == "cuda":
        decodes += [_rotated(device, dtype, name, attend) for name in ROTATED]
    has_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    for kind in KV_DTYPES if has_fp8 else ("int8",):
        decodes += [_quantized(device, dtype, name, kind) for name in QUANTIZED]
    return decodes + [_prompts(device, dtype, name) for name in PROMPTS]


def _decode(device: torch.device, dtype: torch.dtype, name: str) -> KernelCase:
    lengths = [(length - 1, 1) for length in DECODES[name]]
    attend = select_decode_attention(device, dtype)
    inputs = paged_inputs(device, dtype, lengths)
    return KernelCase(
        name=f"attention of decodes ({attend.backend})",
        shape=name,
        dtype=str(dtype).removeprefix("torch."),
        run=_run(inputs, _of_queries(attend)),
        num_bytes=_num_bytes(lengths, dtype),
        flops=_flops(lengths),
        libraries=flashinfer_attention.of_decodes(inputs, _SPEC),
    )


def _quantized(device: torch.device, dtype: torch.dtype, name: str, kind: str) -> KernelCase:
    """Decodes over a KV cache of one byte a number."""
    lengths = [(length - 1, 1) for length in QUANTIZED[name]]
    attend = select_decode_attention(device, dtype)
    inputs = paged_inputs(device, dtype, lengths, KV_DTYPES[kind])
    ones = torch.ones(KV_HEADS, device=device)
    spec = replace(_SPEC, kv_scales=head_scales(ones, ones))
    cached = sum(QUANTIZED[name]) * 2 * KV_HEADS * HEAD_SIZE
    return KernelCase(
        name=f"attention of decodes over {kind} ({attend.backend})",
        shape=name,
        dtype=str(dtype).removeprefix("torch."),
        run=_run(inputs, _of_queries(attend, spec)),
        num_bytes=cached + 2 * len(lengths) * HEADS * HEAD_SIZE * dtype.itemsize,
        flops=_flops(lengths),
    )


def _rotated(
    device: torch.device, dtype: torch.dtype, name: str, attend: DecodeAttention
) -> KernelCase:
    lengths = [(length - 1, 1) for length in DECODES[name]]
    table = torch.randn(max(DECODES[name]), HEAD_SIZE, device=device)

    def run(heads: Tensor, layer: Tensor, metadata: AttentionMetadata) -> Tensor | None:
        return attend.rotated(heads, table, layer, metadata, _SPEC)

    return KernelCase(
        name=f"rotation and attention of decodes ({attend.backend})",
        shape=name,
        dtype=str(dtype).removeprefix("torch."),
        run=_run(paged_inputs(device, dtype, lengths), run),
        num_bytes=_num_bytes(lengths, dtype) + 4 * table.shape[1] * len(lengths),
        flops=_flops(lengths),
    )


def _prompts(device: torch.device, dtype: torch.dtype, name: str) -> KernelCase:
    lengths = PROMPTS[name]
    attend = select_prompt_attention(device, dtype)
    inputs = paged_inputs(device, dtype, lengths)
    return KernelCase(
        name=f"attention of prompts ({attend.backend})",
        shape=name,
        dtype=str(dtype).removeprefix("torch."),
        run=_run(inputs, _of_queries(attend)),
        num_bytes=_num_bytes(lengths, dtype),
        flops=_flops(lengths),
        libraries=flashinfer_attention.of_prompts(inputs, _SPEC),
        peer=None if lengths[0][0] else _dense_peer(device, dtype, lengths),
    )


def _num_bytes(lengths: Lengths, dtype: torch.dtype) -> int:
    tokens = sum(past + queries for past, queries in lengths)
    rows = sum(queries for _, queries in lengths)
    return (2 * tokens * KV_HEADS + 2 * rows * HEADS) * HEAD_SIZE * dtype.itemsize


def _flops(lengths: Lengths) -> int:
    pairs = sum(past * queries + queries * (queries + 1) // 2 for past, queries in lengths)
    return 4 * pairs * HEADS * HEAD_SIZE


def _run(inputs: PagedInputs, attend: Attend) -> Callable[[], object]:
    """One layer's launch, with the plan of the step's first layer."""
    return in_turn(lambda layer: attend(inputs.heads, layer, inputs.metadata), inputs.layers)


def _of_queries(
    attend: PromptAttention | DecodeAttention, spec: AttentionSpec = _SPEC
) -> Attend:
    """Attention of queries in a product's output, whose keys are cached."""

    def run(heads: Tensor, layer: Tensor, metadata: AttentionMetadata) -> Tensor:
        query = heads[:, :HEADS]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        attend(query, layer, metadata, spec, output)
        return output

    return run


def _dense_peer(
    device: torch.device, dtype: torch.dtype, lengths: Lengths
) -> Callable[[], object]:
    """Torch's attention of prompts of one length, with dense keys and values."""
    count, size = len(lengths), lengths[0][1]

    def random_heads(heads: int) -> Tensor:
        return torch.randn(count, heads, size, HEAD_SIZE, device=device, dtype=dtype)

    sets = [
        (random_heads(HEADS), random_heads(KV_HEADS), random_heads(KV_HEADS)) for _ in range(4)
    ]

    def run(inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    return in_turn(run, sets)
