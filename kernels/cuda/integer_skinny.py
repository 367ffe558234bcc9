"""Products of up to 8 rows by integer weights by our Hopper kernel, or SwiGLU of them."""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import CudaKernel, CudaModule
from trimaran.kernels.cuda.integer_units import (
    UNIT_INPUTS,
    UNIT_OUTPUTS,
    UnitFormat,
    Units,
    aligned_rows,
)

# Shapes: T tokens, K columns, E outputs.

MAX_ROWS = 8
"""Rows of x up to which one operand of the matrix units holds them."""

_ROWS = (1, 2, 4, MAX_ROWS)
"""Numbers of rows up to which cuts are equal."""

_SLICE_OUTPUTS = 16
_PER_UNIT = UNIT_OUTPUTS // _SLICE_OUTPUTS
_ROW_BYTES = 2 * UNIT_INPUTS + 16
"""Shared memory of a row of a unit's inputs."""

_SHARED_BYTES = 232_448
"""Most shared memory of a block."""

_FRAGMENT_BYTES = 512
"""The sums of a warp for a slice."""


class SkinnyCut(NamedTuple):
    """How a product is cut; see ``csrc/integer_skinny.cu``."""

    slices: int
    """Slices of 16 outputs of a block; if gated, half of them are gates."""

    stages: int = 1
    """Units of 128 inputs that a warp requests ahead."""

    warps: int = 8
    """Warps of a block, 16 with at most 3 slices."""

    warps_n: int = 1
    """Warps along the outputs, at most 8 slices each; the others divide the inner dimension."""

    def ring_bytes(self, rows: int, unit_bytes: int) -> int:
        """Shared memory of the units that all warps request ahead."""
        weights = self.slices // self.warps_n * unit_bytes // _PER_UNIT
        return self.warps * self.stages * (weights + rows * _ROW_BYTES)

    @property
    def sums_bytes(self) -> int:
        """Shared memory of the warps' sums."""
        return self.warps // self.warps_n * self.slices * _FRAGMENT_BYTES


class Variant(NamedTuple):
    """What the kernel is compiled for."""

    format: UnitFormat
    is_gated: bool
    cut: SkinnyCut

    def compile(self) -> bytes:
        """Machine code, from the cache or compiled now."""
        slices, stages, warps, warps_n = self.cut
        defines = [
            f"SKINNY_SLICES={slices}",
            f"SKINNY_STAGES={stages}",
            f"SKINNY_WARPS={warps}",
            f"SKINNY_WARPS_N={warps_n}",
            f"SKINNY_GATED={int(self.is_gated)}",
        ]
        return load_cubin("integer_skinny", "sm_90a", (*self.format.defines, *defines))


# ---- Cuts.

_MOST_WORDS = 8 << 10
"""Bytes of a unit's integers for a warp, which its registers limit: 8 slices of 4 bits."""

_MOST_RING_BYTES = 206_000
_MOST_STAGES = 3
"""Rings of more stages are no faster."""

_MANY_WARPS_SLICES = 3
"""Slices up to which registers allow 16 warps."""


class _Size(NamedTuple):
    """A product by what its cut depends on."""

    rows: int
    slices: int
    """Of 16 outputs; of the gates alone if gated."""

    inner_steps: int
    unit_bytes: int
    bits: int
    is_gated: bool
    processors: int


def can_multiply(units: Units, *, is_gated: bool, processors: int | None = None) -> bool:
    """Whether the kernel takes a weight, and is faster than that of `integer_gemm`; with
    ``is_gated`` SwiGLU of gates above ups. Inputs have to fill the units.

    On an H200 the four products of a layer of an 8B model take 38, 39 and 43 us for 1, 4 and 8
    rows and 4 bits, SwiGLU included; the other kernel and SwiGLU 47, 49 and 49. With 8 bits
    products gain 4 to 21 %, unless blocks have several tiles.
    """
    if units.outputs % (_SLICE_OUTPUTS * (2 if is_gated else 1)):
        return False
    most = (processors or _processors(units.values.device)) * _most_slices(units.bits)
    return units.bits == 4 or _slices(units, is_gated=is_gated) <= most


def _most_slices(bits: int) -> int:
    return _MOST_WORDS // (_SLICE_OUTPUTS * UNIT_INPUTS * bits // 8)


@functools.lru_cache(maxsize=1024)
def _choose(size: _Size) -> SkinnyCut:
    waves = -(-size.slices // (size.processors * _most_slices(size.bits)))
    slices = -(-size.slices // (size.processors * waves))
    warps_n = 2 if size.is_gated else 1
    warps = 16 if slices * warps_n <= _MANY_WARPS_SLICES else 8
    cut = SkinnyCut(slices * warps_n, 1, warps, warps_n)
    units = -(-size.inner_steps // (warps // warps_n))
    most_bytes = min(_MOST_RING_BYTES, _SHARED_BYTES - cut.sums_bytes)
    stages = most_bytes // cut.ring_bytes(size.rows, size.unit_bytes)
    return cut._replace(stages=max(1, min(stages, _MOST_STAGES, units)))


def choose_cut(
    rows: int, units: Units, *, is_gated: bool, processors: int | None = None
) -> SkinnyCut:
    """The cut of a product of 1 to `MAX_ROWS` rows by which all processors read about as many
    weights."""
    _, inner_steps, unit_bytes = units.values.shape
    return _choose(
        _Size(
            next(most for most in _ROWS if rows <= most),
            _slices(units, is_gated=is_gated),
            inner_steps,
            unit_bytes,
            units.bits,
            is_gated,
            processors or _processors(units.values.device),
        )
    )


def compile_variants(units: Units, dtype: torch.dtype, *, is_gated: bool) -> None:
    """Compile the kernels for a weight in parallel."""
    form = UnitFormat.of(units, dtype)
    variants = {
        Variant(form, is_gated, choose_cut(rows, units, is_gated=is_gated)) for rows in _ROWS
    }
    with ThreadPoolExecutor(max_workers=len(variants)) as pool:
        list(pool.map(Variant.compile, variants))


def _slices(units: Units, *, is_gated: bool) -> int:
    if is_gated:
        return units.outputs // (2 * _SLICE_OUTPUTS)
    return int(units.values.shape[0]) * _PER_UNIT


# ---- Launches.


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("units", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("inner_steps", ctypes.c_int),
        ("slices", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("sums_at", ctypes.c_int),
        ("is_float", ctypes.c_int),
    )


def multiply(
    x_TK: Tensor, units: Units, bias_E: Tensor | None, dtype: torch.dtype, *, is_gated: bool
) -> Tensor:
    """``x @ weight.T + bias`` [T, E] in ``dtype``: that of ``x`` or float32; or SwiGLU of it
    [T, E / 2].

    1 to `MAX_ROWS` rows in bfloat16 or float16, which fill the units: K is a multiple of 128.
    Inputs in bfloat16 may be from 2^-83 to 2^37. Safe under graph capture.
    """
    rows, outputs = x_TK.shape[0], units.outputs // (2 if is_gated else 1)
    cut = choose_cut(rows, units, is_gated=is_gated)
    out = torch.empty((rows, outputs), dtype=dtype, device=x_TK.device)
    x_TK = aligned_rows(x_TK)
    _, inner_steps, unit_bytes = units.values.shape
    slices = _slices(units, is_gated=is_gated)
    tiles = -(-slices // (cut.slices // (2 if is_gated else 1)))
    blocks = min(tiles, _processors(x_TK.device))
    # With one tile a block, sums take the place of units.
    is_apart = tiles > blocks
    ring, sums = cut.ring_bytes(rows, unit_bytes), cut.sums_bytes
    arguments = _Arguments(
        units.values.data_ptr(), x_TK.data_ptr(), out.data_ptr(),
        0 if bias_E is None else bias_E.data_ptr(), rows, outputs, 2 * x_TK.stride(0),
        inner_steps, slices, tiles, ring if is_apart else 0, int(dtype == torch.float32),
    )  # fmt: skip
    variant = Variant(UnitFormat.of(units, x_TK.dtype), is_gated, cut)
    shared_bytes = ring + sums if is_apart else max(ring, sums)
    kernel = _kernel(variant, shared_bytes, x_TK.device)
    kernel.launch(blocks, torch.cuda.current_stream(x_TK.device).cuda_stream, arguments)
    return out


@functools.lru_cache(maxsize=1024)
def _kernel(variant: Variant, shared_bytes: int, device: torch.device) -> CudaKernel:
    # A module of its own: the limit of shared memory is a property of the module's kernel.
    return CudaModule(variant.compile()).kernel(
        "integer_skinny",
        device,
        num_threads=32 * variant.cut.warps,
        shared_bytes=shared_bytes,
        overlaps=True,
    )


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
