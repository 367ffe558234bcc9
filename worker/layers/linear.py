"""Linear layers sharded over tensor-parallel ranks, and the loading of their shards."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimaran.kernels.integers import IntegerProduct
from trimaran.kernels.operators import Ops
from trimaran.kernels.quantized import ByteInputs, ByteProduct, ByteRows
from trimaran.worker.config.quantization import QuantizationConfig
from trimaran.worker.layers.methods import (
    LinearMethod,
    LoRAMethod,
    NoLoRA,
    UnquantizedLinearMethod,
)
from trimaran.worker.parallel.partition import DimPartition, even_partition, partition_heads
from trimaran.worker.parallel.tensor_parallel import (
    Addend,
    PendingSum,
    ShardPosition,
    TensorGroup,
    TokensAcrossDP,
    can_wait,
)

_META = torch.device("meta")


class LayerContext:
    """Construction parameters that all layers of a model share."""

    def __init__(
        self,
        tp: TensorGroup,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        max_seq_len: int = 0,
        moe_ep_size: int = 1,
        expert_ranks: TensorGroup | None = None,
        quantization: QuantizationConfig | None = None,
    ) -> None:
        """``max_seq_len`` is the longest sequence that will run, 0 for the model's limit.
        Experts are distributed to ``moe_ep_size`` parts of ``expert_ranks``, the ranks of all
        dp ranks; None means ``tp`` alone. With ``quantization`` linear layers have no memory
        until each has the method of its name (`ParallelLinear.use_method`)."""
        self.tp = tp
        self.expert_ranks = expert_ranks or tp
        self.tokens_across_dp = TokensAcrossDP()
        self.moe_ep_size = moe_ep_size
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.max_seq_len = max_seq_len
        self.linear_method: LinearMethod = UnquantizedLinearMethod(ops)
        self.quantization = quantization
        self.partition_multiple = max(quantization.block_sizes) if quantization else 1
        """Ranks' shares of inner widths are multiples of this, so that no block of values with
        one scale is cut."""

    @property
    def linear_device(self) -> torch.device:
        """The device of the weights of linear layers as they are made."""
        return self.device if self.quantization is None else _META

    def partition_of(self, whole: int) -> DimPartition:
        """This tensor rank's share of an inner width."""
        return even_partition(
            whole, self.tp.rank, self.tp.size, multiple=self.partition_multiple
        )

    def alone(self) -> LayerContext:
        """A context for layers that every rank holds and computes whole."""
        context = copy.copy(self)
        context.tp = ShardPosition()
        return context

    def unquantized(self) -> LayerContext:
        """A context for layers whose weights are floats, whatever the model's are."""
        context = copy.copy(self)
        context.quantization = None
        return context

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter of this model's dtype and device, uninitialised."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)


class WeightShapeError(ValueError):
    """A checkpoint's tensor has another shape than the configuration implies."""

    def __init__(self, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        super().__init__(
            f"has shape {list(found)}, but the configuration implies {list(expected)}"
        )
        self.expected = expected


def check_shape(loaded: Tensor, expected: tuple[int, ...]) -> None:
    """Raise `WeightShapeError` unless a whole tensor has this shape."""
    if tuple(loaded.shape) != expected:
        raise WeightShapeError(tuple(loaded.shape), expected)


class ParallelLinear(nn.Module):
    """Base of the linear layers: parameters, method objects and the local product."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        context: LayerContext,
        local_shape: tuple[int, int],
        *,
        bias: bool,
        method: LinearMethod | None = None,
        lora: LoRAMethod | None = None,
    ) -> None:
        super().__init__()
        self.tp = context.tp
        self.method = method or context.linear_method
        self.lora: LoRAMethod = lora or NoLoRA()
        self._local_shape, self._dtype = local_shape, context.dtype
        self.method.create_weights(self, local_shape, context.dtype, context.linear_device)
        self.bias = context.empty(local_shape[0]) if bias else None
        self.byte_product: ByteProduct | None = None
        """The product by the loaded weight, set by the method of FP8 or INT8 inputs."""
        self.integer_product: IntegerProduct | None = None
        """The same of integer weights."""

    @property
    def own_product(self) -> ByteProduct | None:
        """The product of FP8 or INT8, for operators that are fused with it; None for other
        weights, and where adapters need the inputs too."""
        return None if self.lora.is_active else self.byte_product

    def use_method(self, method: LinearMethod, device: torch.device) -> None:
        """Let ``method`` store and multiply the weight, with new memory on ``device``."""
        for name in [name for name in self._parameters if name != "bias"]:
            del self._parameters[name]
        self.method = method
        method.create_weights(self, self._local_shape, self._dtype, device)

    def forward(self, x_TD: Tensor | ByteRows) -> Tensor:
        """This rank's part of ``x @ weight.T + bias``. Quantized rows are those that
        `own_product` made."""
        return self._product(x_TD, self.bias)

    def _product(self, x_TD: Tensor | ByteRows, bias_E: Tensor | None) -> Tensor:
        if isinstance(x_TD, ByteRows):
            assert self.own_product is not None, "another product made these rows"
            return self.own_product(x_TD, bias_E)
        output_TE = self.method.apply(self, x_TD, bias_E)
        return self.lora.apply(x_TD, output_TE) if self.lora.is_active else output_TE

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's shard of a whole tensor; ``shard`` names a part of a fused
        weight."""
        raise NotImplementedError

    @property
    def output_parts(self) -> dict[str, OutputPart]:
        """The parts of the outputs by name, in their order."""
        raise NotImplementedError

    @property
    def input_partition(self) -> DimPartition:
        """The inputs of this rank."""
        raise NotImplementedError


class MergedColumnParallelLinear(ParallelLinear):
    """Several column-parallel layers with one input, stacked: each rank has a shard of each.

    ``parts`` are the whole output sizes, or this rank's shards of them, in order.
    """

    def __init__(
        self,
        context: LayerContext,
        in_features: int,
        parts: Mapping[str, int | DimPartition],
        *,
        bias: bool = False,
        method: LinearMethod | None = None,
        lora: LoRAMethod | None = None,
    ) -> None:
        rows = self._stack(parts, in_features, context)
        super().__init__(context, (rows, in_features), bias=bias, method=method, lora=lora)

    def _stack(
        self, parts: Mapping[str, int | DimPartition], in_features: int, context: LayerContext
    ) -> int:
        """Record the stacked parts. Returns the number of rows of all."""
        self._in_features = in_features
        self._parts: dict[str, OutputPart] = {}
        offset = 0
        for name, whole in parts.items():
            self._parts[name] = OutputPart(_partition_of(whole, context), offset)
            offset += self._parts[name].partition.size
        return offset

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's rows of the part ``shard``, a whole [out, in] or [out] tensor.

        ``*`` means all parts, in the order in which they are stacked.
        """
        tail = (self._in_features,) if loaded.dim() == 2 else ()
        if shard == "*":
            sizes = [part.partition.whole for part in self._parts.values()]
            check_shape(loaded, (sum(sizes), *tail))
            for name, rows in zip(self._parts, torch.split(loaded, sizes), strict=True):
                self.weight_loader(parameter, rows, name)
            return
        part = self._parts[shard]
        check_shape(loaded, (part.partition.whole, *tail))
        copy_partition(
            loaded, parameter.data.narrow(0, part.offset, part.partition.size), part.partition
        )

    @property
    def output_parts(self) -> dict[str, OutputPart]:
        """The stacked layers by name."""
        return self._parts

    @property
    def input_partition(self) -> DimPartition:
        """Every rank has all inputs."""
        return even_partition(self._in_features, 0, 1)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """A linear layer whose outputs are sharded over the ranks."""

    def __init__(
        self,
        context: LayerContext,
        in_features: int,
        out_features: int | DimPartition,
        *,
        bias: bool = False,
        method: LinearMethod | None = None,
        lora: LoRAMethod | None = None,
    ) -> None:
        super().__init__(
            context, in_features, {"": out_features}, bias=bias, method=method, lora=lora
        )


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections in one product, sharded by heads.

    With fewer key-value heads than ranks, ranks that share a query group hold copies of its
    key-value head. If the ranks do not divide the heads, some ranks have heads of zeros.
    """

    def __init__(
        self,
        context: LayerContext,
        hidden_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = False,
        method: LinearMethod | None = None,
        lora: LoRAMethod | None = None,
    ) -> None:
        tp = context.tp
        heads = partition_heads(num_heads, num_kv_heads, tp.rank, tp.size)
        self.num_heads, self.num_kv_heads = heads.queries.size, heads.keys.size
        self.output_partition = heads.queries.times(head_size)
        """The outputs of this rank's query heads."""
        keys = heads.keys.times(head_size)
        stacked = {"q": self.output_partition, "k": keys, "v": keys}
        rows = self._stack(stacked, hidden_size, context)
        ParallelLinear.__init__(
            self, context, (rows, hidden_size), bias=bias, method=method, lora=lora
        )
        self._linear = context.ops.linear

    @property
    def is_separable(self) -> bool:
        """Whether `keys_and_values` is supported."""
        return isinstance(self.method, UnquantizedLinearMethod) and not self.lora.is_active

    def keys_and_values(self, x_TD: Tensor) -> Tensor:
        """The keys and values of `forward` [T, 2 * K * H]; only if it `is_separable`."""
        first = self.output_partition.size
        bias = None if self.bias is None else self.bias[first:]
        return self._linear(x_TD, self.weight[first:], bias)


class RowParallelLinear(ParallelLinear):
    """A linear layer whose inputs are sharded over the ranks, followed by an all-reduce.

    ``in_features`` is the whole input size, or this rank's shard of it.
    """

    def __init__(
        self,
        context: LayerContext,
        in_features: int | DimPartition,
        out_features: int,
        *,
        bias: bool = False,
        method: LinearMethod | None = None,
        lora: LoRAMethod | None = None,
    ) -> None:
        self._partition = _partition_of(in_features, context)
        self._whole_shape = (out_features, self._partition.whole)
        self._add_linear = context.ops.add_linear
        self._linear_parts = context.ops.linear_parts
        local_shape = out_features, self._partition.size
        super().__init__(context, local_shape, bias=bias, method=method, lora=lora)

    def forward(self, x_TD: Tensor | ByteRows) -> Tensor:
        """``x @ weight.T + bias``, whole on every rank."""
        if self.tp.size == 1:
            return super().forward(x_TD)
        output_TE = self.tp.all_reduce(self._product(x_TD, None))
        # After the all-reduce, because every rank holds the whole bias.
        return output_TE if self.bias is None else output_TE.add_(self.bias)

    def add_to(self, residual_TD: Tensor | None, x_TD: Tensor | ByteRows) -> Addend:
        """Add ``forward(x)`` to ``residual`` and return None, or return ``forward(x)``.

        The product is returned if the addition would be a pass of its own, or if there is no
        residual. The product may then be float32 parts [parts, T, E], which the next norm adds
        up, or a `PendingSum`, whose all-reduce the next norm does.
        """
        if residual_TD is None or self.bias is not None:
            return self.forward(x_TD)
        is_plain = isinstance(self.method, UnquantizedLinearMethod) and not self.lora.is_active
        plain = x_TD if is_plain and isinstance(x_TD, Tensor) else None
        if self.tp.size == 1 and plain is not None:
            return self._add_linear(plain, self.weight, residual_TD)
        if self.tp.size == 1:
            return self._parts(x_TD)
        if not can_wait(self.tp, residual_TD):
            return self.forward(x_TD)
        if plain is not None:
            return PendingSum(self._linear_parts(plain, self.weight), self.tp)
        return PendingSum(self._parts(x_TD), self.tp)

    def grouped_inputs(self, residual_TD: Tensor | None) -> ByteInputs | None:
        """How inputs of `add_to` with this residual may be quantized in groups; None if it
        takes none."""
        own = self.own_product
        if own is None or residual_TD is None or self.bias is not None:
            return None
        if self.tp.size > 1 and not can_wait(self.tp, residual_TD):
            return None
        return own.grouped_inputs(residual_TD.shape[0])

    def _parts(self, x_TD: Tensor | ByteRows) -> Tensor:
        """This rank's product, in float32 parts [parts, T, E] where these are faster."""
        own = self.own_product
        parts_STE = None if own is None else own.parts(x_TD)
        return self._product(x_TD, None) if parts_STE is None else parts_STE

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's columns of a whole [out, in], or the whole bias [out]."""
        if loaded.dim() == 1:
            check_shape(loaded, self._whole_shape[:1])
            parameter.data.copy_(loaded)
            return
        check_shape(loaded, self._whole_shape)
        copy_partition(loaded.t(), parameter.data.t(), self._partition)

    @property
    def output_parts(self) -> dict[str, OutputPart]:
        """One part, whole on every rank."""
        return {"": OutputPart(even_partition(self._whole_shape[0], 0, 1), 0)}

    @property
    def input_partition(self) -> DimPartition:
        """This rank's inputs."""
        return self._partition


@dataclass(frozen=True, slots=True)
class OutputPart:
    """This rank's shard of one of the stacked weights, and its first row there."""

    partition: DimPartition
    offset: int


def _partition_of(whole: int | DimPartition, context: LayerContext) -> DimPartition:
    return whole if isinstance(whole, DimPartition) else context.partition_of(whole)


def copy_partition(loaded: Tensor, target: Tensor, partition: DimPartition) -> None:
    """Copy a rank's share of the rows of a whole tensor to ``target``, padded with zeros."""
    target[: partition.count].copy_(loaded.narrow(0, partition.first, partition.count))
    target[partition.count :].zero_()
