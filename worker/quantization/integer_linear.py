"""The method of linear layers with integer weights: its parameters, and its product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimaran.kernels.integers import IntegerProduct, IntegerWeight
from trimaran.kernels.operators import Ops
from trimaran.kernels.quantized import INT8, ByteInputs, ByteProduct, ByteWeight
from trimaran.worker.config.schemes import IntegerScheme
from trimaran.worker.quantization.fp8_linear import ShardedLayer, add_parameter
from trimaran.worker.quantization.integer_shards import IntegerShards
from trimaran.worker.quantization.self_check import check_integer_product, check_product

# Shapes: T tokens, D inputs of this rank, E outputs of this rank.


class IntegerLinearMethod:
    """Weights of 4 or 8 bits, unsigned, with a scale for each output and group of inputs.

    `IntegerShards` says what a rank holds. Weights of 8 bits with a scale an output, whose
    inputs are INT8 too, become signed where the device multiplies INT8.
    """

    def __init__(self, ops: Ops, scheme: IntegerScheme) -> None:
        self._ops = ops
        self._shards = IntegerShards(scheme)
        self.scheme = scheme
        self.name = scheme.label
        self._dtype = torch.float32

    def create_weights(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """The parameters of `IntegerShards` by their kinds.

        Raises:
            ConfigError: an odd number of inputs does not fill bytes.
        """
        self._dtype = dtype
        for kind, (size, numbers) in self._shards.parameters(_sharded(layer), shape).items():
            add_parameter(layer, kind, size, numbers, device)

    def load_part(
        self, layer: nn.Module, parameter: nn.Parameter, loaded: Tensor, target: tuple[str, str]
    ) -> None:
        """Copy this rank's shard of a whole unpacked tensor (`integer_formats.unpacked`);
        ``target`` is the parameter's name and the shard.

        Raises:
            WeightShapeError: the tensor has another shape than the configuration implies.
        """
        kind, shard = target
        self._shards.load(_sharded(layer), kind, parameter, loaded, shard)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Hand the weight to the device's product, and compare that with its definition.

        The product's storage replaces the parameters, whose memory is freed, or is theirs.

        Raises:
            ConfigError: the results differ.
        """
        weight = self.weight_of(layer)
        if self._use_int8_product(layer, weight):
            return
        has_byte_inputs = self.scheme.activations is not None
        is_gated = list(_sharded(layer).output_parts) == ["gate", "up"]
        product = self._ops.integer_product(
            weight, has_byte_inputs=has_byte_inputs, is_gated=is_gated
        )
        check_integer_product(
            product, weight, self._dtype, has_byte_inputs=has_byte_inputs, is_gated=is_gated
        )
        layer.integer_product = product  # type: ignore[assignment]
        for parameter in layer.parameters(recurse=False):
            if parameter is not layer.bias:
                parameter.data = parameter.data.new_empty(0)

    def _use_int8_product(self, layer: nn.Module, weight: IntegerWeight) -> bool:
        """Let the device multiply INT8 by INT8, if it can."""
        if self.scheme.activations is None or weight.bits != 8 or weight.scales.shape[1] != 1:
            return False
        if weight.zeros is not None or weight.minimums is not None:
            return False
        # An integer less half of the range: its highest bit changes.
        signed = ByteWeight(weight.values.view(INT8), weight.scales.flatten())
        inputs = ByteInputs(weight.input_scale, dtype=INT8)
        product = self._ops.int8_product(signed, inputs)
        if product is None:
            return False
        weight.values.bitwise_xor_(weight.half)
        is_gated = list(_sharded(layer).output_parts) == ["gate", "up"]
        check_product(product, signed, inputs, self._dtype, is_gated=is_gated)
        layer.byte_product = product  # type: ignore[assignment]
        return True

    def weight_of(self, layer: nn.Module) -> IntegerWeight:
        """This rank's weight as operators take it, before its parameters are freed."""
        tensors = {name: each.data for name, each in layer.named_parameters(recurse=False)}
        return self._shards.weight(_sharded(layer), tensors)

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        product: IntegerProduct | ByteProduct = (
            layer.integer_product or layer.byte_product  # type: ignore[assignment]
        )
        return product(x_TD, bias_E)


def _sharded(layer: nn.Module) -> ShardedLayer:
    sharded: ShardedLayer = layer  # type: ignore[assignment]
    return sharded
