"""Where a model's channels can be scaled without a change of its results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from trimaran.comm.errors import ConfigError
from trimaran.worker.models.gpt_neox import NeoXAttention, NeoXLayer, NeoXMLP
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.models.llama import LlamaAttention, LlamaLayer, LlamaMLP


@dataclass(frozen=True, slots=True)
class NormFold:
    """A norm, and the linear layers that alone read its results; paths in the model.

    What divides a channel of the norm multiplies the layers' inputs.
    """

    norm: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProductFold:
    """A linear layer, and a part of the outputs of another one whose channels are factors of
    the layer's inputs: values of attention, or the ups of a gated MLP.

    What divides an output of the part multiplies the inputs that contain it. Inputs are blocks
    of ``width`` channels; ``repeats`` consecutive blocks contain the same outputs.
    """

    source: str
    part: str
    layer: str
    repeats: int = 1
    width: int = 1


def norm_folds(model: CausalLM) -> list[NormFold]:
    """The norms before products of all layers; a norm of parallel residuals, before attention
    and MLP, has both among its layers.

    Raises:
        ConfigError: products of some layer have no norm before them that is divided so, or
            their inputs cannot become INT8.
    """
    folds: list[NormFold] = []
    for path, layer in _layers(model):
        qkv, up = f"{path}.attention.qkv_proj", f"{path}.mlp.{_up_name(layer.mlp)}"
        if hasattr(layer, "mlp_norm"):
            folds.append(NormFold(f"{path}.attention_norm", (qkv,)))
            folds.append(NormFold(f"{path}.mlp_norm", (up,)))
        else:
            folds.append(NormFold(f"{path}.attention_norm", (qkv, up)))
    return folds


def product_folds(model: CausalLM) -> list[ProductFold]:
    """The output products whose inputs are sums of values, and the down products behind a
    gate. The activation of an MLP without a gate lets no factor through."""
    folds: list[ProductFold] = []
    for path, layer in _layers(model):
        attention = layer.attention
        qkv = attention.qkv_proj
        folds.append(
            ProductFold(
                f"{path}.attention.qkv_proj",
                "v",
                f"{path}.attention.o_proj",
                repeats=qkv.num_heads // qkv.num_kv_heads,
                width=attention.head_size,
            )
        )
        if isinstance(layer.mlp, LlamaMLP):
            folds.append(ProductFold(f"{path}.mlp.gate_up_proj", "up", f"{path}.mlp.down_proj"))
    return folds


def _layers(model: CausalLM) -> Iterator[tuple[str, Any]]:
    for number, layer in model.layers.items():
        if not _is_known(layer):
            raise ConfigError(
                f"SmoothQuant does not know the layers of {model.config.architecture}: it "
                "scales the channels between norms, attention and MLPs of dense models. Name "
                "--quantization int8, whose inputs stay floats."
            )
        yield f"layers.{number}", layer


def _is_known(layer: nn.Module) -> bool:
    parts: Any = layer
    if isinstance(layer, NeoXLayer):
        return isinstance(parts.attention, NeoXAttention) and isinstance(parts.mlp, NeoXMLP)
    # Norms behind attention and MLP change nothing about those before.
    is_llama = isinstance(layer, LlamaLayer) and isinstance(parts.attention, LlamaAttention)
    return is_llama and isinstance(parts.mlp, LlamaMLP)


def _up_name(mlp: nn.Module) -> str:
    return "gate_up_proj" if isinstance(mlp, LlamaMLP) else "up_proj"
