"""Drafts a tree of tokens for each sequence, level by level, with a network in the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trimaran.worker.attention.backend import ForwardContext
from trimaran.worker.config.draft_tree import DraftTree
from trimaran.worker.execution.draft_inputs import DraftBatch
from trimaran.worker.models.drafting.interfaces import RankedNetwork

# Shapes: n sequences that want drafts, k nodes of the tree, m nodes of a level that have
# children, w likeliest tokens behind a node, D hidden size of the network.


@dataclass(frozen=True, slots=True)
class LevelBatch:
    """The tokens that a network computes in one level: those of n sequences times m nodes."""

    rows: Tensor
    """int32 [n * m]: row of the sequence."""

    positions: Tensor
    """int64 [n * m]."""

    slots: Tensor
    """int64 [n * m]: of each token's entry in the network's cache."""

    lengths: Tensor
    """int32 [n * m]: entries up to each token's own."""

    masks: Tensor | None
    """int64 [n * m]: see `AttentionMetadata.tree_masks`."""


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of one depth that have children; with depth 0, the root."""

    depth: int
    nodes: Tensor
    """int64 [m]."""

    masks: Tensor
    """int64 [m]."""

    parents: Tensor
    """int64 [m]: the index of each node's parent among the nodes of the level above."""

    width: int
    """Likeliest tokens that are wanted behind each node."""

    children: Tensor
    """int64 [c]: for each child of the level, in order of nodes, its index among [m, w]."""

    own: Tensor
    """int64 [m]: the index of each node among the children of the level above."""

    is_chain: bool
    """Whether the level has one node, which follows all nodes before."""


class TreeDrafts:
    """Drafts the nodes of a tree, of which each level takes one pass of the network.

    A node's entry in the network's cache has a slot of its own, as its row has in the target's
    cache when the tree is verified. The next step's pass overwrites these entries.
    """

    def __init__(
        self,
        tree: DraftTree,
        network: RankedNetwork,
        context: Callable[[LevelBatch], ForwardContext],
        device: torch.device,
    ) -> None:
        """``context`` makes what layers read of a level's tokens."""
        self._network = network
        self._context = context
        self._levels = _levels_of(tree, device)
        order = sorted(range(tree.num_nodes), key=lambda node: tree.depths[node])
        self._order = torch.tensor(_inverse(order), device=device)

    def draft(self, states_nD: Tensor | None, batch: DraftBatch, first_ids: Tensor) -> Tensor:
        """int64 [n, k]: the ids of all nodes. ``states`` are those of the last accepted rows if
        the network takes the target's states, ``first_ids`` the ids that were sampled there."""
        network = self._network
        count = len(first_ids)
        states_nD = root_states(network, states_nD, batch, first_ids, self._context)
        drafted: list[Tensor] = []
        for level in self._levels:
            num_nodes = len(level.nodes)
            if level.depth:
                size = count, num_nodes
                ids = drafted[-1].index_select(1, level.own).reshape(-1)
                states = states_nD.view(count, -1, states_nD.shape[-1])
                states = states.index_select(1, level.parents).flatten(0, 1)
                at = self._level_batch(level, batch, size)
                states_nD = network.forward(
                    ids.to(torch.int32), states, at.positions, self._context(at)
                )
            if level.width == 1:
                likely = network.draft_ids(states_nD)
            else:
                likely = network.likely_ids(states_nD, level.width)
            drafted.append(likely.view(count, -1).index_select(1, level.children))
        return torch.cat(drafted, dim=1).index_select(1, self._order)

    def _level_batch(
        self, level: _Level, batch: DraftBatch, size: tuple[int, int]
    ) -> LevelBatch:
        # A shifted network computes each token at the position before the token's own.
        ahead = int(not self._network.is_shifted)
        nodes = level.nodes + ahead
        positions = batch.positions[level.depth - 1 + ahead]
        return LevelBatch(
            rows=flat(batch.rows[:, None].expand(size)),
            positions=flat(positions[:, None].expand(size)),
            slots=flat(batch.slots.index_select(0, nodes).T),
            lengths=flat(batch.lengths.index_select(0, nodes).T),
            masks=None if level.is_chain else flat(level.masks.expand(size)),
        )


def flat(table: Tensor) -> Tensor:
    """The rows of a table, one behind another, as kernels read them. `reshape` makes a view of
    a single row, in which all elements may have one address."""
    return table.reshape(-1).contiguous()


def root_states(
    network: RankedNetwork,
    states_nD: Tensor | None,
    batch: DraftBatch,
    first_ids: Tensor,
    context: Callable[[LevelBatch], ForwardContext],
) -> Tensor:
    """The network's states from which the first nodes follow; see `TreeDrafts.draft`."""
    if not network.is_shifted:
        one = LevelBatch(batch.rows, batch.positions[0], batch.slots[0], batch.lengths[0], None)
        states_nD = network.forward(
            first_ids.to(torch.int32), None, one.positions, context(one)
        )
    assert states_nD is not None
    return states_nD


def rank_indices(tree: DraftTree, device: torch.device) -> tuple[list[int], Tensor]:
    """For heads of which each drafts one depth: the likeliest tokens that are wanted of each
    head, and int64 [k], the index of each node's token among those of all heads."""
    pairs = list(zip(tree.depths, tree.ranks, strict=True))
    widths = [
        1 + max(rank for each, rank in pairs if each == depth)
        for depth in range(1, tree.depth + 1)
    ]
    starts = [sum(widths[:depth]) for depth in range(tree.depth)]
    indices = [starts[depth - 1] + rank for depth, rank in pairs]
    return widths, torch.tensor(indices, device=device)


def _levels_of(tree: DraftTree, device: torch.device) -> list[_Level]:
    to_tensor = partial(torch.tensor, dtype=torch.int64, device=device)
    levels: list[_Level] = []
    above: list[int] = []
    known: list[int] = []
    for depth in range(tree.depth):
        nodes = [-1]
        if depth:
            is_parent = set(tree.parents)
            nodes = [node for node in known if node in is_parent]
        children = [n for n, parent in enumerate(tree.parents) if parent in nodes]
        width = 1 + max(tree.ranks[child] for child in children)
        indices = [
            nodes.index(tree.parents[child]) * width + tree.ranks[child] for child in children
        ]
        parents = [above.index(tree.parents[node]) if depth else 0 for node in nodes]
        masks = [tree.masks[node] if depth else -1 for node in nodes]
        own = [known.index(node) if depth else 0 for node in nodes]
        levels.append(
            _Level(
                depth, to_tensor(nodes), to_tensor(masks), to_tensor(parents), width,
                to_tensor(indices), to_tensor(own), masks == [-1],
            )
        )  # fmt: skip
        above, known = nodes, children
    return levels


def _inverse(order: list[int]) -> list[int]:
    indices = [0] * len(order)
    for index, node in enumerate(order):
        indices[node] = index
    return indices
