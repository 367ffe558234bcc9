"""The rows' state on a GPU, and a step's inputs, which kernels make from one packed copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trimaran.worker.execution.input_batch import StepInputs, shift_of
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import Int32Array, SchedulerOutput, int32s

# Shapes: R rows, L longest sequence, M blocks of a longest sequence, T tokens of the step,
# S entries (scheduled sequences), N sampled entries.

_MIN_PACKED = 1 << 14
_MAX_VIEWS = 1024

_Segment = tuple[int, int, Int32Array]
"""Row, position in it, and the ids to write there."""


class _Staging:
    """Pinned memory of one step in flight, and its copy on the device.

    The copy runs on its own stream, beside the preceding step: between two kernels of the main
    stream it would delay the device by some 15 us. Triton's interpreter runs kernels on the
    CPU, where nothing has to wait.
    """

    def __init__(self, device: torch.device, copies: torch.cuda.Stream | None) -> None:
        self._copies = copies
        self.memory = torch.empty(0, dtype=torch.int32)
        self.array: Int32Array = self.memory.numpy()
        self.twin = torch.empty(0, dtype=torch.int32, device=device)
        if copies is not None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def reserve(self, count: int) -> None:
        """Wait until the memory is free, and enlarge it if needed."""
        if self._copies is not None:
            self._copied.synchronize()
        if count > len(self.memory):
            size = max(_MIN_PACKED, 1 << (count - 1).bit_length())
            self.memory = torch.empty(
                size, dtype=torch.int32, pin_memory=self._copies is not None
            )
            self.array = self.memory.numpy()
            self.twin = torch.empty(size, dtype=torch.int32, device=self.twin.device)
            if self._copies is not None:
                # Launched kernels may still use the memory of the old device buffer.
                self._copies.wait_stream(torch.cuda.current_stream(self.twin.device))

    def send(self, count: int) -> Tensor:
        """Start the copy of the first ``count`` numbers. Returns the device buffer, which is
        ready for later work of the current stream."""
        if self._copies is None:
            self.twin[:count].copy_(self.memory[:count])
            return self.twin
        self._copies.wait_event(self._read)
        with torch.cuda.stream(self._copies):
            self.twin[:count].copy_(self.memory[:count], non_blocking=True)
        self._copied.record(self._copies)
        torch.cuda.current_stream(self.twin.device).wait_event(self._copied)
        return self.twin

    def release(self) -> None:
        """Mark the current stream's work so far as the last reader of the device buffer."""
        if self._copies is not None:
            self._read.record()


class DeviceInputs:
    """Token ids and block tables of every row on a GPU; see `InputBatch` for the CPU's.

    A step sends one packed copy: the rows, the numbers of computed tokens, and changes. Kernels
    make token ids, positions and slots from it, in fixed memory that CUDA graphs read. Steps
    run in order on one stream, so this memory serves all steps in flight. Entries that pad a
    step use a spare row and a spare block, which no sequence has.
    """

    def __init__(
        self,
        num_rows: int,
        max_seq_len: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
        depth: int,
        switch_at: int = 0,
    ) -> None:
        """``switch_at``: see `InputBatch`."""
        # Imported late, because a CPU needs no Triton.
        from trimaran.kernels.cuda import decode_inputs
        from trimaran.kernels.triton import inputs as triton_inputs

        self._kernels = triton_inputs
        self.block_size = block_size
        self.device = device
        self.max_seq_len = max_seq_len
        self.max_blocks = -(-max_seq_len // block_size)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        shape = (num_rows + 1, max_seq_len + 1)
        self.token_table = torch.zeros(shape, dtype=torch.int32, device=device)
        table = (num_rows + 1, self.max_blocks)
        self.block_tables = torch.zeros(table, dtype=torch.int32, device=device)
        self.most_sampled = num_rows
        """Most sampled rows of a step; more than sequences if draft tokens are verified."""
        size = max(max_tokens, num_rows)
        self.target = triton_inputs.StepTensors.allocate(size, num_rows + 1, block_size, device)
        """The inputs of the last prepared step, in fixed memory."""
        self._switch_at = switch_at
        if switch_at:
            shifts = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
            self.target.shifts = shifts
        self._most_rows = decode_inputs.MAX_ROWS
        self._most_blocks = decode_inputs.MAX_BLOCKS
        self._decodes = decode_inputs.decode_inputs(
            self.token_table, self.block_tables, self.target
        )
        """Makes the inputs of most decode steps without a copy; None for none."""
        copies = None if device.type == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._views: dict[tuple[int, int, int], StepInputs] = {}
        """By sizes of a step, since views take the host as long as a launch."""
        self._ring = [_Staging(device, copies) for _ in range(depth + 1)]
        self._step = 0

    @property
    def num_tokens(self) -> Tensor:
        """int32 [1]: the step's number of tokens without padding."""
        return self.target.narrow[6, :1]

    @property
    def ring_slot(self) -> int:
        """The last launched step's slot in the ring of steps in flight."""
        return self._step % len(self._ring)

    @property
    def num_ring_slots(self) -> int:
        """Slots of the ring: more than steps in flight."""
        return len(self._ring)

    @property
    def ring_slot_on_device(self) -> Tensor:
        """int32 [1]: the ring slot of the step that runs."""
        return self.target.narrow[6, 1:2]

    def use_trees(self, num_tree_nodes: int) -> None:
        """From now on steps have masks of trees; networks grow trees of ``num_tree_nodes``
        nodes, or none. Before graphs are captured."""
        self.target.has_trees = True
        shape = len(self.token_table), num_tree_nodes
        self.target.tree_words = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._views.clear()

    def use_spare_block(self, block: int) -> None:
        """Set the block that padding entries write to; no sequence may have it."""
        self.block_tables[-1].fill_(block)

    @property
    def tree_words(self) -> Tensor:
        """int64 [R + 1, k]: see `InputBatch.tree_words`."""
        assert self.target.tree_words is not None, "the engine has trees"
        return self.target.tree_words

    @property
    def has_trees(self) -> bool:
        """Whether drafts are trees: steps then have `StepInputs.tree_masks`."""
        return self.target.has_trees

    # ---- one step ------------------------------------------------------------------------

    @property
    def rejected(self) -> Tensor:
        """int32 [R + 1]: see `InputBatch.rejected`."""
        return self.target.rejected

    def resolved(self, decision: SchedulerOutput) -> SchedulerOutput:
        """The decision itself: kernels subtract rejected drafts, and the host's numbers of
        computed tokens are upper bounds."""
        return decision

    def prepare(self, decision: SchedulerOutput, num_padded: int = 0) -> StepInputs:
        """Apply the decision's changes and make the step's inputs.

        The step is padded to ``num_padded`` tokens and as many entries, if that is more.
        """
        num_tokens, max_query_len = self.launch(decision, num_padded)
        num_entries, num_sampled = len(decision.rows), len(decision.sampled)
        longest = int((decision.num_computed_tokens + decision.num_scheduled_tokens).max())
        inputs = self.views(
            max(num_entries, num_padded), max(num_tokens, num_padded), num_sampled
        )
        inputs.max_query_len, inputs.max_seq_len = max_query_len, longest
        if decision.num_decodes < num_entries:
            computed = decision.num_computed_tokens[decision.num_decodes :]
            inputs.has_past = bool(computed.any())
        if num_sampled == num_tokens:
            # Without indices: the tokens come first, in order, then padding.
            inputs.logits_indices = None
        return inputs

    def launch(self, decision: SchedulerOutput, num_padded: int) -> tuple[int, int]:
        """`prepare` without views: launch the kernels that make the step's inputs in fixed
        memory. Returns the numbers of the step's tokens and of the longest entry's tokens."""
        self._step += 1
        if self._decodes is not None and self._is_simple(decision, num_padded):
            self._decodes.launch(
                decision.rows, decision.num_computed_tokens, decision.new_blocks, num_padded,
                self.ring_slot,
            )  # fmt: skip
            return len(decision.rows), 1
        return self._launch_packed(decision, num_padded)

    def _is_simple(self, decision: SchedulerOutput, num_padded: int) -> bool:
        """Whether the step decodes a token of each entry, which the device has, and samples
        all entries."""
        count = len(decision.rows)
        is_decode = decision.num_decodes == count == len(decision.sampled)
        if not is_decode or self.has_trees or max(count, num_padded) > self._most_rows:
            return False
        if decision.new_rows or decision.token_writes or len(decision.decode_ids):
            return False
        has_room = len(decision.new_blocks) <= self._most_blocks
        return has_room and not len(decision.behind_drafts)

    def _launch_packed(self, decision: SchedulerOutput, num_padded: int) -> tuple[int, int]:
        """`launch` of any step."""
        num_entries, segments = len(decision.rows), self._segments(decision)
        num_updates, num_ids = len(decision.new_blocks), len(decision.decode_ids)
        at_words = 4 * num_entries + 2
        at_updates = at_words + (3 * num_entries if self.has_trees else 0)
        at_segments = at_updates + 2 * num_updates
        num_segments = len(segments) + num_ids
        at_ids = at_segments + 4 * num_segments
        at_decode_ids = at_ids + sum(len(ids) for _, _, ids in segments)
        count = at_decode_ids + num_ids
        staging = self._ring[self.ring_slot]
        staging.reserve(count)
        num_tokens = self._pack_entries(staging.array, decision)
        self._pack_blocks(staging.array[at_updates:at_segments], decision)
        _pack_ids(staging.array, at_segments, at_ids, segments)
        if num_ids:
            _pack_decode_ids(staging.array, at_ids - 4 * num_ids, at_decode_ids, decision)
        if self.has_trees:
            _pack_words(staging.array[at_words:at_updates], decision)
        packed = staging.send(count)
        if num_updates or num_segments:
            longest = max((len(ids) for _, _, ids in segments), default=1)
            self._kernels.enter(
                packed, self.token_table, self.block_tables, at_updates, num_updates,
                at_segments, num_segments, longest,
            )  # fmt: skip
        is_decode = decision.num_decodes == num_entries
        max_query_len = 1 if is_decode else int(decision.num_scheduled_tokens.max())
        self._kernels.prepare(
            packed, self.token_table, self.block_tables, self.target, num_entries,
            max(num_entries, num_padded), num_tokens, max_query_len,
        )  # fmt: skip
        staging.release()
        return num_tokens, max_query_len

    def pad(self, count: int) -> None:
        """Make the inputs of a step of ``count`` padding entries alone."""
        self._ring[0].reserve(1)
        self._kernels.prepare(
            self._ring[0].twin, self.token_table, self.block_tables, self.target, 0, count,
            0, 1,
        )  # fmt: skip

    def views(self, num_entries: int, num_tokens: int, num_sampled: int) -> StepInputs:
        """The inputs of a step of these sizes, as views of the fixed memory."""
        sizes = num_entries, num_tokens, num_sampled
        found = self._views.get(sizes)
        if found is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            found = self._views[sizes] = self._make_views(*sizes)
        return replace(found)

    def _make_views(self, num_entries: int, num_tokens: int, num_sampled: int) -> StepInputs:
        wide, narrow = self.target.wide, self.target.narrow
        return StepInputs(
            token_ids=narrow[0, :num_tokens],
            positions=wide[0, :num_tokens],
            query_start_loc=narrow[3, : num_entries + 1],
            seq_lens=narrow[2, :num_entries],
            block_tables=[self.block_tables],
            slot_mappings=[wide[1, :num_tokens]],
            logits_indices=wide[2, :num_sampled],
            sampled_slots=wide[3, :num_sampled],
            max_query_len=1,
            max_seq_len=self.max_seq_len,
            rows=narrow[1, :num_entries],
            sampled_rows=narrow[4, :num_sampled],
            sampled_lengths=narrow[5, :num_sampled],
            tree_masks=wide[4, :num_entries] if self.has_trees else None,
        )

    def _pack_entries(self, array: Int32Array, decision: SchedulerOutput) -> int:
        """Pack rows, computed tokens, indices of sampled entries, starts and the step's ring
        slot. Returns the number of tokens."""
        count = len(decision.rows)
        fields = array[: 3 * count].reshape(3, count)
        fields[0] = decision.rows
        fields[1] = decision.num_computed_tokens
        if len(decision.behind_drafts):
            fields[1][decision.behind_drafts] = ~fields[1][decision.behind_drafts]
        if len(decision.sampled) == count:
            fields[2] = np.arange(count, dtype=np.int32)
        else:
            fields[2] = -1
            fields[2][decision.sampled] = np.arange(len(decision.sampled), dtype=np.int32)
        starts = array[3 * count : 4 * count + 1]
        starts[0] = 0
        np.cumsum(decision.num_scheduled_tokens, out=starts[1:])
        array[4 * count + 1] = self.ring_slot
        return int(starts[-1])

    def _pack_blocks(self, array: Int32Array, decision: SchedulerOutput) -> None:
        count = len(decision.new_blocks)
        if count:
            _, rows, indices, blocks = decision.new_blocks.T
            np.multiply(rows, self.max_blocks, out=array[:count])
            array[:count] += indices
            array[count:] = blocks

    def _segments(self, decision: SchedulerOutput) -> list[_Segment]:
        for new in decision.new_rows:
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
        if self.target.shifts is not None and decision.new_rows:
            entered = [
                (new.row, shift_of(len(new.token_ids), self._switch_at))
                for new in decision.new_rows
            ]
            rows, shifts = to_device(int32s(entered, 2).T.copy(), self.device)
            self.target.shifts[rows.long()] = shifts
        segments = [(new.row, 0, new.token_ids) for new in decision.new_rows]
        segments += [(each.row, each.start, each.token_ids) for each in decision.token_writes]
        return segments

    def write_sampled(self, inputs: StepInputs, token_ids_N: Tensor) -> None:
        """Write sampled ids to the token table, from which the next step reads."""
        self._kernels.store_ids(token_ids_N, inputs.sampled_slots, self.token_table)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return sum(4 * len(staging.memory) for staging in self._ring)


def _pack_ids(
    array: Int32Array, at_segments: int, at_ids: int, segments: list[_Segment]
) -> None:
    for number, (row, first, ids) in enumerate(segments):
        segment, length = at_segments + 4 * number, len(ids)
        array[segment : segment + 4] = row, first, at_ids, length
        array[at_ids : at_ids + length] = ids
        at_ids += length


def _pack_decode_ids(
    array: Int32Array, at_segments: int, at_ids: int, decision: SchedulerOutput
) -> None:
    """A segment of one id for each decode whose id the decision has."""
    ids, known = decision.decode_ids, decision.known_decodes
    count = len(ids)
    segments = array[at_segments : at_segments + 4 * count].reshape(count, 4)
    segments[:, 0] = decision.rows[known]
    segments[:, 1] = decision.num_computed_tokens[known]
    segments[:, 2] = np.arange(at_ids, at_ids + count, dtype=np.int32)
    segments[:, 3] = 1
    array[at_ids : at_ids + count] = ids


def _pack_words(array: Int32Array, decision: SchedulerOutput) -> None:
    """The words of trees of all entries, and the number of each draft's node, from 1 on."""
    count, end, words = len(decision.rows), decision.num_decodes, decision.tree_masks
    array[: 2 * count] = -1
    array[2 * count :] = 0
    drafts = slice(end - len(words), end)
    array[: 2 * count].reshape(count, 2)[drafts] = words
    array[2 * count :][drafts] = decision.draft_nodes + 1
