"""The likeliest token of each row of logits."""

from __future__ import annotations

from torch import Tensor

# Shapes: N rows, V vocabulary of the network.


def likely_ids(logits_NV: Tensor, count: int, offsets_V: Tensor | None = None) -> Tensor:
    """The ids of the ``count`` largest logits, the largest first, int64 [N, count], plus their
    ``offsets``."""
    own_Nk = logits_NV.topk(count, dim=-1).indices
    return own_Nk if offsets_V is None else own_Nk + offsets_V[own_Nk]


def likeliest_ids(logits_NV: Tensor, offsets_V: Tensor | None = None) -> Tensor:
    """The ids of the largest logits, int64 [N], plus their ``offsets``."""
    if logits_NV.is_cuda:
        # Imported late, because a CPU needs no Triton.
        from trimaran.kernels.triton import drafts

        return drafts.likeliest_ids(logits_NV, offsets_V)
    own_N = logits_NV.argmax(dim=-1)
    return own_N if offsets_V is None else own_N + offsets_V.index_select(0, own_N)
