"""One step's integer inputs on a GPU, computed from the rows' state on the device."""

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

from trimaran.kernels.triton.launch import Launcher, num_tiles

# Shapes: R rows, L longest sequence, M blocks of a longest sequence, T tokens, S entries
# (scheduled sequences), N sampled entries.

_TILE = 256


@triton.jit(do_not_specialize=["indices_at", "segments_at", "num_updates", "num_segments"])  # type: ignore[untyped-decorator,unused-ignore]
def _enter_kernel(  # type: ignore[no-untyped-def]
    packed, table, block_tables, indices_at, segments_at, num_updates, num_segments, row_len,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (0, t) writes a tile of block ids, program (1 + i, t) one of segment i's ids."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    what, offsets = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    if what == 0:
        is_update = offsets < num_updates
        indices = tl.load(packed + indices_at + offsets, mask=is_update, other=0)
        blocks = tl.load(packed + indices_at + num_updates + offsets, mask=is_update, other=0)
        tl.store(block_tables + indices, blocks, mask=is_update)
        return
    segment = packed + segments_at + 4 * (what - 1)
    row, first, length = (
        tl.load(segment).to(tl.int64),
        tl.load(segment + 1),
        tl.load(segment + 3),
    )
    source = packed + tl.load(segment + 2)
    ids = tl.load(source + offsets, mask=offsets < length, other=0)
    tl.store(table + row * row_len + first + offsets, ids, mask=offsets < length)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _word_of(words, num_entries, own_words, entry, is_real):  # type: ignore[no-untyped-def]
    """The word of an entry in a tree, the number of rows that it hides, and the number of its
    node or -1. ``own_words`` are the words of the tree that a network grew for the entry's
    row."""
    node = tl.load(words + 2 * num_entries + entry, mask=is_real, other=0) - 1
    low = tl.load(words + 2 * entry, mask=is_real, other=-1).to(tl.int64)
    high = tl.load(words + 2 * entry + 1, mask=is_real, other=-1).to(tl.int64)
    word = (high << 32) | (low & 0xFFFFFFFF)
    is_unknown = word == 0
    word = tl.where(is_unknown, tl.load(own_words + node, mask=is_unknown, other=-1), word)
    bits = (word >> tl.arange(0, 64).to(tl.int64)) & 1
    return word, 64 - tl.sum(bits, 0).to(tl.int32), node


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _num_computed(numbers, rejected, entry, is_real):  # type: ignore[no-untyped-def]
    """Computed tokens of an entry; ``rejected`` points to the number of its row."""
    computed = tl.load(numbers + entry, mask=is_real, other=0)
    # Inverted, the number counts drafts of which the preceding step may have rejected some.
    fewer = tl.load(rejected, mask=computed < 0, other=0)
    return tl.where(computed < 0, -1 - computed - fewer, computed)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sampled_index(indices, entry, is_real):  # type: ignore[no-untyped-def]
    """An entry's index among the sampled ones, or -1. Padding entries are sampled too, for
    steps that draw for all entries."""
    sampled = tl.load(indices + entry, mask=is_real, other=0)
    return tl.where(is_real, sampled, entry)


@triton.jit(do_not_specialize=["num_entries", "num_tokens", "num_padded", "words_at", "dump"])  # type: ignore[untyped-decorator,unused-ignore]
def _prepare_kernel(  # type: ignore[no-untyped-def]
    packed, table, block_tables, wide, narrow, num_entries, num_tokens, num_padded, row_len,
    max_blocks, spare_row, wide_stride, narrow_stride, shifts, rejected, tree_words,
    num_tree_nodes, words_at, dump,
    BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_SHIFTS: tl.constexpr, HAS_TREES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (s, t) computes the t-th tile of entry s's tokens; see `prepare`."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    entry, tile = tl.program_id(0), tl.program_id(1)
    is_real = entry < num_entries
    row = tl.load(packed + entry, mask=is_real, other=spare_row)
    computed = _num_computed(packed + num_entries, rejected + row, entry, is_real)
    sampled = _sampled_index(packed + 2 * num_entries, entry, is_real)
    starts = packed + 3 * num_entries + entry
    # Padding entries stand behind the real ones, with one token each as long as tokens remain.
    padding = num_tokens + entry - num_entries
    first = tl.load(starts, mask=is_real, other=0)
    first = tl.where(is_real, first, tl.minimum(padding, num_padded))
    end = tl.load(starts + 1, mask=is_real, other=0)
    end = tl.where(is_real, end, tl.minimum(padding + 1, num_padded))
    tokens = first + tile * TILE + tl.arange(0, TILE)
    is_token = tokens < end
    positions = computed + tokens - first
    ids = tl.load(table + row.to(tl.int64) * row_len + positions, mask=is_token, other=0)
    blocks = block_tables + row * max_blocks + positions // BLOCK
    block = tl.load(blocks, mask=is_token, other=0).to(tl.int64)
    tl.store(narrow + tokens, ids, mask=is_token)
    shifted, hidden = positions, 0
    if HAS_TREES:
        own_words = tree_words + row.to(tl.int64) * num_tree_nodes
        word, hidden, node = _word_of(packed + words_at, num_entries, own_words, entry, is_real)
        shifted -= hidden
        tl.store(wide + 4 * wide_stride + entry, word, mask=tile == 0)
    if HAS_SHIFTS:
        shifted += tl.load(shifts + row)
    tl.store(wide + tokens, shifted.to(tl.int64), mask=is_token)
    slots = block * BLOCK + positions % BLOCK
    tl.store(wide + wide_stride + tokens, slots, mask=is_token)
    if (entry == 0) & (tile == 0):
        tl.store(narrow + 6 * narrow_stride, num_tokens)
        ring_slot = tl.load(packed + 4 * num_entries + 1, mask=num_entries > 0, other=0)
        tl.store(narrow + 6 * narrow_stride + 1, ring_slot)
    if tile == 0:
        length = computed + end - first
        tl.store(narrow + narrow_stride + entry, row)
        tl.store(narrow + 2 * narrow_stride + entry, length)
        tl.store(narrow + 3 * narrow_stride + entry, first)
        tl.store(narrow + 3 * narrow_stride + entry + 1, end)
        if sampled >= 0:
            tl.store(narrow + 4 * narrow_stride + sampled, tl.where(is_real, row, -1))
            tl.store(narrow + 5 * narrow_stride + sampled, length - hidden)
            tl.store(wide + 2 * wide_stride + sampled, (end - 1).to(tl.int64))
            index = row.to(tl.int64) * row_len + length
            if HAS_TREES:
                # The ids of drafts' rows are read once accepted paths are known.
                index = tl.where(node >= 0, dump, index)
            tl.store(wide + 3 * wide_stride + sampled, tl.where(is_real, index, dump))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator,unused-ignore]
def _store_kernel(  # type: ignore[no-untyped-def]
    ids, indices, table, count, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    is_id = offsets < count
    index = tl.load(indices + offsets, mask=is_id, other=0)
    value = tl.load(ids + offsets, mask=is_id, other=0)
    tl.store(table + index, value.to(tl.int32), mask=is_id)


_enter = Launcher(_enter_kernel)
_prepare = Launcher(_prepare_kernel)
_store = Launcher(_store_kernel)


@dataclass(slots=True)
class StepTensors:
    """The outputs of `prepare`: buffers at fixed addresses, as CUDA graphs need.

    Entries, tokens and sampled entries share the leading size, the largest of a step.
    """

    wide: Tensor
    """int64 [5, size]: positions, slots, token of each sampled entry, index of its id, and the
    word of each entry of `AttentionMetadata.tree_masks`, if the engine's drafts are trees."""

    narrow: Tensor
    """int32 [7, size]: token ids, rows, sequence lengths, query starts, rows and lengths of
    the sampled entries; the first elements of the last row are the number of tokens without
    padding, and the step's ring slot.
    """

    block_size: int

    rejected: Tensor
    """int32 [R]: drafts of each row that the last step with drafts of the row has rejected."""

    has_trees: bool = False
    """Whether drafts are trees."""

    tree_words: Tensor | None = None
    """int64 [R, k]: masks of the tree that a network grew last for each row, if drafts are
    trees; k is 0 if networks grow none."""

    shifts: Tensor | None = None
    """int32 [R]: added to the positions of each row's tokens; None for nothing."""

    @classmethod
    def allocate(
        cls, size: int, num_rows: int, block_size: int, device: torch.device
    ) -> StepTensors:
        """For steps of at most ``size`` tokens, entries and padding entries, in ``num_rows``
        rows."""
        # Every row starts at a cache line: kernels then load whole lines.
        size = -(-(size + 1) // 64) * 64
        wide = torch.zeros((5, size), dtype=torch.int64, device=device)
        narrow = torch.zeros((7, size), dtype=torch.int32, device=device)
        rejected = torch.zeros(num_rows, dtype=torch.int32, device=device)
        return cls(wide, narrow, block_size, rejected)


def enter(
    packed: Tensor,
    table_RL: Tensor,
    block_tables: Tensor,
    indices_at: int,
    num_updates: int,
    segments_at: int,
    num_segments: int,
    longest: int,
) -> None:
    """Write new block ids and rows' token ids from the host.

    ``packed`` is int32. From ``indices_at`` on it has the indices in ``block_tables`` of
    ``num_updates`` blocks, then their ids. From ``segments_at`` on it has (row, index in the
    row, offset in ``packed``, length) for each segment of token ids, of at most ``longest``
    ids.
    """
    tiles = num_tiles(max(num_updates, longest, 1), _TILE)
    args = (
        packed, table_RL, block_tables, indices_at, segments_at, num_updates, num_segments,
        table_RL.stride(0),
    )  # fmt: skip
    _enter((1 + num_segments, tiles), args, (_TILE,))


def prepare(
    packed: Tensor,
    table_RL: Tensor,
    block_tables_RM: Tensor,
    target: StepTensors,
    num_entries: int,
    num_padded: int,
    num_tokens: int,
    max_query_len: int,
) -> None:
    """Fill ``target`` for one step of ``num_entries`` entries.

    ``packed`` is int32: rows [S], computed tokens [S], index among the sampled entries or -1
    [S], query starts [S + 1], the step's ring slot. A negative number -1 - n of computed tokens
    stands for n tokens without those that the row's entry of ``target.rejected`` counts.
    Entries from ``num_entries`` to ``num_padded`` are padding: one token each, at position 0 of
    the last row, which no sequence has, until there are ``num_padded`` tokens; later entries
    have none. If all entries are sampled, padding entries follow them among the sampled ones,
    with row -1 and an index in the token table that no step reads.

    If ``target.has_trees``, the words of `AttentionMetadata.tree_masks` follow in two halves,
    the lower one first [S, 2], and the number of each draft's node, from 1 on, or 0 for other
    entries [S]. A word 0 stands for the node's word in ``target.tree_words``. Computed tokens
    then are slots.
    """
    shifts, tree_words = target.shifts, target.tree_words
    args = (
        packed, table_RL, block_tables_RM, target.wide, target.narrow, num_entries, num_tokens,
        num_padded, table_RL.stride(0), block_tables_RM.stride(0), table_RL.shape[0] - 1,
        target.wide.stride(0), target.narrow.stride(0), packed if shifts is None else shifts,
        target.rejected, target.wide if tree_words is None else tree_words,
        0 if tree_words is None else tree_words.shape[1], 4 * num_entries + 2,
        table_RL.stride(0) - 1,
    )  # fmt: skip
    tile = _TILE if max_query_len > 1 else 16
    constants = target.block_size, tile, shifts is not None, target.has_trees
    _prepare((num_padded, num_tiles(max_query_len, _TILE)), args, constants)


def store_ids(ids_N: Tensor, places_N: Tensor, table_RL: Tensor) -> None:
    """Write sampled ids into the token table."""
    count = ids_N.shape[0]
    _store((num_tiles(count, _TILE), 1), (ids_N, places_N, table_RL, count), (_TILE,))
