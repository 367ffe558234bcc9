"""Distribution of the keys of a step's decodes evenly over programs, planned on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.attention import AttentionMetadata
from trimaran.kernels.triton.launch import Launcher, padded_size

# Shapes: S sequences, K key-value heads, N query heads, H head size, I splits at most, R work
# items at most.

MIN_KEYS = 256
"""Keys of the smallest work item: below, combining splits takes longer than reading them."""

FIXED_KEYS = 512
"""Keys of a split if results must not depend on the batch."""

MAX_FIXED_SPLITS = 8
"""A longer sequence then has larger splits."""

SPLIT_COST = 32
"""Cost of ending a sequence, in keys read in the same time."""

CUT_COST = 400
"""Cost of combining the splits of sequences, in keys read in the same time, if a program has
at most one sequence.
"""

CUT_COST_OF_MANY = 1800
"""The same cost if programs take several sequences in turn: the last programs have memory
bandwidth to themselves, and read several times as fast.
"""

MAX_LAYERS = 512
"""Launches of one plan whose programs choose their reads by L2 partition."""

_WRITERS = 16

_SPAN_OF_ONE_WARP = 256
"""Up to this many sequences, one warp sums faster than several, which wait for each other."""


@dataclass(slots=True)
class WorkPlan:
    """The splits of one step's decodes, shared by all layers, and their workspace.

    A work item is one whole sequence, unless that leaves programs idle for longer than
    combining splits takes. Then all sequences, in units of keys, are divided in order and
    evenly (a stream-K decomposition): an item holds the end of one sequence, some whole
    sequences and the beginning of another. The part of a sequence in an item is a split.
    """

    items: Tensor
    """int32 [R + 3]: the numbers of items and of splits, each item's first split, and the
    number of splits again.
    """

    splits: Tensor
    """int32 [I, 8]: sequence, row, first and end key, first split, number of splits and
    length of the sequence; one unused.
    """

    counters: Tensor
    """int32 [S, K]: finished splits. Zero between launches."""

    partial: Tensor
    """float32 [I, N, H]: a split's partial result."""

    log_sums: Tensor
    """float32 [I, N]: base 2 logarithm of the sum of a split's weights."""

    readers: Tensor
    """int32 [`MAX_LAYERS`, 2]: for each launch, the programs that read each L2 partition.
    Zero before the launch.
    """

    num_programs: int
    """Programs a key-value head: one an item, or fewer that take several in turn."""

    num_launches: int = 0
    """Launches that have used ``readers``."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _put(at, mask, sequence, row, begin, end, first_split, num_splits, length):  # type: ignore[no-untyped-def]
    """Writes splits in the layout of `WorkPlan.splits`."""
    tl.store(at, sequence, mask=mask)
    tl.store(at + 1, row, mask=mask)
    tl.store(at + 2, begin, mask=mask)
    tl.store(at + 3, end, mask=mask)
    tl.store(at + 4, first_split, mask=mask)
    tl.store(at + 5, num_splits, mask=mask)
    tl.store(at + 6, length, mask=mask)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _put_totals(items, all_splits, last_items, IS_FIXED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the numbers before and behind each item's first split."""
    last = all_splits - 1 if IS_FIXED else tl.max(last_items)
    tl.store(items, last + 1)
    tl.store(items + 1, all_splits)
    tl.store(items + 3 + last, all_splits)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _clear(  # type: ignore[no-untyped-def]
    counters, readers, writer, sequences, is_sequence,
    KV_HEADS: tl.constexpr, READERS: tl.constexpr, WRITERS: tl.constexpr,
):  # fmt: skip
    """Zeroes the counters of a plan's launches."""
    own = writer * (READERS // WRITERS) + tl.arange(0, READERS // WRITERS)
    tl.store(readers + own, 0)
    if writer == 0:
        for head in range(KV_HEADS):
            tl.store(counters + sequences * KV_HEADS + head, 0, mask=is_sequence)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _longest(cost, is_sequence, num_sequences, turns):  # type: ignore[no-untyped-def]
    """An estimate of the largest load of a program with whole sequences, this many in turn.

    The largest of some dozens of sums of independent lengths is two deviations above the mean.
    """
    mean = tl.sum(cost).to(tl.float32) / num_sequences
    distance = tl.where(is_sequence, cost.to(tl.float32) - mean, 0.0)
    deviation = tl.sqrt(tl.sum(distance * distance) / num_sequences * turns)
    of_many = tl.maximum((turns * mean + 2.0 * deviation).to(tl.int32), tl.max(cost))
    return tl.where(turns > 1, of_many, tl.max(cost))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _last_unit_before(  # type: ignore[no-untyped-def]
    seq_lens, sequences, is_sequence, place, COST: tl.constexpr, UNIT: tl.constexpr
):
    """The position of the last unit of the preceding sequence, for each sequence."""
    has_former = is_sequence & (sequences > 0)
    former = tl.load(seq_lens + sequences - 1, mask=has_former, other=0)
    return place - COST - former + tl.maximum((former + UNIT - 1) // UNIT - 1, 0) * UNIT


@triton.jit(do_not_specialize=["num_sequences", "num_items"])  # type: ignore[untyped-decorator,unused-ignore]
def _items_kernel(  # type: ignore[no-untyped-def]
    seq_lens, rows, items, splits, counters, readers, num_sequences, num_items,
    KV_HEADS: tl.constexpr, UNIT: tl.constexpr, MIN_KEYS: tl.constexpr, COST: tl.constexpr,
    CUT_COST: tl.constexpr, CUT_COST_OF_MANY: tl.constexpr, FIXED_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, IS_FIXED: tl.constexpr, HAS_ROWS: tl.constexpr,
    READERS: tl.constexpr, SPAN: tl.constexpr, WRITERS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program computes all splits and writes every WRITERS-th of each sequence.

    Sequences lie on one ruler, each as long as its keys plus COST. The ruler is divided into
    equal items; a unit of keys belongs to the item in which it begins.
    """
    writer = tl.program_id(0)
    sequences = tl.arange(0, SPAN)
    is_sequence = sequences < num_sequences
    if OVERLAPS:
        # Lengths are complete, but the preceding kernel may still read the output buffers.
        gdc_launch_dependents()
    length = tl.load(seq_lens + sequences, mask=is_sequence, other=0)
    row = tl.load(rows + sequences, mask=is_sequence, other=0) if HAS_ROWS else sequences
    last_unit = tl.maximum((length + UNIT - 1) // UNIT - 1, 0)
    cost = tl.where(is_sequence, length + COST, 0)
    place = tl.cumsum(cost) - cost
    is_whole = tl.sum(cost) < 0
    if IS_FIXED:
        size = tl.maximum((length + MAX_SPLITS - 1) // MAX_SPLITS, FIXED_KEYS)
        size = (size + UNIT - 1) // UNIT * UNIT
        first_item, last_item = tl.zeros_like(length), last_unit * UNIT // size
        place = first_item
    else:
        size = tl.maximum((tl.sum(cost) + num_items - 1) // num_items, MIN_KEYS)
        turns = (num_sequences + num_items - 1) // num_items
        cut_cost = tl.where(turns > 1, CUT_COST_OF_MANY, CUT_COST)
        is_whole = _longest(cost, is_sequence, num_sequences, turns) <= size + cut_cost
        first_item = tl.where(is_whole, sequences, place // size)
        last_item = tl.where(is_whole, sequences, (place + last_unit * UNIT) // size)
    num_splits = tl.where(is_sequence, last_item - first_item + 1, 0)
    first_split = tl.cumsum(num_splits) - num_splits
    before = _last_unit_before(seq_lens, sequences, is_sequence, place, COST, UNIT)
    if OVERLAPS:
        gdc_wait()
    for number in range(writer, tl.max(num_splits), WRITERS):
        is_split = number < num_splits
        item = first_item + number
        begin = tl.maximum((item * size - place + UNIT - 1) // UNIT * UNIT, 0)
        end = tl.minimum(((item + 1) * size - place + UNIT - 1) // UNIT * UNIT, length)
        begin, end = tl.where(is_whole, 0, begin), tl.where(is_whole, length, end)
        _put(
            splits + (first_split + number) * 8, is_split, sequences, row, begin, end,
            first_split, num_splits, length,
        )  # fmt: skip
        if IS_FIXED:
            tl.store(items + 2 + first_split + number, first_split + number, mask=is_split)
        else:
            begins = is_whole | (number > 0) | (sequences == 0) | (before < item * size)
            tl.store(items + 2 + item, first_split + number, mask=is_split & begins)
    _clear(counters, readers, writer, sequences, is_sequence, KV_HEADS, READERS, WRITERS)
    if writer == 0:
        _put_totals(items, tl.sum(num_splits), tl.where(is_sequence, last_item, 0), IS_FIXED)


_items = Launcher(_items_kernel)


def plan_work(
    metadata: AttentionMetadata,
    heads: tuple[int, int, int],
    num_sequences: int,
    num_programs: int,
    unit: int,
    *,
    is_fixed: bool,
) -> WorkPlan:
    """Distribute the first ``num_sequences`` sequences, each with one query, over programs.

    ``heads`` are the numbers of query and of key-value heads and the head size;
    ``num_programs`` run at once on the device; ``unit`` keys stay together. With ``is_fixed``,
    a sequence's splits depend on its length alone. The launch depends on the number of
    sequences alone, and lengths are read on the device: safe under CUDA graph capture. Lengths
    and rows are read while the preceding kernel still runs. A preceding kernel, such as the
    embedding, must therefore let this kernel begin only once lengths and rows are complete.
    """
    num_heads, num_kv_heads, head_size = heads
    device = metadata.seq_lens.device
    num_items = max(1, num_programs // num_kv_heads)
    num_programs, most = num_items, num_sequences + num_items
    if is_fixed:
        most = num_items = num_sequences * MAX_FIXED_SPLITS
        num_programs = min(num_programs, most)
    plan = WorkPlan(
        items=torch.empty(max(num_items, num_sequences) + 3, dtype=torch.int32, device=device),
        splits=torch.empty((most, 8), dtype=torch.int32, device=device),
        counters=torch.empty((num_sequences, num_kv_heads), dtype=torch.int32, device=device),
        partial=torch.empty((most, num_heads, head_size), device=device, dtype=torch.float32),
        log_sums=torch.empty((most, num_heads), device=device, dtype=torch.float32),
        readers=torch.empty((MAX_LAYERS, 2), dtype=torch.int32, device=device),
        num_programs=num_programs,
    )
    has_rows = metadata.rows is not None
    args = (
        metadata.seq_lens, metadata.rows if has_rows else metadata.seq_lens, plan.items,
        plan.splits, plan.counters, plan.readers, num_sequences, num_items,
    )  # fmt: skip
    span = max(16, padded_size(num_sequences))
    constants = (
        num_kv_heads, unit, MIN_KEYS, SPLIT_COST, CUT_COST, CUT_COST_OF_MANY, FIXED_KEYS,
        MAX_FIXED_SPLITS, is_fixed, has_rows, 2 * MAX_LAYERS, span, _WRITERS,
    )  # fmt: skip
    _items((_WRITERS, 1), args, constants, 1 if span <= _SPAN_OF_ONE_WARP else 4)
    return plan
