"""A mixture of experts in FP8 on a GPU: the CUDA kernel of Hopper, or Triton's."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.cuda.grouped_gemm import (
    GroupedGemm,
    GroupedScales,
    Scaling,
    compile_grouped,
)
from trimaran.kernels.quantized import FP8, Fp8Experts
from trimaran.kernels.tables.grouped_table import (
    EXPERT_LIMITS,
    GroupedKind,
    GroupedShape,
    expert_limit,
)
from trimaran.kernels.triton import experts as triton_experts
from trimaran.kernels.triton import fp8_experts as triton_fp8_experts
from trimaran.kernels.triton.byte_inputs import Choices, quantize_choices, quantize_groups
from trimaran.kernels.triton.launch import num_tiles
from trimaran.kernels.triton.permutation import permute_rows, unpermute_rows

# Shapes: T tokens, D hidden size, X experts of this rank, C experts of a token, N = T C rows in
# the order of their experts, F inner width, G groups of inputs.

_SHAPES = (
    (8, GroupedShape(256, 16)), (16, GroupedShape(256, 32)), (32, GroupedShape(256, 64)),
)  # fmt: skip
_MANY = GroupedShape(128, 128)
_STEP = 128
"""Inputs whose sums the matrix units make at once, and of a block."""

_BLOCK_ROWS = 96
"""An expert's average number of rows from which the CUDA kernel is faster with blocks."""


class Fp8Mixture(NamedTuple):
    """Experts in FP8 on one GPU."""

    dtype: torch.dtype | None = None
    """Dtype of the inputs and results of Hopper's CUDA kernel: bf16; None: Triton's."""

    is_fixed: bool = False
    """Whether a token's result must not depend on the other tokens."""

    @property
    def backend(self) -> str:
        """The kernels by name."""
        return "triton" if self.dtype is None else "cuda, triton"

    def expert_mlp(
        self,
        x_TD: Tensor,
        weights_TC: Tensor,
        ids_TC: Tensor,
        gate_up: Fp8Experts,
        down: Fp8Experts,
        first_expert: int = 0,
    ) -> Tensor:
        """See `Ops.fp8_expert_mlp`. Safe under CUDA graph capture.

        By the CUDA kernel an expert's output is rounded to bf16 before it is weighted.
        """
        num_choices, num_experts = ids_TC.numel(), len(down.values)
        average = num_tiles(num_choices, num_experts)
        if not (self._takes(gate_up, 16, average) and self._takes(down, 8, average)):
            fixed_rows = triton_experts.FIXED_ROWS if self.is_fixed else 0
            return triton_fp8_experts.expert_mlp(
                x_TD, weights_TC, ids_TC, gate_up, down, first_expert, fixed_rows
            )
        if not num_choices:
            return torch.empty_like(x_TD)
        order, totals, positions_TC = triton_experts.sort_assignments(
            ids_TC, num_experts, first_expert
        )
        choices = Choices(ids_TC, first_expert, num_experts, (order, totals), of_tokens=True)
        if gate_up.blocks is None:
            rows = quantize_choices(x_TD, choices, gate_up.inputs)
        else:
            values_TD, scales_TG = quantize_groups(x_TD, gate_up.blocks, gate_up.inputs)
            values_ND = permute_rows(values_TD.view(torch.bfloat16), positions_TC).view(FP8)
            rows = values_ND, permute_rows(scales_TG, positions_TC)
        inner_NF = self._product(rows, gate_up, totals, "gated")
        if down.blocks is None:
            choices = choices._replace(of_tokens=False)
            rows = quantize_choices(inner_NF, choices, down.inputs)
        else:
            rows = quantize_groups(inner_NF, down.blocks, down.inputs)
        parts_ND = self._product(rows, down, totals, "plain")
        return unpermute_rows(parts_ND, positions_TC, weights_TC)

    def compile(self, num_experts: int, *, has_blocks: bool) -> None:
        """Compile the CUDA kernels of so many experts of a layer, in parallel."""
        if self.dtype == torch.bfloat16 and num_experts <= EXPERT_LIMITS[-1]:
            _compile(num_experts, "blocks" if has_blocks else "rows")

    def _takes(self, experts: Fp8Experts, multiple: int, average: int) -> bool:
        """Whether the CUDA kernel multiplies by these matrices, whose outputs have to be a
        multiple of ``multiple``, with an expert's ``average`` number of rows.

        Scales are those of rows, or for many rows of blocks of 128 inputs from the first input
        on: few rows wait for these scales, and Triton is faster. One kernel gives fixed
        results.
        """
        (count, outputs, inner), blocks = experts.values.shape, experts.blocks
        if self.dtype != torch.bfloat16 or count > EXPERT_LIMITS[-1]:
            return False
        if outputs % multiple or inner % 16:
            return False
        if blocks is None:
            return True
        is_whole = blocks.size == _STEP and not blocks.first
        return is_whole and not self.is_fixed and average >= _BLOCK_ROWS

    def _product(
        self,
        rows: tuple[Tensor, Tensor],
        experts: Fp8Experts,
        totals_X: Tensor,
        kind: GroupedKind,
    ) -> Tensor:
        """One of the two grouped products of rows in FP8, with their scales."""
        (values_ND, scales), count = rows, len(experts.values)
        average = num_tiles(len(values_ND), count)
        shape = next((each for most, each in _SHAPES if average <= most), _MANY)
        row_of = None if experts.blocks is None else experts.blocks.rows
        scaling: Scaling = "rows" if row_of is None else "blocks"
        multiply = _kernel(shape, kind, count, scaling, values_ND.device)
        grouped = GroupedScales(experts.scales, scales, row_of)
        return multiply(values_ND, experts.values, totals_X, grouped)


@functools.cache
def _compile(num_experts: int, scaling: Scaling) -> None:
    shapes = [_MANY] if scaling == "blocks" else [each for _, each in _SHAPES]
    limit = expert_limit(num_experts)
    kinds: tuple[GroupedKind, ...] = ("gated", "plain")
    jobs = [
        (shape, torch.bfloat16, kind, limit, scaling)
        for shape in {*shapes, _MANY}
        for kind in kinds
    ]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda job: compile_grouped(*job), jobs))


@functools.cache
def _kernel(
    shape: GroupedShape,
    kind: GroupedKind,
    num_experts: int,
    scaling: Scaling,
    device: torch.device,
) -> GroupedGemm:
    return GroupedGemm(shape, torch.bfloat16, device, kind, num_experts, scaling)
