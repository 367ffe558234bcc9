"""A mixture of experts in floats on a GPU, by the grouped products measured as fastest."""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda.build import check_compiler
from trimaran.kernels.cuda.grouped_gemm import GroupedGemm
from trimaran.kernels.cuda.hopper_gemm import can_multiply
from trimaran.kernels.routing import ExpertForm, ExpertRouting, MixtureWeights
from trimaran.kernels.tables.grouped_table import (
    Cut,
    GroupedKind,
    GroupedShape,
    GroupedTable,
    TritonCut,
)
from trimaran.kernels.tables.tuned_choices import TunedChoices
from trimaran.kernels.triton import experts as triton_experts
from trimaran.kernels.triton.few_tokens.few_experts import can_stream, stream_experts
from trimaran.kernels.triton.few_tokens.mixture import can_mix
from trimaran.kernels.triton.permutation import permute_rows, unpermute_rows

# Shapes: T tokens, D hidden size, X experts of this rank, C experts of a token, F inner
# width, E = 2 F.

_Key = tuple[GroupedShape, GroupedKind, int]


class MeasuredExperts:
    """The weighted sums of each token's experts, by the measured tables.

    With our Hopper kernel, bf16 or float16, an expert's output is rounded to that dtype before
    it is weighted. `derived_shape` serves stacks without a measured tile shape; Triton serves
    those with few rows, those that our kernel does not take, and experts of another form.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        table: GroupedTable,
        *,
        has_own: bool = False,
    ) -> None:
        """``has_own``: our Hopper kernel runs here, and serves stacks without a table entry."""
        self._device = device
        self._dtype = dtype
        self._table = table
        self._kernels: dict[_Key, GroupedGemm] = {}
        self._has_own = has_own
        self.backend = "cuda, triton" if has_own else "triton"

    def expert_mlp(
        self,
        x_TD: Tensor,
        weights_TC: Tensor,
        ids_TC: Tensor,
        gate_up_XED: Tensor,
        down_XDF: Tensor,
        first_expert: int = 0,
        form: ExpertForm | None = None,
    ) -> Tensor:
        """See `Ops.expert_mlp`. Safe under CUDA graph capture."""
        inputs = (x_TD, weights_TC, ids_TC, gate_up_XED, down_XDF, first_expert)
        if form is not None:
            return triton_experts.expert_mlp(*inputs, form)
        num_experts, rows = gate_up_XED.shape[0], ids_TC.numel()
        gated, plain = self._cuts(rows, gate_up_XED)
        if isinstance(gated, TritonCut) and isinstance(plain, TritonCut):
            return triton_experts.expert_mlp(*inputs, None, (gated, plain))
        if not (isinstance(gated, GroupedShape) and isinstance(plain, GroupedShape)):
            if can_stream(ids_TC.shape[0], ids_TC.shape[1], gate_up_XED):
                return stream_experts(*inputs)
            return triton_experts.expert_mlp(*inputs)
        if not rows:
            return torch.empty_like(x_TD)
        _, totals, positions_TC = triton_experts.sort_assignments(
            ids_TC, num_experts, first_expert
        )
        make_inner = self._kernel(gated, "gated", num_experts)
        make_parts = self._kernel(plain, "plain", num_experts)
        inner_NF = make_inner(permute_rows(x_TD, positions_TC), gate_up_XED, totals)
        parts_ND = make_parts(inner_NF, down_XDF, totals)
        return unpermute_rows(parts_ND, positions_TC, weights_TC)

    def streams(self, num_tokens: int, routing: ExpertRouting, weights: MixtureWeights) -> bool:
        """Whether `stream_mixture` is the fastest for so few tokens."""
        gate_up, chosen = weights.routed.gate_up, routing.num_chosen
        if self._cuts(num_tokens * chosen, gate_up) != (None, None):
            return False
        return can_stream(num_tokens, chosen, gate_up) and can_mix(routing, weights)

    def _cuts(self, rows: int, gate_up_XED: Tensor) -> tuple[Cut | None, Cut | None]:
        num_experts, outputs, hidden = gate_up_XED.shape
        shape = num_experts, outputs, hidden
        return self._table.pair(rows, shape, has_own=self._has_own)

    def _kernel(self, cut: GroupedShape, kind: GroupedKind, num_experts: int) -> GroupedGemm:
        key = (cut, kind, num_experts)
        found = self._kernels.get(key)
        if found is None:
            found = GroupedGemm(cut, self._dtype, self._device, kind, num_experts)
            self._kernels[key] = found
        return found


class FixedExperts:
    """The Triton version; a token's result does not depend on the other tokens."""

    backend = "triton"

    def streams(self, *_arguments: object) -> bool:
        """No: the order of sums would depend on the number of tokens."""
        return False

    def expert_mlp(
        self,
        x_TD: Tensor,
        weights_TC: Tensor,
        ids_TC: Tensor,
        gate_up_XED: Tensor,
        down_XDF: Tensor,
        first_expert: int = 0,
        form: ExpertForm | None = None,
    ) -> Tensor:
        """See `Ops.expert_mlp`. Safe under CUDA graph capture."""
        cut = triton_experts.likely_cut(triton_experts.FIXED_ROWS, x_TD.dtype)
        return triton_experts.expert_mlp(
            x_TD, weights_TC, ids_TC, gate_up_XED, down_XDF, first_expert, form, (cut, cut)
        )


Mixture = MeasuredExperts | FixedExperts


def select_experts(
    device: torch.device,
    dtype: torch.dtype,
    is_deterministic: bool = False,
    choices: TunedChoices | None = None,
) -> Mixture:
    """The fastest experts of a GPU; ``choices`` are those that the package ships by
    default."""
    if is_deterministic:
        return FixedExperts()
    if not (can_multiply(device, dtype) and _has_compiler()):
        return MeasuredExperts(device, dtype, GroupedTable({}))
    choices = choices or TunedChoices(torch.cuda.get_device_name(device))
    return MeasuredExperts(device, dtype, choices.experts, has_own=True)


def _has_compiler() -> bool:
    """Whether CUDA C++ can be built; if not, the choice of products logs the reason."""
    try:
        check_compiler()
    except KernelsUnavailableError:
        return False
    return True
