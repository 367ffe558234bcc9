"""The kernel and the cut of a product by integer weights rounded to the dtype of inputs."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from trimaran.kernels.cuda import integer_gemm, integer_wide
from trimaran.kernels.cuda.integer_gemm import Cut
from trimaran.kernels.cuda.integer_units import UNIT_OUTPUTS, UnitFormat, Units
from trimaran.kernels.cuda.integer_wide import WideCut

MIN_ROWS = 33
"""Rows from which rounded weights are faster than sums that are multiplied by scales."""

_PROCESSORS = 132
_CLUSTERED = {1: 132, 2: 132, 4: 120, 8: 104}
"""Blocks that run at once, by the size of clusters, which lie inside groups of processors."""

_STEPS = 8
"""Steps of 16 inputs in a unit."""

# Times measured on an H200, in microseconds.
_START, _TILE = 2.5, 1.0
_SUM_ROW = 0.005
"""The sums of a row and 64 outputs on their way through shared memory."""

_COMPILED_ROWS = (*range(MIN_ROWS, 1025, 8), *range(1088, 16385, 64))


def _step_us(rows: int, tiles: int) -> float:
    """16 inputs of 64 outputs: the matrix units take 0.32 ns a row. With few rows the making of
    weights shows, less so if more tiles take turns."""
    return 1e-3 * max(0.32 * rows, (24 if tiles == 2 else 20) + 0.15 * rows)


def _wide_cuts(*, is_gated: bool) -> list[WideCut]:
    deep = [WideCut(rows, 2, 2) for rows in (64, 96, 112, 128)]
    if is_gated:
        return deep
    flat = [WideCut(rows) for rows in (32, 64, 96, 128, 160, 192, 208, 224, 256)]
    return [*flat, *(WideCut(rows, 3) for rows in (96, 128)), *deep]


def _split_cuts(inner_steps: int) -> list[Cut]:
    sizes = [(rows, 2) for rows in (48, 64, 96, 128, 160, 192, 256)]
    sizes += [(rows, 3) for rows in (48, 64, 96, 128)]
    return [
        Cut(rows, tiles, split, is_scaled=True)
        for rows, tiles in sizes
        for split in (1, 2, 4, 8)
        if split == 1 or 2 * split <= inner_steps
    ]


def _wide_us(cut: WideCut, rows: int, tiles: int, inner_steps: int) -> float:
    wide = cut.tiles * cut.depth
    blocks = -(-rows // cut.rows) * -(-tiles // wide)
    each = _TILE + _STEPS * inner_steps * wide * _step_us(cut.rows, wide)
    return _START + -(-blocks // _PROCESSORS) * each


def _split_us(cut: Cut, rows: int, tiles: int, inner_steps: int) -> float:
    blocks = cut.split * -(-rows // cut.rows) * -(-tiles // cut.tiles)
    steps = _STEPS * -(-inner_steps // cut.split)
    each = _TILE + steps * cut.tiles * _step_us(cut.rows, cut.tiles)
    each += cut.rows * cut.tiles * _SUM_ROW * (2 if cut.split > 1 else 1)
    return _START + -(-blocks // _CLUSTERED[cut.split]) * each


@functools.cache
def choose(rows: int, tiles: int, inner_steps: int, *, has_maps: bool) -> Cut | WideCut:
    """The fastest cut by its estimated time; a `WideCut` only with ``has_maps``, for results
    that a tensor map can describe."""
    size = rows, tiles, inner_steps
    best = min(_split_cuts(inner_steps), key=lambda cut: _split_us(cut, *size))
    if not has_maps:
        return best
    wide = min(_wide_cuts(is_gated=False), key=lambda cut: _wide_us(cut, *size))
    if _split_us(best, *size) < _wide_us(wide, *size):
        return best
    return _shared(wide, rows)


@functools.cache
def choose_gated(rows: int, tiles: int, inner_steps: int) -> WideCut:
    """The fastest cut of SwiGLU by a weight of gates above ups."""
    cuts = _wide_cuts(is_gated=True)
    return _shared(min(cuts, key=lambda cut: _wide_us(cut, rows, tiles, inner_steps)), rows)


def _shared(cut: WideCut, rows: int) -> WideCut:
    """With several tiles of rows, blocks save each other reads of x."""
    return cut._replace(sharing=2) if rows > 2 * cut.rows else cut


def multiply(x_TK: Tensor, units: Units, bias_E: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` [T, E] in the dtype of ``x``, to which weights are rounded.

    At least one row. Safe under graph capture.
    """
    tiles, inner_steps, _ = units.values.shape
    cut = choose(x_TK.shape[0], tiles, inner_steps, has_maps=_has_maps(units))
    if isinstance(cut, WideCut):
        return integer_wide.multiply(x_TK, units, bias_E, cut)
    return integer_gemm.multiply(x_TK, units, bias_E, x_TK.dtype, cut)


def _has_maps(units: Units) -> bool:
    return units.outputs % 8 == 0


def can_gate(units: Units) -> bool:
    """Whether gates and ups fill whole units each."""
    return units.outputs % (2 * UNIT_OUTPUTS) == 0


def multiply_gated(x_TK: Tensor, units: Units) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2], gate rows above up rows, for units that
    `can_gate`; otherwise like `multiply`."""
    tiles, inner_steps, _ = units.values.shape
    cut = choose_gated(x_TK.shape[0], tiles, inner_steps)
    return integer_wide.multiply_gated(x_TK, units, cut)


def compile_variants(units: Units, dtype: torch.dtype, *, has_gates: bool) -> None:
    """Compile the kernels for a weight in parallel."""
    chosen = UnitFormat.of(units, dtype)
    tiles, inner_steps, _ = units.values.shape
    variants: set[integer_gemm.Variant | integer_wide.Variant] = set()
    for rows in _COMPILED_ROWS:
        cut = choose(rows, tiles, inner_steps, has_maps=_has_maps(units))
        if isinstance(cut, WideCut):
            variants.add(integer_wide.Variant(chosen, *cut[:3], is_gated=False))
        else:
            variants.add(integer_gemm.Variant(chosen, cut.rows, cut.tiles, cut.is_scaled))
        if has_gates:
            deep = choose_gated(rows, tiles, inner_steps)
            variants.add(integer_wide.Variant(chosen, *deep[:3], is_gated=True))
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda variant: variant.compile(), variants))
