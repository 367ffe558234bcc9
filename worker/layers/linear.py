"""Linear layers cut over the tensor-parallel ranks, and how a whole weight finds its shard."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from trimaran.kernels.dispatch import Ops
from trimaran.worker.layers.methods import (
    LinearMethod,
    LoRAMethod,
    NoLoRA,
    UnquantizedLinearMethod,
)
from trimaran.worker.layers.parallel import ShardPosition, TensorGroup, split


class LayerContext:
    """What every layer of one model is built with."""

    def __init__(
        self,
        tp: TensorGroup,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        max_seq_len: int = 0,
        moe_ep_size: int = 1,
        expert_ranks: TensorGroup | None = None,
    ) -> None:
        """``max_seq_len`` is the longest sequence that will run, 0 for the model's own;
        experts are shared out over ``moe_ep_size`` parts of ``expert_ranks``, which are
        those of all lanes, or None for ``tp`` alone."""
        self.tp = tp
        self.expert_ranks = expert_ranks or tp
        self.moe_ep_size = moe_ep_size
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.max_seq_len = max_seq_len
        self.linear_method: LinearMethod = UnquantizedLinearMethod(ops)

    def alone(self) -> LayerContext:
        """The same for layers that every rank holds and computes whole."""
        context = copy.copy(self)
        context.tp = ShardPosition()
        return context

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter of this model's dtype and device, without contents."""
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
        self.method.create_weights(self, local_shape, context.dtype, context.device)
        self.bias = context.empty(local_shape[0]) if bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        """The local part of ``x @ weight.T + bias``."""
        output_TE = self.method.apply(self, x_TD, self.bias)
        if self.lora.is_active:
            output_TE = self.lora.apply(x_TD, output_TE)
        return output_TE

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's part of a whole tensor; ``shard`` names a part of a fused one."""
        raise NotImplementedError

    @property
    def output_parts(self) -> dict[str, OutputPart]:
        """The parts that the outputs consist of, by name, in their order."""
        raise NotImplementedError

    @property
    def input_slice(self) -> tuple[int, int, int]:
        """The first of the inputs that this rank has, how many it has, and of how many."""
        raise NotImplementedError


class MergedColumnParallelLinear(ParallelLinear):
    """Several column-parallel layers with one input, stacked: each rank has a slice of each.

    ``parts`` names the whole output sizes in their order.
    """

    def __init__(
        self,
        context: LayerContext,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool = False,
        method: LinearMethod | None = None,
        lora: LoRAMethod | None = None,
    ) -> None:
        size = context.tp.size
        self._in_features = in_features
        self._ranges = _stack(
            {
                name: (whole, split(name, whole, size), context.tp.rank)
                for name, whole in parts.items()
            }
        )
        rows = sum(part.rows for part in self._ranges.values())
        super().__init__(context, (rows, in_features), bias=bias, method=method, lora=lora)

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's rows of the part ``shard``, a whole [out, in] or [out].

        ``*`` is all parts, one after another as they are stacked here.
        """
        tail = (self._in_features,) if loaded.dim() == 2 else ()
        if shard == "*":
            sizes = [part.whole for part in self._ranges.values()]
            check_shape(loaded, (sum(sizes), *tail))
            for name, rows in zip(self._ranges, torch.split(loaded, sizes), strict=True):
                self.weight_loader(parameter, rows, name)
            return
        part = self._ranges[shard]
        check_shape(loaded, (part.whole, *tail))
        rows = loaded.narrow(0, part.source, part.rows)
        parameter.data.narrow(0, part.offset, part.rows).copy_(rows)

    @property
    def output_parts(self) -> dict[str, OutputPart]:
        """The stacked layers by name."""
        return self._ranges

    @property
    def input_slice(self) -> tuple[int, int, int]:
        """Every rank has all inputs."""
        return 0, self._in_features, self._in_features


class ColumnParallelLinear(MergedColumnParallelLinear):
    """A linear layer whose outputs are cut over the ranks."""

    def __init__(
        self,
        context: LayerContext,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        method: LinearMethod | None = None,
        lora: LoRAMethod | None = None,
    ) -> None:
        super().__init__(
            context, in_features, {"": out_features}, bias=bias, method=method, lora=lora
        )


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections in one product, cut by heads.

    With fewer key-value heads than ranks, ranks that share a query group hold copies of its
    key-value head.
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
        self.num_heads = split("num_attention_heads", num_heads, tp.size)
        num_copies = max(1, tp.size // num_kv_heads)
        self.num_kv_heads = split("num_key_value_heads", num_kv_heads * num_copies, tp.size)
        self._in_features = hidden_size
        query = (num_heads * head_size, self.num_heads * head_size, tp.rank)
        kv_rank = tp.rank // num_copies
        kv = (num_kv_heads * head_size, self.num_kv_heads * head_size, kv_rank)
        self._ranges = _stack({"q": query, "k": kv, "v": kv})
        rows = sum(part.rows for part in self._ranges.values())
        ParallelLinear.__init__(
            self, context, (rows, hidden_size), bias=bias, method=method, lora=lora
        )


class RowParallelLinear(ParallelLinear):
    """A linear layer whose inputs are cut over the ranks; the output is their sum."""

    def __init__(
        self,
        context: LayerContext,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        method: LinearMethod | None = None,
        lora: LoRAMethod | None = None,
    ) -> None:
        self._whole_shape = (out_features, in_features)
        self._add_linear = context.ops.add_linear
        local = split("in_features", in_features, context.tp.size)
        super().__init__(context, (out_features, local), bias=bias, method=method, lora=lora)

    def forward(self, x_TD: Tensor) -> Tensor:
        """``x @ weight.T + bias``, whole on every rank."""
        if self.tp.size == 1:
            return super().forward(x_TD)
        output_TE = self.method.apply(self, x_TD, None)
        if self.lora.is_active:
            output_TE = self.lora.apply(x_TD, output_TE)
        output_TE = self.tp.all_reduce(output_TE)
        # After the sum: every rank holds the whole bias.
        return output_TE if self.bias is None else output_TE.add_(self.bias)

    def add_to(self, residual_TD: Tensor | None, x_TD: Tensor) -> Tensor | None:
        """Add ``forward(x)`` to ``residual``, or return it where that is a pass of its own
        or there is no residual.

        It may be returned as float32 parts [parts, T, E], which the next norm adds up.
        """
        is_plain = isinstance(self.method, UnquantizedLinearMethod) and not self.lora.is_active
        is_alone = self.tp.size == 1 and self.bias is None
        if residual_TD is not None and is_plain and is_alone:
            return self._add_linear(x_TD, self.weight, residual_TD)
        return self.forward(x_TD)

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's columns of a whole [out, in], or the whole bias [out]."""
        if loaded.dim() == 1:
            check_shape(loaded, self._whole_shape[:1])
            parameter.data.copy_(loaded)
            return
        check_shape(loaded, self._whole_shape)
        columns = parameter.shape[1]
        parameter.data.copy_(loaded.narrow(1, self.tp.rank * columns, columns))

    @property
    def output_parts(self) -> dict[str, OutputPart]:
        """One part, whole on every rank."""
        rows = self._whole_shape[0]
        return {"": OutputPart(rows, rows, 0, 0)}

    @property
    def input_slice(self) -> tuple[int, int, int]:
        """This rank's share of the inputs."""
        whole = self._whole_shape[1]
        share = whole // self.tp.size
        return self.tp.rank * share, share, whole


class OutputPart:
    """Where a rank's slice of a whole weight starts, and where it goes in the stack."""

    def __init__(self, whole: int, rows: int, source: int, offset: int) -> None:
        self.whole = whole
        self.rows = rows
        self.source = source
        self.offset = offset


def _stack(parts: dict[str, tuple[int, int, int]]) -> dict[str, OutputPart]:
    """Stack slices given as (whole rows, local rows, index of the slice)."""
    stacked = {}
    offset = 0
    for name, (whole, rows, index) in parts.items():
        stacked[name] = OutputPart(whole, rows, index * rows, offset)
        offset += rows
    return stacked
