"""The choice of each token's experts on a GPU, in one launch."""

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
from trimaran.kernels.routing import ExpertCounter, ExpertRouting, ExpertSlotTable
from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens, X experts, C experts of a token.

_ROWS = 4
"""Tokens of a program."""

_FEW = 32


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _leave_best_groups(  # type: ignore[no-untyped-def]
    ranked, experts, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """``ranked``, minus infinity outside of each row's best groups."""
    groups = tl.arange(0, PADDED_GROUPS)[None, :]
    totals = tl.full((ROWS, PADDED_GROUPS), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        members = tl.where(experts // GROUP_SIZE == group, ranked, float("-inf"))
        total = tl.zeros((ROWS,), tl.float32)
        for _ in tl.static_range(RANKED):
            total += tl.max(members, axis=1)
            best = tl.argmax(members, axis=1)
            members = tl.where(experts == best[:, None], float("-inf"), members)
        totals = tl.where(groups == group, total[:, None], totals)
    left = tl.full(ranked.shape, float("-inf"), tl.float32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        group = tl.argmax(totals, axis=1)[:, None]
        left = tl.where(experts // GROUP_SIZE == group, ranked, left)
        totals = tl.where(groups == group, float("-inf"), totals)
    return left


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _slots_of(  # type: ignore[no-untyped-def]
    chosen, choices, source, table, num_copies, PARTS: tl.constexpr,
):  # fmt: skip
    """Slots of the chosen experts; see `Ops.choose_experts`."""
    bits = tl.load(source).to(tl.float32).to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    # Unsigned: drawn number plus choice may exceed the signed range.
    copies = (bits + choices.to(tl.uint32)) % tl.load(num_copies + chosen).to(tl.uint32)
    return tl.load(table + chosen * PARTS + copies.to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits, bias, weights, ids, counts, num_tokens, table, num_copies, row_stride, num_rows,
    IS_COUNTED: tl.constexpr, HAS_PADDING: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED: tl.constexpr, CHOSEN: tl.constexpr, CHOICES: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, IS_NORMALISED: tl.constexpr,
    SCALING: tl.constexpr, EPSILON: tl.constexpr, GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, RANKED: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i chooses the experts of the i-th ``ROWS`` tokens; ``PARTS`` 0: no table."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_rows)[:, None]
    experts = tl.arange(0, PADDED)[None, :]
    is_expert = experts < EXPERTS
    choices = tl.arange(0, CHOICES)[None, :]
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    # Rows after the last row repeat the last row, so that no sum is empty.
    source = logits + tl.minimum(rows, num_rows - 1)[:, None] * row_stride
    values = tl.load(source + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    if IS_SOFTMAX:
        powers = tl.exp(values - tl.max(values, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    else:
        scores = 1.0 / (1.0 + tl.exp(-values))
    ranked = tl.where(is_expert, scores, float("-inf"))
    if HAS_BIAS:
        ranked += tl.load(bias + experts, mask=is_expert, other=0.0)
    if GROUPS > 1:
        ranked = _leave_best_groups(
            ranked, experts, ROWS, GROUPS, EXPERTS // GROUPS, PADDED_GROUPS, CHOSEN_GROUPS,
            RANKED,
        )  # fmt: skip
    shares = tl.zeros((ROWS, CHOICES), tl.float32)
    chosen = tl.zeros((ROWS, CHOICES), tl.int32)
    num_counted = num_rows
    if HAS_PADDING:
        num_counted = tl.minimum(num_rows, tl.load(num_tokens))
    is_counted = (rows < num_counted)[:, None]
    found = tl.zeros((ROWS, PADDED), tl.int32)
    for choice in tl.static_range(CHOSEN):
        # At most the last expert even if all logits are NaN: the result is used as an index.
        expert = tl.minimum(tl.argmax(ranked, axis=1), EXPERTS - 1)[:, None]
        share = tl.sum(tl.where(experts == expert, scores, 0.0), axis=1)
        shares = tl.where(choices == choice, share[:, None], shares)
        chosen = tl.where(choices == choice, expert, chosen)
        ranked = tl.where(experts == expert, float("-inf"), ranked)
        found += ((experts == expert) & is_counted).to(tl.int32)
    if IS_NORMALISED:
        shares = shares / (tl.sum(shares, axis=1) + EPSILON)[:, None]
    if PARTS:
        chosen = _slots_of(chosen, choices, source, table, num_copies, PARTS)
    target = rows[:, None] * CHOSEN + choices
    is_target = is_row & (choices < CHOSEN)
    tl.store(weights + target, shares * SCALING, mask=is_target)
    tl.store(ids + target, chosen, mask=is_target)
    if IS_COUNTED:
        sums = tl.sum(found, axis=0).to(tl.int64)
        tl.atomic_add(counts + tl.arange(0, PADDED), sums, mask=sums > 0, sem="relaxed")


_choose = Launcher(_choose_kernel)


def choose_experts(
    logits_TX: Tensor,
    routing: ExpertRouting,
    bias_X: Tensor | None = None,
    counter: ExpertCounter | None = None,
    table: ExpertSlotTable | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's experts; see `Ops.choose_experts`. Safe under CUDA graph capture.

    Rows of ``logits``, ``bias`` and ``table`` are contiguous. The first of equal experts wins.
    """
    (rows, experts), num_chosen = logits_TX.shape, routing.num_chosen
    weights = torch.empty((rows, num_chosen), dtype=torch.float32, device=logits_TX.device)
    ids = torch.empty((rows, num_chosen), dtype=torch.int32, device=logits_TX.device)
    if not rows:
        return weights, ids
    num_tokens = None if counter is None else counter.num_tokens
    # Unread, but Triton needs a pointer.
    args = (
        logits_TX, weights if bias_X is None else bias_X, weights, ids,
        ids if counter is None else counter.counts,
        ids if num_tokens is None else num_tokens,
        ids if table is None else table.slots, ids if table is None else table.num_copies,
        logits_TX.stride(0), rows,
    )  # fmt: skip
    groups = routing.num_groups
    constants = (
        counter is not None, num_tokens is not None, experts, padded_size(experts),
        num_chosen, padded_size(num_chosen), routing.scoring == "softmax",
        bias_X is not None, routing.is_normalised, routing.scaling, WEIGHT_EPSILON, groups,
        padded_size(groups), routing.num_chosen_groups, routing.num_ranked,
        0 if table is None else table.slots.shape[1], _ROWS,
    )  # fmt: skip
    # With many experts a warp handles one token.
    num_warps = 1 if experts <= _FEW else _ROWS
    _choose((num_tiles(rows, _ROWS), 1), args, constants, num_warps=num_warps)
    return weights, ids
