"""Normalisation layers, with the residual addition fused in."""

from __future__ import annotations

from torch import Tensor, nn

from trimaran.kernels.quantized import ByteRows
from trimaran.worker.layers.linear import LayerContext, ParallelLinear, check_shape
from trimaran.worker.parallel.tensor_parallel import Addend, PendingSum


class RMSNorm(nn.Module):
    """Root-mean-square normalisation.

    A whole checkpoint's weights are stored with ``offset`` added, in the model's dtype.
    """

    def __init__(
        self, context: LayerContext, hidden_size: int, eps: float, offset: float = 0.0
    ) -> None:
        super().__init__()
        self.weight = context.empty(hidden_size)
        self.eps = eps
        self.offset = offset
        self._ops = context.ops

    def forward(self, x_TD: Addend, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalise ``x + residual``. Returns the result and the sum, which is in ``residual``.

        One of the two may be None. ``x`` may also be float32 parts [parts, T, D] of a sum, or a
        `PendingSum`, whose all-reduce is done here.
        """
        if isinstance(x_TD, PendingSum):
            assert residual_TD is not None, "a sum that waits is added to a residual"
            return x_TD.add_and_normalise(residual_TD, self.weight, self.eps), residual_TD
        if x_TD is None or residual_TD is None:
            total_TD = residual_TD if x_TD is None else x_TD
            assert total_TD is not None, "nothing to normalise"
            return self._ops.rms_norm(total_TD, self.weight, self.eps), total_TD
        return self._ops.add_rms_norm(x_TD, residual_TD, self.weight, self.eps), residual_TD

    def forward_to(
        self, linear: ParallelLinear | None, x_TD: Addend, residual_TD: Tensor | None
    ) -> tuple[Tensor | ByteRows, Tensor]:
        """`forward` for the inputs of ``linear`` alone, quantized where that is one kernel."""
        product = None if linear is None else linear.own_product
        if product is None or isinstance(x_TD, PendingSum):
            return self.forward(x_TD, residual_TD)
        whole = residual_TD if x_TD is None else x_TD
        assert whole is not None, "nothing to normalise"
        total_TD = whole if residual_TD is None else residual_TD
        is_sum = x_TD is not None and residual_TD is not None
        rows = product.normalise(whole, residual_TD if is_sum else None, self.weight, self.eps)
        return self.forward(x_TD, residual_TD) if rows is None else (rows, total_TD)

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy the whole tensor, with the offset added before it is rounded."""
        check_shape(loaded, tuple(parameter.shape))
        parameter.data.copy_(loaded.float() + self.offset if self.offset else loaded)


def add_residual(x_TD: Addend, residual_TD: Tensor | None) -> Tensor:
    """The sum of the two that a norm would normalise, as a tensor [T, D]."""
    if isinstance(x_TD, PendingSum):
        assert residual_TD is not None, "a sum that waits is added to a residual"
        x_TD = x_TD.total(residual_TD)
    if x_TD is None or residual_TD is None:
        total_TD = residual_TD if x_TD is None else x_TD
        assert total_TD is not None, "nothing to add up"
        return total_TD
    return residual_TD + (x_TD if x_TD.dim() == 2 else x_TD.sum(0)).to(residual_TD.dtype)


class LayerNorm(nn.Module):
    """Layer normalisation with weight and bias."""

    def __init__(self, context: LayerContext, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = context.empty(hidden_size)
        self.bias = context.empty(hidden_size)
        self.eps = eps
        self._ops = context.ops

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalise ``x + residual``. Returns the result and the sum, which is in
        ``residual``."""
        if residual_TD is None:
            return self._ops.layer_norm(x_TD, self.weight, self.bias, self.eps), x_TD
        normed = self._ops.add_layer_norm(x_TD, residual_TD, self.weight, self.bias, self.eps)
        return normed, residual_TD

    def normalise_heads(self, heads_TNH: Tensor) -> None:
        """Normalise each head in place; the head size is that of the weight."""
        rows, _ = self.forward(heads_TNH.reshape(-1, heads_TNH.shape[2]), None)
        heads_TNH.copy_(rows.view(heads_TNH.shape))

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy the whole tensor."""
        check_shape(loaded, tuple(parameter.shape))
        parameter.data.copy_(loaded)
