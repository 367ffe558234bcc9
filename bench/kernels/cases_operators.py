"""The operators of a layer of any shape, as the engine calls them, and torch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trimaran.bench.kernels.kernel_case import KernelCase, in_turn
from trimaran.bench.kernels.kernel_timing import rotated
from trimaran.bench.limits.roofline import ModelShape
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.dispatch import select_ops
from trimaran.kernels.operators import Ops
from trimaran.kernels.routing import ExpertRouting
from trimaran.kernels.torch_ops import TorchOps

# Shapes: T rows (tokens), D hidden size, E outputs.

_BLOCK = 32

MakeInputs = Callable[[], tuple[Tensor, ...]]
RunOperator = Callable[..., object]
"""A function of the operators to use and then its inputs."""


@functools.cache
def _operators(device: torch.device, dtype: torch.dtype) -> Ops:
    return select_ops(device, dtype)


def _case(
    names: tuple[str, str],
    work: tuple[float, float],
    make: MakeInputs,
    run: RunOperator,
    *,
    has_peer: bool = True,
) -> KernelCase:
    """``names`` are the operator's and the size's, ``work`` its bytes and operations."""
    sets = rotated(make, work[0])
    example = sets[0][0]
    ops, torch_ops = _operators(example.device, example.dtype), TorchOps()
    return KernelCase(
        name=names[0],
        shape=names[1],
        dtype=str(example.dtype).removeprefix("torch."),
        run=in_turn(lambda inputs: run(ops, *inputs), sets),
        num_bytes=int(work[0]),
        flops=int(work[1]),
        peer=in_turn(lambda inputs: run(torch_ops, *inputs), sets) if has_peer else None,
    )


def cases(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: list[int], context: int
) -> Iterator[KernelCase]:
    """All operators of a layer for each number of rows, created lazily."""
    for count in rows:
        yield from _products(shape, device, dtype, count)
        yield from _element_wise(shape, device, dtype, count)
        if count <= 1024:
            yield _decode(shape, device, dtype, count, context)
        else:
            yield _prompts(shape, device, dtype, count, min(context, count))


def _products(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: int
) -> Iterator[KernelCase]:
    hidden, queries = shape.hidden, shape.query_width
    sizes = {
        "qkv": (hidden, queries + 2 * shape.kv_width),
        "out": (queries, hidden),
        "gate_up": (hidden, 2 * shape.inner),
        "down": (shape.inner, hidden),
    }
    if shape.experts > 1:
        sizes = {name: sizes[name] for name in ("qkv", "out")}
        yield _experts(shape, device, dtype, rows)
    for name, (inner, outputs) in sizes.items():
        is_gated = name == "gate_up"
        written = outputs // 2 if is_gated else outputs
        moved = inner * outputs + rows * (inner + written)

        def make(inner: int = inner, outputs: int = outputs) -> tuple[Tensor, ...]:
            x = torch.randn((rows, inner), device=device, dtype=dtype)
            return x, torch.randn((outputs, inner), device=device, dtype=dtype).mul_(0.02)

        def run(ops: Ops, x: Tensor, weight: Tensor, is_gated: bool = is_gated) -> object:
            return ops.gated_linear(x, weight) if is_gated else ops.linear(x, weight)

        size = f"{rows} x {inner} x {outputs}"
        flops = 2.0 * rows * inner * outputs
        yield _case((name, size), (moved * dtype.itemsize, flops), make, run)


def _experts(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: int
) -> KernelCase:
    """Choice and sums of experts that are drawn for each token."""
    experts, chosen, hidden, inner = shape.experts, shape.chosen, shape.hidden, shape.inner
    routing = ExpertRouting(num_chosen=chosen)

    def make() -> tuple[Tensor, ...]:
        x = torch.randn((rows, hidden), device=device, dtype=dtype)
        logits = torch.randn((rows, experts), device=device)
        gate_up = torch.randn((experts, 2 * inner, hidden), device=device, dtype=dtype)
        down = torch.randn((experts, hidden, inner), device=device, dtype=dtype)
        return x, logits, gate_up.mul_(0.02), down.mul_(0.02)

    def run(ops: Ops, x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> object:
        return ops.expert_mlp(x, *ops.choose_experts(logits, routing), gate_up, down)

    read = experts * (1 - (1 - chosen / experts) ** rows)
    moved = 3 * read * hidden * inner + 2 * rows * hidden
    flops = 6.0 * rows * chosen * hidden * inner
    size = f"{rows} x {hidden} x {inner}, {chosen} of {experts}"
    # Torch's own version syncs with the device, which a CUDA graph cannot capture.
    has_peer = device.type == "cpu"
    work = (moved * dtype.itemsize, flops)
    return _case(("expert_mlp", size), work, make, run, has_peer=has_peer)


def _element_wise(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: int
) -> Iterator[KernelCase]:
    hidden, inner = shape.hidden, shape.inner

    def make_norm() -> tuple[Tensor, ...]:
        x, residual = torch.randn((2, rows, hidden), device=device, dtype=dtype)
        return x, residual, torch.ones(hidden, device=device, dtype=dtype)

    def norm(ops: Ops, x: Tensor, residual: Tensor, weight: Tensor) -> object:
        return ops.add_rms_norm(x, residual, weight, 1e-5)

    size = f"{rows} x {hidden}"
    moved = 4 * rows * hidden * dtype.itemsize
    yield _case(("add_rms_norm", size), (moved, 0), make_norm, norm)

    def make_gate() -> tuple[Tensor, ...]:
        return (torch.randn((rows, 2 * inner), device=device, dtype=dtype),)

    size = f"{rows} x {2 * inner}"
    moved = 3 * rows * inner * dtype.itemsize

    def gate(ops: Ops, x: Tensor) -> object:
        return ops.silu_and_mul(x)

    yield _case(("silu_and_mul", size), (moved, 0), make_gate, gate)


def _metadata(
    device: torch.device, num_seqs: int, num_queries: int, context: int
) -> AttentionMetadata:
    blocks_each = -(-context // _BLOCK)
    order = torch.randperm(num_seqs * blocks_each, device=device)
    counts = torch.arange(num_seqs + 1, device=device, dtype=torch.int32)
    return AttentionMetadata(
        query_start_loc=counts * num_queries,
        seq_lens=torch.full((num_seqs,), context, device=device, dtype=torch.int32),
        block_tables=order.view(num_seqs, blocks_each).int(),
        slot_mapping=torch.zeros(num_seqs * num_queries, device=device, dtype=torch.int64),
        max_query_len=num_queries,
        max_seq_len=context,
        num_decodes=num_seqs if num_queries == 1 else 0,
    )


def _attention(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    metadata: AttentionMetadata,
    work: tuple[str, str, float],
) -> KernelCase:
    """``work`` has the case's name, its size and its pairs of queries and keys."""
    name, size, pairs = work
    tokens = len(metadata.slot_mapping)
    keys = float(metadata.seq_lens.sum())
    blocks = metadata.block_tables.numel()
    spec = AttentionSpec(scale=shape.head_size**-0.5)

    def make() -> tuple[Tensor, ...]:
        heads = (tokens, shape.heads, shape.head_size)
        query = torch.randn(heads, device=device, dtype=dtype)
        size = (blocks, 2, _BLOCK, shape.kv_heads, shape.head_size)
        cache = torch.randn(size, device=device, dtype=dtype)
        if device.type == "cuda":
            # The keys of a head are contiguous in a block, as in the engine.
            cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
        return query, cache

    def run(ops: Ops, query: Tensor, cache: Tensor) -> object:
        metadata.plans.clear()
        return ops.paged_attention(query, cache, metadata, spec)

    moved = 2 * shape.kv_width * keys + 2 * tokens * shape.query_width
    flops = 4 * shape.query_width * pairs
    # Torch's own version syncs with the device, which a CUDA graph cannot capture.
    has_peer = device.type == "cpu"
    work_done = (moved * dtype.itemsize, flops)
    return _case((name, size), work_done, make, run, has_peer=has_peer)


def _decode(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: int, context: int
) -> KernelCase:
    metadata = _metadata(device, rows, 1, context)
    work = ("decode", f"{rows} at {context}", float(rows) * context)
    return _attention(shape, device, dtype, metadata, work)


def _prompts(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, tokens: int, length: int
) -> KernelCase:
    count = tokens // length
    metadata = _metadata(device, count, length, length)
    work = ("prompts", f"{count} of {length}", count * length * (length + 1) / 2)
    return _attention(shape, device, dtype, metadata, work)
