"""The likeliest tokens of each row of logits."""

from __future__ import annotations

from torch import Tensor

# Shapes: N rows, V vocabulary of the network.


def likely_ids(logits_NV: Tensor, count: int, offsets_V: Tensor | None = None) -> Tensor:
    """The ids of the ``count`` largest logits, the largest first, int64 [N, count], plus their
    ``offsets``."""
    own_Nk = logits_NV.topk(count, dim=-1).indices
    return own_Nk if offsets_V is None else own_Nk + offsets_V[own_Nk]


def likely_scores(
    logits_NV: Tensor, count: int, offsets_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ids of `likely_ids`, and the logarithms of their probabilities, float32 [N, count].

    No logarithm is above 0, or no number: a row of such logits has valid ids.
    """
    values_Nk, own_Nk = logits_NV.topk(count, dim=-1)
    if logits_NV.is_cuda:
        # Imported late, because a CPU needs no Triton.
        from trimaran.kernels.triton import drafts

        sums_N = drafts.log_sums(logits_NV)
    else:
        sums_N = logits_NV.float().logsumexp(dim=-1)
    scores_Nk = (values_Nk.float() - sums_N[:, None]).clamp_(max=0.0)
    scores_Nk = scores_Nk.nan_to_num_(nan=float("-inf"), neginf=float("-inf"))
    return own_Nk if offsets_V is None else own_Nk + offsets_V[own_Nk], scores_Nk


def likeliest_ids(logits_NV: Tensor, offsets_V: Tensor | None = None) -> Tensor:
    """The ids of the largest logits, int64 [N], plus their ``offsets``."""
    if logits_NV.is_cuda:
        # Imported late, because a CPU needs no Triton.
        from trimaran.kernels.triton import drafts

        return drafts.likeliest_ids(logits_NV, offsets_V)
    own_N = logits_NV.argmax(dim=-1)
    return own_N if offsets_V is None else own_N + offsets_V.index_select(0, own_N)
