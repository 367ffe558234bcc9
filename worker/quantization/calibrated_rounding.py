"""Weights rounded so that the results of their products on a text change little."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trimaran.kernels.byte_reference import (
    as_bf16,
    quantize_weight,
    split_blocks,
    spread_scales,
    to_fp8,
)

# Shapes: D inner width, E outputs, G groups of inputs; of blocks: R rows and C columns.

_COLUMNS = 128
"""Inputs that are rounded one by one before the others hear of their errors."""

_DAMPING = 0.01
"""Added to the diagonal, as a share of its mean: texts are short, and inputs depend on each
other."""

_RATIOS = tuple(1.0 - 0.04 * step for step in range(13))
"""Shares of the largest magnitude that the range of a group's integers may end at."""

_FP8_SCALES = 8
"""Scales of FP8 numbers that are tried in an octave: a factor of two changes no fraction."""

Grid = Callable[[Tensor, Tensor], Tensor]
"""The numbers nearest to floats [E] that a scale for each of them [E] allows."""


def round_to_inputs(
    weight_ED: Tensor, gram_DD: Tensor, scales_ED: Tensor, grid: Grid
) -> Tensor:
    """Float32 numbers of the grid, [E, D], by GPTQ (Frantar et al., arXiv 2210.17323).

    The error of each input is spread over the inputs that are not rounded yet, as ``gram_DD``,
    the sum of ``x.T @ x`` over a text, says. The inputs with the largest numbers come first.
    """
    gram = gram_DD.float().clone()
    power = gram.diagonal().clone()
    # An input that is always zero in the text has no error to spread.
    power[power == 0] = 1.0
    gram.diagonal().copy_(power + _DAMPING * power.mean())
    order = torch.argsort(power, descending=True, stable=True)
    spread = _spread_of_errors(gram[order][:, order])
    work, scales = weight_ED.float()[:, order], scales_ED[:, order]
    found = torch.empty_like(work)
    for start in range(0, work.shape[1], _COLUMNS):
        end = min(start + _COLUMNS, work.shape[1])
        part, errors = work[:, start:end], work.new_empty(len(work), end - start)
        for column in range(end - start):
            at = start + column
            found[:, at] = grid(part[:, column], scales[:, at])
            errors[:, column] = (part[:, column] - found[:, at]) / spread[at, at]
            part[:, column:] -= errors[:, column, None] * spread[at, at:end]
        work[:, end:] -= errors @ spread[start:end, end:]
    return found[:, torch.argsort(order)]


def _spread_of_errors(gram_DD: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram_DD))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def integer_scales(
    weight_ED: Tensor, bits: int, group_size: int | None, weights_of_inputs: Tensor
) -> Tensor:
    """Float32 scales [E, G], bf16 numbers, of symmetric integers with the least squared error.

    ``weights_of_inputs`` [D] says how much the error of each input counts. Ranges may end
    before the largest magnitude, and either sign may have the integer that the other lacks.
    """
    outputs, inner = weight_ED.shape
    size, half = group_size or inner, 1 << (bits - 1)
    missing = (0, -inner % size)
    grouped = torch.nn.functional.pad(weight_ED.float(), missing).view(outputs, -1, size)
    counts = torch.nn.functional.pad(weights_of_inputs.float(), missing).view(1, -1, size)
    peaks = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    tiny = torch.finfo(torch.bfloat16).tiny
    best = least = torch.empty(0)
    for ratio in _RATIOS:
        for sign in (1, -1):
            scales = peaks * (ratio / (sign * half))
            scales = torch.where(scales.abs() < tiny, tiny, scales).to(torch.bfloat16).float()
            rounded = (grouped / scales).round().clamp(-half, half - 1) * scales
            errors = ((rounded - grouped).square() * counts).sum(2, keepdim=True)
            if not len(best):
                best, least = scales, errors
            best = torch.where(errors < least, scales, best)
            least = torch.minimum(errors, least)
    return best.squeeze(2)


def fit_integers(
    weight_ED: Tensor, bits: int, group_size: int | None, gram_DD: Tensor
) -> tuple[Tensor, Tensor]:
    """Unsigned integers uint8 [E, D] and float32 scales [E, G], symmetric around half of the
    range; the last group may be smaller."""
    inner, half = weight_ED.shape[1], 1 << (bits - 1)
    scales_EG = integer_scales(weight_ED, bits, group_size, gram_DD.diagonal())
    spread_ED = scales_EG.repeat_interleave(group_size or inner, 1)[:, :inner]

    def grid(floats_E: Tensor, scales_E: Tensor) -> Tensor:
        return (floats_E / scales_E).round().clamp(-half, half - 1) * scales_E

    rounded_ED = round_to_inputs(weight_ED, gram_DD, spread_ED, grid)
    integers_ED = (rounded_ED / spread_ED).round() + half
    return integers_ED.to(torch.uint8), scales_EG


def fp8_scales(
    weight_ED: Tensor, block: tuple[int, int] | None, weights_of_inputs: Tensor
) -> Tensor:
    """Float32 scales, bf16 numbers, [E] of rows or [R, C] of blocks, of FP8 numbers with the
    least squared error.

    ``weights_of_inputs`` [D] says how much the error of each input counts. With the smallest
    scale that is tried the largest magnitude fills the range.
    """
    floats = weight_ED.float()
    _, first = quantize_weight(weight_ED, block)
    best = least = torch.empty(0)
    for step in range(_FP8_SCALES):
        scales = as_bf16(first * 2.0 ** (step / _FP8_SCALES))
        spread = spread_scales(scales, tuple(floats.shape), block)
        rounded = to_fp8(floats, spread).float() * spread
        errors = (rounded - floats).square() * weights_of_inputs
        sums = errors.sum(1) if block is None else split_blocks(errors, block).sum((1, 3))
        if not len(best):
            best, least = scales, sums
        best = torch.where(sums < least, scales, best)
        least = torch.minimum(sums, least)
    return best
