"""The acceptance of nodes of trees: how often a likely token, or a node, is the right one."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trimaran.worker.config.draft_tree import DraftTree

_SHARE = 0.005
"""Weight of a new trial in the mean of its rank."""

_PRIOR_FIRST, _PRIOR_TRIALS = 0.5, 8
"""A rate before any trial, for rank 0, and the trials that it counts as. Rank r has this rate
by 2 r."""


class TreeShape(NamedTuple):
    """What makes the expected acceptance of each node of a tree, in order of nodes."""

    depths: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]
    """Factor of each node: its chance by that of the first child at each position of its
    path."""


class TreeRates:
    """The acceptance of each rank, over all sequences: a node on an accepted path tries its
    children, of which one at most is right."""

    def __init__(self, tree: DraftTree) -> None:
        self._tree = tree
        count = 1 + max(tree.ranks)
        self._rates = [_PRIOR_FIRST / max(1, 2 * rank) for rank in range(count)]
        self._trials = [_PRIOR_TRIALS] * count
        self._shape: TreeShape | None = None

    def observe(self, num_nodes: int, path: List[int]) -> None:
        """Take in the accepted path through the first ``num_nodes`` nodes."""
        tree, rates, trials = self._tree, self._rates, self._trials
        ranks = tree.ranks
        for at, following in zip((-1, *path), (*path, -1), strict=True):
            for child in tree.children(at, num_nodes):
                rank = ranks[child]
                trials[rank] += 1
                share = 1.0 / trials[rank]
                if share < _SHARE:
                    share = _SHARE
                rates[rank] += ((child == following) - rates[rank]) * share
        self._shape = None

    @property
    def shape(self) -> TreeShape:
        """The depth and the share of each node."""
        if self._shape is None:
            first = max(self._rates[0], 1e-6)
            shares = [min(1.0, rate / first) for rate in self._rates]
            found: list[float] = []
            for parent, rank in zip(self._tree.parents, self._tree.ranks, strict=True):
                found.append((found[parent] if parent >= 0 else 1.0) * shares[rank])
            depths = np.array(self._tree.depths, dtype=np.int64)
            self._shape = TreeShape(depths, np.array(found))
        return self._shape


class NodeRates:
    """The acceptance of each node of trees that a network grows, over all sequences. Nodes are
    numbered by falling probability, so that a number says more than a rank."""

    def __init__(self, num_nodes: int) -> None:
        self._rates = _PRIOR_FIRST / (1.0 + np.arange(num_nodes))
        self._trials = np.full(num_nodes, float(_PRIOR_TRIALS))
        # A sequence's rate is that of its likeliest nodes at all depths.
        self._depths = np.ones(num_nodes, dtype=np.int64)
        self._shape: TreeShape | None = None

    def observe(self, num_nodes: int, path: List[int]) -> None:
        """Take in the accepted path through the first ``num_nodes`` nodes."""
        is_right = np.zeros(num_nodes)
        is_right[list(path)] = 1.0
        rates, trials = self._rates[:num_nodes], self._trials[:num_nodes]
        trials += 1.0
        rates += (is_right - rates) * np.maximum(_SHARE, 1.0 / trials)
        self._shape = None

    @property
    def shape(self) -> TreeShape:
        """The share of each node by that of the first one."""
        if self._shape is None:
            shares = np.minimum(1.0, self._rates / max(float(self._rates[0]), 1e-6))
            self._shape = TreeShape(self._depths, shares)
        return self._shape
