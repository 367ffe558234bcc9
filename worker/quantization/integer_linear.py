"""The method of linear layers with integer weights: its parameters, and how ranks cut them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimaran.comm.errors import ConfigError
from trimaran.kernels.integer_reference import pack, regular_groups, unpack
from trimaran.kernels.integers import Groups, IntegerProduct, IntegerWeight
from trimaran.kernels.operators import Ops
from trimaran.worker.config.schemes import IntegerScheme, Zeros
from trimaran.worker.layers.linear import WeightShapeError, check_shape
from trimaran.worker.quantization.fp8_linear import ShardedLayer, add_parameter
from trimaran.worker.quantization.integer_formats import (
    WEIGHT,
    WEIGHT_GROUP,
    WEIGHT_MINIMUM,
    WEIGHT_SCALE,
    WEIGHT_ZERO,
)
from trimaran.worker.quantization.self_check import check_integer_product

_MAX_PADDING = 8
"""Integers of a word of 4 bits: fewer lie behind the last integer of a row or column."""

# Shapes: T tokens, D inputs of this rank, E outputs of this rank, G groups of these inputs.


class IntegerLinearMethod:
    """Weights of 4 or 8 bits, unsigned, with a scale for each output and group of inputs.

    Parameters are packed as they are loaded. A rank holds the groups of its own inputs, or all
    groups if the checkpoint puts inputs into groups in any order.
    """

    def __init__(self, ops: Ops, scheme: IntegerScheme) -> None:
        self._ops = ops
        self.scheme = scheme
        self.name = f"int{scheme.bits}"
        self._dtype = torch.float32

    def create_weights(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """``weight`` uint8 [E, D] or [E, D / 2]; ``weight_scale`` float32 [E, G]; as the scheme
        has them, ``weight_zero`` int16 [E, G], ``weight_minimum`` float32 [E, G] and
        ``weight_group`` int32 [D].

        Raises:
            ConfigError: an odd number of inputs does not fill bytes.
        """
        outputs, inner = shape
        scheme, sharded = self.scheme, _sharded(layer)
        self._dtype = dtype
        if inner * scheme.bits % 8:
            raise ConfigError(
                f"a weight of {scheme.bits} bits has {inner} inputs on a rank, which do not "
                "fill whole bytes. Choose another --tp, or a checkpoint in bfloat16."
            )
        groups = outputs, self._group_range(sharded)[1]
        add_parameter(layer, WEIGHT, (outputs, inner * scheme.bits // 8), torch.uint8, device)
        add_parameter(layer, WEIGHT_SCALE, groups, torch.float32, device)
        if scheme.zeros is Zeros.POINT:
            add_parameter(layer, WEIGHT_ZERO, groups, torch.int16, device)
        if scheme.zeros is Zeros.MINIMUM:
            add_parameter(layer, WEIGHT_MINIMUM, groups, torch.float32, device)
        if scheme.has_order:
            add_parameter(layer, WEIGHT_GROUP, (inner,), torch.int32, device)

    def load_part(
        self, layer: nn.Module, parameter: nn.Parameter, loaded: Tensor, target: tuple[str, str]
    ) -> None:
        """Copy this rank's shard of a whole unpacked tensor (`integer_formats.unpacked`);
        ``target`` is the parameter's name and the shard.

        Raises:
            WeightShapeError: the tensor has another shape than the configuration implies.
        """
        name, shard = target
        if name == WEIGHT:
            self._load_integers(_sharded(layer), parameter, loaded, shard)
        elif name == WEIGHT_GROUP:
            self._load_order(_sharded(layer), parameter, loaded)
        else:
            self._load_groups(_sharded(layer), parameter, loaded, shard)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Hand the weight to the device's product, and compare that with its definition.

        The product's storage replaces the parameters, whose memory is freed.

        Raises:
            ConfigError: the results differ.
        """
        weight = self.weight_of(layer)
        has_byte_inputs = self.scheme.activations is not None
        product = self._ops.integer_product(weight, has_byte_inputs=has_byte_inputs)
        check_integer_product(product, weight, self._dtype, has_byte_inputs=has_byte_inputs)
        layer.integer_product = product  # type: ignore[assignment]
        for parameter in layer.parameters(recurse=False):
            if parameter is not layer.bias:
                parameter.data = parameter.data.new_empty(0)

    def weight_of(self, layer: nn.Module) -> IntegerWeight:
        """This rank's weight as operators take it, before its parameters are freed."""
        values, scales = layer.weight, layer.weight_scale
        assert isinstance(values, nn.Parameter) and isinstance(scales, nn.Parameter)
        sharded = _sharded(layer)
        inputs, size = sharded.input_partition, self.scheme.group_size
        order = getattr(layer, WEIGHT_GROUP, None)
        if size is None:
            groups = Groups(max(inputs.size, 1))
        elif order is None:
            groups = Groups(size, inputs.first % size)
        else:
            groups = Groups(size, inputs.first, order.data)
        zeros, minimums = (
            getattr(layer, WEIGHT_ZERO, None),
            getattr(layer, WEIGHT_MINIMUM, None),
        )
        half = 1 << (self.scheme.bits - 1)
        if zeros is not None and bool((zeros.data == half).all()):
            zeros = None
        return IntegerWeight(
            values.data,
            scales.data,
            regular_groups(groups, inputs.size),
            self.scheme.bits,
            None if zeros is None else zeros.data,
            None if minimums is None else minimums.data,
        )

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        product: IntegerProduct = layer.integer_product  # type: ignore[assignment]
        return product(x_TD, bias_E)

    def _group_range(self, sharded: ShardedLayer) -> tuple[int, int]:
        """The first group of this rank's inputs, and how many there are."""
        inputs, size = sharded.input_partition, self.scheme.group_size
        if size is None:
            return 0, 1
        if self.scheme.has_order:
            return 0, -(-inputs.whole // size)
        first = inputs.first // size
        return first, max(-(-(inputs.first + inputs.size) // size) - first, 1)

    def _load_integers(
        self, sharded: ShardedLayer, parameter: nn.Parameter, loaded: Tensor, shard: str
    ) -> None:
        inputs = sharded.input_partition
        if inputs.whole < loaded.shape[1] < inputs.whole + _MAX_PADDING:
            # Packed words are padded.
            loaded = loaded[:, : inputs.whole]
        if shard in sharded.output_parts:
            part = sharded.output_parts[shard]
            loaded = _rows_of(loaded, part.partition.whole, inputs.whole)
            mine = loaded[part.partition.first : part.partition.first + part.partition.count]
            mine = mine[:, inputs.first : inputs.first + inputs.count]
            rows = slice(part.offset, part.offset + len(mine))
            whole = mine.new_zeros(len(mine), inputs.size)
            whole[:, : inputs.count] = mine
            parameter.data[rows] = pack(whole, self.scheme.bits)
            return
        # The rows of several matrices are in the layer's own order.
        local = unpack(parameter.data, self.scheme.bits)
        unpacked = nn.Parameter(local.clone(), requires_grad=False)
        sharded.weight_loader(unpacked, loaded, shard)
        parameter.data.copy_(pack(unpacked.data, self.scheme.bits))

    def _load_groups(
        self, sharded: ShardedLayer, parameter: nn.Parameter, loaded: Tensor, shard: str
    ) -> None:
        size, whole = self.scheme.group_size, sharded.input_partition.whole
        num_groups = 1 if size is None else -(-whole // size)
        outputs = self._num_outputs(sharded, shard)
        if loaded.numel() == 1:
            loaded = loaded.reshape(1, 1).expand(outputs, num_groups)
        loaded = _rows_of(loaded, outputs, num_groups)
        first, count = self._group_range(sharded)
        columns = loaded[:, first : first + count]
        for place in range(columns.shape[1]):
            column = nn.Parameter(parameter.data[:, place], requires_grad=False)
            sharded.weight_loader(column, columns[:, place], shard)

    def _load_order(
        self, sharded: ShardedLayer, parameter: nn.Parameter, loaded: Tensor
    ) -> None:
        inputs = sharded.input_partition
        check_shape(loaded, (inputs.whole,))
        size = self.scheme.group_size or inputs.whole
        num_groups = -(-inputs.whole // size)
        if loaded.numel() and not 0 <= int(loaded.min()) <= int(loaded.max()) < num_groups:
            raise ConfigError(
                f"inputs have groups from {int(loaded.min())} to {int(loaded.max())}, but the "
                f"weight has {num_groups}. Download the folder again."
            )
        mine = loaded[inputs.first : inputs.first + inputs.count]
        held = parameter.data[: inputs.count]
        if bool(held.any()) and not held.equal(mine.to(held.device)):
            raise ConfigError(
                "matrices that are multiplied as one put the same inputs into different "
                "groups, which is not served. Name a checkpoint without desc_act or actorder, "
                "or in bfloat16."
            )
        held.copy_(mine)

    def _num_outputs(self, sharded: ShardedLayer, shard: str) -> int:
        parts = sharded.output_parts
        chosen = [parts[shard]] if shard in parts else list(parts.values())
        return sum(part.partition.whole for part in chosen)


def _sharded(layer: nn.Module) -> ShardedLayer:
    sharded: ShardedLayer = layer  # type: ignore[assignment]
    return sharded


def _rows_of(loaded: Tensor, outputs: int, columns: int) -> Tensor:
    """``loaded`` [outputs, columns]; packed words may have made it longer."""
    if not outputs <= loaded.shape[0] < outputs + _MAX_PADDING:
        raise WeightShapeError(tuple(loaded.shape), (outputs, columns))
    loaded = loaded[:outputs]
    check_shape(loaded, (outputs, columns))
    return loaded
