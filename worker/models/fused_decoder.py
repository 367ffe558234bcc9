"""A stage's decoder layers run as one operator where the device has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.kernels.cpu.decoder import Decoder, DecoderShape, DecoderStep, LayerWeights
from trimaran.kernels.cpu.integers import CpuIntegerProduct
from trimaran.worker.attention.backend import AttentionSpec, ForwardContext
from trimaran.worker.attention.taps import LayerTaps
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.layers.methods import NoLoRA, UnquantizedLinearMethod
from trimaran.worker.layers.rotary import RotaryEmbedding
from trimaran.worker.quantization.integer_linear import IntegerLinearMethod

# Shapes: T tokens of the step, D hidden size.


class FusedLayers:
    """Decoder layers in one call, or in one call between two all-reduces of the tensor
    group."""

    def __init__(
        self, decoder: Decoder, context: LayerContext, biases: list[tuple[Tensor | None, ...]]
    ) -> None:
        self._decoder = decoder
        self._tp = context.tp
        self._biases = biases

    def forward(
        self, hidden_TD: Tensor, positions_T: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """The last layer's output, and the residual that the final norm adds; of the wanted
        tokens alone."""
        metadata = context.attention
        step = DecoderStep(
            positions_T,
            metadata.slot_mapping,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            context.kv_caches,
            metadata.tree_masks,
        )
        x, residual = hidden_TD.clone(), torch.empty_like(hidden_TD)
        last = 2 * len(self._biases) - 1
        first = self._run_to_taps(x, residual, step, context.taps)
        if context.wanted is None:
            self._run((first, last + 1), x, residual, step)
            return x, residual
        self._run((first, last), x, residual, step)
        x, residual = (each.index_select(0, context.wanted) for each in (x, residual))
        self._run((last, last + 1), x, residual, step)
        return x, residual

    def _run_to_taps(
        self, x_TD: Tensor, residual_TD: Tensor, step: DecoderStep, taps: LayerTaps | None
    ) -> int:
        """Run the layers before the last one whose input is kept. Returns the next half."""
        done = 0
        for layer in sorted(set(taps.layers)) if taps is not None else ():
            assert taps is not None
            if 2 * layer > done:
                self._run((done, 2 * layer), x_TD, residual_TD, step)
                done = 2 * layer
            taps.take(layer, x_TD, residual_TD if done else None)
        return done

    def _run(
        self, halves: tuple[int, int], x_TD: Tensor, residual_TD: Tensor, step: DecoderStep
    ) -> None:
        """Run these halves of layers in order; see `Decoder.run`."""
        if self._tp.size == 1:
            self._decoder.run(halves, x_TD, residual_TD, step)
            return
        for half in range(*halves):
            self._decoder.run((half, half + 1), x_TD, residual_TD, step)
            self._tp.all_reduce(x_TD)
            bias = self._biases[half // 2][half % 2]
            if bias is not None:
                x_TD += bias


def fuse_layers(
    config: PretrainedConfig,
    context: LayerContext,
    layers: Sequence[nn.Module],
    rotary: RotaryEmbedding | None,
) -> FusedLayers | None:
    """The layers as one operator; None if a quantization method or the device has no such
    operator, or if a layer has windows or other parts than `_is_plain` allows.

    The operator reads the layers' own weights, so no weight may be replaced afterwards.
    """
    if config.parallel_residual:
        return None
    if not layers or not all(_is_plain(layer) for layer in layers):
        return None
    if rotary is not None and not rotary.rotates_whole_heads(config.head_size):
        return None
    if hasattr(layers[0].mlp, "gate_up_proj") and config.hidden_act != "silu":
        return None
    first: Any = layers[0]
    shape = DecoderShape(
        hidden=config.hidden_size,
        inner=first.mlp.down_proj.input_partition.size,
        num_heads=first.attention.qkv_proj.num_heads,
        num_kv_heads=first.attention.qkv_proj.num_kv_heads,
        head_size=config.head_size,
        eps=config.norm_epsilon,
        activation=config.hidden_act,
        cos_sin=None if rotary is None else rotary.cos_sin,
    )
    # With several ranks a row-parallel bias is added after the all-reduce.
    is_alone = context.tp.size == 1
    weights = [_weights_of(layer, with_row_biases=is_alone) for layer in layers]
    decoder = context.ops.fuse_decoder(shape, weights)
    if decoder is None:
        return None
    biases = [_row_biases(layer) for layer in layers]
    return FusedLayers(decoder, context, biases)


_PARTS = {"attention_norm", "attention", "mlp_norm", "mlp"}
_ATTENTION_PARTS = {"qkv_proj", "o_proj"}


def _is_plain(layer: Any) -> bool:
    """Whether a layer consists of two norms, products without quantized inputs or with integer
    weights, and plain attention, and of nothing else."""
    attention = layer.attention
    if {name for name, _ in layer.named_children()} != _PARTS:
        return False
    # Experts have no product in their place.
    if not hasattr(layer.mlp, "down_proj"):
        return False
    if {name for name, _ in attention.named_children()} != _ATTENTION_PARTS:
        return False
    spec = attention.backend.spec
    # Tensors in specs are compared before the specs, since tensors have no plain equality.
    tensors = (spec.position_bias, spec.kv_scales, spec.sink_logits)
    if any(each is not None for each in tensors):
        return False
    if spec != AttentionSpec(scale=attention.head_size**-0.5):
        return False
    linears = (
        layer.attention.qkv_proj,
        layer.attention.o_proj,
        _up(layer),
        layer.mlp.down_proj,
    )
    return all(
        _product_of(linear) is not None and isinstance(linear.lora, NoLoRA)
        for linear in linears
    )


def _product_of(linear: Any) -> Tensor | CpuIntegerProduct | None:
    """A layer's weight as the operator takes it; None if the operator does not."""
    if isinstance(linear.method, UnquantizedLinearMethod):
        weight: Tensor = linear.weight
        return weight
    if isinstance(linear.method, IntegerLinearMethod):
        product = linear.integer_product
        return product if isinstance(product, CpuIntegerProduct) else None
    return None


def _taken(linear: Any) -> Tensor | CpuIntegerProduct:
    product = _product_of(linear)
    assert product is not None, "checked by _is_plain"
    return product


def _up(layer: Any) -> Any:
    return layer.mlp.gate_up_proj if hasattr(layer.mlp, "gate_up_proj") else layer.mlp.up_proj


def _row_biases(layer: Any) -> tuple[Tensor | None, ...]:
    return layer.attention.o_proj.bias, layer.mlp.down_proj.bias


def _weights_of(layer: Any, *, with_row_biases: bool) -> LayerWeights:
    out_bias, down_bias = _row_biases(layer) if with_row_biases else (None, None)
    return LayerWeights(
        attention_norm=layer.attention_norm.weight,
        attention_norm_bias=getattr(layer.attention_norm, "bias", None),
        qkv=_taken(layer.attention.qkv_proj),
        qkv_bias=layer.attention.qkv_proj.bias,
        out=_taken(layer.attention.o_proj),
        out_bias=out_bias,
        mlp_norm=layer.mlp_norm.weight,
        mlp_norm_bias=getattr(layer.mlp_norm, "bias", None),
        up=_taken(_up(layer)),
        up_bias=_up(layer).bias,
        down=_taken(layer.mlp.down_proj),
        down_bias=down_bias,
    )
