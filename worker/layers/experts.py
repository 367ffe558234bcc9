"""A mixture of experts in place of an MLP: router, routed experts and the shared expert."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimaran.kernels.reference import sigmoid
from trimaran.kernels.routing import ExpertCounter, ExpertRouting, ExpertSlotTable, Scoring
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.activation import GatedActivation
from trimaran.worker.layers.expert_dispatch import ExpertDispatch
from trimaran.worker.layers.linear import (
    LayerContext,
    MergedColumnParallelLinear,
    RowParallelLinear,
    check_shape,
    copy_partition,
)
from trimaran.worker.parallel.partition import even_partition
from trimaran.worker.parallel.tensor_parallel import PendingSum, can_wait, split

# Shapes: X experts, P parts of the ranks.


class ExpertSlots:
    """A layer's map from experts to slots, in fixed device memory."""

    def __init__(self, num_experts: int, num_parts: int, device: torch.device) -> None:
        shape = (num_experts, num_parts)
        self.table = ExpertSlotTable(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.ones(num_experts, dtype=torch.int32, device=device),
        )

    def set(self, slots_XP: NDArray[np.int64], copies_X: NDArray[np.int64]) -> None:
        """Set the slots of each expert, and the number of its copies."""
        self.table.slots.copy_(torch.from_numpy(slots_XP))
        self.table.num_copies.copy_(torch.from_numpy(copies_X))


# Shapes: T tokens of the step, D hidden size, X experts of this rank (all, in the router), F
# this rank's part of an expert's inner width, E = 2 F, C experts of a token.

CORRECTED = "noaux_tc"
"""The ``topk_method`` that adds a learned bias to scores."""


def routing_of(config: PretrainedConfig) -> ExpertRouting:
    """The routing parameters of a model."""
    has_groups = config.topk_method != "greedy"
    return ExpertRouting(
        num_chosen=config.num_experts_per_tok,
        scoring=cast(Scoring, config.scoring_func),
        is_normalised=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        num_groups=config.n_group if has_groups else 1,
        num_chosen_groups=config.topk_group if has_groups else 1,
        # As DeepSeek V3 and V2 rank groups.
        num_ranked=2 if config.topk_method == CORRECTED else 1,
    )


def expert_numbers(config: PretrainedConfig, context: LayerContext) -> range:
    """Ids of the experts that a rank holds, whole or sharded."""
    count = split("num_experts", config.num_experts, context.moe_ep_size)
    first = context.expert_ranks.rank % context.moe_ep_size * count
    return range(first, first + count)


class WholeLinear(nn.Module):
    """A small linear layer without bias that every rank holds and computes whole."""

    def __init__(self, context: LayerContext, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = context.empty(out_features, in_features)
        self._ops = context.ops

    def forward(self, x_TD: Tensor) -> Tensor:
        """``x @ weight.T``."""
        return self._ops.linear(x_TD, self.weight)

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy the whole tensor."""
        check_shape(loaded, tuple(parameter.shape))
        parameter.data.copy_(loaded)


class Router(WholeLinear):
    """Scores of all experts for each token, and the choice of experts.

    Sums are float32 and not rounded, because rounding would give some of many experts equal
    scores.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__(context, config.hidden_size, config.num_experts)
        self._routing = routing_of(config)
        self.counter: ExpertCounter | None = None
        """Counts the choices, if set."""

        self.table: ExpertSlotTable | None = None
        """Slots of the experts; None if each expert's slot is its id."""

        self.correction_bias: nn.Parameter | None = None
        if config.topk_method == CORRECTED:
            values = torch.empty(config.num_experts, device=context.device)
            self.correction_bias = nn.Parameter(values, requires_grad=False)

    def choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, C] float32 and slots [T, C] int32 of each token's experts."""
        logits_TX = self._ops.router_logits(x_TD, self.weight)
        return self._ops.choose_experts(
            logits_TX, self._routing, self.correction_bias, self.counter, self.table
        )


class Experts(nn.Module):
    """This rank's experts, or its shard of each, as stacked matrices.

    The ranks of a tensor group, or of all dp ranks, form ``moe_ep_size`` parts: rank r holds
    experts of part ``r % moe_ep_size``. The ``moe_tp_size`` ranks of a part each hold a share
    of the experts' columns.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        ranks, num_parts = context.expert_ranks, context.moe_ep_size
        self._hidden = config.hidden_size
        self._inner = config.moe_intermediate_size
        numbers = expert_numbers(config, context)
        self.first, num_experts = numbers.start, len(numbers)
        num_cuts = split("expert_ranks", ranks.size, num_parts)
        self._partition = even_partition(
            self._inner, ranks.rank // num_parts, num_cuts, multiple=context.partition_multiple
        )
        local = self._partition.size
        self.gate_up = context.empty(num_experts, 2 * local, self._hidden)
        self.down = context.empty(num_experts, self._hidden, local)
        self._ops = context.ops

    def forward(self, x_TD: Tensor, weights_TC: Tensor, ids_TC: Tensor) -> Tensor:
        """This rank's part of the weighted sum of each token's experts, [T, D]."""
        return self._ops.expert_mlp(
            x_TD, weights_TC, ids_TC, self.gate_up, self.down, self.first
        )

    def make_slots(self, num_spare: int) -> None:
        """Allocate the matrices with ``num_spare`` more slots after the last."""
        num_held = self.gate_up.shape[0]
        for parameter in (self.gate_up, self.down):
            # Loaded weights may be mapped from a file that must not be written.
            shape = (num_held + num_spare, *parameter.shape[1:])
            slots = parameter.data.new_empty(shape)
            slots[:num_held] = parameter.data
            parameter.data = slots
        self.first = self.first // num_held * (num_held + num_spare)

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's shard of a whole matrix of one of its experts.

        ``shard`` is the expert's id and ``gate``, ``up`` or ``down``, as in ``3.gate``.
        """
        number, _, part = shard.partition(".")
        matrix = parameter.data[int(number) - self.first]
        if part == "down":
            check_shape(loaded, (self._hidden, self._inner))
            copy_partition(loaded.t(), matrix.t(), self._partition)
            return
        check_shape(loaded, (self._inner, self._hidden))
        rows = self._partition.size
        copy_partition(
            loaded, matrix[:rows] if part == "gate" else matrix[rows:], self._partition
        )


class SharedExpert(nn.Module):
    """An expert that all tokens use, sharded over all ranks.

    If it is gated, a router of its own computes the weight of its output.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        inner, hidden = config.shared_expert_intermediate_size, config.hidden_size
        self.gate_up_proj = MergedColumnParallelLinear(
            context, hidden, {"gate": inner, "up": inner}
        )
        self.act = GatedActivation(context, config.hidden_act)
        self.down_proj = RowParallelLinear(context, inner, hidden)
        is_gated = config.shared_expert_gate
        self.router = WholeLinear(context, hidden, 1) if is_gated else None

    def forward(self, x_TD: Tensor) -> Tensor:
        """This rank's part of the output, [T, D]."""
        inner_TF = self.act.project(self.gate_up_proj, x_TD)
        # No all-reduce here: one all-reduce sums this output and the routed experts' output.
        output_TD = self.down_proj.method.apply(self.down_proj, inner_TF, None)
        if self.router is None:
            return output_TD
        return output_TD.mul_(sigmoid(self.router.forward(x_TD).float()))


class ExpertMLP(nn.Module):
    """The weighted sum of each token's chosen experts, and of the shared expert if any."""

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        self._tp = context.tp
        self.router = Router(config, context)
        self.experts = Experts(config, context)
        self._dispatch: ExpertDispatch | None = None
        if context.expert_ranks.size != context.tp.size:
            num_chosen = config.num_experts_per_tok
            self._dispatch = ExpertDispatch(context, self.experts, num_chosen)
        has_shared = config.shared_expert_intermediate_size > 0
        self.shared_expert = SharedExpert(config, context) if has_shared else None

    def forward(self, hidden_TD: Tensor, residual_TD: Tensor) -> Tensor | PendingSum:
        """[T, D] to the output, not added to the residual yet. Collective over the group."""
        weights, ids = self.router.choose(hidden_TD)
        run = self.experts.forward if self._dispatch is None else self._dispatch.forward
        output_TD = run(hidden_TD, weights, ids)
        if self.shared_expert is not None:
            output_TD += self.shared_expert.forward(hidden_TD)
        if can_wait(self._tp, residual_TD):
            return PendingSum(output_TD, self._tp)
        return self._tp.all_reduce(output_TD)

    def make_slots(self, slots: ExpertSlots, num_spare: int) -> None:
        """Route by ``slots``, and allocate ``num_spare`` more slots on each rank.

        Call after the weights are loaded, and before graphs are captured.
        """
        self.router.table = slots.table
        self.experts.make_slots(num_spare)

    def forward_without_tokens(self) -> None:
        """Compute other data-parallel ranks' tokens in a step without tokens here.

        Collective over the dp ranks that share experts.
        """
        if self._dispatch is not None:
            self._dispatch.forward_without_tokens()
