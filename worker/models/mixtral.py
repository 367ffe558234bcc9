"""Mixtral: a Llama whose layers have a mixture of experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.experts import CORRECTED, ExpertMLP, expert_numbers
from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.models.interfaces import ATTENTION_ADAPTERS, WeightTarget
from trimaran.worker.models.llama import LlamaForCausalLM, LlamaLayer
from trimaran.worker.parallel.tensor_parallel import Addend

_NUM_ATTENTION_LINEARS = 4


class ExpertLayer(LlamaLayer):
    """A decoder layer with experts, or a dense layer where the configuration says so."""

    def make_mlp(
        self, config: PretrainedConfig, context: LayerContext, number: int
    ) -> nn.Module:
        """Experts, or a dense MLP."""
        if number in config.dense_layers:
            return super().make_mlp(config, context, number)
        return ExpertMLP(config, context)

    def mix(self, attended: Addend, residual: Tensor) -> tuple[Addend, Tensor]:
        """See `LlamaLayer`; one operator where the device has one for the step."""
        if isinstance(self.mlp, ExpertMLP):
            found = self.mlp.forward_with_norm(self.mlp_norm, attended, residual)
            if found is not None:
                return found
        return super().mix(attended, residual)


class MixtralForCausalLM(LlamaForCausalLM):
    """Mixtral, one pipeline stage of it; the base of families with experts."""

    layer_class = ExpertLayer
    layer_linears = LlamaForCausalLM.layer_linears[:_NUM_ATTENTION_LINEARS]
    adapter_modules = ATTENTION_ADAPTERS

    block: ClassVar[str] = "block_sparse_moe"
    """The checkpoint's name of a layer's mixture of experts."""

    projections: ClassVar[Mapping[str, str]] = {"w1": "gate", "w3": "up", "w2": "down"}
    """The checkpoint's names of an expert's matrices, with their shards."""

    shared_block: ClassVar[str] = "shared_expert"
    """The checkpoint's name of the shared expert, within the mixture."""

    def checkpoint_weights(self) -> dict[str, tuple[WeightTarget, ...]]:
        """Each weight of the whole model by its Hugging Face name, and its parameter here.

        Experts of other ranks have no parameter.
        """
        weights = super().checkpoint_weights()
        for number in range(self.config.num_hidden_layers):
            dense = number in self.config.dense_layers
            parts = self._dense_weights() if dense else self._expert_weights()
            for name, (target, shard) in parts.items():
                targets = [WeightTarget(f"layers.{number}.mlp.{target}", shard)]
                weights[f"layers.{number}.{name}"] = tuple(targets if target else ())
        return weights

    def _dense_weights(self) -> dict[str, tuple[str, str]]:
        """(parameter, shard) of a dense layer's MLP weights, by checkpoint name."""
        linears = LlamaForCausalLM.layer_linears[_NUM_ATTENTION_LINEARS:]
        return {
            f"{name}.weight": (f"{target.removeprefix('mlp.')}.weight", shard)
            for name, target, shard in linears
        }

    def _expert_weights(self) -> dict[str, tuple[str, str]]:
        """(parameter, shard) of a layer's expert weights; no parameter for other ranks'
        experts."""
        config, block = self.config, self.block
        weights = {f"{block}.gate.weight": ("router.weight", "")}
        if config.topk_method == CORRECTED:
            name = f"{block}.gate.e_score_correction_bias"
            weights[name] = ("router.correction_bias", "")
        own = expert_numbers(config, self.context)
        for expert in range(config.num_experts):
            for name, part in self.projections.items():
                parameter = "experts.down" if part == "down" else "experts.gate_up"
                weights[f"{block}.experts.{expert}.{name}.weight"] = (
                    parameter if expert in own else "",
                    f"{expert}.{part}",
                )
        if config.shared_expert_intermediate_size:
            shared = f"{block}.{self.shared_block}"
            if config.shared_expert_gate:
                weights[f"{shared}_gate.weight"] = ("shared_expert.router.weight", "")
            for name, part in self.projections.items():
                module, shard = ("down_proj", "") if part == "down" else ("gate_up_proj", part)
                weights[f"{shared}.{name}.weight"] = (f"shared_expert.{module}.weight", shard)
        return weights
