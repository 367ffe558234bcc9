"""A mixture of experts of integers or FP4 numbers on a GPU: the CUDA kernels of Hopper, or
Triton's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.cuda import integer_experts as cuda_integer_experts
from trimaran.kernels.integers import IntegerExperts, IntegerWeight
from trimaran.kernels.routing import ExpertForm
from trimaran.kernels.triton import experts as triton_experts
from trimaran.kernels.triton import integer_experts as triton_integer_experts
from trimaran.kernels.triton.launch import num_tiles
from trimaran.kernels.triton.permutation import permute_rows, unpermute_rows

# Shapes: T tokens, D hidden size, C experts of a token, N = T C rows in the order of their
# experts, F inner width.


class IntegerMixture(NamedTuple):
    """Experts of integers or FP4 numbers on one GPU."""

    dtype: torch.dtype | None = None
    """Dtype of the inputs of Hopper's CUDA kernel; None: Triton multiplies."""

    is_fixed: bool = False
    """Whether a token's result must not depend on the other tokens."""

    @property
    def backend(self) -> str:
        """The kernels by name."""
        return "triton" if self.dtype is None else "cuda, triton"

    def storage(self, weights: Sequence[IntegerWeight], *, is_gated: bool) -> IntegerExperts:
        """See `Ops.integer_expert_storage`. Triton takes matrices that the CUDA kernel does
        not take: those with an order of inputs, with inputs or outputs that are no multiple
        of 8, or with other FP4 scales than powers of two for 32 inputs."""
        if self.dtype is not None:
            packed = cuda_integer_experts.pack_experts(weights, self.dtype, is_gated=is_gated)
            if packed is not None:
                return packed
        return triton_integer_experts.expert_storage(weights)

    def expert_mlp(
        self,
        x_TD: Tensor,
        weights_TC: Tensor,
        ids_TC: Tensor,
        gate_up: IntegerExperts,
        down: IntegerExperts,
        first_expert: int = 0,
        form: ExpertForm | None = None,
    ) -> Tensor:
        """See `Ops.integer_expert_mlp`. Safe under CUDA graph capture.

        By the CUDA kernel an expert's output is rounded to the dtype of ``x`` before it is
        weighted.
        """
        num_choices, num_experts = ids_TC.numel(), len(down.values)
        if not num_choices:
            return torch.empty_like(x_TD)
        by_expert = triton_experts.sort_assignments(ids_TC, num_experts, first_expert)
        totals, positions_TC = by_expert.totals, by_expert.positions
        if gate_up.packing is not None:
            rows_ND = permute_rows(x_TD, positions_TC, sorted_first=True)
            inner_NF = cuda_integer_experts.multiply(
                rows_ND, gate_up, totals, form, is_gated=True, is_early=True
            )
        else:
            cut = self._triton_cuts(num_choices, gate_up, down)[0]
            matrices = gate_up, form
            inner_NF = triton_integer_experts.gated_rows(
                x_TD, by_expert, matrices, weights_TC, cut
            )
        if down.packing is None:
            cut = self._triton_cuts(num_choices, gate_up, down)[1]
            choices = weights_TC, ids_TC, first_expert
            return triton_integer_experts.weighted_sums(
                inner_NF, by_expert, (down, form), choices, cut
            )
        parts_ND = cuda_integer_experts.multiply(
            inner_NF, down, totals, form, is_gated=False, is_early=gate_up.packing is not None
        )
        return unpermute_rows(parts_ND, positions_TC, weights_TC)

    def _triton_cuts(
        self, num_choices: int, gate_up: IntegerExperts, down: IntegerExperts
    ) -> tuple[triton_integer_experts.Cut, triton_integer_experts.Cut]:
        """Those of the two products."""
        if self.is_fixed:
            return triton_integer_experts.FIXED_CUTS
        inner, hidden = gate_up.num_outputs // 2, down.num_outputs
        average = num_tiles(num_choices, len(down.values))
        steps = down.values.shape[2]
        return triton_integer_experts.choose_cuts(average, num_choices, (inner, hidden), steps)
