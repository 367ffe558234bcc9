"""Grouped products by experts' matrices of integers or FP4 numbers by our Hopper kernel."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import CudaKernel, CudaModule, MapCache
from trimaran.kernels.cuda.integer_units import (
    UNIT_INPUTS,
    UNIT_OUTPUTS,
    UnitFormat,
    can_pack,
    can_pack_fp4,
    pack_units,
)
from trimaran.kernels.integer_columns import Columns, narrowest
from trimaran.kernels.integers import IntegerExperts, IntegerWeight, Packing
from trimaran.kernels.routing import ExpertForm
from trimaran.kernels.tables.grouped_table import EXPERT_LIMITS, INNER_MULTIPLE, expert_limit

# Shapes: X experts, N rows in the order of their experts, D inner width, E outputs of a matrix,
# F outputs of the product, S units of 64 outputs, C units of 128 inputs.

_MAX_SCALE = 127
"""Scales from which weights would overflow in float16."""

_SHARED_BYTES, _PLAN_BYTES, _BARRIER_BYTES, _ALIGNMENT = 232_448, 8, 512, 1024
"""Shared memory of a block, for each expert, for barriers, and for alignment of the ring."""

_COPIED_INPUTS, _NARROW, _WIDE = 64, 8, 32
"""Inputs of a copy of rows of x, and the rows of a copy."""

_MAX_STAGES = 16
_MEDIUM_ROWS, _MANY_ROWS = 6, 48
"""An expert's average number of rows from which runs have up to 64 and 128 rows."""

_FEW_TILES = 600
"""Tiles of 64 outputs of all experts with rows from which a warp multiplies more at a time."""

_BLOCKS, _LONG_STEPS, _IDLE_SHARES = 132, 64, (1, 4)
"""Where tiles have so many units, and blocks so many tiles, warps of the kernel for few rows
would be idle too long: blocks of the kernel for many rows take whole tiles instead."""

_WARP_OUTPUTS = 16


class Cut(NamedTuple):
    """How a grouped product is cut."""

    rows: int
    """Most rows of a run: 16, which has a kernel of its own, 64 or 128."""

    tiles: int
    """Tiles of 64 outputs of a block at a time, each with a warpgroup."""

    depth: int = 1
    """Tiles of a warpgroup; with more than 16 rows 1."""

    @property
    def kernel(self) -> str:
        """The source and its function."""
        return "integer_few_experts" if self.rows == _FEW_ROWS else "integer_experts"

    @property
    def num_threads(self) -> int:
        """Threads of a block, as the source counts them."""
        return 128 * self.tiles + (128 if self.rows > 64 else 64)


_FEW_ROWS = 16
_FEWEST, _FEW = Cut(_FEW_ROWS, 3, 2), Cut(_FEW_ROWS, 2, 4)
_MEDIUM, _MANY = Cut(64, 3), Cut(128, 2)
CUTS = (_FEWEST, _FEW, _MEDIUM, _MANY)


class Variant(NamedTuple):
    """What the kernel is compiled for."""

    format: UnitFormat
    cut: Cut
    is_gated: bool
    max_experts: int

    def compile(self) -> bytes:
        """Machine code, from the cache or compiled now."""
        rows, tiles, depth = self.cut
        defines = [f"GROUPED_EXPERTS={self.max_experts}", f"INT_TILES={tiles}"]
        if rows == _FEW_ROWS:
            defines.append(f"INT_MI={depth}")
        else:
            defines += [f"INT_ROWS={rows}", f"INT_CHUNKS={rows // 16}"]
        if self.is_gated:
            defines.append("GEMM_GATED")
        return load_cubin(self.cut.kernel, "sm_90a", (*self.format.defines, *defines))


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("units", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("totals", ctypes.c_uint64),
        ("experts", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("sharing", ctypes.c_int),
        ("inner_steps", ctypes.c_int),
        ("unit_tiles", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("is_early", ctypes.c_int),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


def pack_experts(
    weights: Sequence[IntegerWeight], dtype: torch.dtype, *, is_gated: bool
) -> IntegerExperts | None:
    """The experts' matrices in units, for rows of x in ``dtype``: bfloat16 or float16; None if
    the kernel does not take them.

    ``is_gated``: matrices hold gate rows above up rows, and products are SwiGLU. The kernel's
    variants are compiled.
    """
    outputs, inner = weights[0].shape
    columns = [Columns.of(each) for each in weights]
    results = outputs // 2 if is_gated else outputs
    is_whole = not (results % INNER_MULTIPLE or inner % INNER_MULTIPLE)
    if not is_whole or len(weights) > EXPERT_LIMITS[-1]:
        return None
    if not all(_can_pack(*each, dtype) for each in zip(weights, columns, strict=True)):
        return None
    if len({each.step for each in columns}) > 1:
        return None
    has_zeros = any(each.zeros is not None for each in weights)
    numbers = narrowest([each.scales for each in weights])
    order = _gate_order(results, weights[0].values.device) if is_gated else None
    units = [
        pack_units(_arranged(weight, order, has_zeros=has_zeros), own, numbers)
        for weight, own in zip(weights, columns, strict=True)
    ]
    first = weights[0]
    packed = IntegerExperts(
        torch.stack([each.values for each in units]),
        None, None, None, None, first.bits, columns[0].step, first.is_fp4,
        Packing(outputs, has_zeros, units[0].scales),
    )  # fmt: skip
    variants = [
        Variant(_format_of(packed, dtype), cut, is_gated, expert_limit(len(weights)))
        for cut in CUTS
    ]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        list(pool.map(Variant.compile, variants))
    return packed


def _can_pack(weight: IntegerWeight, columns: Columns, dtype: torch.dtype) -> bool:
    if columns.order is not None:
        return False
    if weight.is_fp4:
        return dtype == torch.bfloat16 and can_pack_fp4(weight, columns)
    return can_pack(weight) and bool((weight.scales.abs() < _MAX_SCALE).all())


def _gate_order(results: int, device: torch.device) -> Tensor:
    """int64: the row of each row of the units: 8 gates and their ups for each warp. Rows that
    fill the last unit repeat the first."""
    half = _WARP_OUTPUTS // 2
    width = UNIT_OUTPUTS // 2
    gates = torch.arange(-(-results // width) * width, device=device)
    gates = torch.where(gates < results, gates, 0).view(-1, half)
    return torch.stack((gates, gates + results), 1).flatten()


def _arranged(weight: IntegerWeight, order: Tensor | None, *, has_zeros: bool) -> IntegerWeight:
    if has_zeros and weight.zeros is None:
        zeros = torch.full_like(weight.scales, weight.half, dtype=torch.int16)
        weight = weight._replace(zeros=zeros)
    if order is None:
        return weight
    return weight._replace(
        values=weight.values[order],
        scales=weight.scales[order],
        zeros=None if weight.zeros is None else weight.zeros[order],
    )


def _format_of(experts: IntegerExperts, dtype: torch.dtype) -> UnitFormat:
    assert experts.packing is not None
    groups, is_float16 = UNIT_INPUTS // experts.step, dtype == torch.float16
    has_zeros, scales = experts.packing[1:]
    return UnitFormat(experts.bits, groups, has_zeros, scales, is_float16)


@functools.cache
def choose_cut(rows: int, num_experts: int, unit_tiles: int, inner_steps: int) -> Cut:
    """The cut of a product of ``rows`` rows of all experts, as measured on an H200."""
    if rows >= _MEDIUM_ROWS * num_experts:
        return _MANY if rows >= _MANY_ROWS * num_experts else _MEDIUM
    tiles = num_experts * (1 - (1 - 1 / num_experts) ** rows) * unit_tiles
    if inner_steps >= _LONG_STEPS and math.ceil(tiles / _BLOCKS) in _IDLE_SHARES:
        return _MANY
    return _FEW if tiles >= _FEW_TILES else _FEWEST


def multiply(
    x_ND: Tensor,
    experts: IntegerExperts,
    totals_X: Tensor,
    form: ExpertForm | None,
    *,
    is_gated: bool,
    is_early: bool = False,
    cut: Cut | None = None,
) -> Tensor:
    """[N, F] in the dtype of ``x``: rows times their experts' matrices, plus a bias with
    ``form``; ``is_gated``: SwiGLU of them, or that of ``form``.

    ``x`` is contiguous, with at least one row; ``totals`` are int32, the rows of each expert.
    Rows beyond their sum are left unchanged. Weights are rounded once to the dtype of ``x``.
    Safe under graph capture. A row's result depends on neither the other rows nor the cut.
    ``is_early``: the kernel before this one is such a product with the same totals, or
    `permute_rows` with ``sorted_first``.
    """
    packing = experts.packing
    assert packing is not None
    num_experts, unit_tiles, inner_steps, unit_bytes = experts.values.shape
    rows = x_ND.shape[0]
    columns = packing.outputs // 2 if is_gated else packing.outputs
    cut = cut or choose_cut(rows, num_experts, unit_tiles, inner_steps)
    out_NF = x_ND.new_empty((rows, columns))
    bias, alpha, limit = 0, 0.0, 0.0
    if form is not None:
        biases = form.gate_up_bias if is_gated else form.down_bias
        bias, alpha, limit = biases.data_ptr(), form.alpha, form.limit
    # Blocks divide the tiles for few rows among each other, and take turns for many.
    column_tiles = unit_tiles if cut.rows == _FEW_ROWS else -(-unit_tiles // cut.tiles)
    max_experts = expert_limit(num_experts)
    # The ring begins behind the other variables, at a multiple of its alignment.
    others = _PLAN_BYTES * max_experts + _BARRIER_BYTES
    left = _SHARED_BYTES - -(-others // _ALIGNMENT) * _ALIGNMENT
    stage_bytes = 2 * UNIT_INPUTS * cut.rows + cut.tiles * cut.depth * unit_bytes
    stage_bytes = -(-stage_bytes // _ALIGNMENT) * _ALIGNMENT
    stages = min((left - _ALIGNMENT) // stage_bytes, _MAX_STAGES)
    arguments = _Arguments(
        experts.values.data_ptr(), out_NF.data_ptr(), bias, totals_X.data_ptr(), num_experts,
        columns, column_tiles, 1, inner_steps, unit_tiles, stages, int(is_early), alpha, limit,
    )  # fmt: skip
    variant = Variant(_format_of(experts, x_ND.dtype), cut, is_gated, max_experts)
    kernel, processors = _kernel(variant, left, x_ND.device)
    # Each expert with rows has at most one run that is not full.
    groups = (rows // cut.rows + min(num_experts, rows)) * column_tiles
    maps = [_maps.get(x_ND, (1, 0), (_COPIED_INPUTS, box)) for box in (_NARROW, _WIDE)]
    stream = torch.cuda.current_stream(x_ND.device).cuda_stream
    kernel.launch(min(groups, processors), stream, *maps, arguments)
    return out_NF


_maps = MapCache()


@functools.cache
def _kernel(
    variant: Variant, shared_bytes: int, device: torch.device
) -> tuple[CudaKernel, int]:
    """The kernel, and the number of its blocks that run at once."""
    kernel = CudaModule(variant.compile()).kernel(
        variant.cut.kernel,
        device,
        num_threads=variant.cut.num_threads,
        shared_bytes=shared_bytes,
        overlaps=True,
    )
    return kernel, torch.cuda.get_device_properties(device).multi_processor_count
