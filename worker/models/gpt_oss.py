"""gpt-oss: a Llama with attention sinks, windows in every other layer and clamped experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.experts import expert_numbers
from trimaran.worker.layers.linear import LayerContext, check_shape, copy_partition
from trimaran.worker.layers.rotary import RotaryEmbedding
from trimaran.worker.models.interfaces import OutputSlice, WeightTarget
from trimaran.worker.models.llama import LlamaAttention, LlamaForCausalLM
from trimaran.worker.models.mixtral import ExpertLayer, MixtralForCausalLM
from trimaran.worker.parallel.partition import partition_heads


class GptOssAttention(LlamaAttention):
    """Self-attention whose softmax also has a learned score a head, of no key."""

    def __init__(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding,
        number: int,
    ) -> None:
        super().__init__(config, context, rotary, number)
        self._heads_of_rank = partition_heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            context.tp.rank,
            context.tp.size,
        ).queries
        logits = torch.empty(self._heads_of_rank.size, device=context.device)
        self.sinks = nn.Parameter(logits, requires_grad=False)
        # The loader fills the parameter, which the spec holds too.
        self.backend.spec = replace(self.backend.spec, sink_logits=self.sinks)

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy the scores of this rank's heads."""
        check_shape(loaded, (self._heads_of_rank.whole,))
        copy_partition(loaded, parameter.data, self._heads_of_rank)


class GptOssLayer(ExpertLayer):
    """A decoder layer with sinks and experts."""

    def make_attention(
        self,
        config: PretrainedConfig,
        context: LayerContext,
        rotary: RotaryEmbedding,
        number: int,
    ) -> nn.Module:
        """The attention of a layer."""
        return GptOssAttention(config, context, rotary, number)


class GptOssForCausalLM(MixtralForCausalLM):
    """gpt-oss, one pipeline stage of it.

    A tensor of the checkpoint holds a matrix of all experts, as [in, out], with the outputs of
    gates and ups in turn.
    """

    layer_class = GptOssLayer

    def checkpoint_weights(self) -> dict[str, tuple[WeightTarget, ...]]:
        """Each weight of the whole model by its Hugging Face name, and its parameters here."""
        weights = LlamaForCausalLM.checkpoint_weights(self)
        for number in range(self.config.num_hidden_layers):
            mine = f"layers.{number}."
            weights[f"{mine}self_attn.sinks"] = (WeightTarget(f"{mine}attention.sinks"),)
            for name in ("weight", "bias"):
                target = WeightTarget(f"{mine}mlp.router.{name}")
                weights[f"{mine}mlp.router.{name}"] = (target,)
            for name, ending in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
                experts = f"{mine}mlp.experts."
                matrices = self._matrices_of(f"{experts}{name}", name, is_transposed=True)
                weights[experts + ending] = tuple(matrices)
                biases = self._matrices_of(f"{experts}biases.{name}", name)
                weights[f"{experts}{ending}_bias"] = tuple(biases)
        return weights

    def _matrices_of(
        self, parameter: str, name: str, *, is_transposed: bool = False
    ) -> Iterator[WeightTarget]:
        """What this rank's experts have in a tensor of all experts."""
        parts = ("gate", "up") if name == "gate_up" else ("down",)
        for expert in expert_numbers(self.config, self.context):
            for place, part in enumerate(parts):
                outputs = OutputSlice(expert, place, len(parts))
                shard = f"{expert}.{part}"
                yield WeightTarget(parameter, shard, is_transposed, outputs)
