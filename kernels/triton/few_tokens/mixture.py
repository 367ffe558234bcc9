"""A mixture of experts for few tokens, with its norm, router and shared experts, in three
launches.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.reference import WEIGHT_EPSILON
from trimaran.kernels.routing import (
    ExpertCounter,
    ExpertRouting,
    MixtureInput,
    MixtureWeights,
)
from trimaran.kernels.triton.launch import Launcher, padded_size
from trimaran.kernels.triton.norm import norm_warps
from trimaran.kernels.triton.skinny import prefetch

# Shapes: T tokens, D hidden size, X experts, C experts of a token, F inner width, E = 2 F, S
# shared experts, N = C + S experts that compute for a token.

_MAX_EXPERTS = 128
"""Each program compares each two logits of its token, in less time than a launch takes."""

_LINE = 64
"""Values of a cache line."""


_MAX_INNER = 4096
"""Wider experts gain nothing: for one token of Mixtral's shape the norm, the router and the
experts take 177 us here, and 176 in separate launches.
"""

_GATED_COLUMNS, _GATED_STEP = 16, 256
_COLUMNS, _STEP, _STAGES = 64, 128, 4
"""Outputs of a program, and inner values in a step of its loop. With the norm and the router a
layer of one token takes on an H200 25.9 us for 8 of 128 experts of 768 by 2,048 (32.1 in
separate launches; the weights alone 17.8), and 41.4 for 6 of 64 experts of 1,408 by 2,048 with
two shared ones (50.9; 32.6). With matrix units for gates and ups: 26.9 and 41.6 at best, and
with other tiles up to 54 and 67.
"""

_ROWS = 16
"""The minimum rows of the matrix units; one of them is a token's."""

_AHEAD = 4
"""Cache lines of each row of a matrix that a program requests before its input is ready."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _normed_logits_kernel(  # type: ignore[no-untyped-def]
    x, residual, norm, router, normed, total, logits, part_stride, x_stride, residual_stride,
    eps, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, e) computes the e-th logit of row t, whose sum and norm program (t, 0)
    stores. The residual keeps its values, since other programs read them at any time.
    """
    row, expert = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, PADDED)
    is_dim = dims < WIDTH
    if OVERLAPS:
        gdc_launch_dependents()
    line = tl.load(router + expert * WIDTH + dims, mask=is_dim, other=0.0)
    scale = tl.load(norm + dims, mask=is_dim, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_wait()
    value = tl.load(residual + row * residual_stride + dims, mask=is_dim, other=0.0)
    if PARTS > 0:
        source = x + row * x_stride + dims
        added = tl.load(source, mask=is_dim, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(source + part * part_stride, mask=is_dim, other=0.0)
        value = (added + value.to(tl.float32)).to(value.dtype)
    floats = value.to(tl.float32)
    floats *= tl.rsqrt(tl.sum(floats * floats, 0) / WIDTH + eps) * scale
    result = floats.to(normed.dtype.element_ty)
    logit = tl.sum(result.to(tl.float32) * line.to(tl.float32), axis=0)
    tl.store(logits + row * EXPERTS + expert, logit)
    if expert == 0:
        tl.store(total + row * WIDTH + dims, value, mask=is_dim)
        tl.store(normed + row * WIDTH + dims, result, mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _choice(  # type: ignore[no-untyped-def]
    logits, token, slot, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, IS_NORMALISED: tl.constexpr, SCALING: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """A token's ``slot``-th best expert and its weight; see `Ops.choose_experts`.

    An expert's rank is the number of experts with larger logits. The first of equal experts
    is the better one.
    """
    row, experts = logits + token * EXPERTS, tl.arange(0, PADDED)
    theirs, ours = experts[None, :], experts[:, None]
    other = tl.load(row + theirs, mask=theirs < EXPERTS, other=float("-inf"))
    own = tl.load(row + ours, mask=ours < EXPERTS, other=float("-inf"))
    is_better = (other > own) | ((other == own) & (theirs < ours))
    rank = tl.sum(is_better.to(tl.int32), axis=1)
    values = tl.load(row + experts, mask=experts < EXPERTS, other=float("-inf"))
    if IS_SOFTMAX:
        scores = tl.exp(values - tl.max(values, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-values))
    is_mine = rank == slot
    # At most the last expert even if logits are NaN: the result is used as an index.
    expert = tl.minimum(tl.sum(tl.where(is_mine, experts, 0), axis=0), EXPERTS - 1)
    share = tl.sum(tl.where(is_mine, scores, 0.0), axis=0)
    if IS_NORMALISED:
        share = share / (tl.sum(tl.where(rank < CHOSEN, scores, 0.0), axis=0) + EPSILON)
    return expert, share * SCALING


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gated_kernel(  # type: ignore[no-untyped-def]
    x, logits, weight, shared, output, counts, num_tokens, x_stride, INNER: tl.constexpr,
    OUTPUTS: tl.constexpr, SHARED: tl.constexpr, IS_COUNTED: tl.constexpr,
    HAS_PADDING: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    CHOSEN: tl.constexpr, IS_SOFTMAX: tl.constexpr, IS_NORMALISED: tl.constexpr,
    SCALING: tl.constexpr, EPSILON: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (i, n T + t) computes the i-th ``COLUMNS`` values of SwiGLU of token t's n-th
    expert. The first experts are the shared ones, which need no choice: their matrices are read
    while the logits are made. They lie in one matrix of ``SHARED`` times the width.
    """
    place, num_rows = tl.program_id(1), tl.num_programs(1) // (CHOSEN + SHARED)
    slot, token = place // num_rows, place % num_rows
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if slot >= SHARED:
        if OVERLAPS:
            gdc_wait()
            # Not before this point: the following kernel reads the logits before its wait.
            gdc_launch_dependents()
        expert, _ = _choice(
            logits, token, slot - SHARED, EXPERTS, PADDED, CHOSEN, IS_SOFTMAX, IS_NORMALISED,
            SCALING, EPSILON,
        )  # fmt: skip
        if IS_COUNTED:
            is_real = tl.program_id(0) == 0
            if HAS_PADDING:
                is_real = is_real & (token < tl.load(num_tokens))
            one = tl.full((), 1, tl.int64)
            tl.atomic_add(counts + expert, one, mask=is_real, sem="relaxed")
        gates = weight + expert.to(tl.int64) * (2 * OUTPUTS * INNER)
        to_ups = tl.full((), OUTPUTS * INNER, tl.int32)
    else:
        gates = shared + slot.to(tl.int64) * (OUTPUTS * INNER)
        to_ups = tl.full((), SHARED * OUTPUTS * INNER, tl.int32)
        if OVERLAPS:
            # A cache line holds 64 values.
            lines = gates + columns[:, None] * INNER + 64 * tl.arange(0, AHEAD)[None, :]
            prefetch(lines)
            prefetch(lines + to_ups)
            gdc_wait()
            gdc_launch_dependents()
    inner = tl.arange(0, STEP)
    source, values_at = gates + columns[:, None] * INNER, x + token.to(tl.int64) * x_stride
    gate = tl.zeros([COLUMNS, STEP], tl.float32)
    up = tl.zeros([COLUMNS, STEP], tl.float32)
    # Unrolled, so that the loads of several steps are in flight.
    for first in tl.static_range(0, INNER, STEP):
        values = tl.load(values_at + inner + first).to(tl.float32)[None, :]
        lower = tl.load(source + inner[None, :] + first)
        upper = tl.load(source + inner[None, :] + to_ups + first)
        gate += lower.to(tl.float32) * values
        up += upper.to(tl.float32) * values
    gate, up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + place * OUTPUTS + columns, result.to(output.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _down_kernel(  # type: ignore[no-untyped-def]
    x, logits, weight, shared, parts, INNER: tl.constexpr, OUTPUTS: tl.constexpr,
    SHARED: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, IS_NORMALISED: tl.constexpr, SCALING: tl.constexpr,
    EPSILON: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (i, n T + t) computes the i-th ``COLUMNS`` outputs of token t's n-th expert,
    times the expert's weight.
    """
    place, num_rows = tl.program_id(1), tl.num_programs(1) // (CHOSEN + SHARED)
    slot, token = place // num_rows, place % num_rows
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if OVERLAPS:
        gdc_launch_dependents()
    # The logits were complete before the preceding kernel let this one begin.
    if slot >= SHARED:
        expert, share = _choice(
            logits, token, slot - SHARED, EXPERTS, PADDED, CHOSEN, IS_SOFTMAX, IS_NORMALISED,
            SCALING, EPSILON,
        )  # fmt: skip
        matrix = weight + expert.to(tl.int64) * (OUTPUTS * INNER)
        pitch = tl.full((), INNER, tl.int32)
    else:
        share = tl.full((), 1.0, tl.float32)
        matrix = shared + slot.to(tl.int64) * INNER
        pitch = tl.full((), SHARED * INNER, tl.int32)
    line = matrix + columns[:, None] * pitch
    if OVERLAPS:
        prefetch(line + 64 * tl.arange(0, AHEAD)[None, :])
        gdc_wait()
    inner, rows = tl.arange(0, STEP), tl.arange(0, ROWS)
    values_at = x + place * INNER + inner[:, None] + 0 * rows[None, :]
    is_row = (rows == 0)[None, :]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in range(0, INNER, STEP):
        values = tl.load(values_at + first, mask=is_row, other=0.0)
        sums = tl.dot(tl.load(line + inner[None, :] + first), values, sums)
    total = tl.sum(sums, axis=1) * share
    tl.store(parts + place.to(tl.int64) * OUTPUTS + columns, total)


_normed_logits = Launcher(_normed_logits_kernel)
_gated = Launcher(_gated_kernel)
_down = Launcher(_down_kernel)


def can_mix(routing: ExpertRouting, weights: MixtureWeights) -> bool:
    """Whether `stream_mixture` takes experts of these shapes and this rule."""
    num_experts, hidden, inner = weights.routed.down.shape
    if routing.num_groups > 1 or num_experts > _MAX_EXPERTS or inner > _MAX_INNER:
        return False
    if weights.shared is not None and weights.shared.down.shape[1] % inner:
        return False
    is_whole = not (hidden % _GATED_STEP or inner % _STEP or inner < _AHEAD * _LINE)
    return is_whole and weights.router.dtype.itemsize == 2


def normed_logits(rows: MixtureInput, router_XD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The norm [T, D] of addend plus residual, the router's float32 logits [T, X] of it, and
    the sum itself.

    For few rows, since each output's program normalises its row. Rows are contiguous, the
    router fully. bf16 or float16. Safe under CUDA graph capture.
    """
    addend, residual_TD, norm_D, eps = rows
    (tokens, hidden), num_experts = residual_TD.shape, router_XD.shape[0]
    normed_TD, total_TD = (torch.empty_like(residual_TD) for _ in range(2))
    logits_TX = torch.empty(
        (tokens, num_experts), dtype=torch.float32, device=residual_TD.device
    )
    parts, part_stride = 0, 0
    x = residual_TD if addend is None else addend
    if addend is not None:
        parts, part_stride = (1, 0) if addend.dim() == 2 else (len(addend), addend.stride(0))
    args = (
        x, residual_TD, norm_D, router_XD, normed_TD, total_TD, logits_TX, part_stride,
        x.stride(-2), residual_TD.stride(0), eps,
    )  # fmt: skip
    padded = padded_size(hidden)
    constants = hidden, num_experts, padded, parts
    _normed_logits((tokens, num_experts), args, constants, norm_warps(padded))
    return normed_TD, logits_TX, total_TD


def stream_mixture(
    x_TD: Tensor,
    logits_TX: Tensor,
    routing: ExpertRouting,
    weights: MixtureWeights,
    counter: ExpertCounter | None = None,
) -> Tensor:
    """Float32 parts [N, T, D], one for each expert of a token, whose sum is the mixture.

    bf16 or float16 with float32 logits, sums in float32, for shapes and rules that `can_mix`
    allows. Rows of ``x`` are contiguous, all other tensors are fully contiguous. Every program
    finds the expert of its choice itself. Safe under CUDA graph capture.
    """
    (gate_up_XED, down_XDF), shared = weights.routed, weights.shared
    tokens, (num_experts, hidden, inner) = x_TD.shape[0], down_XDF.shape
    num_shared = 0 if shared is None else shared.down.shape[1] // inner
    chosen = routing.num_chosen
    slots = chosen + num_shared
    rule = (
        num_experts, padded_size(num_experts), chosen, routing.scoring == "softmax",
        routing.is_normalised, routing.scaling, WEIGHT_EPSILON,
    )  # fmt: skip
    inner_NF = torch.empty((tokens * slots, inner), dtype=x_TD.dtype, device=x_TD.device)
    counts = logits_TX if counter is None else counter.counts
    num_real = None if counter is None else counter.num_tokens
    # Unread where there are none, but Triton needs a pointer.
    gates, downs = (gate_up_XED, down_XDF) if shared is None else shared
    args = (
        x_TD, logits_TX, gate_up_XED, gates, inner_NF, counts,
        logits_TX if num_real is None else num_real, x_TD.stride(0),
    )  # fmt: skip
    counted = counter is not None, num_real is not None
    of_gated = (
        hidden, inner, num_shared, *counted, *rule, _GATED_COLUMNS, _GATED_STEP, _AHEAD,
    )  # fmt: skip
    _gated((inner // _GATED_COLUMNS, tokens * slots), args, of_gated)
    parts_NTD = torch.empty((slots, tokens, hidden), dtype=torch.float32, device=x_TD.device)
    of_down = inner, hidden, num_shared, *rule, _ROWS, _COLUMNS, _STEP, _AHEAD
    inputs = inner_NF, logits_TX, down_XDF, downs, parts_NTD
    _down((hidden // _COLUMNS, tokens * slots), inputs, of_down, num_stages=_STAGES)
    return parts_NTD
