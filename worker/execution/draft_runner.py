"""Runs a network that drafts: over each step's tokens, then a chain of tokens a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.worker.attention.backend import AttentionMetadata, ForwardContext
from trimaran.worker.attention.taps import LayerTaps
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.input_batch import InputBatch, StepInputs
from trimaran.worker.models.drafting.interfaces import ChainNetwork, DraftNetwork, ParallelHeads
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import SchedulerOutput

# Shapes: T tokens of the step, S entries, N sampled rows, n sequences that want drafts, K most
# draft rows of a sequence, k ids to draft, D hidden size of the network, X of its inputs.


@dataclass(slots=True)
class _Ends:
    """Where each of n sequences ends once its accepted drafts are known."""

    sampled: Tensor
    """Index of the last accepted row among the sampled rows."""

    tokens: Tensor
    """Index of its token in the step."""

    lengths: Tensor
    """int64 tokens up to it, itself included: the position of the sampled id behind it."""

    next_ids: Tensor
    """The sampled id behind it."""


class DraftRunner:
    """A network with its KV cache, whose blocks have the numbers of the target's blocks.

    Each step of the target is followed by a pass of the network over the same tokens. So its
    cache holds what the target's holds, whatever becomes of the blocks: reused, copied, moved
    to the host, or overwritten behind rejected drafts. Then each sequence that wants drafts has
    a chain of tokens, whose entries the next steps overwrite.
    """

    def __init__(
        self,
        network: DraftNetwork,
        kv_caches: list[Tensor],
        inputs: InputBatch | DeviceInputs,
        taps: LayerTaps | None,
        vocab_size: int,
    ) -> None:
        """``kv_caches`` has a view a layer of the network, with one spare block at the end."""
        self._chain = network if isinstance(network, ChainNetwork) else None
        self._heads = network if isinstance(network, ParallelHeads) else None
        self._kv_caches = kv_caches
        self._inputs = inputs
        self.taps = taps
        self._last_id = vocab_size - 1
        self._block_size = inputs.block_size
        self._spare_slot = 0
        if kv_caches:
            self._spare_slot = (kv_caches[0].shape[0] - 1) * inputs.block_size
        self._flat_ids = inputs.token_table.view(-1)
        self._row_len = inputs.token_table.shape[1]
        self._longest = self._row_len - 1

    @property
    def needs_states(self) -> bool:
        """Whether `follow` reads the target's last hidden states of all tokens."""
        return self._chain is not None and self._chain.needs_states

    # ---- the pass over a step's tokens ---------------------------------------------------

    def follow(
        self, hidden_TD: Tensor, inputs: StepInputs, decision: SchedulerOutput
    ) -> Tensor | None:
        """Run the network over a step's tokens, once its ids are sampled.

        ``hidden`` are the target's last states. Returns the network's [T, D], or None for
        heads that have no cache. Collective over the tensor group.
        """
        network = self._chain
        if network is None:
            return None
        count = decision.num_tokens
        states_TX: Tensor | None = None
        if self.taps is not None:
            states_TX = self.taps.states(count)
        elif network.needs_states:
            states_TX = hidden_TD[:count]
        places = _token_places(decision, self._row_len) + network.is_shifted
        ids_T = self._ids_at(to_device(places, self._inputs.device))
        return network.forward(
            ids_T,
            states_TX,
            inputs.positions[:count],
            ForwardContext(
                attention=_attention_of(inputs, decision), kv_caches=self._kv_caches
            ),
        )

    def _ids_at(self, places: Tensor) -> Tensor:
        """Ids of the token table. Those of a prompt table, and of rows without an id, are none
        of the vocabulary."""
        return self._flat_ids.index_select(0, places).clamp_(0, self._last_id)

    # ---- proposals -----------------------------------------------------------------------

    def propose(
        self,
        states_TD: Tensor | None,
        wanted_ND: Tensor,
        decision: SchedulerOutput,
        token_ids_N: Tensor,
    ) -> Tensor | None:
        """Draft for the decision's ``proposals``: int64 [n, k], or None without any.

        ``states`` is the result of `follow`, ``wanted`` the target's states of the sampled
        rows. Collective over the tensor group.
        """
        if not len(decision.proposals):
            return None
        ends = self._ends(decision, token_ids_N)
        count = int(decision.proposals[:, 4].max())
        if self._heads is not None:
            states_ND = wanted_ND.index_select(0, ends.sampled)
            return self._heads.propose(states_ND, min(count, self._heads.num_heads))
        assert self._chain is not None and states_TD is not None, "a chain follows a pass"
        return self._draft_chain(self._chain, states_TD, ends, decision, count)

    def _ends(self, decision: SchedulerOutput, token_ids_N: Tensor) -> _Ends:
        """Compare drafts with the ids that were sampled in their place."""
        device = self._inputs.device
        own, first, num_drafts = decision.proposals[:, :3].T.astype(np.int64)
        most = int(num_drafts.max())
        rows = np.repeat(own[:, None], most + 1, axis=1)
        places = np.arange(most)
        has_draft = places < num_drafts[:, None]
        rows[:, 1:][has_draft] = (first[:, None] + places)[has_draft]
        lengths = decision.num_computed_tokens + decision.num_scheduled_tokens
        tokens = np.cumsum(decision.num_scheduled_tokens) - 1
        entries = decision.sampled[rows]
        table = np.stack((rows, tokens[entries], lengths[entries]))
        rows_nK, tokens_nK, lengths_nK = to_device(table.astype(np.int64), device)
        if not most:
            sampled, last = rows_nK[:, 0], None
        else:
            drafts = to_device(_drafts_of(decision, has_draft, entries), device)
            is_right = token_ids_N[rows_nK[:, :-1]] == drafts
            last = is_right.long().cumprod(1).sum(1, keepdim=True)
            sampled = rows_nK.gather(1, last)[:, 0]
        return _Ends(
            sampled,
            tokens_nK[:, 0] if last is None else tokens_nK.gather(1, last)[:, 0],
            lengths_nK[:, 0] if last is None else lengths_nK.gather(1, last)[:, 0],
            token_ids_N.index_select(0, sampled),
        )

    def _draft_chain(
        self,
        network: ChainNetwork,
        states_TD: Tensor,
        ends: _Ends,
        decision: SchedulerOutput,
        count: int,
    ) -> Tensor:
        """The ids of ``count`` tokens, one after another."""
        device = self._inputs.device
        entries = decision.sampled[decision.proposals[:, 0]]
        rows_n = to_device(decision.rows[entries], device)
        limits_n = to_device(decision.proposals[:, 3].astype(np.int64), device)
        drafted: list[Tensor] = []
        states_nD: Tensor | None = None
        ids_n, positions_n = ends.next_ids, ends.lengths
        if network.is_shifted:
            states_nD = states_TD.index_select(0, ends.tokens)
            ids_n = network.draft_ids(states_nD)
            drafted.append(ids_n)
        while len(drafted) < count:
            context = self._chain_context(rows_n, positions_n, limits_n)
            states_nD = network.forward(
                ids_n.clamp(0, self._last_id).to(torch.int32),
                states_nD,
                positions_n.clamp(max=self._longest - 1),
                context,
            )
            ids_n = network.draft_ids(states_nD)
            drafted.append(ids_n)
            positions_n = positions_n + 1
        return torch.stack(drafted, dim=1)

    def _chain_context(
        self, rows_n: Tensor, positions_n: Tensor, limits_n: Tensor
    ) -> ForwardContext:
        """One token of each sequence. A token behind a sequence's blocks goes to the spare
        block: its drafts are not used."""
        size, device = self._block_size, self._inputs.device
        tables = self._inputs.block_tables
        tables_RM = tables[0] if isinstance(self._inputs, InputBatch) else tables
        blocks_n = (positions_n // size).clamp(max=tables_RM.shape[1] - 1)
        slots_n = tables_RM[rows_n.long(), blocks_n].long() * size + positions_n % size
        has_room = positions_n < limits_n
        slots_n = slots_n.where(has_room, torch.full_like(slots_n, self._spare_slot))
        lengths_n = torch.minimum(positions_n + 1, limits_n).to(torch.int32)
        count = len(rows_n)
        # Operators of the CPU take one table a sequence, those of a GPU one table a row.
        is_by_row = device.type == "cuda"
        attention = AttentionMetadata(
            query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=device),
            seq_lens=lengths_n,
            block_tables=tables_RM if is_by_row else tables_RM.index_select(0, rows_n),
            slot_mapping=slots_n,
            max_query_len=1,
            max_seq_len=self._longest,
            num_decodes=count,
            rows=rows_n if is_by_row else None,
        )
        return ForwardContext(attention=attention, kv_caches=self._kv_caches)


_Places = npt.NDArray[np.int64]


def _token_places(decision: SchedulerOutput, row_len: int) -> _Places:
    """int64 [T]: the place of each token of a step in the flat token table."""
    chunks = decision.num_scheduled_tokens
    starts = np.cumsum(chunks) - chunks
    first = decision.rows.astype(np.int64) * row_len + decision.num_computed_tokens - starts
    places: _Places = np.arange(int(chunks.sum()), dtype=np.int64) + np.repeat(first, chunks)
    return places


def _drafts_of(
    decision: SchedulerOutput, has_draft: npt.NDArray[np.bool_], entries_nK: _Places
) -> _Places:
    """int64 [n, K]: the draft ids that the step's entries computed; -1 for none."""
    drafts = np.full(has_draft.shape, -1, dtype=np.int64)
    places = entries_nK[:, 1:][has_draft] - decision.told_decodes.start
    drafts[has_draft] = decision.decode_ids[places]
    return drafts


def _attention_of(inputs: StepInputs, decision: SchedulerOutput) -> AttentionMetadata:
    """The target's attention of the step, without padding."""
    num_entries, num_tokens = len(decision.rows), decision.num_tokens
    rows = inputs.rows
    return AttentionMetadata(
        query_start_loc=inputs.query_start_loc[: num_entries + 1],
        seq_lens=inputs.seq_lens[:num_entries],
        block_tables=inputs.block_tables[0],
        slot_mapping=inputs.slot_mappings[0][:num_tokens],
        max_query_len=inputs.max_query_len,
        max_seq_len=inputs.max_seq_len,
        num_decodes=decision.num_decodes,
        has_past=inputs.has_past,
        rows=None if rows is None else rows[:num_entries],
        # Drafts are several rows of one sequence.
        shares_rows=True,
    )
