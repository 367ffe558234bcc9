"""Expert-parallel load balancing: moves experts so that ranks have equal loads."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimaran.worker.config.experts_config import ExpertsConfig
from trimaran.worker.experts.loads import ExpertLoads, mixtures_of
from trimaran.worker.experts.placement import IntArray, Move, Placement
from trimaran.worker.layers.experts import ExpertMLP, ExpertSlots
from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.models.interfaces import CausalLM

logger = logging.getLogger(__name__)

# Shapes: L layers with experts in this rank's stage, X experts of a layer, W width of a row.

_CHUNK_BYTES = 64 << 20
"""Most bytes of matrices that are being sent at once."""


class ExpertBalancer:
    """The placement of each layer's experts, rebalanced every ``interval`` steps.

    All ranks that share experts rebalance after the same steps, with the same loads, and so
    compute the same placements. Weights are copied within fixed memory, and maps change on the
    device, so CUDA graphs stay valid.
    """

    def __init__(
        self,
        mixtures: dict[int, ExpertMLP],
        loads: ExpertLoads,
        context: LayerContext,
        num_redundant: int,
        interval: int,
    ) -> None:
        """``num_redundant`` slots of a layer, a multiple of the parts, are empty at first.

        Call after loading the weights, and before sizing the KV cache.
        """
        self._mixtures = [mixtures[number] for number in loads.layers]
        self._loads = loads
        self._ranks = context.expert_ranks
        self._tp = context.tp
        self._num_parts = context.moe_ep_size
        self._interval = interval
        self._num_steps = 0
        num_experts = loads.counts_LX.shape[1]
        start = Placement.initial(num_experts, self._num_parts, num_redundant)
        self._placements = [start for _ in self._mixtures]
        self._slots = []
        for mixture in self._mixtures:
            slots = ExpertSlots(num_experts, self._num_parts, context.device)
            slots.set(start.slots(), start.num_copies())
            mixture.make_slots(slots, num_redundant // self._num_parts)
            self._slots.append(slots)
        self._seen_LX: IntArray = np.zeros(tuple(loads.counts_LX.shape), dtype=np.int64)

    @torch.inference_mode()
    def after_step(self) -> None:
        """Count a step, rebalance when due. Collective over the expert-parallel ranks."""
        self._num_steps += 1
        if self._num_steps % self._interval == 0:
            self.balance()

    @torch.inference_mode()
    def fill(self) -> None:
        """Copy experts to empty slots, as if all loads were equal. Collective."""
        num_moves, *_ = self._arrange(np.ones_like(self._seen_LX))
        logger.info("copied %d experts to the redundant slots", num_moves)

    def balance(self) -> None:
        """Move experts for the loads since the last rebalance. Collective."""
        num_moves, before, after = self._arrange(self._fresh_counts())
        if num_moves:
            logger.info(
                "moved %d experts: the busiest part of a layer had %.2f times the average to "
                "do and would have had %.2f",
                num_moves,
                before,
                after,
            )

    def _arrange(self, fresh_LX: IntArray) -> tuple[int, float, float]:
        """Place every layer's experts for these loads. Returns the number of copied experts,
        and the worst imbalance of a layer before and after. Collective."""
        num_moves, before, after = 0, 1.0, 1.0
        for index, mixture in enumerate(self._mixtures):
            now, tokens_X = self._placements[index], fresh_LX[index]
            new = now.balanced(tokens_X)
            before = max(before, now.imbalance(tokens_X))
            after = max(after, new.imbalance(tokens_X))
            moves = now.moves_to(new)
            if not moves:
                continue
            num_moves += len(moves)
            for parameter in mixture.experts.parameters():
                self._move(_bytes_of(parameter.data), moves)
            self._slots[index].set(new.slots(), new.num_copies())
            self._placements[index] = new
        return num_moves, before, after

    def _fresh_counts(self) -> IntArray:
        """Tokens of every expert since the last rebalance, over all dp ranks. Equal on all
        ranks."""
        counts_LX: IntArray = self._loads.counts_LX.cpu().numpy().copy()
        fresh_LX: IntArray = counts_LX - self._seen_LX
        self._seen_LX = counts_LX
        if self._ranks.size == self._tp.size:
            # Every rank of a tensor group counts the same tokens.
            return fresh_LX
        own = torch.from_numpy(fresh_LX if self._tp.rank == 0 else np.zeros_like(fresh_LX))
        every = self._ranks.all_reduce(own.to(self._loads.counts_LX.device))
        total_LX: IntArray = every.cpu().numpy()
        return total_LX

    def _move(self, matrices: Tensor, moves: Sequence[Move]) -> None:
        """Copy whole matrices between slots, a range of rows of all matrices at a time.

        All rows are sent before any is overwritten: a slot may be a source and a target.
        """
        num_parts = self._num_parts
        own_part = self._ranks.rank % num_parts
        num_rows, width = matrices.shape[1:]
        leaving = [move for move in moves if move.from_part == own_part]
        coming = [move for move in moves if move.to_part == own_part]
        # Ordered by receiving rank, then by sending rank.
        sources = [
            move.from_slot for move in sorted(leaving, key=lambda m: (m.to_part, m.to_slot))
        ]
        targets = [
            move.to_slot for move in sorted(coming, key=lambda m: (m.from_part, m.to_slot))
        ]
        pairs = self._pairs(moves)
        step = max(1, _CHUNK_BYTES // (len(moves) * width * matrices.element_size()))
        for first in range(0, num_rows, step):
            height = min(step, num_rows - first)
            rows = matrices[sources, first : first + height]
            counts = [[height * count for count in row] for row in pairs]
            found = self._ranks.all_to_all(rows.reshape(len(sources) * height, width), counts)
            if targets:
                matrices[targets, first : first + height] = found.view(-1, height, width)

    def _pairs(self, moves: Sequence[Move]) -> list[list[int]]:
        """Number of matrices from rank to rank; both ranks shard experts alike."""
        size, num_parts = self._ranks.size, self._num_parts
        pairs = [[0] * size for _ in range(size)]
        for move in moves:
            for first in range(0, size, num_parts):
                pairs[first + move.from_part][first + move.to_part] += 1
        return pairs


def _bytes_of(slots: Tensor) -> Tensor:
    """The bytes [slots, rows, width] of what slots hold, whatever the dtype, in place."""
    rows = slots.shape[1] if slots.dim() == 3 else 1
    return slots.view(len(slots), -1).view(torch.uint8).view(len(slots), rows, -1)


def balance_experts(model: CausalLM, loads: ExpertLoads | None, config: ExpertsConfig) -> None:
    """Balance a model's experts from now on, if the configuration asks for it. Collective over
    the ranks that share experts.

    ``config`` was checked against the model; a stage may still have no experts.
    """
    if config.rebalance_steps and loads is not None:
        sizes = config.num_redundant, config.rebalance_steps
        balancer = ExpertBalancer(mixtures_of(model), loads, model.context, *sizes)
        if config.num_redundant:
            balancer.fill()
        loads.balancer = balancer
