"""Where the drafts of a step begin: fixed memory that CUDA graphs read, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.input_batch import InputBatch, StepInputs
from trimaran.worker.execution.tree_paths import Outcomes
from trimaran.worker.steps.step_types import SchedulerOutput

if TYPE_CHECKING:
    from trimaran.kernels.triton.drafts import DraftBatchTensors

# Shapes: N sampled rows of the step, n sequences that want drafts, K most drafts of a sequence,
# D width of the states, R rows, M blocks of a longest sequence.

_ROW, _LIMIT, _OWN, _FIRST, _COUNT = range(5)
"""Columns of the table: row of the sequence, tokens for which it has blocks, indices of its own
row and of its first draft row among the sampled rows, number of draft rows."""

_MAX_PAGEABLE = 1 << 16
"""See `staging.to_device`."""


@dataclass(slots=True)
class DraftBatch:
    """The sequences of a step that want drafts, n of them, once the accepted drafts are
    known."""

    sampled: Tensor
    """int64 [n]: index of the last accepted row among the sampled rows."""

    next_ids: Tensor
    """int64 [n]: the sampled id behind that row."""

    rows: Tensor
    """int32 [n]: row of the sequence."""

    positions: Tensor
    """int64 [K, n]: of the sampled id, and of the drafts behind it but the last one."""

    slots: Tensor
    """int64 [K, n]: slot of each position; those behind a sequence's blocks have the spare
    block, and their drafts are not used."""

    lengths: Tensor
    """int32 [K, n]: tokens of the sequence up to each position, within its blocks."""


class DraftInputs:
    """The table of the sequences that want drafts, the step's sampled ids, and the states of
    the sampled rows.

    Steps run in order on one stream, so this memory serves all steps in flight.
    """

    def __init__(
        self,
        inputs: InputBatch | DeviceInputs,
        max_rows: int,
        max_drafts: int,
        state_size: int,
        dtype: torch.dtype,
        spare_slot: int,
    ) -> None:
        """Steps have ``max_rows`` sampled rows at most; states have ``state_size`` dims, 0 for
        none. ``spare_slot`` belongs to no sequence."""
        device = inputs.device
        num_rows = len(inputs.num_prompt_tokens)
        self._inputs = inputs
        self._spare_slot = spare_slot
        self._most = max_drafts
        self._block_size = inputs.block_size
        self._longest = inputs.token_table.shape[1] - 1
        # Indices of draft rows that a sequence has not lie at most so far behind the end.
        self._ids = torch.zeros(max_rows + max_drafts, dtype=torch.int64, device=device)
        self.states = torch.zeros((max_rows, state_size), dtype=dtype, device=device)
        """The states of the sampled rows, [rows, D]."""

        self._targets: DraftBatchTensors | None = None
        if isinstance(inputs, DeviceInputs):
            # Imported late, because a CPU needs no Triton.
            from trimaran.kernels.triton.drafts import (
                DraftBatchTensors,
                draft_batch,
                store_drafts,
            )

            self._draft_batch, self._store_drafts = draft_batch, store_drafts
            self._targets = DraftBatchTensors.allocate(num_rows, max_drafts, device)
        # One token in the spare row, whose blocks are the spare block.
        self._padding = np.array([num_rows, 1, 0, 0, 0])
        table = np.tile(self._padding, (num_rows, 1))
        self._table = torch.from_numpy(table).to(device)
        # On the CPU: tokens up to each sequence's own row, and the drafts that it verifies.
        self.outcomes: Outcomes | None = None
        """What became of the step's drafts, if paths through trees are followed."""
        self._lengths_n = torch.zeros(0, dtype=torch.int64)
        self._drafts_nK = torch.zeros((0, max_drafts), dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        """Memory on the device."""
        each = [self._table, self._ids, self.states]
        if self._targets is not None:
            each += [self._targets.wide, self._targets.narrow]
        return sum(tensor.nbytes for tensor in each)

    @property
    def block_tables(self) -> Tensor:
        """int32 [rows, blocks]."""
        tables = self._inputs.block_tables
        return tables[0] if isinstance(self._inputs, InputBatch) else tables

    def keep(self, states_ND: Tensor) -> Tensor:
        """Copy the states of the first sampled rows, unless they are kept already or drafts
        need none. Returns the kept ones."""
        kept = self.states[: len(states_ND)]
        if kept.shape[1] and kept.data_ptr() != states_ND.data_ptr():
            kept.copy_(states_ND)
        return kept

    def send(
        self, decision: SchedulerOutput, inputs: StepInputs, token_ids_N: Tensor, size: int
    ) -> None:
        """Write the sampled ids and the table of the decision's ``proposals``, padded to
        ``size`` sequences. The host does not wait. ``inputs`` are the step's."""
        self._ids[: len(token_ids_N)].copy_(token_ids_N)
        table = torch.from_numpy(self._packed(decision, size))
        if self._targets is None:
            self._read_drafts(decision, inputs)
        if self._table.is_cuda and table.nbytes > _MAX_PAGEABLE:
            table = table.pin_memory()
        self._table[:size].copy_(table, non_blocking=True)

    def _packed(self, decision: SchedulerOutput, size: int) -> npt.NDArray[np.int64]:
        own, first, num_drafts, limits, _ = decision.proposals.T.astype(np.int64)
        table = np.tile(self._padding, (size, 1))
        real = table[: len(own)]
        real[:, _ROW] = decision.rows[decision.sampled[own]]
        real[:, _LIMIT] = limits
        real[:, _OWN], real[:, _FIRST], real[:, _COUNT] = own, first, num_drafts
        return table

    def _read_drafts(self, decision: SchedulerOutput, inputs: StepInputs) -> None:
        """On the CPU: read the step's drafts from its inputs, which the next step changes."""
        own, first, num_drafts, *_ = decision.proposals.T.astype(np.int64)
        ends = decision.num_computed_tokens + decision.num_scheduled_tokens
        self._lengths_n = torch.from_numpy(ends[decision.sampled[own]].astype(np.int64))
        if self.outcomes is not None:
            return
        steps = np.arange(self._most)
        has_draft = steps < num_drafts[:, None]
        rows = (first[:, None] + steps)[has_draft]
        tokens = (np.cumsum(decision.num_scheduled_tokens) - 1)[decision.sampled[rows]]
        drafts = np.full((len(own), self._most), -1, dtype=np.int64)
        drafts[has_draft] = inputs.token_ids.numpy()[tokens]
        self._drafts_nK = torch.from_numpy(drafts)

    def batch(self, size: int) -> DraftBatch:
        """Where drafts of the first ``size`` sequences go: the ids that were sampled instead of
        drafts are compared with them. The numbers of rejected drafts are written to
        the rows' state, from which the next step's positions follow."""
        table, targets = self._table[:size], self._targets
        if targets is None:
            return self._batch_on_cpu(table)
        most = self._most
        assert isinstance(self._inputs, DeviceInputs)
        self._draft_batch(
            table, self._ids, self.block_tables, self._inputs.target, targets,
            self._longest, self._spare_slot,
            None if self.outcomes is None else (self.outcomes.num_accepted, self.outcomes.last),
        )  # fmt: skip
        wide, narrow = targets.wide[:, :size], targets.narrow[:, :size]
        return DraftBatch(
            sampled=wide[0],
            next_ids=wide[1],
            rows=narrow[0],
            positions=wide[2 : 2 + most],
            slots=wide[2 + most :],
            lengths=narrow[1:],
        )

    def _batch_on_cpu(self, table: Tensor) -> DraftBatch:
        block_size = self._block_size
        steps_K1 = torch.arange(self._most)[:, None]
        accepted_n, sampled_n = self._verified(table)
        limits_n = table[:, _LIMIT]
        positions_Kn = self._lengths_n + accepted_n + steps_K1
        tables_RM = self.block_tables
        blocks_Kn = (positions_Kn // block_size).clamp_(max=tables_RM.shape[1] - 1)
        slots_Kn = tables_RM[table[:, _ROW], blocks_Kn].long() * block_size
        slots_Kn += positions_Kn % block_size
        return DraftBatch(
            sampled=sampled_n,
            next_ids=self._ids.index_select(0, sampled_n),
            rows=table[:, _ROW].to(torch.int32),
            positions=positions_Kn.clamp(max=self._longest - 1),
            slots=slots_Kn.masked_fill_(positions_Kn >= limits_n, self._spare_slot),
            lengths=torch.minimum(positions_Kn + 1, limits_n).to(torch.int32),
        )

    def _verified(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """On the CPU, int64 [n]: accepted drafts, and the last accepted rows among the sampled
        rows."""
        if self.outcomes is not None:
            own_n, has_drafts = table[:, _OWN], table[:, _COUNT] > 0
            accepted_n = self.outcomes.num_accepted[own_n]
            last_n = torch.where(has_drafts, self.outcomes.last[own_n], own_n)
            return accepted_n.masked_fill(~has_drafts, 0), last_n
        own, first = table[:, _OWN, None], table[:, _FIRST, None]
        rows_nK = torch.cat((own, first + torch.arange(self._most)), 1)
        is_right = self._ids[rows_nK[:, :-1]] == self._drafts_nK
        accepted_n = is_right.long().cumprod(1).sum(1)
        rejected_n = table[:, _COUNT] - accepted_n
        self._inputs.rejected[table[:, _ROW]] = rejected_n.to(torch.int32)
        return accepted_n, rows_nK.gather(1, accepted_n[:, None])[:, 0]

    def store_words(self, words_nk: Tensor, batch: DraftBatch) -> None:
        """Write the masks of dynamic trees' nodes to the table by row, where the next step
        finds them."""
        words_Rk = self._inputs.tree_words[:, : words_nk.shape[1]]
        words_Rk[batch.rows.long()] = words_nk

    def store(self, drafts_nK: Tensor, batch: DraftBatch) -> None:
        """Write drafts to the token table, behind the ids that were sampled, where the next
        step finds them."""
        table_RL, first_n = self._inputs.token_table, batch.positions[0]
        if self._targets is not None:
            self._store_drafts(drafts_nK, batch.rows, first_n, table_RL, self._most)
            return
        steps = torch.arange(1, drafts_nK.shape[1] + 1)
        # The last entry of a row is behind its longest sequence.
        positions_nK = (first_n[:, None] + steps).clamp_(max=self._longest)
        table_RL[batch.rows.long()[:, None], positions_nK] = drafts_nK.to(torch.int32)
