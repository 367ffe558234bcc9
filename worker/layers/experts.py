"""A mixture of experts in place of an MLP: router, routed experts and the shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimaran.kernels.operators import Ops
from trimaran.kernels.reference import sigmoid
from trimaran.kernels.routing import (
    ExpertCounter,
    ExpertForm,
    ExpertMatrices,
    ExpertRouting,
    ExpertSlotTable,
    MixtureInput,
    MixtureWeights,
    Scoring,
)
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.activation import GatedActivation
from trimaran.worker.layers.expert_dispatch import ExpertDispatch
from trimaran.worker.layers.linear import (
    LayerContext,
    MergedColumnParallelLinear,
    OutputPart,
    RowParallelLinear,
    check_shape,
    copy_partition,
)
from trimaran.worker.layers.methods import ExpertMethod, UnquantizedLinearMethod
from trimaran.worker.layers.norm import RMSNorm
from trimaran.worker.parallel.partition import DimPartition, even_partition
from trimaran.worker.parallel.tensor_parallel import Addend, PendingSum, can_wait, split

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

        self.bias: nn.Parameter | None = None
        if config.moe_bias:
            values = torch.empty(config.num_experts, device=context.device)
            self.bias = nn.Parameter(values, requires_grad=False)

    def choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, C] float32 and slots [T, C] int32 of each token's experts."""
        logits_TX = self._ops.router_logits(x_TD, self.weight)
        if self.bias is not None:
            logits_TX += self.bias
        return self._ops.choose_experts(
            logits_TX, self._routing, self.correction_bias, self.counter, self.table
        )

    def mixture_parts(
        self, rows: MixtureInput, routed: ExpertMatrices, shared: ExpertMatrices | None
    ) -> tuple[Tensor, Tensor] | None:
        """See `Ops.mixture_parts`; None also where scores or logits have biases, or experts
        have slots."""
        others = (self.bias, self.correction_bias, self.table)
        if any(each is not None for each in others):
            return None
        weights = MixtureWeights(self.weight, routed, shared)
        return self._ops.mixture_parts(rows, weights, self._routing, self.counter)


class ExpertMatrix:
    """The stacked matrices of an expert with one input, and this rank's share of them."""

    def __init__(self, parts: Mapping[str, DimPartition], inputs: DimPartition) -> None:
        self.input_partition = inputs
        """The inputs of this rank."""

        self.output_parts: dict[str, OutputPart] = {}
        """The stacked matrices by name."""

        offset = 0
        for name, partition in parts.items():
            self.output_parts[name] = OutputPart(partition, offset)
            offset += partition.size
        self.shape = offset, inputs.size
        """Outputs and inputs of this rank."""

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's share of the matrix ``shard`` [out, in], or of its rows' scales
        [out], to an expert's slot."""
        part, inputs = self.output_parts[shard], self.input_partition
        tail = (inputs.whole,) if loaded.dim() == 2 else ()
        check_shape(loaded, (part.partition.whole, *tail))
        rows = parameter.data.narrow(0, part.offset, part.partition.size)
        if not tail:
            copy_partition(loaded, rows, part.partition)
            return
        count = part.partition.count
        mine = loaded.narrow(0, part.partition.first, count)
        copy_partition(mine.t(), rows[:count].t(), inputs)
        rows[count:].zero_()


class UnquantizedExpertMethod:
    """Matrices in the model's dtype."""

    name = "unquantized"

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def create_weights(
        self, layer: nn.Module, num_experts: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Two parameters, ``gate_up`` and ``down``."""
        assert isinstance(layer, Experts)
        for name, matrix in layer.matrices.items():
            values = torch.empty((num_experts, *matrix.shape), dtype=dtype, device=device)
            layer.register_parameter(name, nn.Parameter(values, requires_grad=False))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing."""

    def apply(
        self, layer: nn.Module, x_TD: Tensor, weights_TC: Tensor, ids_TC: Tensor
    ) -> Tensor:
        """The sum of this rank's experts."""
        assert isinstance(layer, Experts)
        return self._ops.expert_mlp(
            x_TD, weights_TC, ids_TC, layer.gate_up, layer.down, layer.first, layer.form
        )


class ExpertBiases(nn.Module):
    """The biases of this rank's experts. Among ranks with shares of the same experts, the first
    adds the biases of outputs."""

    def __init__(
        self, matrices: Mapping[str, ExpertMatrix], numbers: range, context: LayerContext
    ) -> None:
        super().__init__()
        self._matrices, self._first = matrices, numbers.start
        self._is_first_share = matrices["down"].input_partition.first == 0
        self.gate_up = context.empty(len(numbers), matrices["gate_up"].shape[0])
        self.down = context.empty(len(numbers), matrices["down"].shape[0])

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's share of a whole bias [out]; ``shard`` as in `Experts.place`."""
        number, _, part = shard.partition(".")
        matrix = self._matrices["down" if part == "down" else "gate_up"]
        slot = parameter.data[int(number) - self._first]
        matrix.weight_loader(nn.Parameter(slot, requires_grad=False), loaded, part)
        if part == "down" and not self._is_first_share:
            slot.zero_()


class Experts(nn.Module):
    """This rank's experts, or its shard of each, as stacked matrices.

    The ranks of a tensor group, or of all dp ranks, form ``moe_ep_size`` parts: rank r holds
    experts of part ``r % moe_ep_size``. The ``moe_tp_size`` ranks of a part each hold a share
    of the experts' columns.
    """

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__()
        ranks, num_parts = context.expert_ranks, context.moe_ep_size
        self.hidden_size = config.hidden_size
        numbers = expert_numbers(config, context)
        self.first, self._num_experts = numbers.start, len(numbers)
        num_cuts = split("expert_ranks", ranks.size, num_parts)
        inner = even_partition(
            config.moe_intermediate_size,
            ranks.rank // num_parts,
            num_cuts,
            multiple=context.partition_multiple,
        )
        hidden = even_partition(config.hidden_size, 0, 1)
        self.matrices = {
            "gate_up": ExpertMatrix({"gate": inner, "up": inner}, hidden),
            "down": ExpertMatrix({"down": hidden}, inner),
        }
        """The parameters of matrices by name."""

        self.biases: ExpertBiases | None = None
        if config.moe_bias:
            self.biases = ExpertBiases(self.matrices, numbers, context)
        self._glu = config.swiglu_alpha, config.swiglu_limit
        self.dtype = context.dtype
        self.method: ExpertMethod = UnquantizedExpertMethod(context.ops)
        self.use_method(self.method, context.linear_device)

    def use_method(self, method: ExpertMethod, device: torch.device) -> None:
        """Let ``method`` store and multiply the matrices, with new memory on ``device``."""
        self._parameters.clear()
        self.method = method
        method.create_weights(self, self._num_experts, self.dtype, device)

    def forward(self, x_TD: Tensor, weights_TC: Tensor, ids_TC: Tensor) -> Tensor:
        """This rank's part of the weighted sum of each token's experts, [T, D]."""
        return self.method.apply(self, x_TD, weights_TC, ids_TC)

    @property
    def form(self) -> ExpertForm | None:
        """What experts compute beside products; None for SwiGLU without biases."""
        if self.biases is None:
            return None
        return ExpertForm(self.biases.gate_up.data, self.biases.down.data, *self._glu)

    @property
    def plain_matrices(self) -> ExpertMatrices | None:
        """All matrices, if they are in the model's dtype and experts are plain SwiGLU."""
        if self.biases is not None or not isinstance(self.method, UnquantizedExpertMethod):
            return None
        return ExpertMatrices(self.gate_up, self.down)

    @property
    def num_slots(self) -> int:
        """Slots of experts on this rank."""
        return self.gate_up.shape[0]

    def no_tokens(self) -> Tensor:
        """Hidden states of no tokens [0, D]."""
        return self.gate_up.new_empty((0, self.hidden_size), dtype=self.dtype)

    def make_slots(self, num_spare: int) -> None:
        """Allocate every parameter with ``num_spare`` more slots after the last."""
        num_held = self.num_slots
        for parameter in self.parameters():
            # Loaded weights may be mapped from a file that must not be written.
            shape = (num_held + num_spare, *parameter.shape[1:])
            slots = parameter.data.new_empty(shape)
            slots[:num_held] = parameter.data
            parameter.data = slots
        self.first = self.first // num_held * (num_held + num_spare)

    def place(self, shard: str) -> tuple[int, str]:
        """The slot of an expert on this rank, and the name of one of its matrices.

        ``shard`` is the expert's id and ``gate``, ``up`` or ``down``, as in ``3.gate``.
        """
        number, _, part = shard.partition(".")
        return int(number) - self.first, part

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's shard of a whole matrix of one of its experts; see `place`."""
        slot, part = self.place(shard)
        target = nn.Parameter(parameter.data[slot], requires_grad=False)
        self.matrix_of(part).weight_loader(target, loaded, part)

    def matrix_of(self, part: str) -> ExpertMatrix:
        """The stacked matrices of which ``part`` is one."""
        return self.matrices["down" if part == "down" else "gate_up"]


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

    @property
    def plain_matrices(self) -> ExpertMatrices | None:
        """The matrices, if they are in the model's dtype and the expert is a SwiGLU without a
        router."""
        gate_up, down = self.gate_up_proj, self.down_proj
        is_plain = self.router is None and self.act.is_fused(gate_up) and down.bias is None
        for linear in (gate_up, down):
            is_plain &= isinstance(linear.method, UnquantizedLinearMethod)
            is_plain &= not linear.lora.is_active
        return ExpertMatrices(gate_up.weight, down.weight) if is_plain else None


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

    def forward_with_norm(
        self, norm: RMSNorm, addend_TD: Addend, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """`forward` of the norm of ``addend + residual``, as float32 parts [S, T, D], and that
        sum; None, without effect, where no operator computes all of it."""
        if self._dispatch is not None or self._tp.size > 1 or residual_TD is None:
            return None
        assert not isinstance(addend_TD, PendingSum), "a single rank has no sum to wait for"
        routed, shared = self.experts.plain_matrices, None
        if self.shared_expert is not None:
            shared = self.shared_expert.plain_matrices
            if shared is None:
                return None
        if routed is None:
            return None
        rows = MixtureInput(addend_TD, residual_TD, norm.weight, norm.eps)
        return self.router.mixture_parts(rows, routed, shared)

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
