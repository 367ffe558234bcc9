"""Activations on a GPU, and the embedding lookup."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.triton.launch import Launcher, num_tiles

# Shapes: T tokens, D width, E = 2 F gate and up, V rows of a table.

_TILE = 1024
_VECTOR_TILE = 2048
"""Tile of the lookup: 8,192 vectors of 6,144 values take 51 us on an H200, by tiles of 1,024
60; few vectors take equally long.
"""

CODES = {"silu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "gelu": 2, "relu": 3}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def activate(x, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation of float32 values, by its number in ``CODES``."""
    if CODE == 0:
        return x / (1.0 + tl.exp(-x))
    elif CODE == 1:
        # 0.5 (1 + tanh(z)) is the logistic function of 2 z; z has sqrt(2 / pi).
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif CODE == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return tl.where(x < 0.0, 0.0, x)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_up, output, row_stride, width, TILE: tl.constexpr, CODE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, i) computes the i-th tile of row t."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_dim = dims < width
    source = gate_up + row * row_stride + dims
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(source, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=is_dim, other=0.0).to(tl.float32)
    value = activate(gate, CODE) * up
    tl.store(output + row * width + dims, value.to(output.dtype.element_ty), mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _activation_kernel(  # type: ignore[no-untyped-def]
    x, output, row_stride, width, TILE: tl.constexpr, CODE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_dim = dims < width
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * row_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    value = activate(value, CODE)
    tl.store(output + row * width + dims, value.to(output.dtype.element_ty), mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _embed_kernel(  # type: ignore[no-untyped-def]
    ids, table, output, first_row, num_rows, width, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if OVERLAPS:
        # The order matters: kernels that begin early after this kernel find the step's integers
        # complete.
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(ids + token).to(tl.int64) - first_row
    is_here = (row >= 0) & (row < num_rows)
    value = tl.load(table + row * width + dims, mask=is_here & (dims < width), other=0.0)
    tl.store(output + token * width + dims, value, mask=dims < width)


_gated = Launcher(_gated_kernel)
_activation = Launcher(_activation_kernel)
_embed = Launcher(_embed_kernel)


def gated_activation(gate_up_TE: Tensor, name: str) -> Tensor:
    """``act(gate) * up`` of the halves of the last dim, in float32, rounded once.

    The last dim is contiguous, rows have any stride. ``name`` is ``silu`` or a name that
    `activation` takes. Safe under CUDA graph capture, as all of this file.
    """
    rows, width = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    output = torch.empty((rows, width), dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    args = (gate_up_TE, output, gate_up_TE.stride(0), width)
    _gated((rows, num_tiles(width, _TILE)), args, (_TILE, CODES[name]))
    return output


def silu_and_mul(gate_up_TE: Tensor) -> Tensor:
    """``silu(gate) * up`` of the halves of the last dim."""
    return gated_activation(gate_up_TE, "silu")


def activation(x_TD: Tensor, name: str) -> Tensor:
    """``gelu_new`` or ``gelu_pytorch_tanh`` (tanh form), ``gelu`` (exact) or ``relu``."""
    rows, width = x_TD.shape
    output = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    args = (x_TD, output, x_TD.stride(0), width)
    _activation((rows, num_tiles(width, _TILE)), args, (_TILE, CODES[name]))
    return output


def embed(ids_T: Tensor, table_VD: Tensor, first_row: int | None = None) -> Tensor:
    """The rows ``ids`` of a contiguous table, or ``ids - first_row``; zeros for ids outside the
    table.

    Kernels after this kernel begin only after the preceding kernels have ended. They may
    therefore read results of the preceding kernels, such as the step's integers, at once.
    """
    tokens, (num_rows, width) = ids_T.shape[0], table_VD.shape
    output = torch.empty((tokens, width), dtype=table_VD.dtype, device=table_VD.device)
    args = (ids_T, table_VD, output, first_row or 0, num_rows, width)
    _embed((tokens, num_tiles(width, _VECTOR_TILE)), args, (_VECTOR_TILE,))
    return output
