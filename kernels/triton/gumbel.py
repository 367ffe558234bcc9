"""Gumbel-max sampling in Triton: a draw by an argmax over keyed noise.

argmax(logit / temperature + Gumbel noise) is a draw from the softmax. An exact score costs
several logarithms for each id. All ids therefore first get a cheap upper bound of their score,
and only ids that can win get an exact score.
"""

from __future__ import annotations

import os

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from trimaran.kernels import sampling_state

SEED = tl.constexpr(sampling_state.SEED)
SEQUENCE = tl.constexpr(sampling_state.SEQUENCE)
NUM_PROMPT = tl.constexpr(sampling_state.NUM_PROMPT)

_IS_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
_LANE = tl.constexpr(8)
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_float(word):  # type: ignore[no-untyped-def]
    """The float32 with the bits of a state's word."""
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _minus_log2(x):  # type: ignore[no-untyped-def]
    """One instruction, accurate to 2**-22. The compiler folds the sign into the following
    addition.
    """
    if _IS_COMPILED:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1; neg.f32 $0, $0;", "=f,f", [x], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return -tl.log2(x)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _opaque(x):  # type: ignore[no-untyped-def]
    """``x``, opaque to the compiler."""
    if _IS_COMPILED:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.uint32, is_pure=True, pack=1
        )
    return x


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mix(x):  # type: ignore[no-untyped-def]
    """The finaliser of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def noise_keys(own, length):  # type: ignore[no-untyped-def]
    """The two words of `noise.noise_keys` for a row's state, as blocks of one element.

    The first word is pre-folded as `_hash` would fold it with every id. The value is made
    opaque: the compiler would otherwise move the folding back into `_hash`.
    """
    golden = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    at = tl.arange(0, 1)
    low = tl.load(own + SEED + at).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(own + SEED + 1 + at).to(tl.uint32, bitcast=True).to(tl.uint64)
    sequence = tl.load(own + SEQUENCE + at).to(tl.uint64)
    position = (length - tl.load(own + NUM_PROMPT + at)).to(tl.uint64)
    key = _mix((low | (high << 32)) + golden)
    key = _mix(key ^ (sequence * golden))
    key = _mix(key + position * golden)
    first = key.to(tl.uint32)
    return _opaque(first ^ (first >> 16)), (key >> 32).to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _hash(ids, first_key, second_key):  # type: ignore[no-untyped-def]
    """`noise.hash_bits`; folding is linear, so the key's part is pre-folded."""
    x = ids.to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 16) ^ first_key) * 0x7FEB352D
    x = ((x ^ (x >> 15)) ^ second_key) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def gumbel(ids, first_key, second_key):  # type: ignore[no-untyped-def]
    """`noise.gumbel`, up to the rounding of the logarithms."""
    bits = _hash(ids, first_key, second_key) & 0x7FFFFFFF
    uniform = tl.minimum(
        (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 1.0 - 5.9604645e-8
    )
    # -log(1 - u), corrected where the subtraction rounds: by the ratio of u to the value
    # subtracted.
    rest = 1.0 - uniform
    taken = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    waits = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / taken))
    return -tl.log(waits)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def is_before(x, ids, bound, bound_id):  # type: ignore[no-untyped-def]
    """Whether ids come before (bound, bound_id) in the order of descending logits.

    The lower id comes first if logits are equal.
    """
    return (x > bound) | ((x == bound) & (ids < bound_id))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def likeliest(source, vocab_size, first, last, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logit of tiles ``first`` to ``last`` and the first id with this logit."""
    lanes = tl.arange(0, TILE // _LANE)
    in_tile = lanes[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
    best = tl.full([TILE // _LANE], float("-inf"), tl.float32)
    best_tile = tl.full([TILE // _LANE], 0, tl.int32) + first
    for tile in range(first, last):
        ids = tile * TILE + in_tile
        x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf"))
        local = tl.max(x.to(tl.float32), 1)
        is_better = local > best
        best = tl.where(is_better, local, best)
        best_tile = tl.where(is_better, tile, best_tile)
    top = tl.max(best, 0)
    tile = tl.min(tl.where(best == top, best_tile, last), 0)
    is_winner = (best == top) & (best_tile == tile)
    lane = tl.min(tl.where(is_winner, lanes, TILE // _LANE - 1), 0)
    ids = tile * TILE + lane * _LANE + tl.arange(0, _LANE)
    x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return top, tl.min(tl.where(x == top, ids, _NO_ID), 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _exact_argmax(  # type: ignore[no-untyped-def]
    source, vocab_size, first, last, temperature, first_key, second_key, bound, bound_id,
    TILE: tl.constexpr, FIRST_ID: tl.constexpr,
):  # fmt: skip
    """`gumbel_argmax` without bounds of scores. Rarely one program of a launch runs this
    function. Larger steps shorten the wait of all other programs, but even larger steps would
    cost `gumbel_argmax` registers.
    """
    STEP: tl.constexpr = TILE // 2
    top = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 0, tl.int32) + first * TILE
    for step in range(first * 2, last * 2):
        ids = step * STEP + tl.arange(0, STEP)
        x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(x, temperature) + gumbel(ids + FIRST_ID, first_key, second_key)
        score = tl.where(is_before(x, ids, bound, bound_id), score, float("-inf"))
        local = tl.max(score, 0)
        if local > top:
            top = local
            winner = tl.min(tl.where(score == local, ids, _NO_ID), 0)
    return top, winner


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _exact_lanes(  # type: ignore[no-untyped-def]
    source, vocab_size, tiles, temperature, first_key, second_key, bound, bound_id,
    TILE: tl.constexpr, FIRST_ID: tl.constexpr,
):  # fmt: skip
    """`_exact_argmax` of each lane's ids in its own one of ``tiles``, one id a lane at a
    time.
    """
    lanes = tl.arange(0, TILE // _LANE)
    top = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 0, tl.int32) + tl.min(tiles, 0) * TILE
    for place in range(_LANE):
        ids = tiles * TILE + lanes * _LANE + place
        x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(x, temperature) + gumbel(ids + FIRST_ID, first_key, second_key)
        score = tl.where(is_before(x, ids, bound, bound_id), score, float("-inf"))
        local = tl.max(score, 0)
        first_id = tl.min(tl.where(score == local, ids, _NO_ID), 0)
        if (local > top) | ((local == top) & (first_id < winner)):
            top = local
            winner = first_id
    return top, winner


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def gumbel_argmax(  # type: ignore[no-untyped-def]
    source, vocab_size, first, last, temperature, first_key, second_key, bound, bound_id,
    IS_BOUNDED: tl.constexpr, TILE: tl.constexpr, FIRST_ID: tl.constexpr = 0,
):  # fmt: skip
    """The best score of tiles ``first`` to ``last``, and the index of its logit.

    ``source`` holds the logits of the ids from ``FIRST_ID`` on. With ``IS_BOUNDED``, which
    requires id 0 as the first, only ids before (bound, bound_id) compete. An exponential wait
    -log(1 - u) is at least u, so logit / temperature - log(u) is an upper bound. A lane keeps
    its best and its second-best bound. If only the lanes' best ids can win, they get exact
    scores; if some second-best id could win as well, all ids do.
    """
    lanes = tl.arange(0, TILE // _LANE)
    in_tile = lanes[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
    best = tl.full([TILE // _LANE], float("-inf"), tl.float32)
    second = best
    best_tile = tl.full([TILE // _LANE], 0, tl.int32) + first
    scale = 1.4426950408889634 / temperature
    for tile in range(first, last):
        ids = tile * TILE + in_tile
        x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        bits = _hash(ids + FIRST_ID, first_key, second_key) & 0x7FFFFFFF
        most = x * scale + _minus_log2(bits.to(tl.float32))
        if IS_BOUNDED:
            most = tl.where(is_before(x, ids, bound, bound_id), most, float("-inf"))
        local = tl.max(most, 1)
        second = tl.maximum(second, tl.minimum(best, local))
        is_better = local > best
        best = tl.where(is_better, local, best)
        best_tile = tl.where(is_better, tile, best_tile)
    top = tl.max(best, 0)
    lane = tl.min(tl.where(best == top, lanes, TILE // _LANE - 1), 0)
    tile = tl.max(tl.where(lanes == lane, best_tile, first), 0)
    ids = tile * TILE + lane * _LANE + tl.arange(0, _LANE)
    x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    exact = tl.div_rn(x, temperature) + gumbel(ids + FIRST_ID, first_key, second_key)
    if IS_BOUNDED:
        exact = tl.where(is_before(x, ids, bound, bound_id), exact, float("-inf"))
    score = tl.max(exact, 0)
    winner = tl.min(tl.where(exact == score, ids, _NO_ID), 0)
    # Whether other ids could reach that score, including rounding of the bound and of its
    # scale.
    needed = score * 1.4426950408889634 - 31.0
    needed -= 1e-4 + 1e-6 * (tl.abs(needed) + 64.0)
    rivals = tl.maximum(tl.where(lanes == lane, float("-inf"), best), second)
    if tl.max(rivals, 0) >= needed:
        edge, edge_id = float("-inf"), _NO_ID
        if IS_BOUNDED:
            edge, edge_id = bound, bound_id
        if tl.max(second, 0) >= needed:
            score, winner = _exact_argmax(
                source, vocab_size, first, last, temperature, first_key, second_key, edge,
                edge_id, TILE, FIRST_ID,
            )  # fmt: skip
        else:
            score, winner = _exact_lanes(
                source, vocab_size, best_tile, temperature, first_key, second_key, edge,
                edge_id, TILE, FIRST_ID,
            )  # fmt: skip
    return score, winner
