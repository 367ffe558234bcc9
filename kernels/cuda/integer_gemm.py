"""Products by integer weights by our Hopper kernel, dequantized in registers."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
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
    Units,
    aligned_rows,
)

# Shapes: T tokens, K columns, E outputs.

_COPIED_INPUTS = 64
_MAX_STAGES = 16
_SHARED_BYTES = 231_424
"""Dynamic shared memory available to a block beside its barriers."""


class Cut(NamedTuple):
    """How a product is cut."""

    rows: int
    """Rows of x of a block: 8, or a multiple of 16 up to 128; with ``is_scaled`` up to 256."""

    tiles: int
    """Tiles of 64 outputs of a block, each a warpgroup: 2 to 4; at most 3 from 48 rows and 2
    from 96 rows, with ``is_scaled`` from 129 rows, for the registers."""

    split: int = 1
    """Blocks that share the columns: 1, 2, 4 or 8. A result depends on this number alone."""

    sharing: int = 1
    """Blocks that send each other rows of x: 1, 2 or 4. Each of them copies a multiple of 8
    rows. A cluster of blocks has at most 8."""

    ring_bytes: int = _SHARED_BYTES
    """Most shared memory for units and rows of x. What is left over lets blocks of the next
    kernel begin to read."""

    is_scaled: bool = False
    """Whether weights are rounded to the dtype of x before they are multiplied. Otherwise the
    sums of a group are multiplied by its scale, which takes longer from some 48 rows on."""


class Variant(NamedTuple):
    """What the kernel of products is compiled for."""

    format: UnitFormat
    rows: int
    tiles: int
    is_scaled: bool

    @property
    def num_threads(self) -> int:
        """Threads of a block, as the source counts them."""
        copiers = 128 if self.rows >= 48 else 64
        return 128 * self.tiles + copiers

    def compile(self) -> bytes:
        """Machine code, from the cache or compiled now."""
        defines = [
            f"INT_ROWS={self.rows}",
            f"INT_CHUNKS={self.rows // 16}",
            f"INT_TILES={self.tiles}",
            f"INT_SCALED={int(self.is_scaled)}",
        ]
        return load_cubin("integer_gemm", "sm_90a", (*self.format.defines, *defines))


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("units", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("inner_steps", ctypes.c_int),
        ("unit_tiles", ctypes.c_int),
        ("row_tiles", ctypes.c_int),
        ("split_bits", ctypes.c_int),
        ("sharing_bits", ctypes.c_int),
        ("share", ctypes.c_int),
        ("extra", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("is_float", ctypes.c_int),
    )


def multiply(
    x_TK: Tensor, units: Units, bias_E: Tensor | None, dtype: torch.dtype, cut: Cut
) -> Tensor:
    """``x @ weight.T + bias`` [T, E], rounded once to ``dtype``: that of ``x`` or float32.

    ``x`` and the bias are bfloat16 or float16. Columns of the units beyond K count as 0. Safe
    under graph capture. A row's result depends on neither the other rows nor their number, and
    is equal for all cuts of equal ``split``.
    """
    rows, outputs = x_TK.shape[0], units.outputs
    out_TE = torch.empty((rows, outputs), dtype=dtype, device=x_TK.device)
    if not rows:
        return out_TE
    x_TK = aligned_rows(x_TK)
    unit_tiles, inner_steps, unit_bytes = units.values.shape
    stage_bytes = 2 * UNIT_INPUTS * cut.rows + cut.tiles * unit_bytes
    stage_bytes = -(-stage_bytes // 1024) * 1024
    # A unit is released when the next unit is there.
    stages = max(2, min(cut.ring_bytes // stage_bytes, _MAX_STAGES))
    sums_bytes = 4 * cut.rows * (UNIT_OUTPUTS * cut.tiles + 4)
    shared_bytes = max(stages * stage_bytes, sums_bytes) + 1024
    row_tiles = -(-rows // cut.rows)
    arguments = _Arguments(
        units.values.data_ptr(), out_TE.data_ptr(),
        0 if bias_E is None else bias_E.data_ptr(), rows, outputs, inner_steps, unit_tiles,
        row_tiles, cut.split.bit_length() - 1, cut.sharing.bit_length() - 1,
        inner_steps // cut.split, inner_steps % cut.split, stages, int(dtype == torch.float32),
    )  # fmt: skip
    kernel = _kernel(
        Variant(UnitFormat.of(units, x_TK.dtype), cut.rows, cut.tiles, cut.is_scaled),
        shared_bytes,
        cut.split * cut.sharing,
        x_TK.device,
    )
    box = (_COPIED_INPUTS, cut.rows // cut.sharing)
    stream = torch.cuda.current_stream(x_TK.device).cuda_stream
    num_clusters = row_tiles * -(-unit_tiles // (cut.tiles * cut.sharing))
    num_blocks = num_clusters * cut.split * cut.sharing
    kernel.launch(num_blocks, stream, _maps.get(x_TK, (1, 0), box), arguments)
    return out_TE


_ROWS = (8, 16, 32, 64, 96, 128)
_MAX_ROWS = _ROWS[-1]
_BLOCKS = {1: 132, 2: 132, 4: 112, 8: 96}
"""Blocks that run at once, by the size of clusters, which lie inside groups of processors."""

_UNIT_COST, _ROW_COST = 150, 4.5
"""Cycles of a unit of few rows, and of each row more, measured on an H200."""

_ROUND_UNITS, _SUM_UNITS = 3, 5
"""The time in which a block begins and ends, and in which blocks add up, in units."""

_SHARED_ROWS = 64
"""Rows from which the reads of x by all blocks take longer than those of the weight."""

_FIXED_TILES = 2


@functools.cache
def choose_cut(rows: int, unit_tiles: int, inner_steps: int, *, is_fixed: bool) -> Cut:
    """The cut of a product with a weight of ``unit_tiles`` x ``inner_steps`` units.

    With ``is_fixed`` the split depends on the weight alone.
    """
    if is_fixed:
        # The split for few rows, which read the weight alone.
        cuts = [cut for cut in _cuts(8, inner_steps) if cut.tiles == _FIXED_TILES]
        best = min(cuts, key=lambda cut: _cost(cut, 8, unit_tiles, inner_steps))
        cut_rows = _tile_rows(rows, _MAX_ROWS)
        return best._replace(rows=cut_rows, sharing=_sharing(cut_rows, best.split))
    # Some tiles of rows may suit the number of processors better than one.
    max_rows = [most for most in _ROWS if most >= min(rows, 32)]
    sizes = sorted({_tile_rows(rows, most) for most in max_rows})
    cuts = [cut for size in sizes for cut in _cuts(size, inner_steps)]
    return min(cuts, key=lambda cut: _cost(cut, rows, unit_tiles, inner_steps))


def _tile_rows(rows: int, most: int) -> int:
    """A block's rows, for the fewest equal tiles of at most ``most`` rows."""
    each = -(-rows // -(-rows // most))
    return next(size for size in _ROWS if size >= each)


def _sharing(rows: int, split: int) -> int:
    return 2 if rows >= _SHARED_ROWS and split <= 4 else 1


def _cuts(rows: int, inner_steps: int) -> Iterator[Cut]:
    max_tiles = 4 if rows < 48 else 3 if rows < 96 else 2
    for tiles in range(2, max_tiles + 1):
        for split in (1, 2, 4, 8):
            if split == 1 or 2 * split <= inner_steps:
                yield Cut(rows, tiles, split, _sharing(rows, split))


def _cost(cut: Cut, rows: int, unit_tiles: int, inner_steps: int) -> float:
    """The estimated cycles of a product: rounds of blocks, times the units of a processor."""
    cluster = cut.split * cut.sharing
    wide = cut.tiles * cut.sharing
    blocks = cluster * -(-rows // cut.rows) * -(-unit_tiles // wide)
    rounds = -(-blocks // _BLOCKS[cluster])
    units = rounds * -(-inner_steps // cut.split) * cut.tiles
    overhead = rounds * (_ROUND_UNITS + (_SUM_UNITS if cut.split > 1 else 0))
    return (units + overhead) * (_UNIT_COST + _ROW_COST * cut.rows)


def compile_variants(
    units: Units, dtype: torch.dtype, max_rows: int, *, is_fixed: bool
) -> None:
    """Compile the kernels of `choose_cut` for a weight and up to ``max_rows``, in parallel."""
    chosen = UnitFormat.of(units, dtype)
    tiles, steps, _ = units.values.shape
    cuts = (
        choose_cut(rows, tiles, steps, is_fixed=is_fixed) for rows in range(8, max_rows + 8, 8)
    )
    variants = {Variant(chosen, cut.rows, cut.tiles, cut.is_scaled) for cut in cuts}
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        list(pool.map(Variant.compile, variants))


_maps = MapCache()


@functools.cache
def _kernel(
    variant: Variant, shared_bytes: int, cluster: int, device: torch.device
) -> CudaKernel:
    # A module of its own: the limit of shared memory is a property of the module's kernel.
    return CudaModule(variant.compile()).kernel(
        "integer_gemm",
        device,
        num_threads=variant.num_threads,
        shared_bytes=shared_bytes,
        cluster=cluster,
        overlaps=True,
    )
