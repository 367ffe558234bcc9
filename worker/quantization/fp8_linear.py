"""The method of linear layers with FP8 weights: its parameters, and how ranks cut them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from trimaran.comm.errors import ConfigError
from trimaran.kernels.operators import Ops
from trimaran.kernels.quantized import FP8, BlockMap, ByteInputs, ByteProduct, ByteWeight
from trimaran.worker.config.schemes import Activations, Fp8Scheme
from trimaran.worker.layers.linear import OutputPart, WeightShapeError, check_shape
from trimaran.worker.parallel.partition import DimPartition
from trimaran.worker.quantization.self_check import check_product

# Shapes: T tokens, D inputs of this rank, E outputs of this rank; of scales: R rows and C
# columns of blocks.

WEIGHT_SCALE = "weight_scale"
INPUT_SCALE = "input_scale"
ALL_PARTS = "*"


def scale_prefix(parameter: str) -> str:
    """What stands before `WEIGHT_SCALE` and `INPUT_SCALE` in the names of a weight's scales:
    experts have several weights."""
    weight = "weight"
    is_weight = parameter.endswith(f".{weight}")
    return parameter.removesuffix(weight) if is_weight else f"{parameter}_"


class ShardedLayer(Protocol):
    """The part of a linear layer, or of a matrix of experts, that says which rows and columns
    are this rank's."""

    @property
    def output_parts(self) -> dict[str, OutputPart]: ...

    @property
    def input_partition(self) -> DimPartition: ...

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str) -> None: ...


class Fp8LinearMethod:
    """FP8 weights with a scale a row or a block, and inputs quantized on the way.

    A scale for a whole matrix becomes one for each of its rows, so that stacked matrices keep
    their own. Stacked matrices share their input: the largest of their static scales counts,
    since inputs that one of them was calibrated for must fit.
    """

    name = "fp8"

    def __init__(self, ops: Ops, scheme: Fp8Scheme) -> None:
        self._ops = ops
        self.scheme = scheme
        self._dtype = torch.float32

    @property
    def has_input_scale(self) -> bool:
        """Whether the checkpoint holds the scale of inputs."""
        return self.scheme.activations is Activations.STATIC

    def create_weights(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """``weight`` [E, D] in FP8; ``weight_scale`` float32 [E] or [R, C]; for static inputs
        ``input_scale`` float32, one for each stacked matrix."""
        sharded: ShardedLayer = layer  # type: ignore[assignment]
        self._dtype = dtype
        scales: tuple[int, ...] = shape[:1]
        if self.scheme.block is not None:
            rows, columns = self.scheme.block
            mine = sharded.input_partition
            count = -(-(mine.first % columns + mine.size) // columns)
            scales = block_rows(sharded, rows).count, count
        add_parameter(layer, "weight", shape, FP8, device)
        add_parameter(layer, WEIGHT_SCALE, scales, torch.float32, device)
        if self.has_input_scale:
            add_parameter(
                layer, INPUT_SCALE, (len(sharded.output_parts),), torch.float32, device
            )

    def load_scale(
        self, layer: nn.Module, parameter: nn.Parameter, loaded: Tensor, target: tuple[str, str]
    ) -> None:
        """Copy this rank's scales from a checkpoint's tensor; ``target`` is the parameter's
        name and the shard.

        Raises:
            WeightShapeError: the tensor has another shape than the configuration implies.
        """
        sharded: ShardedLayer = layer  # type: ignore[assignment]
        name, shard = target
        if name == INPUT_SCALE:
            load_input_scale(sharded, parameter, loaded, shard)
        else:
            load_weight_scales(self.scheme.block, sharded, parameter, loaded, shard)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Hand the weight to the device's product, and compare that with its definition.

        Raises:
            ConfigError: the results differ.
        """
        sharded: ShardedLayer = layer  # type: ignore[assignment]
        weight, scales = layer.weight.data, layer.weight_scale.data
        assert isinstance(weight, Tensor) and isinstance(scales, Tensor)
        blocks = None
        if self.scheme.block is not None:
            rows, columns = self.scheme.block
            rows_E = block_rows(sharded, rows).of_outputs
            first = sharded.input_partition.first % columns
            blocks = BlockMap.of(rows_E, columns, first, weight.device)
        static = getattr(layer, INPUT_SCALE, None)
        inputs = ByteInputs(
            None if static is None else static.data.max(),
            self.scheme.activation_bound,
            self.scheme.has_power_scales,
        )
        whole = ByteWeight(weight, scales, blocks)
        product = self._ops.fp8_product(whole, inputs)
        is_gated = list(sharded.output_parts) == ["gate", "up"]
        check_product(product, whole, inputs, self._dtype, is_gated=is_gated)
        layer.byte_product = product  # type: ignore[assignment]

    def apply(self, layer: nn.Module, x_TD: Tensor, bias_E: Tensor | None) -> Tensor:
        """``x @ weight.T + bias`` of quantized inputs."""
        product: ByteProduct = layer.byte_product  # type: ignore[assignment]
        return product(x_TD, bias_E)


def load_weight_scales(
    block: tuple[int, int] | None,
    sharded: ShardedLayer,
    parameter: nn.Parameter,
    loaded: Tensor,
    shard: str,
) -> None:
    """Copy this rank's scales of a weight from a checkpoint's tensor.

    Raises:
        WeightShapeError: the tensor has another shape than the configuration implies.
    """
    if block is None:
        outputs = sum(part.partition.whole for part in _parts_of(sharded, shard).values())
        sharded.weight_loader(parameter, _row_scales(loaded, outputs), shard)
    else:
        _load_block_scales(block, sharded, parameter, loaded, shard)


def _load_block_scales(
    block: tuple[int, int],
    sharded: ShardedLayer,
    parameter: nn.Parameter,
    loaded: Tensor,
    shard: str,
) -> None:
    rows, columns = block
    if shard not in (*sharded.output_parts, ALL_PARTS):
        raise ConfigError(
            "a weight whose heads hold queries, keys and values in turn has scales of "
            "blocks, which is not served. Name a checkpoint with a scale a row."
        )
    parts, inputs = _parts_of(sharded, shard), sharded.input_partition
    outputs = sum(part.partition.whole for part in parts.values())
    check_shape(loaded, (-(-outputs // rows), -(-inputs.whole // columns)))
    first = inputs.first // columns
    count = -(-(inputs.first + inputs.count) // columns) - first if inputs.count else 0
    targets, start = block_rows(sharded, rows).of_parts, 0
    for name, part in parts.items():
        if start % rows:
            raise ConfigError(
                f"a weight of stacked matrices has scales of blocks of {rows} rows, but "
                f"one matrix begins at row {start}: such a block belongs to two. Name a "
                "checkpoint with a scale a row, or in bfloat16."
            )
        source = slice(start // rows + part.partition.first // rows, None)
        target = parameter.data[targets[name]]
        target.zero_()
        mine = loaded[source, first : first + count][: target.shape[0]]
        target[: mine.shape[0], :count].copy_(mine)
        start += part.partition.whole


class BlockRows:
    """The rows of block scales of a rank: those of each stacked matrix, one after another."""

    def __init__(self, parts: dict[str, OutputPart], rows: int) -> None:
        self.of_parts: dict[str, slice] = {}
        numbers, at = [], 0
        for name, part in parts.items():
            mine = part.partition
            skipped = mine.first // rows
            count = -(-(mine.first + mine.count) // rows) - skipped if mine.count else 0
            self.of_parts[name] = slice(at, at + count)
            # Outputs of padding have values of zero, so that any scale will do.
            blocks = torch.arange(mine.first, mine.first + mine.size) // rows - skipped
            numbers.append(at + blocks.clamp_max(max(count - 1, 0)))
            at += count
        self.count = max(at, 1)
        self.of_outputs = torch.cat(numbers).clamp_max(self.count - 1).to(torch.int32)


def block_rows(sharded: ShardedLayer, rows: int) -> BlockRows:
    """The rows of block scales of a layer."""
    return BlockRows(sharded.output_parts, rows)


def _parts_of(sharded: ShardedLayer, shard: str) -> dict[str, OutputPart]:
    """The stacked matrices that a checkpoint's tensor holds."""
    parts = sharded.output_parts
    return {shard: parts[shard]} if shard in parts else parts


def _row_scales(loaded: Tensor, outputs: int) -> Tensor:
    """A scale for each of ``outputs`` rows, from those of a checkpoint."""
    if loaded.numel() == 1:
        return loaded.reshape(1).expand(outputs)
    check_shape(loaded, (outputs, 1) if loaded.dim() > 1 else (outputs,))
    return loaded.reshape(outputs)


def load_input_scale(
    sharded: ShardedLayer, parameter: nn.Parameter, loaded: Tensor, shard: str
) -> None:
    """Copy the static scale of the inputs of a stacked matrix; see `load_weight_scales`."""
    if loaded.numel() != 1:
        raise WeightShapeError(tuple(loaded.shape), ())
    names = list(sharded.output_parts)
    places = [names.index(shard)] if shard in names else range(len(names))
    for place in places:
        parameter.data[place].copy_(loaded.reshape(()))


def add_parameter(
    layer: nn.Module,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Register a parameter of zeros."""
    # Zeros, because a rank without outputs has a scale that no tensor fills.
    values = torch.zeros(shape, dtype=dtype, device=device)
    layer.register_parameter(name, nn.Parameter(values, requires_grad=False))
