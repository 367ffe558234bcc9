"""A layer's output that is not summed over the tensor group yet: the next norm does that."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trimaran.worker.parallel.tensor_parallel import TensorGroup

# Shapes: T tokens of the step, D hidden size, S parts of a product.


@dataclass(frozen=True, slots=True)
class PendingSum:
    """What every rank of a group adds to a residual [T, D], for which `can_wait`."""

    addend: Tensor
    """This rank's, [T, D], or float32 parts [S, T, D] of it."""

    tp: TensorGroup

    def add_and_normalise(self, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Add the sum into ``residual``, and return that RMS-normalised. Collective."""
        assert self.tp.sum_norm is not None, "nothing sums together with a norm here"
        return self.tp.sum_norm(self.addend, residual_TD, weight_D, eps)

    def total(self, residual_TD: Tensor) -> Tensor:
        """The sum [T, D], in the dtype of ``residual``, which stays as it is. Collective."""
        whole_TD = self.addend if self.addend.dim() == 2 else self.addend.sum(0)
        return self.tp.all_reduce(whole_TD.to(residual_TD.dtype))


Addend = Tensor | PendingSum | None
"""What is still to be added to a residual: a tensor [T, D] or its float32 parts [S, T, D], or a
sum that waits; None where it has been added."""


def can_wait(tp: TensorGroup, residual_TD: Tensor | None) -> bool:
    """Whether sums over ``tp`` can be left to the norm that adds them to ``residual``."""
    if tp.size == 1 or residual_TD is None or tp.sum_norm is None:
        return False
    return tp.sum_norm.takes(residual_TD)
