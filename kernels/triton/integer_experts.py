"""A mixture of experts with integer weights on a GPU: grouped products, dequantized in
registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.integer_columns import Columns, narrowest
from trimaran.kernels.integer_reference import stacked_zeros
from trimaran.kernels.integers import IntegerExperts, IntegerWeight
from trimaran.kernels.routing import ExpertForm
from trimaran.kernels.triton.experts import (
    FIXED_ROWS,
    SortedAssignments,
    add_parts,
    find_tile,
    finished,
    form_arguments,
    sort_assignments,
)
from trimaran.kernels.triton.integer_gemm import integer_floats, scale_floats, weight_floats
from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens, D hidden size, X experts of this rank, C experts of a token, N = T C choices
# (token t's c-th choice is number t C + c), F inner width, E = 2 F; of a matrix: K columns
# (inputs, or inputs by groups and padding), S steps of columns, G groups.

_GROUP = 8
"""Tiles of rows that process the same columns at about the same time, for the cache."""

_FULL_TILES = 264
"""Programs from which a product keeps all multiprocessors of the largest GPU busy."""

_MAX_SHARES = 4

_MANTISSA_BITS, _INFINITE = 23, 255
"""The bits of float32 below its exponent, and the exponent of infinity and NaN."""


class Cut(NamedTuple):
    """How a grouped product is cut."""

    rows: int
    """Choices of a program, a power of two from 16 on."""

    columns: int
    """Outputs of a program."""

    shares: int = 1
    """Programs that share the steps of a tile."""

    warps: int = 4
    stages: int = 4


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _with_step(  # type: ignore[no-untyped-def]
    total, lines, scales, zeros, first, second, is_column, BITS: tl.constexpr,
    IS_FP4: tl.constexpr, HAS_ZEROS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``total`` [COLUMNS, ROWS] with one more step, whose inputs are ``first`` and, for 4 bits,
    ``second``."""
    DTYPE: tl.constexpr = first.dtype
    HALF: tl.constexpr = 1 << (BITS - 1)
    words = tl.load(lines)
    scale = scale_floats(tl.load(scales, mask=is_column, other=0))
    zero = tl.full([COLUMNS, 1], HALF, tl.int16)
    if HAS_ZEROS:
        zero = tl.load(zeros, mask=is_column, other=0)[:, None]
    if BITS == 4:
        low = weight_floats(words & 15, zero, IS_FP4, DTYPE)
        part = tl.dot(low, first, input_precision="ieee")
        high = weight_floats(words >> 4, zero, IS_FP4, DTYPE)
        part = tl.dot(high, second, part, input_precision="ieee")
    else:
        part = tl.dot(integer_floats(words, zero, 8, DTYPE), first, input_precision="ieee")
    return total + part * scale[:, None]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _inputs(  # type: ignore[no-untyped-def]
    tokens, order, columns, HAS_ORDER: tl.constexpr
):
    """The inputs [columns, ROWS] at some columns of a matrix; zeros for padding."""
    if HAS_ORDER:
        places = tl.load(order + columns)
        values = tl.load(
            tokens[None, :] + (places - 1)[:, None], mask=(places > 0)[:, None], other=0.0
        )
    else:
        values = tl.load(tokens[None, :] + columns[:, None])
    return values


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sums(  # type: ignore[no-untyped-def]
    tokens, order, lines, scales, zeros, groups, begin, end, is_column, UP: tl.constexpr,
    HEIGHT: tl.constexpr, LINE: tl.constexpr, BITS: tl.constexpr, IS_FP4: tl.constexpr,
    STEP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr,
    IS_GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, ROWS] twice: products of ``lines`` and, if gated, of lines ``UP`` rows below,
    over the steps from ``begin`` to ``end``."""
    BYTES: tl.constexpr = STEP * BITS // 8
    inner = tl.arange(0, BYTES)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(begin, end):
        first = _inputs(tokens, order, step * STEP + inner, HAS_ORDER)
        second = first
        if BITS == 4:
            second = _inputs(tokens, order, step * STEP + BYTES + inner, HAS_ORDER)
        group = tl.load(groups + step).to(tl.int64) * HEIGHT
        total = _with_step(
            total, lines + step * BYTES, scales + group, zeros + group, first, second,
            is_column, BITS, IS_FP4, HAS_ZEROS, COLUMNS,
        )  # fmt: skip
        if IS_GATED:
            up = _with_step(
                up, lines + UP * LINE + step * BYTES, scales + group + UP,
                zeros + group + UP, first, second, is_column, BITS, IS_FP4, HAS_ZEROS, COLUMNS,
            )  # fmt: skip
    return total, up


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _experts_kernel(  # type: ignore[no-untyped-def]
    x, values, scales, zeros, groups, inputs, bias, output, order, totals, routing_weights,
    x_stride, num_groups, OUTPUTS: tl.constexpr, NUM_STEPS: tl.constexpr, CHOSEN: tl.constexpr,
    PADDED: tl.constexpr, BITS: tl.constexpr, IS_FP4: tl.constexpr, STEP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr, IS_GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, s) adds up the s-th share of the steps for ``COLUMNS`` outputs of up to
    ``ROWS`` choices of one expert; with ``ALPHA`` also biases and SwiGLU of `ExpertForm`.

    ``IS_GATED``: SwiGLU of the choices' tokens, in the order by expert; one share. Otherwise:
    products of rows in this order, times the choices' weights; a choice's shares lie side by
    side. Programs behind the last tile end at once.
    """
    NUM_COLUMNS: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.load(totals + tl.arange(0, PADDED))
    last = tl.sum((counts + ROWS - 1) // ROWS, axis=0)
    program, share = tl.program_id(0), tl.program_id(1)
    if program < last * NUM_COLUMNS:
        first_tile = program // (GROUP * NUM_COLUMNS) * GROUP
        height = tl.minimum(last - first_tile, GROUP)
        within = program % (GROUP * NUM_COLUMNS)
        tile = first_tile + within % height
        expert, first_row, count, before = find_tile(counts, tile, PADDED, ROWS)
        expert = expert.to(tl.int64)
        rows = first_row + tl.arange(0, ROWS)
        is_row = rows < count
        rows += before
        assignments = tl.load(order + rows, mask=is_row, other=0)
        source = assignments // CHOSEN if IS_GATED else tl.where(is_row, rows, 0)
        columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < OUTPUTS
        # Columns beyond the end read the first of them, and are not stored.
        columns = tl.where(is_column, columns, 0)
        HEIGHT: tl.constexpr = OUTPUTS * 2 if IS_GATED else OUTPUTS
        BYTES: tl.constexpr = STEP * BITS // 8
        LINE: tl.constexpr = NUM_STEPS * BYTES
        PART: tl.constexpr = (NUM_STEPS + SHARES - 1) // SHARES
        lines = values + (expert * HEIGHT + columns)[:, None] * LINE
        scale_of = expert * num_groups * HEIGHT + columns
        total, up = _sums(
            x + source.to(tl.int64) * x_stride, inputs + expert * NUM_STEPS * STEP,
            lines + tl.arange(0, BYTES)[None, :], scales + scale_of, zeros + scale_of,
            groups + expert * NUM_STEPS, share * PART, min(share * PART + PART, NUM_STEPS),
            is_column, OUTPUTS, HEIGHT, LINE, BITS, IS_FP4, STEP, HAS_ZEROS, HAS_ORDER,
            IS_GATED, ROWS, COLUMNS,
        )  # fmt: skip
        # The first share has the biases.
        total = finished(
            total, up, bias + expert * HEIGHT + columns, is_column & (share == 0),
            routing_weights + assignments, is_row, OUTPUTS, IS_GATED, ALPHA, LIMIT,
        )  # fmt: skip
        target = rows if IS_GATED else assignments * SHARES + share
        place = output + target[None, :].to(tl.int64) * OUTPUTS + columns[:, None]
        is_output = is_row[None, :] & is_column[:, None]
        tl.store(place, total.to(output.dtype.element_ty), mask=is_output)


_multiply = Launcher(_experts_kernel)


def expert_storage(weights: Sequence[IntegerWeight]) -> IntegerExperts:
    """See `Ops.integer_expert_storage` and `expert_mlp`."""
    columns = Columns.of_experts(weights)
    step, bits = columns[0].step, weights[0].bits
    values = torch.stack(
        [own.packed(weight).view(len(weight.values), -1, step * bits // 8)
         for weight, own in zip(weights, columns, strict=True)]
    )  # fmt: skip
    scales = torch.stack([each.scales for each in weights]).transpose(1, 2).contiguous()
    zeros = stacked_zeros(weights)
    orders = [each.order.to(torch.int32) for each in columns if each.order is not None]
    return IntegerExperts(
        values,
        _exponents(scales) if weights[0].is_fp4 else scales.to(narrowest([scales])),
        None if zeros is None else zeros.transpose(1, 2).contiguous(),
        torch.stack([each.groups for each in columns]),
        torch.stack(orders) if orders else None,
        bits,
        step,
        weights[0].is_fp4,
    )


def _exponents(scales: Tensor) -> Tensor:
    """uint8: the exponent bits of scales that are normal powers of two; else the scales in the
    narrowest dtype."""
    bits = scales.view(torch.int32)
    exponents = bits >> _MANTISSA_BITS
    is_power = (exponents << _MANTISSA_BITS == bits) & (exponents > 0) & (exponents < _INFINITE)
    return exponents.to(torch.uint8) if bool(is_power.all()) else scales.to(narrowest([scales]))


def choose_cuts(
    average: int, num_choices: int, shape: tuple[int, int], num_steps: int
) -> tuple[Cut, Cut]:
    """The cuts of the gated product and of the second product, as measured on an H200.

    ``average`` is an expert's likely number of rows, ``shape`` the outputs of the two products,
    ``num_steps`` the steps of the second.
    """
    rows = min(max(padded_size(average), 16), 128)
    narrow, wide = Cut(rows, 64), Cut(rows, 128, warps=8, stages=3)
    if rows > 32:
        return (narrow._replace(stages=3) if rows == 64 else wide), wide
    if num_choices * num_tiles(shape[1], 128) >= _FULL_TILES:
        return narrow, wide
    shares, tiles = 1, num_choices * num_tiles(shape[1], 64)
    while tiles * shares < _FULL_TILES and shares < _MAX_SHARES and num_steps >= 8 * shares:
        shares *= 2
    return narrow, narrow._replace(shares=shares)


FIXED_CUTS = Cut(FIXED_ROWS, 64, stages=3), Cut(FIXED_ROWS, 64, stages=3)
"""Cuts whatever the number of tokens, for results that do not depend on it."""


def expert_mlp(
    x_TD: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up: IntegerExperts,
    down: IntegerExperts,
    first_expert: int = 0,
    form: ExpertForm | None = None,
    cuts: tuple[Cut, Cut] | None = None,
) -> Tensor:
    """The weighted sum of each token's experts; see `Ops.integer_expert_mlp`.

    ``gate_up`` and ``down`` hold values [X, E, S, step] of 8 bits, or [X, E, S, step / 2] of 4,
    where a byte's low half belongs to the first half of a step; scales (or exponents of powers
    of two) and zeros [X, G, E],
    the groups of steps [X, S], and the input of each column plus one [X, K], 0 for padding.

    Rows of ``x`` are contiguous. The host does not read the choices: grids depend on the number
    of tokens alone, so this is safe under CUDA graph capture. With `FIXED_CUTS` a token's
    result does not depend on the other tokens.
    """
    (num_experts, hidden), num_choices = down.values.shape[:2], ids_TC.numel()
    if not num_choices:
        return torch.empty_like(x_TD)
    inner = gate_up.values.shape[1] // 2
    if cuts is None:
        average = num_tiles(num_choices, num_experts)
        num_steps = down.values.shape[2]
        cuts = choose_cuts(average, num_choices, (inner, hidden), num_steps)
    by_expert = sort_assignments(ids_TC, num_experts, first_expert)
    inner_NF = gated_rows(x_TD, by_expert, (gate_up, form), weights_TC, cuts[0])
    choices = weights_TC, ids_TC, first_expert
    return weighted_sums(inner_NF, by_expert, (down, form), choices, cuts[1])


def gated_rows(
    x_TD: Tensor,
    by_expert: SortedAssignments,
    matrices: tuple[IntegerExperts, ExpertForm | None],
    weights_TC: Tensor,
    cut: Cut,
) -> Tensor:
    """SwiGLU of the choices' tokens [N, F], in the order by expert."""
    inner = matrices[0].values.shape[1] // 2
    inner_NF = torch.empty((weights_TC.numel(), inner), dtype=x_TD.dtype, device=x_TD.device)
    _product(cut, by_expert, (x_TD, inner_NF), matrices, weights_TC, is_gated=True)
    return inner_NF


def weighted_sums(
    inner_NF: Tensor,
    by_expert: SortedAssignments,
    matrices: tuple[IntegerExperts, ExpertForm | None],
    choices: tuple[Tensor, Tensor, int],
    cut: Cut,
) -> Tensor:
    """The sums [T, D] of each token's products; ``choices`` are their weights and ids [T, C],
    and the rank's first expert."""
    weights_TC, ids_TC, first_expert = choices
    num_experts, hidden = matrices[0].values.shape[:2]
    rows = ids_TC.numel() * cut.shares
    parts_ND = torch.empty((rows, hidden), dtype=torch.float32, device=inner_NF.device)
    _product(cut, by_expert, (inner_NF, parts_ND), matrices, weights_TC, is_gated=False)
    return add_parts(parts_ND, ids_TC, num_experts, first_expert, inner_NF)


def _product(
    cut: Cut,
    by_expert: SortedAssignments,
    operands: tuple[Tensor, Tensor],
    matrices: tuple[IntegerExperts, ExpertForm | None],
    weights_TC: Tensor,
    *,
    is_gated: bool,
) -> None:
    """One of the two grouped products: ``operands`` are rows and the output."""
    x, output = operands
    experts, form = matrices
    bias, alpha, limit = form_arguments(form, experts.values, is_gated=is_gated)
    num_experts, _, num_steps = experts.values.shape[:3]
    outputs, num_choices = output.shape[1], weights_TC.numel()
    assert experts.scales is not None and experts.groups is not None
    # Each expert with rows has at most one tile that is not full.
    tiles = num_choices // cut.rows + min(num_experts, num_choices)
    # An unread tensor replaces an absent tensor.
    args = (
        x, experts.values, experts.scales,
        experts.scales if experts.zeros is None else experts.zeros, experts.groups,
        experts.groups if experts.order is None else experts.order, bias, output,
        by_expert.order, by_expert.totals, weights_TC, x.stride(0), experts.scales.shape[1],
    )  # fmt: skip
    constants = (
        outputs, num_steps, weights_TC.shape[1], padded_size(num_experts), experts.bits,
        experts.is_fp4, experts.step, experts.zeros is not None, experts.order is not None,
        is_gated, alpha, limit, cut.shares, cut.rows, cut.columns, _GROUP,
    )  # fmt: skip
    grid = (tiles * num_tiles(outputs, cut.columns), cut.shares)
    _multiply(grid, args, constants, num_warps=cut.warps, num_stages=cut.stages)
