"""From logits to ids on a GPU: the likeliest or a draw, in one pass over the vocabulary."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

# Shapes: N sampled rows, V vocabulary, R rows, C chunks of the vocabulary.

_CHUNK = 4096
"""Ids that one program looks at: few enough that one row alone keeps many programs busy."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mix(x):  # type: ignore[no-untyped-def]
    """The finaliser of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _noise_keys(state, length):  # type: ignore[no-untyped-def]
    """The two words of `noise.noise_keys`, as blocks of one element."""
    golden = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    at = tl.arange(0, 1)
    seed = tl.load(state + at).to(tl.uint64, bitcast=True)
    sequence = tl.load(state + 1 + at).to(tl.uint64, bitcast=True)
    position = (length - tl.load(state + 2 + at)).to(tl.uint64, bitcast=True)
    key = _mix(seed + golden)
    key = _mix(key ^ (sequence * golden))
    key = _mix(key + position * golden)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _waits(ids, first_key, second_key):  # type: ignore[no-untyped-def]
    """Exponential variates of `noise.gumbel`'s bits: Gumbel noise is minus their logarithm."""
    x = (ids.to(tl.uint32) * 0x9E3779B1) ^ first_key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) ^ second_key) * 0x846CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    uniform = tl.minimum((x.to(tl.float32) + 0.5) * 4.656612873077393e-10, 1.0 - 5.9604645e-8)
    # -log(1 - u): a series where the subtraction would lose the bits that decide who wins.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0 + uniform * 0.25)))
    return tl.where(uniform < 0.01, series, -tl.log(1.0 - uniform))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _race_kernel(  # type: ignore[no-untyped-def]
    logits, rows, lengths, state, scores, winners, row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The best id of one chunk of one row, and its score.

    A draw is a race: the id with the least E / exp(logit / temperature) wins, E being
    exponential. That is argmax(logit / temperature + Gumbel noise) with one logarithm less.
    """
    entry, chunk = tl.program_id(0), tl.program_id(1)
    own = state + tl.load(rows + entry).to(tl.int64) * 4
    bits = tl.load(own + 3).to(tl.int32)
    temperature = bits.to(tl.float32, bitcast=True)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    source = logits + entry.to(tl.int64) * row_stride + ids
    x = tl.load(source, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    if temperature > 0.0:
        first_key, second_key = _noise_keys(own, tl.load(lengths + entry).to(tl.int64))
        x = x / temperature
        top = tl.maximum(tl.max(x, 0), -1e30)
        arrivals = _waits(ids, first_key, second_key) * tl.exp(top - x)
        best, winner = tl.min(arrivals, 0, return_indices=True)
        score = top - tl.log(best)
    else:
        score, winner = tl.max(x, 0, return_indices=True)
    tl.store(scores + entry * num_chunks + chunk, score)
    tl.store(winners + entry * num_chunks + chunk, chunk * CHUNK + winner)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _finish_kernel(  # type: ignore[no-untyped-def]
    scores, winners, output, num_chunks, vocab_size, PADDED: tl.constexpr
):
    entry, chunks = tl.program_id(0), tl.arange(0, PADDED)
    is_chunk = chunks < num_chunks
    score = tl.load(scores + entry * num_chunks + chunks, mask=is_chunk, other=float("-inf"))
    _, best = tl.max(score, 0, return_indices=True)
    winner = tl.load(winners + entry * num_chunks + best)
    # Logits that are no numbers must not lead out of the vocabulary.
    tl.store(output + entry, tl.minimum(winner, vocab_size - 1).to(tl.int64))


def draw(logits_NV: Tensor, rows_N: Tensor, lengths_N: Tensor, state_R4: Tensor) -> Tensor:
    """Each row's likeliest id, or a draw from its softmax; int64 [N].

    ``state`` is int64: seed, index of the sequence, length of the prompt, and the bits of
    the float32 temperature, 0 for the likeliest id. ``lengths`` are tokens before the
    sampled one. Logits of any float dtype; of equal ones the lowest id wins. The twin is
    `candidates.argmax` over logits / temperature + `noise.gumbel`.
    """
    count, vocab_size = logits_NV.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    scores = torch.empty((count, num_chunks), dtype=torch.float32, device=logits_NV.device)
    winners = torch.empty((count, num_chunks), dtype=torch.int32, device=logits_NV.device)
    output = torch.empty(count, dtype=torch.int64, device=logits_NV.device)
    _race_kernel[(count, num_chunks)](
        logits_NV, rows_N, lengths_N, state_R4, scores, winners, logits_NV.stride(0),
        vocab_size, num_chunks, CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    _finish_kernel[(count,)](
        scores, winners, output, num_chunks, vocab_size,
        PADDED=triton.next_power_of_2(num_chunks), num_warps=1,
    )  # fmt: skip
    return output
