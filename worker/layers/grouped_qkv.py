"""Query, key and value projections whose rows a checkpoint holds group by group."""

from __future__ import annotations

from torch import Tensor, nn

from trimaran.worker.layers.linear import LayerContext, QKVParallelLinear, check_shape


class GroupedQKVParallelLinear(QKVParallelLinear):
    """Also takes one tensor of all three, interleaved by key-value head.

    Each group is the query heads that share a key-value head, then its key, then its value:
    [K * (N / K + 2) * H, in] or the same without ``in``. With as many key-value heads as
    query heads that is query, key and value of one head after another (GPT-NeoX), with one
    key-value head all queries, then the key, then the value (Falcon).
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
