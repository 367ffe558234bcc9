"""Groups of decodes that read the keys of one sequence together, found on the device."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_wait,
)

from trimaran.kernels.attention import AttentionMetadata
from trimaran.kernels.triton.launch import Launcher, padded_size

# Shapes: S decodes, R rows of the block table.

NUM_FIELDS = 6
"""Fields of a group: keys that its last query sees, row of the block table, decode of the first
query, number of queries, decode of the second query (later queries follow it), and keys of the
sequence before this step."""

_SPAN_OF_ONE_WARP = 256


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _smaller(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def fixed_size(length, UNIT: tl.constexpr, FIXED_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of each split of a sequence whose splits depend on its length alone."""
    size = tl.maximum((length + MAX_SPLITS - 1) // MAX_SPLITS, FIXED_KEYS)
    return (size + UNIT - 1) // UNIT * UNIT


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _follows(  # type: ignore[no-untyped-def]
    row, length, next_row, next_length, UNIT: tl.constexpr, FIXED_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, IS_FIXED: tl.constexpr,
):  # fmt: skip
    """Whether a query is of the same sequence as another, sees one key more, and has its keys
    cut at the same places."""
    follows = (row == next_row) & (length + 1 == next_length)
    if IS_FIXED:
        size = fixed_size(length, UNIT, FIXED_KEYS, MAX_SPLITS)
        follows &= size == fixed_size(next_length, UNIT, FIXED_KEYS, MAX_SPLITS)
    return follows


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _runs_of_row(scratch, num_rows, row, own, length, begins, is_own, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the last run of each decode's row, and the row's keys before this step."""
    firsts, lasts, shortest = scratch, scratch + num_rows, scratch + 2 * num_rows
    every = tl.arange(0, ROWS)
    tl.store(firsts + every, 0x7FFFFFFF, mask=every < num_rows)
    tl.store(lasts + every, -1, mask=every < num_rows)
    tl.store(shortest + every, 0x7FFFFFFF, mask=every < num_rows)
    tl.debug_barrier()
    tl.atomic_min(firsts + row, own, mask=begins)
    tl.atomic_max(lasts + row, own, mask=begins)
    tl.atomic_min(shortest + row, length, mask=begins)
    tl.debug_barrier()
    head = tl.load(firsts + row, mask=is_own, other=0, cache_modifier=".cg")
    tail = tl.load(lasts + row, mask=is_own, other=0, cache_modifier=".cg")
    known = tl.load(shortest + row, mask=is_own, other=1, cache_modifier=".cg") - 1
    return head, tail, known


@triton.jit(do_not_specialize=["num_decodes", "num_rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _groups_kernel(  # type: ignore[no-untyped-def]
    seq_lens, rows, scratch, groups, num_decodes, num_rows, MOST: tl.constexpr,
    UNIT: tl.constexpr, FIXED_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    IS_FIXED: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program. A run is a series of adjacent decodes, each of which follows the one before.
    A row's first run of one decode and its last run are joined if the latter follows the
    former.
    """
    if OVERLAPS:
        gdc_wait()
    own = tl.arange(0, SPAN)
    is_own = own < num_decodes
    row = tl.load(rows + own, mask=is_own, other=-1)
    length = tl.load(seq_lens + own, mask=is_own, other=-2)
    has_next = own + 1 < num_decodes
    next_row = tl.load(rows + own + 1, mask=has_next, other=-2)
    next_length = tl.load(seq_lens + own + 1, mask=has_next, other=-2)
    former = (own > 0) & is_own
    former_row = tl.load(rows + own - 1, mask=former, other=-2)
    former_length = tl.load(seq_lens + own - 1, mask=former, other=-2)
    continues = _follows(
        former_row, former_length, row, length, UNIT, FIXED_KEYS, MAX_SPLITS, IS_FIXED
    )
    goes_on = _follows(
        row, length, next_row, next_length, UNIT, FIXED_KEYS, MAX_SPLITS, IS_FIXED
    )
    begin = tl.associative_scan(tl.where(continues, 0, own), 0, _larger)
    last = tl.associative_scan(tl.where(goes_on, SPAN, own), 0, _smaller, reverse=True)
    begins = is_own & (begin == own)

    head, tail, known = _runs_of_row(scratch, num_rows, row, own, length, begins, is_own, ROWS)
    ends_of = scratch + 3 * num_rows
    tl.store(ends_of + own, last, mask=is_own)
    tl.debug_barrier()
    end_of_head = tl.load(ends_of + head, mask=is_own, other=0, cache_modifier=".cg")
    end_of_tail = tl.load(ends_of + tail, mask=is_own, other=0, cache_modifier=".cg")
    is_joined = (head < tail) & (end_of_head == head) & _follows(
        row, tl.load(seq_lens + head, mask=is_own, other=0), row,
        tl.load(seq_lens + tail, mask=is_own, other=0), UNIT, FIXED_KEYS, MAX_SPLITS, IS_FIXED,
    )  # fmt: skip
    is_head = is_joined & (own == head)
    place = own - begin + (is_joined & (begin == tail)).to(tl.int32)
    left = tl.where(is_head, end_of_tail - tail + 2, last - own + 1)

    leads = is_own & (place % MOST == 0)
    queries = tl.minimum(left, MOST)
    at = groups + tl.cumsum(leads.to(tl.int32)) - 1
    tl.store(at, length + queries - 1, mask=leads)
    tl.store(at + num_decodes, row, mask=leads)
    tl.store(at + 2 * num_decodes, own, mask=leads)
    tl.store(at + 3 * num_decodes, queries, mask=leads)
    tl.store(at + 4 * num_decodes, tl.where(is_head, tail, own + 1), mask=leads)
    tl.store(at + 5 * num_decodes, known, mask=leads)
    tl.store(groups + 6 * num_decodes, tl.sum(leads.to(tl.int32)))


_groups = Launcher(_groups_kernel)


def group_queries(
    metadata: AttentionMetadata,
    num_decodes: int,
    most: int,
    unit: int,
    fixed_keys: int,
    max_splits: int,
    *,
    is_fixed: bool,
) -> Tensor:
    """Groups of at most ``most`` of the first ``num_decodes`` decodes. Those of a group are of
    one row of the block table, and each sees one key more than the one before.

    The decodes of a sequence may lie in two places of the step: the one that computes its last
    token, and behind all such decodes those of its draft tokens, in order. With ``is_fixed``
    the keys of a group are cut at the same places (`fixed_size`) as without other decodes.
    Returns int32 [`NUM_FIELDS` * S + 1]: each field of all groups, then the number of groups.
    The launch depends on the number of decodes alone: safe under CUDA graph capture.
    """
    assert metadata.rows is not None
    device, num_rows = metadata.seq_lens.device, metadata.block_tables.shape[0]
    groups = torch.empty(NUM_FIELDS * num_decodes + 1, dtype=torch.int32, device=device)
    scratch = torch.empty(3 * num_rows + num_decodes, dtype=torch.int32, device=device)
    span = max(16, padded_size(num_decodes))
    args = metadata.seq_lens, metadata.rows, scratch, groups, num_decodes, num_rows
    constants = (
        most, unit, fixed_keys, max_splits, is_fixed, span, max(16, padded_size(num_rows)),
    )  # fmt: skip
    _groups((1, 1), args, constants, 1 if span <= _SPAN_OF_ONE_WARP else 4)
    return groups
