"""The state of sequences in fixed rows, and the inputs of a step made from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.kernels.cpu.sampling import CpuSampling
from trimaran.worker.config.draft_tree import UNKNOWN_MASK
from trimaran.worker.steps.staging import StagingRing, StepArrays, to_device
from trimaran.worker.steps.step_types import Int32Array, SchedulerOutput, int32s

# Shapes: R rows, L longest sequence, M blocks of a longest sequence, T tokens of the step,
# S entries (scheduled sequences), N sampled entries.


@dataclass(slots=True)
class StepInputs:
    """A step's inputs on the device, and their sizes on the host."""

    token_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: list[Tensor]
    """One tensor a KV group, [S, blocks of the longest sequence]."""

    slot_mappings: list[Tensor]
    """One tensor a KV group, [T]."""

    logits_indices: Tensor | None
    """Tokens whose logits are wanted; None for all."""

    sampled_slots: Tensor
    """Index of each sampled id in the token table."""

    max_query_len: int
    max_seq_len: int

    rows: Tensor | None = None
    """Row of each sequence in ``block_tables``; None if sequence s is in row s."""

    sampled_rows: Tensor | None = None
    """int32 [N] on the device: the rows that sample. None if the device does not know them."""

    sampled_lengths: Tensor | None = None
    """int32 [N] on the device: tokens before each sampled token; None as above."""

    has_past: bool = True
    """See `AttentionMetadata`."""

    tree_masks: Tensor | None = None
    """int64 [S]: see `AttentionMetadata`; None if the engine's drafts are chains."""


class _DecodeStep:
    """A pure decode step on the CPU, whose inputs can be advanced in place."""

    __slots__ = ("block_size", "host", "inputs")

    def __init__(self, block_size: int, inputs: StepInputs, host: StepArrays) -> None:
        self.block_size = block_size
        self.inputs = inputs
        self.host = host

    def is_followed_by(self, decision: SchedulerOutput) -> bool:
        """Whether ``decision`` decodes the next token of the same rows, in the same blocks."""
        host = self.host
        if len(decision.new_blocks) or decision.new_rows or decision.token_writes:
            return False
        if decision.num_drafts:
            return False
        if decision.rows.tobytes() != host.rows.tobytes():
            return False
        computed = decision.num_computed_tokens
        return (
            decision.num_decodes == len(decision.rows) == len(decision.sampled)
            and computed.tobytes() == host.seq_lens.tobytes()
            and bool((computed % self.block_size).all())
        )


class InputBatch:
    """Token ids and block tables of every row, kept on the device.

    A step brings changes alone. Sampled ids are written to the token table on the device, so
    the next step reads them before they reach the host. The host mirrors the block tables, from
    which it computes slots; on the CPU the mirror is the table itself.
    """

    def __init__(
        self,
        num_rows: int,
        max_seq_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
        depth: int,
        kernel: CpuSampling | None = None,
        switch_at: int = 0,
    ) -> None:
        """If a sequence enters with more than ``switch_at`` tokens, ``switch_at`` is added to
        its positions; see `RotaryEmbedding`."""
        self.block_size = block_size
        self._switch_at = switch_at
        self._shifts = np.zeros(num_rows, dtype=np.int32)
        self.device = device
        self._kernel = kernel
        self.row_len = max_seq_len + 1
        self.max_blocks = -(-max_seq_len // block_size)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        # numpy's zeros take no memory until they are written.
        table = torch.from_numpy(np.zeros((num_rows, self.row_len), dtype=np.int32))
        self.token_table = table.to(device)
        self._flat_ids = self.token_table.view(-1)
        self.rejected = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """int32 [R]: drafts of each row that the last step with drafts of the row has
        rejected."""
        self.tree_words = torch.zeros((num_rows, 0), dtype=torch.int64, device=device)
        """int64 [R, k]: masks of the tree that a network grew last for each row."""
        shape = (num_groups, num_rows, self.max_blocks)
        self._block_ids: npt.NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        mirror = torch.from_numpy(self._block_ids)
        self.block_tables = mirror if device.type == "cpu" else mirror.to(device)
        self._staging = StagingRing(device, depth + 1)
        self._last_decode: _DecodeStep | None = None

    def use_spare_block(self, block: int) -> None:
        """Do nothing: steps are not padded here."""

    def use_trees(self, num_tree_nodes: int) -> None:
        """From now on steps have masks of trees; networks grow trees of ``num_tree_nodes``
        nodes, or none."""
        shape = len(self.tree_words), num_tree_nodes
        self.tree_words = torch.zeros(shape, dtype=torch.int64, device=self.device)

    def resolved(self, decision: SchedulerOutput) -> SchedulerOutput:
        """The decision with exact numbers of computed tokens and with the masks of dynamic
        trees, once the preceding step has ended."""
        words = np.ascontiguousarray(decision.tree_masks).view(np.int64)[:, 0]
        is_unknown = words == UNKNOWN_MASK
        if is_unknown.any():
            end = decision.num_decodes
            rows, nodes = decision.rows[end - len(words) : end], decision.draft_nodes
            own = self.tree_words.numpy()[rows[is_unknown], nodes[is_unknown]]
            words = words.copy()
            words[is_unknown] = own
            masks = words.view(np.int32).reshape(-1, 2)
            decision = replace(decision, tree_masks=masks)
        behind = decision.behind_drafts
        if not len(behind):
            return decision
        computed = decision.num_computed_tokens.copy()
        computed[behind] -= self.rejected.numpy()[decision.rows[behind]]
        return replace(decision, num_computed_tokens=computed, behind_drafts=int32s(()))

    def _apply_changes(self, decision: SchedulerOutput) -> None:
        """Apply the decision's new rows and blocks."""
        for new in decision.new_rows:
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
            if self._switch_at:
                self._shifts[new.row] = shift_of(len(new.token_ids), self._switch_at)
            ids = torch.from_numpy(np.array(new.token_ids, dtype=np.int32))
            self.token_table[new.row, : len(ids)].copy_(ids, non_blocking=True)
        for write in decision.token_writes:
            ids = torch.from_numpy(np.array(write.token_ids, dtype=np.int32))
            end = write.start + len(ids)
            self.token_table[write.row, write.start : end].copy_(ids, non_blocking=True)
        if len(decision.decode_ids):
            self._write_decode_ids(decision)
        blocks = decision.new_blocks
        if len(blocks):
            groups, rows, indices, values = blocks.T
            self._block_ids[groups, rows, indices] = values
            if self.device.type != "cpu":
                self._send_blocks(groups, rows, indices, values)

    def _write_decode_ids(self, decision: SchedulerOutput) -> None:
        """Write the tokens of decodes that this rank has not sampled."""
        known = decision.known_decodes
        flat_indices = decision.rows[known].astype(np.int64) * self.row_len
        flat_indices += decision.num_computed_tokens[known]
        ids = torch.from_numpy(np.array(decision.decode_ids))
        self._flat_ids[to_device(flat_indices, self.device)] = ids.to(self.device)

    def _send_blocks(
        self, groups: Int32Array, rows: Int32Array, indices: Int32Array, values: Int32Array
    ) -> None:
        num_rows = self._block_ids.shape[1]
        flat_indices = (groups.astype(np.int64) * num_rows + rows) * self.max_blocks + indices
        on_device = to_device(np.stack((flat_indices, values.astype(np.int64))), self.device)
        self.block_tables.view(-1).index_copy_(0, on_device[0], on_device[1].int())

    def prepare(self, decision: SchedulerOutput, num_padded: int = 0) -> StepInputs:
        """Apply the decision's changes and make the inputs; ``num_padded`` is unused on a
        CPU."""
        self._apply_changes(decision)
        last = self._last_decode
        if last is not None and last.is_followed_by(decision):
            return self._advance(last, decision)
        inputs, host = self._compute(decision)
        is_repeatable = self.device.type == "cpu" and inputs.logits_indices is None
        self._last_decode = None
        # Sequences with draft tokens have several rows.
        is_repeatable = is_repeatable and not (decision.token_writes or decision.num_drafts)
        if is_repeatable and decision.num_decodes == len(decision.rows):
            self._last_decode = _DecodeStep(self.block_size, inputs, host)
        return inputs

    def _advance(self, last: _DecodeStep, decision: SchedulerOutput) -> StepInputs:
        """The preceding step's inputs, advanced by one token a sequence, in place.

        Ids that were sampled here are in place already: `write_sampled` wrote them.
        """
        host, inputs = last.host, last.inputs
        # Positions, table indices and slots all advance by one, because no block ends here.
        host.wide += 1
        host.seq_lens += 1
        inputs.max_seq_len += 1
        if len(decision.decode_ids):
            inputs.token_ids = torch.from_numpy(np.array(decision.decode_ids))
        return inputs

    def _compute(self, decision: SchedulerOutput) -> tuple[StepInputs, StepArrays]:
        rows, computed = decision.rows, decision.num_computed_tokens
        chunks, sampled = decision.num_scheduled_tokens, decision.sampled
        num_entries, num_sampled = len(rows), len(sampled)
        is_decode = decision.num_decodes == num_entries
        num_tokens = num_entries if is_decode else decision.num_tokens
        num_groups = len(self._block_ids)
        host, device = self._staging.next(num_tokens, num_entries, num_sampled, num_groups)
        ends = computed + chunks
        if is_decode:
            token_rows, positions = rows, computed
            host.query_start_loc[:] = np.arange(num_entries + 1, dtype=np.int32)
        else:
            token_rows, positions = self._expand(decision, host, num_tokens)
        host.positions[:] = positions
        if self._switch_at:
            host.positions += self._shifts[token_rows]
        # Decodes have one token each, so that their entries are their tokens.
        hidden = decision.hidden_rows
        host.positions[: len(hidden)] -= hidden
        np.multiply(token_rows, self.row_len, out=host.token_indices, dtype=np.int64)
        host.token_indices += positions
        self._fill_slots(host, token_rows, positions)
        host.seq_lens[:] = ends
        host.rows[:] = rows
        np.multiply(rows[sampled], self.row_len, out=host.sampled_indices, dtype=np.int64)
        host.sampled_indices += ends[sampled]
        host.sampled_indices[_rows_of_drafts(decision)] = self.row_len - 1
        needs_all = num_sampled == num_tokens
        if not needs_all:
            host.logits_indices[:] = host.query_start_loc[1:][sampled] - 1
        self._staging.send()
        max_seq_len = int(ends.max())
        num_blocks = -(-max_seq_len // self.block_size)
        inputs = StepInputs(
            token_ids=self._flat_ids.index_select(0, device["token_indices"]),
            positions=device["positions"],
            query_start_loc=device["query_start_loc"],
            seq_lens=device["seq_lens"],
            block_tables=[
                self.block_tables[group, :, :num_blocks].index_select(0, device["rows"])
                for group in range(num_groups)
            ],
            slot_mappings=list(device["slots"].unbind(0)),
            logits_indices=None if needs_all else device["logits_indices"],
            sampled_slots=device["sampled_indices"],
            max_query_len=1 if is_decode else int(chunks.max()),
            max_seq_len=max_seq_len,
            tree_masks=_masks_of(decision),
        )
        return inputs, host

    def _expand(
        self, decision: SchedulerOutput, host: StepArrays, num_tokens: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Row and position of each token of the step; fills ``query_start_loc``."""
        chunks = decision.num_scheduled_tokens
        host.query_start_loc[0] = 0
        np.cumsum(chunks, out=host.query_start_loc[1:])
        first = decision.num_computed_tokens - host.query_start_loc[:-1]
        positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(first, chunks)
        return np.repeat(decision.rows, chunks), positions

    def _fill_slots(
        self, host: StepArrays, token_rows: npt.NDArray[Any], positions: npt.NDArray[Any]
    ) -> None:
        indices, offsets = np.divmod(positions, self.block_size)
        for group, table in enumerate(self._block_ids):
            slots = host.slots[group]
            np.multiply(table[token_rows, indices], self.block_size, out=slots, dtype=np.int64)
            slots += offsets

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return self._staging.pinned_bytes

    def write_sampled(self, inputs: StepInputs, token_ids_N: Tensor) -> None:
        """Write sampled ids to the token table, from which the next step reads."""
        if self._kernel is not None:
            self._kernel.store(token_ids_N, inputs.sampled_slots, self._flat_ids)
        else:
            self._flat_ids.index_copy_(0, inputs.sampled_slots, token_ids_N.to(torch.int32))
        if self._last_decode is not None:
            inputs.token_ids = token_ids_N


def _rows_of_drafts(decision: SchedulerOutput) -> slice:
    """The rows, among the sampled ones, whose ids no row reads before an accepted path is
    known: those of drafts, if ranks find the paths."""
    runs = decision.tree_runs
    return (
        slice(int(runs[:, 1].min()), int(runs[:, 1:].sum(1).max())) if len(runs) else slice(0)
    )


def _masks_of(decision: SchedulerOutput) -> Tensor | None:
    """int64 [S]: see `AttentionMetadata`."""
    words = decision.tree_masks
    if not len(words):
        return None
    masks = np.full(len(decision.rows), -1, dtype=np.int64)
    end = decision.num_decodes
    masks[end - len(words) : end] = np.ascontiguousarray(words).view(np.int64)[:, 0]
    return torch.from_numpy(masks)


def shift_of(num_tokens: int, switch_at: int) -> int:
    """The number that is added to positions of a sequence that enters with so many tokens."""
    return switch_at if num_tokens > switch_at else 0
