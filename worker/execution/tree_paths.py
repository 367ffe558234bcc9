"""Accepted paths through trees of drafts: found on the rank, and moved to consecutive slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimaran.kernels.kv_quantization import as_bytes
from trimaran.worker.config.draft_tree import MAX_NODES, accepted_path
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.input_batch import InputBatch, StepInputs
from trimaran.worker.kv_cache.kv_group import KVGroup
from trimaran.worker.sampling.sampling_rows import SamplingBatch
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import SchedulerOutput

# Shapes: n sequences with draft rows, N sampled rows of the step, R rows, B tokens of a block.


@dataclass(slots=True)
class Outcomes:
    """What became of a step's drafts, by the sampled row of each sequence's own token. They say
    nothing of sequences without draft rows."""

    num_accepted: Tensor
    """int64 [N]."""

    last: Tensor
    """int64 [N]: index among the sampled rows of the last accepted row."""


class TreePaths:
    """Follows the accepted path of each sequence whose drafts a step has verified.

    Each node of a tree has a slot of its own behind the sequence. Once ids are sampled, the
    path's ids, keys and values move to the slots that they have without a tree, so that later
    steps, reused blocks and copies need to know nothing of trees.
    """

    def __init__(self, inputs: InputBatch, max_rows: int) -> None:
        """Steps have ``max_rows`` sampled rows at most."""
        self._inputs = inputs
        numbers = [torch.zeros(max_rows, dtype=torch.int64) for _ in range(2)]
        self.outcomes = Outcomes(*numbers)
        self._moves = torch.zeros((2, 0), dtype=torch.int64)

    def accept(
        self, inputs: StepInputs, decision: SchedulerOutput, token_ids_N: Tensor
    ) -> None:
        """Compare a step's drafts with its sampled ids. Writes the ids of paths to the token
        table, and the numbers of rejected drafts to the rows' state."""
        outcomes, batch = self.outcomes, self._inputs
        ends = np.cumsum(decision.num_scheduled_tokens)
        drafts, sampled = inputs.token_ids.tolist(), token_ids_N.tolist()
        words = np.ascontiguousarray(decision.tree_masks).view(np.int64)[:, 0].tolist()
        moves: list[tuple[int, int]] = []
        first_word = 0
        # The runs are in the order of their rows.
        for own, first, number in decision.tree_runs.tolist():
            entries = decision.sampled[first : first + number]
            parents = _parents_of(words[first_word : first_word + number])
            first_word += number
            ids = [drafts[ends[entry] - 1] for entry in entries]
            chosen = [sampled[own], *sampled[first : first + number]]
            path = accepted_path(parents, ids, chosen)
            row, start = int(decision.rows[entries[0]]), int(ends[entries[0]] - 1)
            batch.rejected[row] = number - len(path)
            outcomes.num_accepted[own] = len(path)
            outcomes.last[own] = first + path[-1] if path else own
            length = int(decision.num_computed_tokens[entries[0]])
            known = [chosen[0], *(chosen[1 + node] for node in path)]
            batch.token_table[row, length : length + len(known)] = torch.tensor(known)
            moves += [(start + node, start + at) for at, node in enumerate(path) if node != at]
        self._moves = torch.tensor(moves, dtype=torch.int64).reshape(-1, 2).T

    def move(self, groups: list[KVGroup], slot_mappings: list[Tensor]) -> None:
        """Move what the last step's accepted rows wrote to these caches, of which each has a
        mapping of the step's tokens to slots: from the slots of the path's nodes to those
        behind the sequence."""
        if not self._moves.numel():
            return
        for group, slots_T in zip(groups, slot_mappings, strict=True):
            move_entries(group, slots_T[self._moves[0]], slots_T[self._moves[1]])


def move_entries(group: KVGroup, source_M: Tensor, target_M: Tensor) -> None:
    """Move entries of a cache from slots to slots, int64 [M] each."""
    assert group.pool is not None
    pool = as_bytes(group.pool)
    size = pool.shape[3]
    # Indexing copies all sources before any slot is written.
    moved = pool[source_M // size, :, :, source_M % size]
    pool[target_M // size, :, :, target_M % size] = moved


class DeviceTreePaths:
    """`TreePaths` on a GPU. The host waits for nothing."""

    def __init__(self, inputs: DeviceInputs, max_rows: int) -> None:
        """Steps have ``max_rows`` sampled rows at most."""
        # Imported late, because a CPU needs no Triton.
        from trimaran.kernels.triton import tree_paths as kernels

        self._kernels = kernels
        self._inputs = inputs
        numbers = [
            torch.zeros(max_rows, dtype=torch.int64, device=inputs.device) for _ in range(2)
        ]
        self.outcomes = Outcomes(*numbers)
        shape = max_rows, kernels.MAX_NODES
        self._paths = torch.zeros(shape, dtype=torch.int32, device=inputs.device)
        self._runs = torch.zeros((0, 3), dtype=torch.int32, device=inputs.device)

    def accept(
        self, inputs: StepInputs, decision: SchedulerOutput, token_ids_N: Tensor
    ) -> None:
        """See `TreePaths.accept`."""
        self._runs = to_device(decision.tree_runs, self._inputs.device)
        outcomes = self.outcomes.num_accepted, self.outcomes.last
        self._kernels.accept_paths(
            self._runs, token_ids_N, self._inputs.target, self._inputs.token_table, outcomes,
            self._paths,
        )  # fmt: skip

    def move(self, groups: list[KVGroup], slot_mappings: list[Tensor]) -> None:
        """See `TreePaths.move`."""
        for group in groups:
            assert group.pool is not None
            self._kernels.move_paths(
                self._runs, self._paths, self.outcomes.num_accepted, self._inputs.target,
                as_bytes(group.pool),
            )  # fmt: skip


def _parents_of(words: list[int]) -> list[int]:
    """The parent of each node, -1 for the root: the next row that the node's row sees."""
    parents = []
    for number, word in enumerate(words):
        above = word >> 1
        parents.append(max(-1, number - (above & -above).bit_length()) if above else -1)
    return parents


def table_of_paths(
    token_table_RL: Tensor, inputs: StepInputs, decision: SchedulerOutput, batch: SamplingBatch
) -> Tensor:
    """A token table with a row of its own for each sampled row, which `SamplingBatch.id_rows`
    then names: the ids of the sequence, and behind them those of the row's path. int32 [N, L],
    on the device. ``batch.lengths`` are those of paths."""
    device = token_table_RL.device
    sampled, count = decision.sampled, len(decision.sampled)
    words_N = inputs.tree_masks
    assert words_N is not None, "the step has drafts in trees"
    if count < len(decision.rows):
        words_N = words_N.index_select(0, to_device(sampled.astype(np.int64), device))
    # Behind the rows of a step in a CUDA graph lies padding.
    words_N = words_N[:count]
    steps = torch.arange(MAX_NODES, device=device)
    # A sampled row sees, from its own slot downwards, the slots whose bits are set.
    bits = words_N[:, None] >> steps & 1
    # Stable: set bits first, each group in order. Bits that are not set come to no position.
    distances = bits.sort(dim=1, descending=True, stable=True).indices
    hidden = MAX_NODES - bits.sum(dim=1, keepdim=True)
    lengths = batch.device_lengths
    if lengths is None:
        lengths = to_device(batch.lengths, device)
    rows = batch.device_rows
    if rows is None:
        rows = to_device(batch.rows, device)
    # Lengths in the cache, which on a GPU may be less.
    longest = int((batch.lengths + decision.hidden_rows[sampled]).max())
    table = token_table_RL[:, :longest].index_select(0, rows.long())
    to = lengths[:, None].long() - 1 - steps
    source = lengths[:, None].long() - 1 + hidden - distances
    # Steps before the start, and bits behind the last set one, write to a spare column.
    is_path = (steps < MAX_NODES - hidden) & (to >= 0) & (source >= 0)
    ids = table.gather(1, source.clamp(0, longest - 1))
    # Kernels are compiled for multiples of 16, or for other strides: as of the usual table.
    width = longest + 16 - longest % 16
    width += int(token_table_RL.stride(0) % 16 > 0)
    table = torch.cat((table, table.new_zeros((count, width - longest))), dim=1)
    table.scatter_(1, torch.where(is_path, to, longest), ids)
    batch.id_rows = torch.arange(count, dtype=torch.int32, device=device)
    return table
