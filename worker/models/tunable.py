"""The products of a rank's model among whose kernels a GPU chooses, for `trimaran tune`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from trimaran.comm.errors import ConfigError
from trimaran.kernels.tables.product_table import Kind
from trimaran.kernels.tuning.expert_candidates import MixtureSizes
from trimaran.kernels.tuning.product_candidates import Product
from trimaran.worker.config.engine_config import ParallelConfig
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.activation import GatedActivation
from trimaran.worker.layers.embedding import ParallelLMHead
from trimaran.worker.layers.experts import Experts, UnquantizedExpertMethod
from trimaran.worker.layers.linear import (
    MergedColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
)
from trimaran.worker.layers.methods import UnquantizedLinearMethod
from trimaran.worker.models.deepseek import LatentAttention
from trimaran.worker.models.gemma import GemmaLayer
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.llama import LlamaLayer, LlamaMLP
from trimaran.worker.models.registry import build_model, dtype_by_name
from trimaran.worker.parallel.tensor_parallel import ExpertRanks, ShardPosition

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Tunable:
    """The products and mixtures of a rank, each once."""

    products: tuple[Product, ...]
    mixtures: tuple[MixtureSizes, ...]

    @classmethod
    def of(cls, config: PretrainedConfig, parallel: ParallelConfig) -> Tunable:
        """Those of a rank 0 with weights in the model's dtype. No weights are made.

        Raises:
            ConfigError: all weights of layers are quantized.
        """
        num_layers = config.num_hidden_layers
        experts = ExpertRanks(parallel.expert_parts)
        if parallel.expert_dp_size > 1:
            size = parallel.tp_size * parallel.expert_dp_size
            experts = ExpertRanks(parallel.expert_parts, ShardPosition(0, size))
        model = build_model(
            config,
            StageRange.of(num_layers, 0, 1),
            ShardPosition(0, parallel.tp_size),
            dtype=dtype_by_name(config.dtype),
            device=_META,
            experts=experts,
        )
        found = dict.fromkeys(_products(model))
        mixtures = dict.fromkeys(_mixtures(model, config))
        if config.quantization is not None and len(found) <= 1 and not mixtures:
            raise ConfigError(
                "all weights of layers are quantized, and their kernels have nothing to "
                "measure. Tune a folder of floating-point weights"
            )
        return cls(tuple(found), tuple(mixtures))


def _products(model: nn.Module) -> Iterator[Product]:
    """The product of every layer and of the head, as the table names them."""
    gated = {id(linear) for linear in _gated(model)}
    adding = {id(linear) for linear in _adding(model)}
    joined = {id(linear) for group in _joined(model) for linear in group}
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            outputs, inner = module.floats.shape
            yield Product(outputs, inner, "plain")
        if isinstance(module, LatentAttention) and module.joinable:
            shapes = [linear.weight.shape for linear in module.joinable]
            yield Product(sum(shape[0] for shape in shapes), shapes[0][1], "plain")
        if not isinstance(module, ParallelLinear) or id(module) in joined:
            continue
        if isinstance(module.method, UnquantizedLinearMethod):
            (outputs, inner), number = module.weight.shape, id(module)
            kind: Kind = "plain"
            if number in gated or number in adding:
                kind = "gated" if number in gated else "parts"
            yield Product(outputs, inner, kind)


def _joined(model: nn.Module) -> Iterator[tuple[ParallelLinear, ...]]:
    """The layers whose products are parts of one."""
    for module in model.modules():
        if isinstance(module, LatentAttention):
            yield module.joinable


def _gated(model: nn.Module) -> Iterator[ParallelLinear]:
    """The layers whose product and activation are one kernel."""
    for module in model.modules():
        gate_up, act = (getattr(module, name, None) for name in ("gate_up_proj", "act"))
        if (
            isinstance(gate_up, MergedColumnParallelLinear)
            and isinstance(act, GatedActivation)
            and act.is_fused(gate_up)
        ):
            yield gate_up


def _adding(model: nn.Module) -> Iterator[ParallelLinear]:
    """The layers whose product is added to the residual, maybe in parts."""
    for layer in model.modules():
        if not isinstance(layer, LlamaLayer) or isinstance(layer, GemmaLayer):
            continue
        linears = [layer.attention.o_proj]
        if isinstance(layer.mlp, LlamaMLP):
            linears.append(layer.mlp.down_proj)
        for linear in linears:
            if isinstance(linear, RowParallelLinear) and linear.bias is None:
                yield linear


def _mixtures(model: nn.Module, config: PretrainedConfig) -> Iterator[MixtureSizes]:
    for module in model.modules():
        # Experts of another form are Triton's alone.
        if not isinstance(module, Experts) or module.form is not None:
            continue
        if isinstance(module.method, UnquantizedExpertMethod):
            count, outputs, hidden = module.gate_up.shape
            yield MixtureSizes(
                experts=count,
                chosen=config.num_experts_per_tok,
                hidden=hidden,
                inner=outputs // 2,
                parts=config.num_experts // count,
            )
