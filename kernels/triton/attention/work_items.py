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
from trimaran.kernels.triton.attention.query_groups import fixed_size, group_queries
from trimaran.kernels.triton.launch import Launcher, padded_size

# Shapes: S sequences, K key-value heads, N query heads, H head size, I splits at most, R work
# items at most, P partial results at most.

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
    """int32 [I, 8]: sequence of the first query, row, first and end key, first split, number of
    splits, keys that the first query sees; one unused.
    """

    shares: Tensor | None
    """int32 [I, 4] if queries of one sequence share splits: number of queries, sequence of the
    second query (later ones follow it), first partial result of the first split, and keys of
    the sequence before this step.
    """

    counters: Tensor
    """int32 [S, K]: finished splits. Zero between launches."""

    partial: Tensor
    """float32 [P, N, H]: a split's partial result; with ``shares`` one for each query."""

    log_sums: Tensor
    """float32 [P, N]: base 2 logarithm of the sum of a split's weights."""

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
def _groups_of(groups, num_decodes, OVERLAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of groups and their rows. The preceding kernel makes the groups."""
    if OVERLAPS:
        gdc_wait()
    return tl.load(groups + 6 * num_decodes), groups + num_decodes


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _queries(groups, numbers, mask, num_decodes):  # type: ignore[no-untyped-def]
    """The first query and the number of queries of each group."""
    fields = groups + numbers + 2 * num_decodes
    count = tl.load(fields + num_decodes, mask=mask, other=0)
    return tl.load(fields, mask=mask, other=0), count


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _put_shares(at, mask, queries, fields, first_partial, num_decodes):  # type: ignore[no-untyped-def]
    """Writes shares in the layout of `WorkPlan.shares`, from the last two fields of groups."""
    tl.store(at, queries, mask=mask)
    tl.store(at + 1, tl.load(fields + 4 * num_decodes, mask=mask, other=0), mask=mask)
    tl.store(at + 2, first_partial, mask=mask)
    tl.store(at + 3, tl.load(fields + 5 * num_decodes, mask=mask, other=0), mask=mask)


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
def _cut(  # type: ignore[no-untyped-def]
    length, is_sequence, num_sequences, num_items, sequences, UNIT: tl.constexpr,
    MIN_KEYS: tl.constexpr, COST: tl.constexpr, CUT_COST: tl.constexpr,
    CUT_COST_OF_MANY: tl.constexpr, FIXED_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    IS_FIXED: tl.constexpr,
):  # fmt: skip
    """Each sequence's place on the ruler, the size of items, whether items are whole sequences
    because cuts would save no time, and each sequence's first and last item."""
    last_place = tl.maximum((length + UNIT - 1) // UNIT - 1, 0) * UNIT
    cost = tl.where(is_sequence, length + COST, 0)
    is_whole = tl.sum(cost) < 0
    if IS_FIXED:
        size = fixed_size(length, UNIT, FIXED_KEYS, MAX_SPLITS)
        place, last_item = tl.zeros_like(length), last_place // size
        first_item = place
    else:
        place = tl.cumsum(cost) - cost
        size = tl.maximum((tl.sum(cost) + num_items - 1) // num_items, MIN_KEYS)
        turns = (num_sequences + num_items - 1) // num_items
        cut_cost = tl.where(turns > 1, CUT_COST_OF_MANY, CUT_COST)
        is_whole = _longest(cost, is_sequence, num_sequences, turns) <= size + cut_cost
        first_item = tl.where(is_whole, sequences, place // size)
        last_item = tl.where(is_whole, sequences, (place + last_place) // size)
    return place, size, is_whole, first_item, last_item


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _keys_of(item, size, place, length, is_whole, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key and the end of each sequence's part in an item."""
    begin = tl.maximum((item * size - place + UNIT - 1) // UNIT * UNIT, 0)
    end = tl.minimum(((item + 1) * size - place + UNIT - 1) // UNIT * UNIT, length)
    return tl.where(is_whole, 0, begin), tl.where(is_whole, length, end)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _last_unit_before(  # type: ignore[no-untyped-def]
    seq_lens, sequences, is_sequence, place, COST: tl.constexpr, UNIT: tl.constexpr
):
    """The position of the last unit of the preceding sequence, for each sequence."""
    has_former = is_sequence & (sequences > 0)
    former = tl.load(seq_lens + sequences - 1, mask=has_former, other=0)
    return place - COST - former + tl.maximum((former + UNIT - 1) // UNIT - 1, 0) * UNIT


@triton.jit(do_not_specialize=["num_decodes", "num_items"])  # type: ignore[untyped-decorator,unused-ignore]
def _items_kernel(  # type: ignore[no-untyped-def]
    seq_lens, rows, items, splits, shares, counters, readers, num_decodes, num_items,
    KV_HEADS: tl.constexpr, UNIT: tl.constexpr, MIN_KEYS: tl.constexpr, COST: tl.constexpr,
    CUT_COST: tl.constexpr, CUT_COST_OF_MANY: tl.constexpr, FIXED_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, IS_FIXED: tl.constexpr, HAS_ROWS: tl.constexpr,
    SHARES: tl.constexpr, READERS: tl.constexpr, SPAN: tl.constexpr, WRITERS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each program computes all splits and writes every WRITERS-th of each sequence.

    With SHARES sequences are groups of `query_groups`, with their fields in ``seq_lens``. They
    lie on one ruler, each as long as its keys plus COST. The ruler is divided into
    equal items; a unit of keys belongs to the item in which it begins.
    """
    writer = tl.program_id(0)
    sequences = tl.arange(0, SPAN)
    is_decode = sequences < num_decodes
    if OVERLAPS:
        # Lengths are complete, but the preceding kernel may still read the output buffers.
        gdc_launch_dependents()
    num_sequences = num_decodes
    if SHARES:
        num_sequences, rows = _groups_of(seq_lens, num_decodes, OVERLAPS)
    is_sequence = sequences < num_sequences
    length = tl.load(seq_lens + sequences, mask=is_sequence, other=0)
    row = tl.load(rows + sequences, mask=is_sequence, other=0) if HAS_ROWS else sequences
    place, size, is_whole, first_item, last_item = _cut(
        length, is_sequence, num_sequences, num_items, sequences, UNIT, MIN_KEYS, COST,
        CUT_COST, CUT_COST_OF_MANY, FIXED_KEYS, MAX_SPLITS, IS_FIXED,
    )  # fmt: skip
    num_splits = tl.where(is_sequence, last_item - first_item + 1, 0)
    first_split = tl.cumsum(num_splits) - num_splits
    before = _last_unit_before(seq_lens, sequences, is_sequence, place, COST, UNIT)
    first_query, seen = sequences, length
    if SHARES:
        first_query, queries = _queries(seq_lens, sequences, is_sequence, num_decodes)
        seen = length - queries + 1
        first_partial = tl.cumsum(num_splits * queries) - num_splits * queries
    if OVERLAPS:
        gdc_wait()
    for number in range(writer, tl.max(num_splits), WRITERS):
        is_split = number < num_splits
        item = first_item + number
        begin, end = _keys_of(item, size, place, length, is_whole, UNIT)
        at = splits + (first_split + number) * 8
        _put(at, is_split, first_query, row, begin, end, first_split, num_splits, seen)
        if SHARES:
            at, fields = shares + (first_split + number) * 4, seq_lens + sequences
            _put_shares(at, is_split, queries, fields, first_partial, num_decodes)
        if IS_FIXED:
            tl.store(items + 2 + first_split + number, first_split + number, mask=is_split)
        else:
            begins = is_whole | (number > 0) | (sequences == 0) | (before < item * size)
            tl.store(items + 2 + item, first_split + number, mask=is_split & begins)
    _clear(counters, readers, writer, sequences, is_decode, KV_HEADS, READERS, WRITERS)
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
    max_queries: int = 1,
) -> WorkPlan:
    """Distribute the first ``num_sequences`` sequences, each with one query, over programs.

    ``heads`` are the numbers of query and of key-value heads and the head size;
    ``num_programs`` run at once on the device; ``unit`` keys stay together. With ``is_fixed``,
    a sequence's splits depend on its length alone. With ``max_queries`` over 1, up to so many
    queries of one row of the block table share splits (`group_queries`). The launch depends on
    the number of sequences alone, and lengths are read on the device: safe under CUDA graph
    capture. Lengths and rows are read while the preceding kernel still runs. A preceding
    kernel, such as the embedding, must therefore let this kernel begin only once lengths and
    rows are complete.
    """
    num_items = max(1, num_programs // heads[1])
    shares = max_queries > 1 and metadata.rows is not None
    # Each item but one cuts one sequence more.
    most = num_sequences + num_items
    max_partial = num_sequences + num_items * max_queries
    num_programs = num_items
    if is_fixed:
        most = max_partial = num_items = num_sequences * MAX_FIXED_SPLITS
        num_programs = min(num_programs, most)
    plan = _allocate(
        metadata.seq_lens.device, heads, num_sequences, num_items, most, max_partial, shares
    )  # fmt: skip
    plan.num_programs = num_programs
    lengths, rows = metadata.seq_lens, metadata.rows
    if shares:
        lengths = group_queries(
            metadata, num_sequences, max_queries, unit, FIXED_KEYS, MAX_FIXED_SPLITS,
            is_fixed=is_fixed,
        )  # fmt: skip
        # The kernel finds the groups' rows there: a view would have another alignment.
        rows = lengths
    args = (
        lengths, lengths if rows is None else rows, plan.items, plan.splits,
        plan.splits if plan.shares is None else plan.shares, plan.counters, plan.readers,
        num_sequences, num_items,
    )  # fmt: skip
    span = max(16, padded_size(num_sequences))
    constants = (
        heads[1], unit, MIN_KEYS, SPLIT_COST, CUT_COST, CUT_COST_OF_MANY, FIXED_KEYS,
        MAX_FIXED_SPLITS, is_fixed, rows is not None, shares, 2 * MAX_LAYERS, span, _WRITERS,
    )  # fmt: skip
    _items((_WRITERS, 1), args, constants, 1 if span <= _SPAN_OF_ONE_WARP else 4)
    return plan


def _allocate(
    device: torch.device,
    heads: tuple[int, int, int],
    num_sequences: int,
    num_items: int,
    most: int,
    max_partial: int,
    shares: bool,
) -> WorkPlan:
    """A plan of at most so many items, splits and partial results, without contents."""
    num_heads, num_kv_heads, head_size = heads

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return WorkPlan(
        items=ints(max(num_items, num_sequences) + 3),
        splits=ints(most, 8),
        shares=ints(most, 4) if shares else None,
        counters=ints(num_sequences, num_kv_heads),
        partial=floats(max_partial, num_heads, head_size),
        log_sums=floats(max_partial, num_heads),
        readers=ints(MAX_LAYERS, 2),
        num_programs=0,
    )
