"""Logits processors, bit masks and log-probabilities on a GPU."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels import sampling_state
from trimaran.kernels.triton.gumbel import load_float

# Shapes: N sampled rows, V vocabulary, R rows, L longest sequence, W bad words, H ids before
# the last one of the longest of these.

_WIDTH = tl.constexpr(sampling_state.WIDTH)
_NUM_PROMPT = tl.constexpr(sampling_state.NUM_PROMPT)
_REPETITION = tl.constexpr(sampling_state.REPETITION)
_PRESENCE = tl.constexpr(sampling_state.PRESENCE)
_FREQUENCY = tl.constexpr(sampling_state.FREQUENCY)
_MIN_TOKENS = tl.constexpr(sampling_state.MIN_TOKENS)
_END_ID = tl.constexpr(sampling_state.END_ID)
_END_IDS = tl.constexpr(sampling_state.END_IDS)
_NUM_END_IDS = tl.constexpr(sampling_state.NUM_END_IDS)
_NGRAM = tl.constexpr(sampling_state.NGRAM)

_IN_PROMPT = tl.constexpr(1 << 30)
_TILE = 1024
_LOGITS_TILE = 4096


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _penalties_of(own):  # type: ignore[no-untyped-def]
    """Repetition, presence and frequency penalty of a row's state, and whether it has any."""
    repetition = load_float(own + _REPETITION)
    presence = load_float(own + _PRESENCE)
    frequency = load_float(own + _FREQUENCY)
    has_any = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    return repetition, presence, frequency, has_any


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _count_kernel(  # type: ignore[no-untyped-def]
    rows, id_rows, lengths, state, table, counts, table_stride, vocab_size, TILE: tl.constexpr
):
    """Count each id of the output; for ids of the prompt only mark their presence."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    own = state + row * _WIDTH
    _, _, _, has_any = _penalties_of(own)
    positions = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_known = positions < tl.where(has_any, tl.load(lengths + entry), 0)
    id_row = tl.load(id_rows + entry).to(tl.int64)
    ids = tl.load(table + id_row * table_stride + positions, mask=is_known, other=-1)
    is_known = is_known & (ids >= 0) & (ids < vocab_size)
    is_output = positions >= tl.load(own + _NUM_PROMPT)
    count = counts + entry * vocab_size + ids
    tl.atomic_add(count, 1, mask=is_known & is_output, sem="relaxed")
    is_prompt = positions < tl.load(own + _NUM_PROMPT)
    tl.atomic_or(count, _IN_PROMPT, mask=is_known & is_prompt, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _penalise_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    id_rows,
    lengths,
    state,
    table,
    counts,
    table_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    """Apply the penalties to every counted id, once, and reset its count to 0."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    repetition, presence, frequency, has_any = _penalties_of(state + row * _WIDTH)
    positions = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_known = positions < tl.where(has_any, tl.load(lengths + entry), 0)
    id_row = tl.load(id_rows + entry).to(tl.int64)
    ids = tl.load(table + id_row * table_stride + positions, mask=is_known, other=-1)
    is_known = is_known & (ids >= 0) & (ids < vocab_size)
    # The first position with an id to read the id's count applies the penalty.
    index = entry * vocab_size + ids
    count = tl.atomic_xchg(counts + index, 0, mask=is_known, sem="relaxed")
    is_mine = is_known & (count != 0)
    x = tl.load(logits + index, mask=is_mine, other=0.0)
    x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    num_outputs = count & (_IN_PROMPT - 1)
    x -= frequency * num_outputs.to(tl.float32)
    x -= tl.where(num_outputs > 0, presence, 0.0)
    tl.store(logits + index, x, mask=is_mine)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _forbid_kernel(  # type: ignore[no-untyped-def]
    logits, rows, id_rows, lengths, state, table, table_stride, vocab_size, TILE: tl.constexpr
):
    """Mask ids that would repeat an n-gram, and the end ids while there are too few tokens."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    id_row = tl.load(id_rows + entry).to(tl.int64)
    own, tokens = state + row * _WIDTH, table + id_row * table_stride
    target = logits + entry * vocab_size
    length = tl.load(lengths + entry)
    end_id = tl.load(own + _END_ID)
    is_early = length - tl.load(own + _NUM_PROMPT) < tl.load(own + _MIN_TOKENS)
    is_end = (end_id >= 0) & (end_id < vocab_size) & (tl.program_id(1) == 0)
    tl.store(target + end_id, float("-inf"), mask=is_early & is_end)
    ends = tl.load(own + _END_IDS + tl.arange(0, _NUM_END_IDS))
    is_end = (ends >= 0) & (ends < vocab_size) & (tl.program_id(1) == 0)
    never = tl.full([_NUM_END_IDS], float("-inf"), tl.float32)
    tl.store(target + ends, never, mask=is_early & is_end)
    size = tl.load(own + _NGRAM)
    if size > 0:
        positions = tl.program_id(1) * TILE + tl.arange(0, TILE)
        is_repeat = positions <= length - size
        # Most positions differ at once: the other ids of a long n-gram would be read in vain.
        step = size - 2
        while (step >= 0) & (tl.max(is_repeat.to(tl.int32), 0) > 0):
            wanted = tl.load(tokens + length - size + 1 + step)
            found = tl.load(tokens + positions + step, mask=is_repeat, other=-2)
            is_repeat = is_repeat & (found == wanted)
            step -= 1
        ids = tl.load(tokens + positions + size - 1, mask=is_repeat, other=-1)
        is_repeat = is_repeat & (ids >= 0) & (ids < vocab_size)
        tl.store(target + ids, tl.full([TILE], float("-inf"), tl.float32), mask=is_repeat)


@triton.jit(do_not_specialize=["entry", "num_words"])  # type: ignore[untyped-decorator,unused-ignore]
def _bad_words_kernel(  # type: ignore[no-untyped-def]
    logits, id_rows, lengths, table, last, starts, before, entry, num_words, table_stride,
    vocab_size, TILE: tl.constexpr,
):  # fmt: skip
    """Mask the last id of one row's bad words whose other ids end the sequence."""
    row = tl.load(id_rows + entry).to(tl.int64)
    length = tl.load(lengths + entry)
    numbers = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_word = numbers < num_words
    ids = tl.load(last + numbers, mask=is_word, other=-1)
    start = tl.load(starts + numbers, mask=is_word, other=0)
    num_before = tl.load(starts + numbers + 1, mask=is_word, other=0) - start
    is_bad = is_word & (ids >= 0) & (ids < vocab_size) & (num_before <= length)
    # From the end backwards: most words differ at once, and long ones would be read in vain.
    step = 0
    while tl.max((is_bad & (step < num_before)).to(tl.int32), 0) > 0:
        is_open = is_bad & (step < num_before)
        wanted = tl.load(before + start + step, mask=is_open, other=-1)
        found = tl.load(
            table + row * table_stride + length - 1 - step, mask=step < length, other=-2
        )
        is_bad = is_bad & (~is_open | (wanted == found))
        step += 1
    never = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(logits + entry.to(tl.int64) * vocab_size + ids, never, mask=is_bad)


def penalise(
    logits_NV: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    state: Tensor,
    table_RL: Tensor,
    counts: Tensor,
    longest: int,
    id_rows_N: Tensor | None = None,
) -> None:
    """Repetition, presence and frequency penalties on float32 ``logits``, in place.

    ``table`` holds the ids of ``id_rows``, or of ``rows`` if that is None; ``longest`` is the
    largest of ``lengths``. ``counts`` is int32 for N * V numbers, all 0 before and after. The
    twin is
    `logits_processors.apply_penalties`; all logits of this file are contiguous.
    """
    count, vocab_size = logits_NV.shape
    grid = (count, triton.cdiv(longest, _TILE))
    sizes = (table_RL.stride(0), vocab_size)
    ids = rows_N, rows_N if id_rows_N is None else id_rows_N, lengths_N
    _count_kernel[grid](*ids, state, table_RL, counts, *sizes, TILE=_TILE)
    _penalise_kernel[grid](logits_NV, *ids, state, table_RL, counts, *sizes, TILE=_TILE)


def forbid(
    logits_NV: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    state: Tensor,
    table_RL: Tensor,
    longest: int,
    id_rows_N: Tensor | None = None,
) -> None:
    """Mask repeated n-grams and early ends in float32 ``logits``, in place.

    The twins are `logits_processors.forbid_repeated_ngrams` and `forbid_early_end`.
    """
    count, vocab_size = logits_NV.shape
    _forbid_kernel[(count, triton.cdiv(longest, _TILE))](
        logits_NV, rows_N, rows_N if id_rows_N is None else id_rows_N, lengths_N, state,
        table_RL, table_RL.stride(0), vocab_size, TILE=_TILE,
    )  # fmt: skip


def forbid_bad_words(
    logits_NV: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    table_RL: Tensor,
    last_W: Tensor,
    starts: Tensor,
    before_B: Tensor,
    entry: int,
) -> None:
    """Mask ids that would complete a bad word in one row of float32 ``logits``, in place.

    ``last`` is each word's last id. ``before`` holds the ids before it from the end backwards,
    one word's behind the other's, as ``starts`` [W + 1] says; all int32. The twin is
    `logits_processors.forbid_bad_words`.
    """
    num_words = len(last_W)
    _bad_words_kernel[(triton.cdiv(num_words, 64),)](
        logits_NV, rows_N, lengths_N, table_RL, last_W, starts, before_B, entry, num_words,
        table_RL.stride(0), logits_NV.shape[1], TILE=64,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_kernel(  # type: ignore[no-untyped-def]
    logits, largest, sums, row_stride, vocab_size, num_tiles, TILE: tl.constexpr
):
    """One tile's largest logit and its sum of exponentials relative to that."""
    entry, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    source = logits + entry * row_stride + ids
    x = tl.load(source, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(x, 0), -3e38)
    tl.store(largest + entry * num_tiles + tile, top)
    tl.store(sums + entry * num_tiles + tile, tl.sum(tl.exp(x - top), 0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _log_prob_kernel(  # type: ignore[no-untyped-def]
    logits, ids, largest, sums, output, row_stride, num_tiles, PADDED: tl.constexpr
):
    """The chosen id's logit minus the logarithm of the row's sum."""
    entry, tiles = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    at, is_tile = entry * num_tiles + tiles, tiles < num_tiles
    tops = tl.load(largest + at, mask=is_tile, other=-3e38)
    top = tl.max(tops, 0)
    total = tl.sum(tl.load(sums + at, mask=is_tile, other=0.0) * tl.exp(tops - top), 0)
    chosen = tl.load(logits + entry * row_stride + tl.load(ids + entry)).to(tl.float32)
    tl.store(output + entry, chosen - top - tl.log(total))


def log_probs(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    """Each row's id's log-probability; float32 [N]. Logits of any float dtype and stride."""
    count, vocab_size = logits_NV.shape
    num_tiles = triton.cdiv(vocab_size, _LOGITS_TILE)
    largest = torch.empty((count, num_tiles), dtype=torch.float32, device=logits_NV.device)
    sums = torch.empty_like(largest)
    output = torch.empty(count, dtype=torch.float32, device=logits_NV.device)
    _sum_kernel[(count, num_tiles)](
        logits_NV, largest, sums, logits_NV.stride(0), vocab_size, num_tiles, TILE=_LOGITS_TILE
    )
    _log_prob_kernel[(count,)](
        logits_NV, ids_N, largest, sums, output, logits_NV.stride(0), num_tiles,
        PADDED=triton.next_power_of_2(num_tiles), num_warps=1,
    )  # fmt: skip
    return output


# Shapes: N sampled rows, V vocabulary, M masked rows, W words of 32 bits, ceil(V / 32).

_WORDS = 128


# Both may start at any offset of the transfer; separate kernels for aligned ones are not
# worthwhile.
@triton.jit(do_not_specialize=["entries", "masks"])  # type: ignore[untyped-decorator,unused-ignore]
def _mask_kernel(  # type: ignore[no-untyped-def]
    logits, entries, masks, vocab_size, num_words, row_stride, WORDS: tl.constexpr
):
    """Program (m, t) covers the ids of the t-th ``WORDS`` words of the m-th masked row."""
    masked = tl.program_id(0)
    row = tl.load(entries + masked).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(masks + masked.to(tl.int64) * num_words + word, mask=word < num_words)
    bit = tl.arange(0, 32)[None, :]
    token = word[:, None] * 32 + bit
    is_forbidden = ((bits[:, None] >> bit) & 1) == 0
    target = logits + row * row_stride + token
    never = tl.full([WORDS, 32], float("-inf"), tl.float32)
    tl.store(target, never, mask=is_forbidden & (token < vocab_size))


def apply_masks(logits_NV: Tensor, entries_M: Tensor, masks_MW: Tensor) -> None:
    """Mask forbidden ids in float32 ``logits``, in place.

    Row ``entries[m]`` (int64) keeps id i if bit i % 32 of ``masks[m, i // 32]`` (int32) is set.
    The twin is `logits_processors.apply_masks`.
    """
    num_words = masks_MW.shape[1]
    _mask_kernel[(len(entries_M), triton.cdiv(num_words, _WORDS))](
        logits_NV, entries_M, masks_MW, logits_NV.shape[1], num_words, logits_NV.stride(0),
        WORDS=_WORDS,
    )  # fmt: skip
