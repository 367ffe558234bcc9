"""All-to-all dispatch of tokens to experts that data-parallel ranks share, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.parallel.tensor_parallel import MAX_TO_ALL

# Shapes: T tokens of the step, S tokens that this rank sends, R tokens that it receives, D
# hidden size, C experts of a token, P parts of the experts' ranks, N ranks.

_WORD = 4
"""Bytes of a weight and of an expert id."""

_NOWHERE = -1
"""The expert id of padding, which no rank has."""


class RunsExperts(Protocol):
    """The experts of one rank."""

    @property
    def num_slots(self) -> int:
        """Slots of experts on this rank."""
        ...

    def no_tokens(self) -> Tensor:
        """Hidden states of no tokens [0, D]."""
        ...

    def forward(self, x_TD: Tensor, weights_TC: Tensor, ids_TC: Tensor) -> Tensor:
        """This rank's part of the weighted sum of each token's experts, [T, D]."""
        ...


@dataclass(slots=True)
class _Delivery:
    """Tokens that were sent and received."""

    rows: Tensor
    """Each received token as bytes: weights, expert ids, hidden state."""

    tokens: list[Tensor]
    """For each rank the indices of the S tokens that it got, in order."""

    counts: list[list[int]]
    """Tokens from each rank to each rank."""


class ExpertDispatch:
    """Sends each token to the ranks that hold its experts, and adds up their results.

    A token is sent once to each rank of a part, however many of its experts are there. If every
    dp rank has few tokens, all tokens go to all ranks, so no size depends on device data. Both
    ways give the same bits. The ranks of a tensor group hold the same tokens; each sends a
    share of them and leaves zeros in other rows of the result, for the all-reduce that follows.
    All ranks of all dp ranks call `forward` or `forward_without_tokens` once a layer, in the
    same order.
    """

    def __init__(self, context: LayerContext, experts: RunsExperts, num_chosen: int) -> None:
        self._ranks = context.expert_ranks
        self._tp = context.tp
        self._num_parts = context.moe_ep_size
        self._bound = context.tokens_across_dp
        self._experts = experts
        self._num_chosen = num_chosen

    def forward(self, x_TD: Tensor, weights_TC: Tensor, ids_TC: Tensor) -> Tensor:
        """This rank's part of the weighted sums, [T, D]. Collective over all dp ranks."""
        num_tokens, most = x_TD.shape[0], self._bound.most_tokens
        is_bounded = 0 < most <= MAX_TO_ALL
        num_rows = -(-(most if is_bounded else num_tokens) // self._tp.size)
        first = min(self._tp.rank * num_rows, num_tokens)
        own = slice(first, min(first + num_rows, num_tokens))
        rows_S = torch.cat([_bytes_of(each[own]) for each in (weights_TC, ids_TC, x_TD)], dim=1)
        if is_bounded:
            sums_SD = self._through_all(rows_S, num_rows, x_TD)
        else:
            delivery = self._send(rows_S, ids_TC[own])
            found_RD = self._run(delivery.rows, x_TD)
            sums_SD = self._return_outputs(found_RD, delivery, len(rows_S))
        if self._tp.size == 1:
            return sums_SD.to(x_TD.dtype)
        output_TD = torch.zeros_like(x_TD)
        output_TD[own] = sums_SD
        return output_TD

    def forward_without_tokens(self) -> None:
        """Do the part of a dp rank without tokens in `forward`. Collective over all dp
        ranks."""
        hidden = self._experts.no_tokens()
        nothing = hidden.new_empty((0, self._num_chosen), dtype=torch.float32)
        self.forward(hidden, nothing, nothing.to(torch.int32))

    def _through_all(self, rows_S: Tensor, num_rows: int, like: Tensor) -> Tensor:
        """Float32 sums [S, D] of all ranks' results; each rank sends ``num_rows`` rows."""
        num_own, size = len(rows_S), self._ranks.size
        padded = rows_S.new_zeros((num_rows, rows_S.shape[1]))
        padded[:num_own] = rows_S
        ids = slice(_WORD * self._num_chosen, 2 * _WORD * self._num_chosen)
        # All bytes of `_NOWHERE` are ones.
        padded[num_own:, ids] = _NOWHERE % 256
        found_RD = self._run(self._ranks.all_gather(padded, 0), like)
        returned = self._ranks.all_to_all(found_RD, [[num_rows] * size] * size)
        sums_SD = like.new_zeros((num_own, like.shape[1]), dtype=torch.float32)
        for rows in returned.view(size, num_rows, -1)[:, :num_own]:
            sums_SD += rows.float()
        return sums_SD

    def _send(self, rows_S: Tensor, ids_SC: Tensor) -> _Delivery:
        num_local = self._experts.num_slots
        parts_SC = ids_SC.long() // num_local
        is_needed_SP = torch.zeros(
            (len(rows_S), self._num_parts), dtype=torch.bool, device=rows_S.device
        ).scatter_(1, parts_SC, True)
        by_part = [column.nonzero().flatten() for column in is_needed_SP.unbind(1)]
        # Rank r is in part r % P; the ranks of a part shard its experts.
        tokens = [by_part[rank % self._num_parts] for rank in range(self._ranks.size)]
        counts = self._share_counts([len(each) for each in tokens], rows_S.device)
        sent = rows_S.index_select(0, torch.cat(tokens))
        return _Delivery(self._ranks.all_to_all(sent, counts), tokens, counts)

    def _share_counts(self, own: Sequence[int], device: torch.device) -> list[list[int]]:
        mine = torch.tensor([own], dtype=torch.int64, device=device)
        counts: list[list[int]] = self._ranks.all_gather(mine, 0).tolist()
        return counts

    def _run(self, rows_R: Tensor, like: Tensor) -> Tensor:
        """Partial sums [R, D] of the received tokens."""
        if rows_R.shape[0] == 0:
            return like.new_empty((0, like.shape[1]))
        ends = [_WORD * self._num_chosen, 2 * _WORD * self._num_chosen]
        weights, ids, x = rows_R.tensor_split(ends, dim=1)
        return self._experts.forward(
            x.contiguous().view(like.dtype),
            weights.contiguous().view(torch.float32),
            ids.contiguous().view(torch.int32),
        )

    def _return_outputs(self, found_RD: Tensor, delivery: _Delivery, num_sent: int) -> Tensor:
        """Float32 sums [S, D] of all ranks' results, added in rank order."""
        back = [list(column) for column in zip(*delivery.counts, strict=True)]
        returned = self._ranks.all_to_all(found_RD, back)
        sums_SD = returned.new_zeros((num_sent, found_RD.shape[1]), dtype=torch.float32)
        sizes = [len(each) for each in delivery.tokens]
        for tokens, rows in zip(delivery.tokens, torch.split(returned, sizes), strict=True):
            sums_SD.index_add_(0, tokens, rows.float())
        return sums_SD


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
