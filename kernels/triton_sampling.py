"""From logits to ids on a GPU: the likeliest or a draw, from all ids or from a row's best."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels import sampling_state, triton_filters, triton_race

# Shapes: N sampled rows, V vocabulary, R rows, P parts of the vocabulary.

_WIDTH = tl.constexpr(sampling_state.WIDTH)
_TOP_K = tl.constexpr(sampling_state.TOP_K)
_TEMPERATURE = tl.constexpr(sampling_state.TEMPERATURE)

_TILE = 2048
"""Ids that one program looks at in one go."""

_RESIDENT = 132 * 5
"""Programs that the largest GPU runs at once, for their registers; few rows are cut into about
as many parts."""

_MOST_TILES = 8
"""Tiles of a part where there are more programs than that, so that all end together."""


@triton.jit(do_not_specialize=["num_parts", "tiles_each", "has_filters"])  # type: ignore[untyped-decorator,unused-ignore]
def _race_kernel(  # type: ignore[no-untyped-def]
    logits, rows, lengths, state, scores, winners, row_stride, vocab_size, num_tiles, num_parts,
    tiles_each, has_filters, TILE: tl.constexpr,
):  # fmt: skip
    """The best id of one part of one row, and its score."""
    entry, part = tl.program_id(0), tl.program_id(1)
    own = state + tl.load(rows + entry).to(tl.int64) * _WIDTH
    temperature = triton_race.load_float(own + _TEMPERATURE)
    first = part * tiles_each
    last = tl.minimum(first + tiles_each, num_tiles)
    source = logits + entry.to(tl.int64) * row_stride
    # With top-k it is drawn from a short list instead.
    top_k = tl.load(own + _TOP_K)
    if (has_filters > 0) & (top_k > 0) & (top_k < vocab_size):
        score, winner = float("-inf"), 0
    elif temperature > 0.0:
        length = tl.load(lengths + entry)
        first_key, second_key = triton_race.noise_keys(own, length)
        score, winner = triton_race.race(
            source, vocab_size, first, last, temperature, first_key, second_key, 0.0, 0, False,
            TILE,
        )  # fmt: skip
    else:
        score, winner = triton_race.likeliest(source, vocab_size, first, last, TILE)
    tl.store(scores + entry * num_parts + part, score)
    tl.store(winners + entry * num_parts + part, winner)


@triton.jit(do_not_specialize=["num_parts"])  # type: ignore[untyped-decorator,unused-ignore]
def _finish_kernel(  # type: ignore[no-untyped-def]
    scores, winners, output, num_parts, vocab_size, PADDED: tl.constexpr
):
    """The best of a row's parts; of equal scores the first part's."""
    entry, parts = tl.program_id(0), tl.arange(0, PADDED)
    is_part = parts < num_parts
    score = tl.load(scores + entry * num_parts + parts, mask=is_part, other=float("-inf"))
    winner = tl.load(winners + entry * num_parts + parts, mask=is_part, other=0x7FFFFFFF)
    best = tl.min(tl.where(score == tl.max(score, 0), winner, 0x7FFFFFFF), 0)
    # Logits that are no numbers must not lead out of the vocabulary.
    tl.store(output + entry, tl.minimum(best, vocab_size - 1).to(tl.int64))


def draw(
    logits_NV: Tensor,
    rows_N: Tensor,
    lengths_N: Tensor,
    state: Tensor,
    *,
    has_filters: bool = False,
) -> Tensor:
    """Each row's likeliest id, or a draw from its softmax; int64 [N].

    ``state`` is int32 [R, WIDTH], see `sampling_state`; ``rows`` and ``lengths`` are int32,
    the lengths being tokens before the sampled one. Logits of any float dtype and row
    stride; of equal ones the lowest id wins. Rows' top-k, top-p and min-p count only with
    ``has_filters``. The twins are `candidates.argmax` and `draw.draw`. Nothing waits for the
    device, so that a CUDA graph can hold it.
    """
    count, vocab_size = logits_NV.shape
    device = logits_NV.device
    num_tiles = triton.cdiv(vocab_size, _TILE)
    tiles_each = min(triton.cdiv(num_tiles * count, _RESIDENT), _MOST_TILES)
    num_parts = triton.cdiv(num_tiles, tiles_each)
    scores = torch.empty((count, num_parts), dtype=torch.float32, device=device)
    winners = torch.empty((count, num_parts), dtype=torch.int32, device=device)
    output = torch.empty(count, dtype=torch.int64, device=device)
    _race_kernel[(count, num_parts)](
        logits_NV, rows_N, lengths_N, state, scores, winners, logits_NV.stride(0), vocab_size,
        num_tiles, num_parts, tiles_each, int(has_filters), TILE=_TILE, num_warps=4,
    )  # fmt: skip
    _finish_kernel[(count,)](
        scores, winners, output, num_parts, vocab_size,
        PADDED=triton.next_power_of_2(num_tiles), num_warps=1,
    )  # fmt: skip
    if has_filters:
        triton_filters.keep_to_filters(logits_NV, rows_N, lengths_N, state, output)
    return output
