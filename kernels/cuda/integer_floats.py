"""Integer weights as floats, for products of so many rows that torch's are faster."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import CudaKernel, CudaModule
from trimaran.kernels.cuda.integer_units import UNIT_INPUTS, UNIT_OUTPUTS, UnitFormat, Units

# Shapes: E outputs, K columns of whole units.

_THREADS = 128


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("units", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("inner_steps", ctypes.c_int),
    )


def compile_floats(chosen: UnitFormat) -> bytes:
    """Machine code, from the cache or compiled now."""
    return load_cubin("integer_floats", "sm_90a", chosen.defines)


def dequantize(units: Units, dtype: torch.dtype) -> Tensor:
    """The weight [E, K] in ``dtype``, bfloat16 or float16: float32 products of integers and
    scales, rounded once. Columns beyond the weight's own are arbitrary.

    Safe under graph capture.
    """
    tiles, steps, _ = units.values.shape
    out = torch.empty(
        (tiles * UNIT_OUTPUTS, steps * UNIT_INPUTS), dtype=dtype, device=units.values.device
    )
    arguments = _Arguments(units.values.data_ptr(), out.data_ptr(), steps)
    kernel = _kernel(UnitFormat.of(units, dtype), out.device)
    stream = torch.cuda.current_stream(out.device).cuda_stream
    kernel.launch(tiles * steps, stream, arguments)
    return out[: units.outputs]


@functools.cache
def _kernel(chosen: UnitFormat, device: torch.device) -> CudaKernel:
    module = CudaModule(compile_floats(chosen))
    return module.kernel("integer_floats", device, num_threads=_THREADS)
