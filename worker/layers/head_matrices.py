"""A matrix of its own for each attention head, the heads shared out over the ranks."""

from __future__ import annotations

from torch import Tensor, nn

from trimaran.worker.layers.linear import LayerContext, check_shape, copy_share
from trimaran.worker.parallel.shares import Share

# Shapes: N heads of this rank, E rows and D columns of a head's matrix.


class HeadMatrices(nn.Module):
    """One matrix [E, D] a head: ``weight`` [N, E, D].

    A whole checkpoint holds several of them in one tensor, a head behind the other: ``rows``
    of a head's rows are these, transposed with ``is_transposed``.
    """

    def __init__(
        self,
        context: LayerContext,
        heads: Share,
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
        """Copy this layer's rows of this rank's heads."""
        check_shape(loaded, self._whole_shape)
        heads = loaded.view(-1, self._head_rows, self._whole_shape[1])
        ours = heads[:, self._rows.start : self._rows.stop]
        ours = ours.transpose(1, 2) if self._is_transposed else ours
        copy_share(ours, parameter.data, self._heads)
