"""The operators on a GPU: our Triton kernels, and torch where it is as good."""

from __future__ import annotations

from torch import Tensor

from trimaran.kernels import reference, triton_attention, triton_elementwise
from trimaran.kernels.torch_ops import TorchOps

_TRITON = (
    "rms_norm", "add_rms_norm", "silu_and_mul", "rotate", "write_kv", "paged_attention",
)  # fmt: skip


class TritonOps(TorchOps):
    """Attention and what is done to each token by Triton; products by torch."""

    # Decodes and prompt chunks want other tiles: they are called apart.
    pads_to_longest = True
    silu_and_mul = staticmethod(triton_elementwise.silu_and_mul)
    rotate = staticmethod(triton_elementwise.rotate)
    write_kv = staticmethod(triton_elementwise.write_kv)
    paged_attention = staticmethod(triton_attention.paged_attention)

    @property
    def backends(self) -> dict[str, str]:
        """Which operators are Triton's."""
        names = dict.fromkeys(reference.OPERATORS, "torch")
        names.update(dict.fromkeys(_TRITON, "triton"))
        return names

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square normalisation in float32."""
        return triton_elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add ``x`` into ``residual``, which becomes the sum, and normalise it."""
        return triton_elementwise.rms_norm(x, weight, eps, residual)
