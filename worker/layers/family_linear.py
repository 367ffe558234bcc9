"""Linear layers of single families: grouped QKV, a joint sum, head matrices, biased logits."""

from __future__ import annotations

from torch import Tensor, nn

from trimaran.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from trimaran.worker.layers.linear import (
    LayerContext,
    QKVParallelLinear,
    RowParallelLinear,
    check_shape,
    copy_partition,
)
from trimaran.worker.parallel.partition import DimPartition


class GroupedQKVParallelLinear(QKVParallelLinear):
    """Also loads one tensor of all three projections, interleaved by key-value head.

    Each group holds the query heads that share a key-value head, then its key, then its value:
    [K * (N / K + 2) * H, in], or without ``in`` for a bias. In GPT-NeoX, with as many key-value
    heads as query heads, a group is the query, key and value of a head. In Falcon, with one
    key-value head, the only group holds all queries, then the key, then the value.
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
    ) -> None:
        self._group = num_kv_heads, num_heads // num_kv_heads + 2, head_size
        super().__init__(context, hidden_size, head_size, num_heads, num_kv_heads, bias=bias)

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's rows of a part ``q``, ``k`` or ``v``, or of all: ``groups``."""
        if shard != "groups":
            super().weight_loader(parameter, loaded, shard)
            return
        groups, heads, size = self._group
        tail = tuple(parameter.shape[1:])
        check_shape(loaded, (groups * heads * size, *tail))
        grouped = loaded.reshape(groups, heads, size, *tail)
        parts = {"q": grouped[:, :-2], "k": grouped[:, -2], "v": grouped[:, -1]}
        for name, rows in parts.items():
            super().weight_loader(parameter, rows.reshape(-1, *tail), name)


def sum_of_products(*products: tuple[RowParallelLinear, Tensor]) -> Tensor:
    """The sum [T, D] of ``layer.forward(x)`` over (layer, x). Collective over the group."""
    first = products[0][0]
    if first.tp.size == 1:
        return _add_up([layer.forward(x_TE) for layer, x_TE in products])
    total_TD = first.tp.all_reduce(_add_up([_partial(layer, x_TE) for layer, x_TE in products]))
    for layer, _ in products:
        # After the all-reduce, because every rank holds the whole bias.
        if layer.bias is not None:
            total_TD += layer.bias
    return total_TD


def _partial(layer: RowParallelLinear, x_TE: Tensor) -> Tensor:
    """This rank's part of a layer's output, without the bias."""
    output_TD = layer.method.apply(layer, x_TE, None)
    return layer.lora.apply(x_TE, output_TD) if layer.lora.is_active else output_TD


def _add_up(outputs: list[Tensor]) -> Tensor:
    total_TD, *others = outputs
    for output_TD in others:
        total_TD += output_TD
    return total_TD


# Shapes: N heads of this rank, E rows and D columns of a head's matrix.


class HeadMatrices(nn.Module):
    """One matrix [E, D] a head: ``weight`` [N, E, D].

    A checkpoint holds several such matrices in one tensor, head by head: this matrix is the
    range ``rows`` of each head's rows, transposed with ``is_transposed``.
    """

    def __init__(
        self,
        context: LayerContext,
        heads: DimPartition,
        head_rows: int,
        rows: range,
        width: int,
        *,
        is_transposed: bool = False,
    ) -> None:
        """The checkpoint's tensor is [all heads * ``head_rows``, ``width``]."""
        super().__init__()
        self._whole_shape = (heads.whole * head_rows, width)
        self._head_rows, self._rows = head_rows, rows
        self._is_transposed = is_transposed
        self._heads = heads
        shape = (width, len(rows)) if is_transposed else (len(rows), width)
        self.weight = context.empty(heads.size, *shape)

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this matrix's rows of this rank's heads."""
        check_shape(loaded, self._whole_shape)
        heads = loaded.view(-1, self._head_rows, self._whole_shape[1])
        ours = heads[:, self._rows.start : self._rows.stop]
        ours = ours.transpose(1, 2) if self._is_transposed else ours
        copy_partition(ours, parameter.data, self._heads)


class BiasedLMHead(ParallelLMHead):
    """Hidden states to logits plus a bias, which is sharded like the weight's rows."""

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        *,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(context, vocab_size, padded_size, hidden_size, tied_to=tied_to)
        self.bias = context.empty(self.num_rows)

    def local_logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, local rows], starting at id ``first_row``; float32 or a GPU's dtype, zero
        padded."""
        return super().local_logits(hidden_ND).add_(self.bias)
