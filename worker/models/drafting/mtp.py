"""Multi-token prediction: a decoder layer behind a model's last one, which drafts.

The layer comes with the checkpoint of its model, after the last layer, and shares the model's
embedding and output matrix. Source: DeepSeek-V3 technical report, https://arxiv.org/abs/2412.19437,
section 2.2.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.worker.attention.backend import ForwardContext, KVCacheSpec
from trimaran.worker.config.checkpoint_folder import find_weight_files
from trimaran.worker.layers.experts import WholeLinear
from trimaran.worker.layers.norm import RMSNorm
from trimaran.worker.models.deepseek import DeepseekV3ForCausalLM
from trimaran.worker.models.drafting.likeliest import likeliest_ids
from trimaran.worker.models.interfaces import CausalLM, StageRange, WeightTarget
from trimaran.worker.models.quantized_layers import choose_methods, finish_weights
from trimaran.worker.models.weights.checkpoint import file_entries
from trimaran.worker.models.weights.weight_loader import fill_random, load_checkpoint

logger = logging.getLogger(__name__)

# Shapes: T tokens, N sequences, D hidden size of the target.

_OWN_WEIGHTS = {
    "enorm": "embedding_norm",
    "hnorm": "state_norm",
    "eh_proj": "projection",
    "shared_head.norm": "norm",
}
"""Modules of the layer beside a decoder layer, by their names in the checkpoint."""


class PredictionLayer(CausalLM):
    """One rank's part of the layer: a family's decoder layer, with norms and a projection.

    The base of one class a family, in front of the family's own class. As a stage of the model
    the layer lies between two others, without embedding and head.
    """

    def __init__(self, target: CausalLM) -> None:
        number = self._number = target.config.num_hidden_layers
        config = replace(target.config, num_hidden_layers=number + 1)
        super().__init__(config, StageRange(number, number + 1, number + 2), target.context)
        context, width = target.context, config.hidden_size
        self.embedding_norm = RMSNorm(context, width, config.norm_epsilon)
        self.state_norm = RMSNorm(context, width, config.norm_epsilon)
        self.projection = WholeLinear(context, 2 * width, width)
        self.norm = RMSNorm(context, width, config.norm_epsilon)

    @property
    def checkpoint_prefix(self) -> str:
        """The beginning of the names of the layer's tensors, behind `name_prefix`."""
        return f"layers.{self._number}."

    @property
    def next_prefix(self) -> str:
        """The beginning of the names of a second layer's tensors."""
        return f"layers.{self._number + 1}."

    def checkpoint_weights(self) -> dict[str, tuple[WeightTarget, ...]]:
        """The layer's weights alone."""
        prefix = self.checkpoint_prefix
        whole = super().checkpoint_weights()
        weights = {name: each for name, each in whole.items() if name.startswith(prefix)}
        for name, module in _OWN_WEIGHTS.items():
            weights[f"{prefix}{name}.weight"] = (WeightTarget(f"{module}.weight"),)
        return weights

    def is_unused(self, name: str) -> bool:
        """All tensors of other layers are unused, and copies of the embedding and head."""
        prefix = self.checkpoint_prefix
        shared = ("embed_tokens.weight", "shared_head.head.weight")
        is_shared = name.startswith(prefix) and name.removeprefix(prefix) in shared
        return is_shared or not name.startswith(prefix) or super().is_unused(name)

    def join(self, embedding_TD: Tensor, states_TD: Tensor) -> Tensor:
        """The decoder layer's input, from the embedding of each token and the hidden state of
        the position before."""
        embedding_TD, _ = self.embedding_norm.forward(embedding_TD, None)
        states_TD, _ = self.state_norm.forward(states_TD, None)
        return self.projection.forward(torch.cat((embedding_TD, states_TD), dim=-1))


class _DeepseekV3Layer(PredictionLayer, DeepseekV3ForCausalLM):
    """The layer of DeepSeek V3: latent attention, and experts."""


_LAYERS: dict[str, type[PredictionLayer]] = {"DeepseekV3ForCausalLM": _DeepseekV3Layer}
"""By the target's architecture."""


class MtpNetwork:
    """A layer for multi-token prediction as a network that drafts.

    The layer takes the target's last hidden states, normalised as for the output matrix. A
    further draft takes the layer's own normalised states in their place.
    """

    taps: tuple[int, ...] = ()
    needs_states = True
    is_shifted = True

    def __init__(self, layer: PredictionLayer, target: CausalLM) -> None:
        self.layer = layer
        self.state_size = target.config.hidden_size
        self._target = target

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The entry of the one layer."""
        return self.layer.kv_cache_specs()

    def forward(
        self,
        token_ids_T: Tensor,
        states_TX: Tensor | None,
        positions_T: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """See `ChainNetwork.forward`."""
        assert states_TX is not None, "the layer computes from hidden states"
        embedding_TD = self._target.embed(token_ids_T, positions_T, None)
        input_TD = self.layer.join(embedding_TD, states_TX)
        states_TD = self.layer.forward(token_ids_T, positions_T, context, input_TD)
        normed_TD, _ = self.layer.norm.forward(states_TD, None)
        return normed_TD

    def draft_ids(self, states_ND: Tensor) -> Tensor:
        """See `ChainNetwork.draft_ids`."""
        return likeliest_ids(self._target.compute_logits(states_ND))


def prediction_layer(target: CausalLM) -> PredictionLayer:
    """The layer of a target's family, with memory for its weights, which are not loaded yet.

    Raises:
        ConfigError: no such layer of the family is served.
    """
    name = target.config.architecture
    if name not in _LAYERS:
        raise ConfigError(
            f"layers for multi-token prediction are served for {', '.join(_LAYERS)}, but the "
            f"target is a {name}. Choose another drafter."
        )
    layer = _LAYERS[name](target).eval()
    choose_methods(layer)
    return layer


def layer_files(layer: PredictionLayer, folder: Path) -> dict[Path, list[str]]:
    """The names of the layer's tensors in the files of the target's checkpoint.

    Raises:
        ConfigError: the files hold no such layer, or more than one.
    """
    files: dict[Path, list[str]] = {}
    is_followed = False
    for path in find_weight_files(folder):
        for name in file_entries(path):
            key = name.removeprefix(layer.outer_prefix).removeprefix(layer.name_prefix)
            is_followed |= key.startswith(layer.next_prefix)
            if not layer.is_unused(key):
                files.setdefault(path, []).append(name)
    if not files:
        raise ConfigError(
            f"{folder}: has no tensors {layer.name_prefix}{layer.checkpoint_prefix}*, so it "
            "holds no layer for multi-token prediction. Name the checkpoint of the target with "
            "this layer, or choose another drafter."
        )
    if is_followed:
        raise ConfigError(
            f"{folder}: holds several layers for multi-token prediction, of which one is "
            "served. Choose another drafter."
        )
    return files


def load_mtp(folder: Path, target: CausalLM, *, is_random: bool = False) -> MtpNetwork:
    """This rank's part of the layer in the target's checkpoint folder, or one of random
    weights.

    Raises:
        ConfigError: the folder lacks the layer, or holds one of another model.
    """
    layer = prediction_layer(target)
    if is_random:
        fill_random(layer)
    else:
        load_checkpoint(layer, list(layer_files(layer, folder)))
    finish_weights(layer)
    num_bytes = layer.num_weight_bytes
    logger.info("layer for multi-token prediction: %.2f MiB a rank", num_bytes / 2**20)
    return MtpNetwork(layer, target)
