"""The step being planned, and the host's record of a step until its result is here."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np

from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.draft_tree import AnyTree, accepted_path, row_masks
from trimaran.worker.kv_cache.manager import BlockCopy, KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import SequenceBlocks
from trimaran.worker.requests.request import Sequence
from trimaran.worker.steps.step_types import (
    DraftRule,
    Int32Array,
    KeptLogits,
    NewRow,
    SampledTokens,
    SchedulerOutput,
    TokenWrite,
    TransferKind,
    int32s,
)

Emission = tuple[Sequence, int, FinishReason]
"""A sequence, its next token id or -1 if there is none, and its finish reason."""

_NO_BLOCKS = int32s((), 4)
_NO_COPIES = int32s((), 3)
_NO_TRANSFERS = int32s((), 4)
_NONE = int32s(())

_MAX_RECOMPUTED = 512
"""Most tokens that a step recomputes after preemptions, beside other sequences."""


@dataclass(slots=True)
class DraftRun:
    """Draft tokens of one sequence that a step verifies."""

    sequence: Sequence
    token_ids: array[int]
    """Zeros until the host has them, if they were drafted by the preceding step."""

    start: int
    """Position of the first draft, if the preceding step accepts all of its drafts."""

    is_known: bool
    """Whether the host has the drafts, and tells the ranks."""

    own: int = 0
    """Index in ``sampled`` of the row that samples the token in place of the first draft."""

    first: int = 0
    """Index in ``sampled`` of the row that computes the first draft; others follow."""

    num_accepted: int = 0
    """Drafts that became output, once the step's result was taken in."""

    tree: AnyTree | None = None
    """The tree whose first nodes the drafts are; None for a chain."""

    path: List[int] = ()
    """The drafts that equal the model's own tokens, from the first one on, once the step's
    result is here."""

    def accepted_rows(self) -> Iterator[int]:
        """The indices in ``sampled`` of the rows that sample behind each accepted draft, once
        the step's result is here."""
        for node in self.path:
            yield self.first + node

    def accept(self, token_ids: List[int]) -> list[int]:
        """Find the accepted path from the ids of the step's ``sampled``. Returns the model's
        own ids: those in place of the path's drafts, and the one behind them; for a chain also
        the ids behind wrong drafts."""
        first, ids = self.first, self.token_ids
        own = [token_ids[self.own], *token_ids[first : first + len(ids)]]
        self.path = accepted_path(None if self.tree is None else self.tree.parents, ids, own)
        if self.tree is None:
            return own
        return [own[0], *(own[1 + node] for node in self.path)]


class ScheduledStep:
    """A decision, and the sequences in its rows."""

    __slots__ = (
        "decision", "dp_rank", "drafts", "logits", "num_context", "num_context_tokens",
        "num_scheduled", "proposed", "proposers", "sampled",
    )  # fmt: skip

    def __init__(
        self,
        decision: SchedulerOutput,
        sampled: list[Sequence],
        num_context: int,
        num_context_tokens: int,
        num_scheduled: int,
    ) -> None:
        self.decision = decision
        self.sampled = sampled
        self.num_context = num_context
        """Sequences that compute prompt tokens."""
        self.num_context_tokens = num_context_tokens
        self.num_scheduled = num_scheduled
        """Sequences that compute tokens; beams of one request count once."""
        self.logits: KeptLogits | None = None
        """Logits of its result, if clients asked for any."""
        self.drafts: list[DraftRun] = []
        """Drafts that it verifies. Their sequences are several times in ``sampled``."""
        self.proposers: list[Sequence] = []
        """Sequences for which a network drafts after the step."""
        self.proposed: list[list[int]] = []
        """The ids of each of them, once the step's result is here."""
        self.dp_rank = 0

    @property
    def num_generation_tokens(self) -> int:
        """Ids that this step samples for outputs, or finds as candidates of beams; without
        those in place of draft tokens, which may be accepted or not."""
        num_drafts = sum(len(run.token_ids) for run in self.drafts)
        num_others = num_drafts + self.num_context + self.decision.num_recomputed
        return len(self.decision.rows) - num_others

    def draft_batch(self) -> dict[int, int]:
        """By index in ``sampled`` of each draft row, the number of drafts up to its own."""
        return {
            run.first + place: place + 1
            for run in self.drafts
            for place in range(len(run.token_ids))
        }

    def parts(self, sampled: SampledTokens) -> list[tuple[ScheduledStep, SampledTokens]]:
        """The steps that `update_from_output` takes one by one, each with its sampled ids."""
        return [(self, sampled)]


class _Entries:
    """The scheduled sequences of one kind, as parallel columns of the decision."""

    __slots__ = ("chunks", "rows", "sequences", "starts", "unsampled")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.rows = array("i")
        self.starts = array("i")
        self.chunks = array("i")
        """Empty for decodes, which compute one token each."""
        self.unsampled: list[int] = []
        """Entries whose last token is not sampled: the few incomplete prompts."""

    def ids(self) -> Int32Array:
        """The one token that each entry computes, which must be on the host."""
        pairs = zip(self.sequences, self.starts, strict=True)
        ids = (sequence.token_ids[start] for sequence, start in pairs)
        return np.fromiter(ids, dtype=np.int32, count=len(self.starts))


class StepPlan:
    """Collects one step: entries within a token budget, new rows, blocks and copies."""

    def __init__(
        self, step: int, budget: int, *, can_cut: bool = True, max_recompute_rows: int = 0
    ) -> None:
        """Without ``can_cut`` there is no chunked prefill: prompts are computed whole. See
        `SchedulerConfig.max_recompute_rows`."""
        self.has_trees = False
        """Whether ranks are told how draft rows see each other."""
        self.step = step
        self.budget = budget
        """Tokens that may still be scheduled."""
        self._recompute_budget = _MAX_RECOMPUTED if can_cut else budget
        self._max_recompute_rows = max_recompute_rows
        self.num_further_rows = 0
        """Decodes of known output, without the first of each sequence."""
        self.has_preempted = False
        self.transfers = _NO_TRANSFERS
        self.first_samples: list[Sequence] = []
        """Sequences whose first new token this step samples."""
        self._decodes = _Entries()
        self._chunks = _Entries()
        self._drafts: list[DraftRun] = []
        self._behind = array("i")
        """Decodes whose positions follow drafts of the step in flight."""
        self._proposals: list[tuple[int, Sequence, DraftRun | None, int]] = []
        self._new_rows: list[NewRow] = []
        self._new_blocks: list[tuple[int, int, int, int]] = []
        self._copies: list[BlockCopy] = []
        self._token_writes: list[TokenWrite] = []
        self._num_context = 0
        self._num_context_tokens = 0
        self.num_further_beams = 0
        """Scheduled beams, without the first of each request."""

    @property
    def has_entries(self) -> bool:
        """Whether the step computes anything."""
        return bool(self._decodes.sequences or self._chunks.sequences)

    def budget_for(self, sequence: Sequence, num_others: int, num_later: int = 0) -> int:
        """Tokens that a chunk of a sequence may have beside ``num_others`` running sequences.

        ``num_later`` of them are kept for sequences that are scheduled after it. A preempted
        sequence is recomputed in small chunks: a step reads all weights for its few decodes
        anyway, so a small chunk costs little there, and no stream waits long.
        """
        if not num_others or not sequence.num_output_tokens or sequence.beams is not None:
            return self.budget
        return min(self.budget, self._recompute_budget + num_later)

    def with_same_kernels(self, sequence: Sequence, missing: int, num_running: int) -> int:
        """As many of a sequence's next ``missing`` tokens as this step can compute by one kind
        of kernels, that of prompts or that of decodes, beside ``num_running`` sequences."""
        if not self._max_recompute_rows:
            return missing
        left = sequence.num_prompt_tokens - sequence.num_computed_tokens
        if left <= 0:
            # The sequence has a row already, as each running sequence has.
            num_rows = num_running + self.num_further_rows
            left = max(1, self._max_recompute_rows - num_rows)
        return min(missing, left)

    def _add_known(self, sequence: Sequence, start: int, count: int, is_sampled: bool) -> None:
        """Schedule known output as ``count`` decodes, each of which rounds as the decode did
        that computed the token first. As with drafts, a row finds the keys and values of the
        rows before it."""
        entries = self._decodes
        first = len(entries.sequences)
        entries.unsampled += range(first, first + count - is_sampled)
        entries.sequences += [sequence] * count
        entries.rows.extend([sequence.row] * count)
        entries.starts.extend(range(start, start + count))
        self.num_further_rows += count - 1
        self.budget -= count
        self._recompute_budget -= count

    def add_decode(self, sequence: Sequence, start: int) -> None:
        """Schedule one decode: the token at ``start``, with the next one sampled.

        The token is at a later place if a step in flight accepts drafts of the sequence.
        """
        entries = self._decodes
        ahead = sequence.num_unverified
        if ahead:
            self._behind.append(len(entries.sequences))
        entries.sequences.append(sequence)
        entries.rows.append(sequence.row)
        entries.starts.append(start + ahead)
        self.budget -= 1

    @property
    def num_decodes(self) -> int:
        """Decodes so far, which have a row each."""
        return len(self._decodes.sequences)

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies draft tokens."""
        return bool(self._drafts)

    @property
    def has_proposals(self) -> bool:
        """Whether a network drafts after the step."""
        return bool(self._proposals)

    @property
    def has_chunks(self) -> bool:
        """Whether a sequence computes several tokens, or a part of its prompt."""
        return bool(self._chunks.sequences or self.num_further_rows)

    def sampled(self) -> list[Sequence]:
        """The sequences whose next token is sampled, decodes first."""
        found = []
        for entries in (self._decodes, self._chunks):
            unsampled = set(entries.unsampled)
            found += [s for place, s in enumerate(entries.sequences) if place not in unsampled]
        return found

    def add_drafts(self, run: DraftRun) -> None:
        """Verify ids that may follow the known ids of a sequence that is sampled.

        ``run.own`` is the sequence's index in `sampled`. Each id is a decode of its own in the
        sequence's row. Layers write the keys and values of all tokens before they attend, so a
        row finds those of the drafts before it. Call after all other entries are added.
        """
        self._drafts.append(run)
        self.budget -= len(run.token_ids)

    def ask_network(
        self, place: int, sequence: Sequence, run: DraftRun | None, count: int
    ) -> None:
        """Let a network draft ``count`` ids behind those that the step yields of a sampled
        sequence, whose index in `sampled` is ``place`` and whose drafts are ``run``."""
        self._proposals.append((place, sequence, run, count))

    def _enter_proposals(self, step: ScheduledStep) -> None:
        """Tell ranks where each sequence ends for which a network drafts."""
        rows = array("i")
        first, num_drafts = self._draft_batch()
        for place, sequence, run, count in self._proposals:
            if run is None:
                own = place if place < first else place + num_drafts
                rows.extend((own, 0, 0, sequence.capacity, count))
            else:
                drafts = run.first, len(run.token_ids)
                rows.extend((run.own, *drafts, sequence.capacity, count))
        step.proposers = [sequence for _, sequence, _, _ in self._proposals]
        step.decision.proposals = np.frombuffer(rows, dtype=np.int32).reshape(-1, 5)

    def _draft_batch(self) -> tuple[int, int]:
        """The index of the first draft row among the sampled rows, and the number of draft
        rows."""
        if not self._drafts:
            return 0, 0
        first, last = self._drafts[0].first, self._drafts[-1]
        return first, last.first + len(last.token_ids) - first

    def _enter_drafts(self) -> Int32Array:
        """Enter the draft rows behind the decodes. Returns the ids that the host has, which
        come last."""
        entries = self._decodes
        place = len(entries.sequences) - len(entries.unsampled)
        behind = {entries.sequences[index] for index in self._behind}
        self._drafts.sort(key=lambda run: run.is_known)
        ids = array("i")
        for run in self._drafts:
            count, first = len(run.token_ids), len(entries.sequences)
            run.first = place
            place += count
            if run.is_known:
                ids += run.token_ids
            if run.sequence in behind:
                self._behind.extend(range(first, first + count))
            entries.sequences += [run.sequence] * count
            entries.rows.extend([run.sequence.row] * count)
            entries.starts.extend(range(run.start, run.start + count))
        return np.frombuffer(ids, dtype=np.int32)

    def add(self, sequence: Sequence, start: int, chunk: int, is_sampled: bool) -> None:
        """Schedule ``chunk`` tokens after the first ``start``."""
        # A prompt's single token is computed as part of a prompt, so that its rounding does
        # not depend on where the prompt was cut.
        is_prompt = start < sequence.num_prompt_tokens
        if not is_prompt and chunk == 1 and is_sampled:
            self.add_decode(sequence, start)
            return
        if self._max_recompute_rows and not is_prompt:
            self._add_known(sequence, start, chunk, is_sampled)
            return
        entries = self._chunks if is_prompt or chunk > 1 else self._decodes
        if not is_sampled:
            entries.unsampled.append(len(entries.sequences))
        entries.sequences.append(sequence)
        entries.rows.append(sequence.row)
        entries.starts.append(start)
        if entries is self._chunks:
            entries.chunks.append(chunk)
        self.budget -= chunk
        if chunk > 1 and sequence.num_output_tokens:
            self._recompute_budget -= chunk
        if is_prompt:
            self._num_context += 1
            self._num_context_tokens += chunk
            if is_sampled and len(sequence.request.sequences) > 1:
                self.first_samples.append(sequence)

    def add_row(self, sequence: Sequence, copies: list[BlockCopy]) -> None:
        """Send a sequence that has just entered its row, with all of its ids and blocks."""
        self._new_rows.append(
            NewRow(
                row=sequence.row,
                token_ids=np.array(sequence.token_ids, dtype=np.int32),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sequence_index=sequence.index,
                sampling=sequence.request.row_sampling(),
                adapter_id=sequence.request.adapter_id,
                prompt_table=sequence.request.prompt_table,
            )
        )
        self._copies += copies
        self.add_blocks(sequence.row, sequence.blocks, 0)

    def add_tokens(self, sequence: Sequence, first: int) -> None:
        """Send the ids from ``first`` on of a sequence that is in its row already."""
        ids = np.array(sequence.token_ids[first:], dtype=np.int32)
        self._token_writes.append(TokenWrite(row=sequence.row, start=first, token_ids=ids))

    def add_copies(self, copies: list[BlockCopy]) -> None:
        """Copy blocks before the step."""
        self._copies += copies

    def add_transfers(self, cache: KVCacheManager, wait_step: int) -> None:
        """Add copies between device and host cache, and a wait for those of an earlier step."""
        moves, loads = cache.take_transfers()
        transfers = [(TransferKind.MOVE, *move) for move in moves]
        transfers += [(TransferKind.LOAD, *load) for load in loads]
        if wait_step:
            transfers.append((TransferKind.WAIT, wait_step, 0, 0))
        if transfers:
            self.transfers = int32s(transfers, 4)

    def add_blocks(self, row: int, blocks: SequenceBlocks, first: int) -> None:
        """Send the entries of a row's block tables from index ``first`` on."""
        for group, table in enumerate(blocks.tables):
            for index in range(first, len(table)):
                self._new_blocks.append((group, row, index, table[index]))

    def finish(self, finished_rows: List[int], *, has_ids: bool = False) -> ScheduledStep:
        """The decision, decodes first. With ``has_ids`` the decision holds the ids that decodes
        compute, else those of drafts alone."""
        first, then = self._decodes, self._chunks
        decode_ids = first.ids() if has_ids else _NONE
        if self._drafts:
            draft_ids = self._enter_drafts()
            decode_ids = np.concatenate((decode_ids, draft_ids))
        sequences = first.sequences + then.sequences
        num_decodes = len(first.sequences)
        indices = np.arange(len(sequences), dtype=np.int32)
        sampled = sequences
        if first.unsampled or then.unsampled:
            unsampled = first.unsampled + [num_decodes + index for index in then.unsampled]
            indices = np.delete(indices, unsampled)
            sampled = [sequences[index] for index in indices]
        chunks = np.ones(len(sequences), dtype=np.int32)
        chunks[num_decodes:] = then.chunks
        decision = SchedulerOutput(
            step=self.step,
            rows=np.frombuffer(first.rows + then.rows, dtype=np.int32),
            num_scheduled_tokens=chunks,
            num_computed_tokens=np.frombuffer(first.starts + then.starts, dtype=np.int32),
            sampled=indices,
            new_blocks=int32s(self._new_blocks, 4) if self._new_blocks else _NO_BLOCKS,
            block_copies=int32s(self._copies, 3) if self._copies else _NO_COPIES,
            finished_rows=int32s(finished_rows) if finished_rows else _NONE,
            new_rows=self._new_rows,
            token_writes=self._token_writes,
            num_decodes=num_decodes,
            transfers=self.transfers,
            num_drafts=sum(len(run.token_ids) for run in self._drafts),
            decode_ids=decode_ids,
            behind_drafts=np.frombuffer(self._behind, np.int32) if self._behind else _NONE,
        )
        num_scheduled = len(sequences) - self.num_further_beams - self.num_further_rows
        step = ScheduledStep(
            decision, sampled, self._num_context, self._num_context_tokens, num_scheduled
        )
        if self._drafts:
            self._locate_drafts(step)
        if self._proposals:
            self._enter_proposals(step)
        return step

    def _locate_drafts(self, step: ScheduledStep) -> None:
        """Find the rows that sample in place of each first draft, and correct the counts."""
        step.drafts = self._drafts
        first, num_drafts = self._draft_batch()
        step.num_scheduled -= num_drafts
        for run in self._drafts:
            if run.own >= first:
                run.own += num_drafts
            rule = _rule_of(run)
            if rule is not None:
                step.decision.draft_rules.append(rule)
        if self.has_trees:
            words = [row_masks(run.tree, len(run.token_ids)) for run in self._drafts]
            masks = np.concatenate(words, dtype=np.int64)
            step.decision.tree_masks = masks.view(np.int32).reshape(-1, 2)
            runs = [(run.own, run.first, len(run.token_ids)) for run in self._drafts]
            step.decision.tree_runs = int32s(runs, 3)


def _rule_of(run: DraftRun) -> DraftRule | None:
    """How a request's draft tokens are accepted; None for equality with the own draws."""
    request, count = run.sequence.request, len(run.token_ids)
    threshold, logits = request.draft_acceptance_threshold, request.draft_logits
    if not threshold and logits is None:
        return None
    rows = None
    if logits is not None:
        start = run.sequence.num_output_tokens
        start -= len(request.draft_token_ids) - len(logits)
        # Logits of draft tokens in place of known output are not sent.
        rows = logits[start : start + count] if start >= 0 else None
    return DraftRule(
        sampled_rows=int32s([run.own, *range(run.first, run.first + count - 1)]),
        token_ids=np.array(run.token_ids, dtype=np.int32),
        threshold=threshold,
        logits=rows,
    )
