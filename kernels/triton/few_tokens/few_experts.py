"""A mixture of experts for few tokens: each choice reads its expert's matrix separately."""

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
from trimaran.kernels.triton.skinny import prefetch

# Shapes: T tokens, D hidden size, X experts of this rank, C experts of a token, N = T C choices
# (token t's c-th choice is number t C + c), F inner width, E = 2 F.

_SPREAD = 3
"""Experts for each choice above which tokens seldom share an expert; sorted choices would
read a shared matrix once.
"""

_ROWS = 16
"""The minimum rows of the matrix units; one of them is a token's."""

_GATED_COLUMNS, _GATED_STAGES = 32, 3
_COLUMNS, _STEP, _STAGES, _AHEAD = 64, 128, 8, 4
_SUM_TILE = 1024


@triton.jit(do_not_specialize=["first_expert"])  # type: ignore[untyped-decorator,unused-ignore]
def _gated_kernel(  # type: ignore[no-untyped-def]
    x, ids, weight, output, x_stride, first_expert, INNER: tl.constexpr,
    OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (i, p) computes the i-th ``COLUMNS`` values of SwiGLU of choice p's token."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.program_id(1)
    if OVERLAPS:
        gdc_wait()
        # Not before this point: the following kernel reads the choices before its wait.
        gdc_launch_dependents()
    expert = tl.load(ids + place) - first_expert
    if (expert >= 0) & (expert < EXPERTS):
        inner, rows = tl.arange(0, STEP), tl.arange(0, ROWS)
        gates = weight + (expert.to(tl.int64) * 2 * OUTPUTS + columns)[:, None] * INNER
        source = gates + inner[None, :]
        token = x + (place // CHOSEN).to(tl.int64) * x_stride
        values_at = token + inner[:, None] + 0 * rows[None, :]
        is_row = (rows == 0)[None, :]
        gate = tl.zeros([COLUMNS, ROWS], tl.float32)
        up = tl.zeros([COLUMNS, ROWS], tl.float32)
        for first in range(0, INNER, STEP):
            values = tl.load(values_at + first, mask=is_row, other=0.0)
            gate = tl.dot(tl.load(source + first), values, gate)
            up = tl.dot(tl.load(source + OUTPUTS * INNER + first), values, up)
        result = gate / (1.0 + tl.exp(-gate)) * up
        target = output + place * OUTPUTS + columns[:, None] + 0 * rows[None, :]
        tl.store(target, result.to(output.dtype.element_ty), mask=is_row)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _owned(  # type: ignore[no-untyped-def]
    ids, first_expert, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """A token's experts as this rank numbers them, and 1 for each expert that this rank has."""
    choices = tl.arange(0, PADDED)
    own = tl.load(ids + choices, mask=choices < CHOSEN, other=-1) - first_expert
    is_own = (choices < CHOSEN) & (own >= 0) & (own < EXPERTS)
    return own, is_own.to(tl.int32)


@triton.jit(do_not_specialize=["first_expert"])  # type: ignore[untyped-decorator,unused-ignore]
def _down_kernel(  # type: ignore[no-untyped-def]
    x, ids, routing_weights, weight, parts, first_expert, INNER: tl.constexpr,
    OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (i, t C + s) computes the s-th part of token t's i-th ``COLUMNS`` outputs.

    A token has as many parts as choices. Programs for other ranks' experts compute parts of
    this rank's experts instead: each expert of this rank has its inner dimension split equally.
    Half as many experts therefore take half as long.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token, slot = tl.program_id(1) // CHOSEN, tl.program_id(1) % CHOSEN
    if OVERLAPS:
        gdc_launch_dependents()
    # The choices were complete before the preceding kernel let this one begin.
    own, is_own = _owned(ids + token * CHOSEN, first_expert, EXPERTS, CHOSEN, PADDED)
    num_own = tl.sum(is_own)
    cuts = CHOSEN // tl.maximum(num_own, 1)
    is_mine = (is_own > 0) & (tl.cumsum(is_own) - 1 == slot // cuts)
    choice = tl.sum(tl.where(is_mine, tl.arange(0, PADDED), 0))
    expert = tl.sum(tl.where(is_mine, own, 0))
    is_used = slot < num_own * cuts
    steps = (INNER // STEP + cuts - 1) // cuts * STEP
    begin = slot % cuts * steps
    line = weight + (expert.to(tl.int64) * OUTPUTS + columns)[:, None] * INNER + begin
    if OVERLAPS:
        if is_used & (begin + 64 * AHEAD <= INNER):
            # A cache line holds 64 values.
            prefetch(line + 64 * tl.arange(0, AHEAD)[None, :])
        gdc_wait()
    if is_used:
        place = token * CHOSEN + choice
        inner, rows = tl.arange(0, STEP), tl.arange(0, ROWS)
        source = line + inner[None, :]
        values_at = x + place * INNER + begin + inner[:, None] + 0 * rows[None, :]
        is_row = (rows == 0)[None, :]
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for first in range(0, tl.minimum(steps, INNER - begin), STEP):
            values = tl.load(values_at + first, mask=is_row, other=0.0)
            total = tl.dot(tl.load(source + first), values, total)
        total *= tl.load(routing_weights + place)
        part = (token * CHOSEN + slot) * OUTPUTS
        target = parts + part + columns[:, None] + 0 * rows[None, :]
        tl.store(target, total, mask=is_row)


@triton.jit(do_not_specialize=["first_expert"])  # type: ignore[untyped-decorator,unused-ignore]
def _sum_kernel(  # type: ignore[no-untyped-def]
    parts, ids, output, first_expert, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, i) adds up the parts of token t's i-th tile."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < WIDTH
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    _, is_own = _owned(ids + token * CHOSEN, first_expert, EXPERTS, CHOSEN, PADDED)
    num_own = tl.sum(is_own)
    num_used = CHOSEN // tl.maximum(num_own, 1) * num_own
    total = tl.zeros((TILE,), tl.float32)
    for slot in tl.static_range(CHOSEN):
        source = parts + (token * CHOSEN + slot) * WIDTH + columns
        total += tl.load(source, mask=is_column & (slot < num_used), other=0.0)
    target = output + token * WIDTH + columns
    tl.store(target, total.to(output.dtype.element_ty), mask=is_column)


_gated = Launcher(_gated_kernel)
_down = Launcher(_down_kernel)
_sum = Launcher(_sum_kernel)


def can_stream(num_tokens: int, num_chosen: int, gate_up_XED: Tensor) -> bool:
    """Whether the experts of a number of tokens are supported here, and faster than sorted.

    Measured on an H200 in a CUDA graph, in microseconds, against the sorted products of
    `kernels.experts`. One token of Mixtral's shape: two experts of a rank 172 and 179, halves
    of two 90 and 102, one of two 89 and 118. Six of 64 experts of 2,048 x 1,408: one token 34
    and 45, two 59 and 64, three 84 and 88, four 106 and 106. Two tokens of Mixtral: 326 and
    306.
    """
    num_experts, outputs, hidden = gate_up_XED.shape
    is_whole = outputs // 2 % _STEP == 0 and hidden % _STEP == 0
    are_few = num_tokens == 1 or 0 < _SPREAD * num_tokens * num_chosen <= num_experts
    return are_few and is_whole and gate_up_XED.dtype.itemsize == 2


def stream_experts(
    x_TD: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up_XED: Tensor,
    down_XDF: Tensor,
    first_expert: int = 0,
) -> Tensor:
    """The weighted sum of each token's experts; see `Ops.expert_mlp`.

    bf16 or float16, sums in float32, for shapes that `can_stream` allows. Rows of ``x`` are
    contiguous, all other tensors are fully contiguous. Choices are not sorted: a program looks
    up its choice's expert, and ends at once if the expert belongs to another rank. Safe under
    CUDA graph capture.
    """
    (num_tokens, hidden), num_chosen = x_TD.shape, ids_TC.shape[1]
    num_experts, _, inner = down_XDF.shape
    num_assignments, device = num_tokens * num_chosen, x_TD.device
    inner_NF = torch.empty((num_assignments, inner), dtype=x_TD.dtype, device=device)
    step = 2 * _STEP if hidden % (2 * _STEP) == 0 else _STEP
    _gated(
        (inner // _GATED_COLUMNS, num_assignments),
        (x_TD, ids_TC, gate_up_XED, inner_NF, x_TD.stride(0), first_expert),
        (hidden, inner, num_experts, num_chosen, _ROWS, _GATED_COLUMNS, step),
        num_stages=_GATED_STAGES,
    )
    parts_ND = torch.empty((num_assignments, hidden), dtype=torch.float32, device=device)
    choices = (num_experts, num_chosen, padded_size(num_chosen))
    _down(
        (hidden // _COLUMNS, num_assignments),
        (inner_NF, ids_TC, weights_TC, down_XDF, parts_ND, first_expert),
        (inner, hidden, *choices, _ROWS, _COLUMNS, _STEP, _AHEAD),
        num_stages=_STAGES,
    )
    output_TD = torch.empty((num_tokens, hidden), dtype=x_TD.dtype, device=device)
    tile = min(padded_size(hidden), _SUM_TILE)
    args = (parts_ND, ids_TC, output_TD, first_expert)
    _sum((num_tokens, num_tiles(hidden, tile)), args, (hidden, *choices, tile))
    return output_TD
