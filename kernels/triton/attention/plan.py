"""Splits of a step's decodes into parts of about equal length, planned on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec

# Shapes: S sequences, K key-value heads, N query heads, H head size, I splits at most.

TILE = 32
"""A split is a multiple of this many keys, except for a sequence's last one."""

MIN_SPLIT = 128
"""Keys of the smallest split: below, starting a program costs more than its reads."""

FIXED_SPLIT = 256
"""Keys of a split if results must not depend on the batch."""

MAX_FIXED_SPLITS = 16
"""A longer sequence then has larger splits, which limits memory for partial results."""

PROGRAMS_PER_SM = 3
"""Programs on each multiprocessor over time, so that few are idle at the end."""

_WRITERS = 16


@dataclass(slots=True)
class DecodePlan:
    """The splits of one step's decodes, shared by all layers, and their workspace."""

    splits: Tensor
    """int32 [1 + I, 8]: the number of splits; then for each split its sequence, row, first
    and end key, first split and number of splits of the sequence, keys skipped behind the
    sinks.
    """

    counters: Tensor
    """int32 [S, K]: finished splits. Zero between launches."""

    partial: Tensor
    """float32 [I, N, H]: a split's partial result."""

    log_sums: Tensor
    """float32 [I, N]: base 2 logarithm of the sum of a split's weights."""

    num_programs: int
    """Programs a key-value head: one a split, or fewer that take several in turn."""


@triton.jit(do_not_specialize=["num_sequences", "target"])  # type: ignore[untyped-decorator,unused-ignore]
def _plan_kernel(  # type: ignore[no-untyped-def]
    seq_lens, rows, splits, counters, num_sequences, target,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, TILE: tl.constexpr,
    FIXED: tl.constexpr, MAX_SPLITS: tl.constexpr, MIN: tl.constexpr, HAS_ROWS: tl.constexpr,
    SPAN: tl.constexpr, WRITERS: tl.constexpr,
):  # fmt: skip
    """Each program computes all splits and writes every WRITERS-th of each sequence."""
    writer = tl.program_id(0)
    sequences = tl.arange(0, SPAN)
    is_sequence = sequences < num_sequences
    length = tl.load(seq_lens + sequences, mask=is_sequence, other=0)
    row = sequences
    if HAS_ROWS:
        row = tl.load(rows + sequences, mask=is_sequence, other=0)
    skipped = tl.zeros_like(length)
    if WINDOW > 0:
        skipped = tl.maximum(length - WINDOW - SINKS, 0)
    seen = length - skipped
    if FIXED > 0:
        size = tl.maximum((seen + MAX_SPLITS - 1) // MAX_SPLITS, FIXED)
        size = (size + TILE - 1) // TILE * TILE
    else:
        wanted = tl.maximum((tl.sum(seen) + target - 1) // target, MIN)
        number = tl.maximum((seen + wanted - 1) // wanted, 1)
        each = (seen + number - 1) // number
        size = tl.maximum((each + TILE - 1) // TILE, 1) * TILE
    # A sequence without tokens still has a split, which writes zeros.
    num_splits = tl.maximum((seen + size - 1) // size, 1)
    num_splits = tl.where(is_sequence, num_splits, 0)
    first_split = tl.cumsum(num_splits) - num_splits
    for number in range(writer, tl.max(num_splits), WRITERS):
        is_split = number < num_splits
        at = splits + (1 + first_split + number) * 8
        tl.store(at, sequences, mask=is_split)
        tl.store(at + 1, row, mask=is_split)
        tl.store(at + 2, number * size, mask=is_split)
        tl.store(at + 3, tl.minimum((number + 1) * size, seen), mask=is_split)
        tl.store(at + 4, first_split, mask=is_split)
        tl.store(at + 5, num_splits, mask=is_split)
        tl.store(at + 6, skipped, mask=is_split)
    if writer == 0:
        tl.store(splits, tl.sum(num_splits))
        for head in range(KV_HEADS):
            tl.store(counters + sequences * KV_HEADS + head, 0, mask=is_sequence)


@lru_cache(maxsize=8)
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; those of an H200 in Triton's interpreter."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_decodes(
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    heads: tuple[int, int, int],
    num_sequences: int,
    is_fixed: bool,
    *,
    min_split: int = MIN_SPLIT,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> DecodePlan:
    """Plan the splits of the first ``num_sequences`` sequences, each with one query.

    ``heads`` are the numbers of query and of key-value heads and the head size. A split has at
    least ``min_split`` keys. Without
    ``is_fixed`` the splits divide all keys of the step, so a long sequence beside short
    sequences gets more programs. Lengths are read on the device alone: safe under CUDA graph
    capture.
    """
    num_heads, num_kv_heads, head_size = heads
    device = metadata.seq_lens.device
    processors = num_processors(device)
    target = max(1, processors * programs_per_sm // num_kv_heads)
    most = num_sequences + target
    num_programs = most
    if is_fixed:
        splits = triton.cdiv(metadata.max_seq_len, FIXED_SPLIT)
        most = num_sequences * min(splits, MAX_FIXED_SPLITS)
        num_programs = min(most, 4 * target)
    plan = DecodePlan(
        splits=torch.empty((1 + most, 8), dtype=torch.int32, device=device),
        counters=torch.empty((num_sequences, num_kv_heads), dtype=torch.int32, device=device),
        partial=torch.empty((most, num_heads, head_size), device=device, dtype=torch.float32),
        log_sums=torch.empty((most, num_heads), device=device, dtype=torch.float32),
        num_programs=num_programs,
    )
    has_rows = metadata.rows is not None
    _plan_kernel[(_WRITERS,)](
        metadata.seq_lens, metadata.rows if has_rows else metadata.seq_lens, plan.splits,
        plan.counters, num_sequences, target, KV_HEADS=num_kv_heads, WINDOW=spec.window,
        SINKS=spec.num_sinks, TILE=TILE, FIXED=FIXED_SPLIT if is_fixed else 0,
        MAX_SPLITS=MAX_FIXED_SPLITS, MIN=min_split, HAS_ROWS=has_rows,
        SPAN=max(16, triton.next_power_of_2(num_sequences)), WRITERS=_WRITERS,
    )  # fmt: skip
    return plan
