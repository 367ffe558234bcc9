"""How ranks cut the integers, scales, zero points and orders of a weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trimaran.comm.errors import ConfigError
from trimaran.kernels.integer_reference import pack, powers_of_two, regular_groups, unpack
from trimaran.kernels.integers import Groups, IntegerWeight
from trimaran.worker.config.schemes import IntegerScheme, Zeros
from trimaran.worker.layers.linear import WeightShapeError, check_shape
from trimaran.worker.quantization.fp8_linear import (
    INPUT_SCALE,
    ShardedLayer,
    load_input_scale,
)
from trimaran.worker.quantization.integer_formats import (
    WEIGHT,
    WEIGHT_GROUP,
    WEIGHT_MINIMUM,
    WEIGHT_SCALE,
    WEIGHT_ZERO,
)

_MAX_PADDING = 8
"""Integers of a word of 4 bits: fewer lie behind the last integer of a row or column."""

# Shapes: D inputs of this rank, E outputs of this rank, G groups of these inputs.


class IntegerShards:
    """The parameters of a rank's share of a weight of integers, by their kinds
    (`integer_formats.WEIGHT` and the others).

    Integers are packed as they are loaded. A rank holds the groups of its own inputs, or all
    groups if the checkpoint puts inputs into groups in any order.
    """

    def __init__(self, scheme: IntegerScheme) -> None:
        self.scheme = scheme

    def parameters(
        self, sharded: ShardedLayer, shape: tuple[int, int]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes by kind, for a rank's weight of ``shape`` [E, D]: uint8 integers
        [E, D] or [E, D / 2], float32 scales [E, G] or the uint8 exponents of powers of two,
        biased by 127; as the scheme has them, int16 zero points
        [E, G], float32 minimums [E, G], int32 groups of inputs [D], and a float32 scale of
        inputs for each stacked matrix.

        Raises:
            ConfigError: an odd number of inputs does not fill bytes.
        """
        outputs, inner = shape
        scheme = self.scheme
        if inner * scheme.bits % 8:
            raise ConfigError(
                f"a weight of {scheme.bits} bits has {inner} inputs on a rank, which do not "
                "fill whole bytes. Choose another --tp, or a checkpoint in bfloat16."
            )
        groups = outputs, self._group_range(sharded)[1]
        scales = torch.uint8 if scheme.has_power_scales else torch.float32
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            WEIGHT: ((outputs, inner * scheme.bits // 8), torch.uint8),
            WEIGHT_SCALE: (groups, scales),
        }
        if scheme.zeros is Zeros.POINT:
            found[WEIGHT_ZERO] = groups, torch.int16
        if scheme.zeros is Zeros.MINIMUM:
            found[WEIGHT_MINIMUM] = groups, torch.float32
        if scheme.has_order:
            found[WEIGHT_GROUP] = (inner,), torch.int32
        if scheme.has_input_scale:
            found[INPUT_SCALE] = (len(sharded.output_parts),), torch.float32
        return found

    def load(
        self,
        sharded: ShardedLayer,
        kind: str,
        parameter: nn.Parameter,
        loaded: Tensor,
        shard: str,
    ) -> None:
        """Copy this rank's shard of a whole unpacked tensor (`integer_formats.unpacked`).

        Raises:
            WeightShapeError: the tensor has another shape than the configuration implies.
            ConfigError: stacked matrices put inputs into different groups.
        """
        if kind == WEIGHT:
            self._load_integers(sharded, parameter, loaded, shard)
        elif kind == WEIGHT_GROUP:
            self._load_order(sharded, parameter, loaded)
        elif kind == INPUT_SCALE:
            load_input_scale(sharded, parameter, loaded, shard)
        else:
            self._load_groups(sharded, parameter, loaded, shard)

    def weight(self, sharded: ShardedLayer, tensors: Mapping[str, Tensor]) -> IntegerWeight:
        """This rank's weight as operators take it, of tensors by kind."""
        inputs, size = sharded.input_partition, self.scheme.group_size
        order = tensors.get(WEIGHT_GROUP)
        if size is None:
            groups = Groups(max(inputs.size, 1))
        elif order is None:
            groups = Groups(size, inputs.first % size)
        else:
            groups = Groups(size, inputs.first, order)
        zeros = tensors.get(WEIGHT_ZERO)
        half = 1 << (self.scheme.bits - 1)
        if zeros is not None and bool((zeros == half).all()):
            zeros = None
        scales = tensors[WEIGHT_SCALE]
        # Inputs that one of the stacked matrices was calibrated for must fit.
        static = tensors.get(INPUT_SCALE)
        return IntegerWeight(
            tensors[WEIGHT],
            powers_of_two(scales) if self.scheme.has_power_scales else scales,
            regular_groups(groups, inputs.size),
            self.scheme.bits,
            zeros,
            tensors.get(WEIGHT_MINIMUM),
            self.scheme.is_fp4,
            None if static is None else static.max(),
        )

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
        if loaded.is_meta:
            # A build checks shapes before it reads values.
            return
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


def _rows_of(loaded: Tensor, outputs: int, columns: int) -> Tensor:
    """``loaded`` [outputs, columns]; packed words may have made it longer."""
    if not outputs <= loaded.shape[0] < outputs + _MAX_PADDING:
        raise WeightShapeError(tuple(loaded.shape), (outputs, columns))
    loaded = loaded[:outputs]
    check_shape(loaded, (outputs, columns))
    return loaded
