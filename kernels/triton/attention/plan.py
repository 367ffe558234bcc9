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

MIN_PIECE = 128
"""Keys of the smallest split: below, starting a program costs more than its reads."""

FIXED_PIECE = 256
"""Keys of a split if results must not depend on the batch."""

MAX_FIXED_PIECES = 16
"""A longer sequence then has larger splits, which limits memory for partial results."""

PROGRAMS_PER_SM = 3
"""Programs on each multiprocessor over time, so that few are idle at the end."""

_WRITERS = 16


@dataclass(slots=True)
class DecodePlan:
    """The splits of one step's decodes, shared by all layers, and their workspace."""

    pieces: Tensor
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
    seq_lens, rows, pieces, counters, num_sequences, target,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, TILE: tl.constexpr,
    FIXED: tl.constexpr, MAX_PIECES: tl.constexpr, MIN: tl.constexpr, HAS_ROWS: tl.constexpr,
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
        size = tl.maximum((seen + MAX_PIECES - 1) // MAX_PIECES, FIXED)
        size = (size + TILE - 1) // TILE * TILE
    else:
        wanted = tl.maximum((tl.sum(seen) + target - 1) // target, MIN)
        number = tl.maximum((seen + wanted - 1) // wanted, 1)
        each = (seen + number - 1) // number
        size = tl.maximum((each + TILE - 1) // TILE, 1) * TILE
    # A sequence without tokens still has a split, which writes zeros.
    num_pieces = tl.maximum((seen + size - 1) // size, 1)
    num_pieces = tl.where(is_sequence, num_pieces, 0)
    first_piece = tl.cumsum(num_pieces) - num_pieces
    for number in range(writer, tl.max(num_pieces), WRITERS):
        is_piece = number < num_pieces
        at = pieces + (1 + first_piece + number) * 8
        tl.store(at, sequences, mask=is_piece)
        tl.store(at + 1, row, mask=is_piece)
        tl.store(at + 2, number * size, mask=is_piece)
        tl.store(at + 3, tl.minimum((number + 1) * size, seen), mask=is_piece)
        tl.store(at + 4, first_piece, mask=is_piece)
        tl.store(at + 5, num_pieces, mask=is_piece)
        tl.store(at + 6, skipped, mask=is_piece)
    if writer == 0:
        tl.store(pieces, tl.sum(num_pieces))
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
) -> DecodePlan:
    """Plan the splits of the first ``num_sequences`` sequences, each with one query.

    ``heads`` are the numbers of query and of key-value heads and the head size. Without
    ``is_fixed`` the splits divide all keys of the step, so a long sequence beside short ones
    gets more programs. Lengths are read on the device alone: safe under CUDA graph capture.
    """
    num_heads, num_kv_heads, head_size = heads
    device = metadata.seq_lens.device
    processors = num_processors(device)
    target = max(1, processors * PROGRAMS_PER_SM // num_kv_heads)
    most = num_sequences + target
    num_programs = most
    if is_fixed:
        pieces = triton.cdiv(metadata.max_seq_len, FIXED_PIECE)
        most = num_sequences * min(pieces, MAX_FIXED_PIECES)
        num_programs = min(most, 4 * target)
    plan = DecodePlan(
        pieces=torch.empty((1 + most, 8), dtype=torch.int32, device=device),
        counters=torch.empty((num_sequences, num_kv_heads), dtype=torch.int32, device=device),
        partial=torch.empty((most, num_heads, head_size), device=device, dtype=torch.float32),
        log_sums=torch.empty((most, num_heads), device=device, dtype=torch.float32),
        num_programs=num_programs,
    )
    has_rows = metadata.rows is not None
    _plan_kernel[(_WRITERS,)](
        metadata.seq_lens, metadata.rows if has_rows else metadata.seq_lens, plan.pieces,
        plan.counters, num_sequences, target, KV_HEADS=num_kv_heads, WINDOW=spec.window,
        SINKS=spec.num_sinks, TILE=TILE, FIXED=FIXED_PIECE if is_fixed else 0,
        MAX_PIECES=MAX_FIXED_PIECES, MIN=MIN_PIECE, HAS_ROWS=has_rows,
        SPAN=max(16, triton.next_power_of_2(num_sequences)), WRITERS=_WRITERS,
    )  # fmt: skip
    return plan
