"""MoE permutation on a GPU: rows of tokens to rows of their experts, and back."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens, D hidden size, C experts of a token, N = T C rows in the order of experts.

_TILE = 1024


@triton.jit(do_not_specialize=["x_stride"])  # type: ignore[untyped-decorator,unused-ignore]
def _permute_kernel(  # type: ignore[no-untyped-def]
    x, positions, permuted, x_stride, WIDTH: tl.constexpr, CHOSEN: tl.constexpr,
    TILE: tl.constexpr, SORTED_FIRST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, i) copies the i-th tile of token t to the rows of its experts.

    ``SORTED_FIRST``: the next kernel begins when the kernel before this one has ended.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < WIDTH
    if OVERLAPS:
        if not SORTED_FIRST:
            gdc_launch_dependents()
        gdc_wait()
        if SORTED_FIRST:
            gdc_launch_dependents()
    values = tl.load(x + token * x_stride + columns, mask=is_column)
    for place in tl.static_range(CHOSEN):
        position = tl.load(positions + token * CHOSEN + place).to(tl.int64)
        tl.store(
            permuted + position * WIDTH + columns, values, mask=is_column & (position >= 0)
        )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _unpermute_kernel(  # type: ignore[no-untyped-def]
    parts, positions, shares, output, WIDTH: tl.constexpr, CHOSEN: tl.constexpr,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, i) adds up the i-th tile of the outputs of token t's experts on this rank."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < WIDTH
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((TILE,), tl.float32)
    for place in tl.static_range(CHOSEN):
        position = tl.load(positions + token * CHOSEN + place).to(tl.int64)
        share = tl.load(shares + token * CHOSEN + place)
        source = parts + position * WIDTH + columns
        part = tl.load(source, mask=is_column & (position >= 0), other=0.0)
        total += part.to(tl.float32) * share
    target = output + token * WIDTH + columns
    tl.store(target, total.to(output.dtype.element_ty), mask=is_column)


_permute = Launcher(_permute_kernel)
_unpermute = Launcher(_unpermute_kernel)


def permute_rows(x_TD: Tensor, positions_TC: Tensor, *, sorted_first: bool = False) -> Tensor:
    """Each token's row at all of its positions, [N, D]; other rows are uninitialised.

    Rows of ``x`` are contiguous; positions are int32, negative for experts of other ranks.
    ``sorted_first``: the kernel after this one may read at once what the sort before has
    written.
    """
    (num_tokens, width), num_chosen = x_TD.shape, positions_TC.shape[1]
    permuted = torch.empty(
        (num_tokens * num_chosen, width), dtype=x_TD.dtype, device=x_TD.device
    )
    tile = min(padded_size(width), _TILE)
    args = (x_TD, positions_TC, permuted, x_TD.stride(0))
    constants = width, num_chosen, tile, sorted_first
    _permute((num_tokens, num_tiles(width, tile)), args, constants)
    return permuted


def unpermute_rows(parts_ND: Tensor, positions_TC: Tensor, weights_TC: Tensor) -> Tensor:
    """The weighted sum of the rows at each token's positions, in float32, rounded once."""
    (num_tokens, num_chosen), width = positions_TC.shape, parts_ND.shape[1]
    output = torch.empty((num_tokens, width), dtype=parts_ND.dtype, device=parts_ND.device)
    tile = min(padded_size(width), _TILE)
    args = (parts_ND, positions_TC, weights_TC, output)
    _unpermute((num_tokens, num_tiles(width, tile)), args, (width, num_chosen, tile))
    return output
