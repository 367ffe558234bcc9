"""Products of many rows by integer weights by our Hopper kernel, dequantized in registers."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import CudaKernel, CudaModule, MapCache
from trimaran.kernels.cuda.integer_units import (
    UNIT_OUTPUTS,
    UnitFormat,
    Units,
    aligned_rows,
)

# Shapes: T tokens, K columns, E outputs.

_PANEL_COLUMNS = 64
_MAX_PANELS = 16
_MIN_UNITS = 3
_SHARED_BYTES = 230_400
"""Dynamic shared memory available to a block beside its barriers and their alignment."""


class WideCut(NamedTuple):
    """How a product of many rows is cut."""

    rows: int
    """Rows of x of a block: a multiple of 16 up to 256."""

    tiles: int = 2
    """Warpgroups of a block that multiply: 2, or 3 up to 128 rows x ``depth``."""

    depth: int = 1
    """Tiles of 64 outputs of a warpgroup: 1, or 2 up to 128 rows."""

    sharing: int = 1
    """Blocks that send each other rows of x: 1, 2 or 4. Each of them copies a multiple of 8
    rows."""


class Variant(NamedTuple):
    """What the kernel is compiled for."""

    format: UnitFormat
    rows: int
    tiles: int
    depth: int
    is_gated: bool

    def compile(self) -> bytes:
        """Machine code, from the cache or compiled now."""
        defines = [
            f"INT_ROWS={self.rows}",
            f"INT_CHUNKS={self.rows // 16}",
            f"INT_TILES={self.tiles}",
            f"INT_MI={self.depth}",
            *(["GEMM_GATED"] if self.is_gated else []),
        ]
        return load_cubin("integer_wide", "sm_90a", (*self.format.defines, *defines))


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("units", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("columns", ctypes.c_int),
        ("inner_steps", ctypes.c_int),
        ("unit_tiles", ctypes.c_int),
        ("row_tiles", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("sharing_bits", ctypes.c_int),
        ("panel_stages", ctypes.c_int),
        ("unit_stages", ctypes.c_int),
    )


def multiply(x_TK: Tensor, units: Units, bias_E: Tensor | None, cut: WideCut) -> Tensor:
    """``x @ weight.T + bias`` [T, E] in the dtype of ``x``, bfloat16 or float16.

    Weights are ``(integer - zero) * scale`` rounded to that dtype. E is a multiple of 8, and
    there is at least one row. Columns of the units beyond K count as 0. Safe under capture. A
    row's result depends on neither the other rows nor their number nor the cut.
    """
    out_TE = x_TK.new_empty((x_TK.shape[0], units.outputs))
    _launch(aligned_rows(x_TK), units, bias_E, out_TE, cut)
    return out_TE


def multiply_gated(x_TK: Tensor, units: Units, cut: WideCut) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2], gate rows above up rows, otherwise like
    `multiply`. E is a multiple of 128, and ``cut.depth`` 2."""
    out_TF = x_TK.new_empty((x_TK.shape[0], units.outputs // 2))
    _launch(aligned_rows(x_TK), units, None, out_TF, cut, is_gated=True)
    return out_TF


def _launch(
    x_TK: Tensor,
    units: Units,
    bias_E: Tensor | None,
    out_TF: Tensor,
    cut: WideCut,
    *,
    is_gated: bool = False,
) -> None:
    _, inner_steps, unit_bytes = units.values.shape
    store_rows = 64 if cut.rows % 64 == 0 else 32 if cut.rows % 32 == 0 else 16
    left = _SHARED_BYTES - 2 * cut.tiles * store_rows * 2 * UNIT_OUTPUTS
    # Both rings reach about as far ahead.
    panel_bytes = cut.rows * 2 * _PANEL_COLUMNS
    units_bytes = cut.tiles * cut.depth * unit_bytes
    stages = max(_MIN_UNITS, min(left // (2 * panel_bytes + units_bytes), _MAX_PANELS // 2))
    panels = min((left - stages * units_bytes) // panel_bytes, _MAX_PANELS)
    rows, outputs = out_TF.shape
    unit_tiles = -(-outputs // UNIT_OUTPUTS)
    block_tiles = cut.tiles if is_gated else cut.tiles * cut.depth
    row_tiles = -(-rows // cut.rows)
    groups = row_tiles * -(-unit_tiles // (block_tiles * cut.sharing))
    arguments = _Arguments(
        units.values.data_ptr(), 0 if bias_E is None else bias_E.data_ptr(), outputs,
        inner_steps, unit_tiles, row_tiles, groups, cut.sharing.bit_length() - 1, panels,
        stages,
    )  # fmt: skip
    chosen = UnitFormat.of(units, x_TK.dtype)
    variant = Variant(chosen, cut.rows, cut.tiles, cut.depth, is_gated)
    kernel, most = _kernel(variant, cut.sharing, x_TK.device)
    stream = torch.cuda.current_stream(x_TK.device).cuda_stream
    kernel.launch(
        min(groups, most) * cut.sharing,
        stream,
        _maps.get(x_TK, (1, 0), (_PANEL_COLUMNS, cut.rows // cut.sharing)),
        _maps.get(out_TF, (1, 0), (UNIT_OUTPUTS, store_rows)),
        arguments,
    )


_maps = MapCache()


@functools.cache
def _kernel(variant: Variant, cluster: int, device: torch.device) -> tuple[CudaKernel, int]:
    """The kernel, and the number of clusters that run at once."""
    # A module of its own: the limit of shared memory is a property of the module's kernel.
    kernel = CudaModule(variant.compile()).kernel(
        "integer_wide",
        device,
        num_threads=128 * (variant.tiles + 1),
        shared_bytes=_SHARED_BYTES + 1024,
        cluster=cluster,
        overlaps=True,
    )
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return kernel, count if cluster == 1 else kernel.max_clusters(cluster)
