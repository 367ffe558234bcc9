"""Grows a tree of drafts for each sequence by the probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.worker.attention.backend import ForwardContext
from trimaran.worker.config.draft_tree import MAX_NODES, DynamicTreeLimits
from trimaran.worker.execution.draft_inputs import DraftBatch
from trimaran.worker.execution.tree_drafts import LevelBatch, flat, root_states
from trimaran.worker.models.drafting.interfaces import RankedNetwork

# Shapes: n sequences that want drafts, w nodes that are expanded at a depth and their children,
# C candidates, k nodes of a tree, D hidden size of the network.


@dataclass(slots=True)
class Candidates:
    """The nodes among which a tree is chosen, in an order in which each follows its parent."""

    ids: list[Tensor]
    """int64 [n, c] each."""

    scores: list[Tensor]
    """float32 [n, c] each: the logarithm of the probability of the path to the node."""

    parents: list[Tensor]
    """int64 [n, c] each: the number of the parent among all candidates; -1 for the root."""

    @property
    def count(self) -> int:
        """Candidates so far."""
        return sum(ids.shape[1] for ids in self.ids)

    def add(self, ids: Tensor, scores: Tensor, parents: Tensor) -> None:
        """Add children of candidates, or of the root."""
        self.ids.append(ids)
        self.scores.append(scores)
        self.parents.append(parents)


def likeliest_nodes(found: Candidates, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The ids and the parents of the candidates with the largest scores, the largest first,
    int64 [n, k] each. Parents are numbers among these nodes.

    A score is at most that of the parent, and equal scores stay in order: each node follows its
    parent, which is among them.
    """
    scores_nC = torch.cat(found.scores, dim=1)
    order_nC = scores_nC.sort(dim=1, descending=True, stable=True).indices
    ids_nC, parents_nC = torch.cat(found.ids, dim=1), torch.cat(found.parents, dim=1)
    return _in_order(ids_nC, parents_nC, order_nC, num_nodes)


def beam_nodes(
    ids_ndw: Tensor, scores_ndw: Tensor, from_ndw: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor]:
    """The nodes of the tree that the beams of `BeamHeads.propose_beams` make, and their
    parents; see `likeliest_nodes`. Beams that begin alike share nodes. Nodes of beams that the
    search has given up come last, so that every tree has as many nodes."""
    _, depth, width = ids_ndw.shape
    is_kept = [torch.ones_like(from_ndw[:, 0])]
    for level in range(depth - 1, 0, -1):
        above = torch.zeros_like(is_kept[0])
        is_kept.insert(0, above.scatter_reduce(1, from_ndw[:, level], is_kept[0], "amax"))
    order_nC = scores_ndw.flatten(1).sort(dim=1, descending=True, stable=True).indices
    kept_nC = torch.cat(is_kept, dim=1).gather(1, order_nC)
    order_nC = order_nC.gather(1, kept_nC.sort(dim=1, descending=True, stable=True).indices)
    starts_d = torch.arange(-width, width * (depth - 1), width, device=ids_ndw.device)
    parents_ndw = (from_ndw + starts_d[:, None]).clamp(min=-1)
    parents_ndw[:, 0] = -1
    return _in_order(ids_ndw.flatten(1), parents_ndw.flatten(1), order_nC, num_nodes)


def _in_order(
    ids_nC: Tensor, parents_nC: Tensor, order_nC: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor]:
    """The ids and parents of the first nodes of an order, with parents as numbers in it."""
    order_nk = order_nC[:, :num_nodes]
    ids_nk, above_nk = ids_nC.gather(1, order_nk), parents_nC.gather(1, order_nk)
    ranks_nC = torch.empty_like(order_nC).scatter_(
        1, order_nC, torch.arange(order_nC.shape[1], device=order_nC.device).expand_as(order_nC)
    )
    parents_nk = ranks_nC.gather(1, above_nk.clamp(min=0))
    return ids_nk, torch.where(above_nk < 0, -1, parents_nk)


def tree_words(parents_nk: Tensor, depth: int) -> Tensor:
    """int64 [n, k]: `DraftTree.masks` of trees of at most this depth."""
    nodes_k = torch.arange(parents_nk.shape[1], device=parents_nk.device)
    is_first = parents_nk < 0
    first_k = 1 | (-2 << nodes_k)
    words_nk = first_k.expand_as(parents_nk)
    distances_nk = (nodes_k - parents_nk).clamp_(max=MAX_NODES - 1)
    above_nk = parents_nk.clamp(min=0)
    # Each round extends the paths that are right by a node.
    for _ in range(depth - 1):
        below_nk = 1 | (words_nk.gather(1, above_nk) << distances_nk)
        words_nk = torch.where(is_first, first_k, below_nk)
    return words_nk


class DynamicTreeDrafts:
    """The dynamic trees of EAGLE-2, Li et al. (2024), https://arxiv.org/abs/2406.16858.

    A node's score is the product of the probabilities on the path to the node. At each depth
    the network expands the nodes with the largest scores, and the likeliest children of each
    become candidates. The candidates with the largest scores make the tree. Shapes are those of
    `DynamicTreeLimits`, whatever the trees are, as CUDA graphs need.

    Each expanded node has an entry in the network's cache, at a slot of its own behind the
    known ids, in order of depths. The next step's pass overwrites these entries.
    """

    def __init__(
        self,
        dynamic_limits: DynamicTreeLimits,
        network: RankedNetwork,
        context: Callable[[LevelBatch], ForwardContext],
        device: torch.device,
    ) -> None:
        """``context`` makes what layers read of a level's tokens."""
        self._dynamic_limits = dynamic_limits
        self._network = network
        self._context = context
        self._numbers = torch.arange(dynamic_limits.width, device=device)

    def draft(self, states_nD: Tensor | None, batch: DraftBatch, first_ids: Tensor) -> Tensor:
        """int64 [n, 2, k]: the ids of the nodes, and their parents; see `TreeDrafts.draft`."""
        dynamic_limits, network, count = self._dynamic_limits, self._network, len(first_ids)
        width = dynamic_limits.width
        states_nD = root_states(network, states_nD, batch, first_ids, self._context)
        ids_nw, scores_nw = network.likely_scores(states_nD, width)
        found = Candidates([], [], [])
        found.add(ids_nw, scores_nw, torch.full_like(ids_nw, -1))
        numbers_nw = self._numbers.expand(count, width)
        words_nw = (1 | (-2 << self._numbers)).expand(count, width)
        from_nw = torch.zeros_like(ids_nw)
        for level in range(1, dynamic_limits.depth):
            before = states_nD.view(count, -1, states_nD.shape[-1])
            states = before.gather(1, from_nw[:, :, None].expand(-1, -1, before.shape[-1]))
            at = self._level_batch(level, words_nw, batch)
            states_nD = network.forward(
                ids_nw.reshape(-1).to(torch.int32), states.flatten(0, 1), at.positions,
                self._context(at),
            )  # fmt: skip
            likely, log_probs = network.likely_scores(states_nD, width)
            ids_nC = likely.view(count, -1)
            scores_nC = (scores_nw[:, :, None] + log_probs.view(count, width, -1)).flatten(1)
            first = found.count
            found.add(ids_nC, scores_nC, numbers_nw.repeat_interleave(width, dim=1))
            if level + 1 == dynamic_limits.depth:
                break
            # The nodes that are expanded next: their index is that of their parent in this
            # level, and of their entry.
            order_nC = scores_nC.sort(dim=1, descending=True, stable=True).indices
            chosen_nw = order_nC[:, :width]
            ids_nw, scores_nw = ids_nC.gather(1, chosen_nw), scores_nC.gather(1, chosen_nw)
            numbers_nw, from_nw = first + chosen_nw, chosen_nw // width
            distances_nw = width + self._numbers - from_nw
            words_nw = 1 | (words_nw.gather(1, from_nw) << distances_nw)
        return torch.stack(likeliest_nodes(found, dynamic_limits.num_nodes), dim=1)

    def _level_batch(self, level: int, words_nw: Tensor, batch: DraftBatch) -> LevelBatch:
        width, size = self._dynamic_limits.width, words_nw.shape
        # A shifted network computes each token at the position before the token's own.
        ahead = int(not self._network.is_shifted)
        first = (level - 1) * width + ahead
        positions_n = batch.positions[level - 1 + ahead]
        return LevelBatch(
            rows=flat(batch.rows[:, None].expand(size)),
            positions=flat(positions_n[:, None].expand(size)),
            slots=flat(batch.slots[first : first + width].T),
            lengths=flat(batch.lengths[first : first + width].T),
            masks=flat(words_nw),
        )
