"""Runs a network that drafts: over each step's tokens, then a chain of tokens a sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.worker.attention.backend import AttentionMetadata, ForwardContext
from trimaran.worker.attention.taps import LayerTaps
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.execution.cuda_graphs import CudaGraphs
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.draft_inputs import DraftBatch, DraftInputs
from trimaran.worker.execution.dynamic_trees import DynamicTreeDrafts, beam_nodes, tree_words
from trimaran.worker.execution.input_batch import InputBatch, StepInputs
from trimaran.worker.execution.tree_drafts import LevelBatch, TreeDrafts, rank_indices
from trimaran.worker.execution.tree_paths import DeviceTreePaths, TreePaths
from trimaran.worker.models.drafting.interfaces import (
    BeamHeads,
    CachelessHeads,
    ChainNetwork,
    DraftNetwork,
    RankedHeads,
    RankedNetwork,
)
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import SchedulerOutput

# Shapes: T tokens of the step, N sampled rows, n sequences that want drafts, k ids to draft, D
# hidden size of the network, E hidden size of the target, X width of the network's inputs.


class DraftRunner:
    """A network with its KV cache, whose blocks have the numbers of the target's blocks.

    Each step of the target is followed by a pass of the network over the same tokens. So its
    cache holds what the target's holds, whatever becomes of the blocks: reused, copied, moved
    to the host, or overwritten behind rejected drafts. Then each sequence that wants drafts has
    a chain of tokens, whose entries the next steps overwrite.

    With CUDA graphs the pass behind a step of decodes is one graph, and so are all tokens of
    the chains. A chain begins behind ids that the device compares, so that the host waits for
    nothing.
    """

    def __init__(
        self,
        network: DraftNetwork,
        kv_caches: list[Tensor],
        inputs: InputBatch | DeviceInputs,
        target: CausalLM,
        limits: SchedulerConfig,
    ) -> None:
        """``kv_caches`` has a view a layer of the network, with one spare block at the end."""
        self._chain = network if isinstance(network, ChainNetwork) else None
        self._heads = network if isinstance(network, CachelessHeads) else None
        self._kv_caches = kv_caches
        self._inputs = inputs
        self._last_id = target.config.vocab_size - 1
        self._flat_ids = inputs.token_table.view(-1)
        self._row_len = inputs.token_table.shape[1]
        spare_slot = 0
        if kv_caches:
            spare_slot = (kv_caches[0].shape[0] - 1) * inputs.block_size
        self.max_drafts = limits.speculation.max_draft_tokens
        """Most ids of a sequence that `propose` drafts."""

        rows = max(limits.max_num_rows, limits.max_num_seqs)
        self._dynamic_limits = limits.speculation.dynamic_limits
        most = (
            self.max_drafts if self._dynamic_limits is None else self._dynamic_limits.num_slots
        )
        self._begin = DraftInputs(
            inputs, rows, max(most, self.max_drafts), network.state_size, target.dtype,
            spare_slot,
        )  # fmt: skip
        self.taps: LayerTaps | None = None
        if network.taps:
            sizes = max(limits.max_num_batched_tokens, rows), target.config.hidden_size
            self.taps = LayerTaps(
                network.taps, *sizes, target.dtype, inputs.device, target.stage.layers
            )
        self._last_RE: Tensor | None = None
        if self.needs_states:
            self._last_RE = torch.zeros(
                (rows, target.config.hidden_size), dtype=target.dtype, device=inputs.device
            )
        self._counts = limits.speculation.drafted_counts
        self._trees: dict[int, TreeDrafts | DynamicTreeDrafts] = {}
        """Draft so many first nodes of trees, if the network has a cache."""
        self._ranks: dict[int, tuple[list[int], Tensor]] = {}
        """See `rank_indices`, for other networks."""
        self._use_forms(limits)
        self._passes: CudaGraphs | None = None
        self._drafts: dict[int, CudaGraphs] = {}

    def use_trees(self, trees: TreePaths | DeviceTreePaths) -> None:
        """Begin drafts behind the paths that ``trees`` finds."""
        self._begin.outcomes = trees.outcomes

    def _use_forms(self, limits: SchedulerConfig) -> None:
        """Make what drafts each number of nodes. First nodes in a row are drafted as a
        chain."""
        tree, dynamic = limits.speculation.draft_tree, self._dynamic_limits
        device = self._inputs.device
        make = self._level_context
        for count in self._counts:
            if dynamic is not None and self._chain is not None:
                assert isinstance(self._chain, RankedNetwork), "checked while loading"
                shape = dynamic.first(count)
                self._trees[count] = DynamicTreeDrafts(shape, self._chain, make, device)
            elif tree is None or count <= tree.chain_length:
                continue
            elif self._chain is None:
                self._ranks[count] = rank_indices(tree.first(count), device)
            else:
                assert isinstance(self._chain, RankedNetwork), "checked while loading"
                self._trees[count] = TreeDrafts(tree.first(count), self._chain, make, device)

    @property
    def needs_states(self) -> bool:
        """Whether `follow` reads the target's last hidden states of all tokens."""
        return self._chain is not None and self._chain.needs_states

    @property
    def num_bytes(self) -> int:
        """Device memory for inputs, which lie at fixed addresses, without `taps`."""
        last = 0 if self._last_RE is None else self._last_RE.nbytes
        return self._begin.num_bytes + last

    # ---- graphs --------------------------------------------------------------------------

    def capture(self, sizes: list[int], pool: Any) -> None:
        """From now on run passes over decodes, and drafts, from CUDA graphs. ``sizes`` are
        those of the target's graphs, whose memory ``pool`` they share. Collective."""
        device = self._inputs.device
        if self._chain is not None:
            self._passes = CudaGraphs("rows, for drafts", sizes, self._launch_pass, pool)
            self._passes.capture(device)
        most = len(self._inputs.num_prompt_tokens)
        sequences = [size for size in sizes if size < most]
        if max(sizes) >= most:
            sequences.append(most)
        for count in self._counts:
            kind = f"sequences, {count} drafts each"
            launch = partial(self._launch_drafts, count=count)
            self._drafts[count] = CudaGraphs(kind, sequences, launch, pool)
            self._drafts[count].capture(device)

    @property
    def num_graphs(self) -> int:
        """Captured sizes of passes and of drafts."""
        passes = 0 if self._passes is None else len(self._passes)
        return passes + sum(map(len, self._drafts.values()))

    def close(self) -> None:
        """Free graphs. Before the tensor group's communicator is closed."""
        for graphs in (self._passes, *self._drafts.values()):
            if graphs is not None:
                graphs.close()
        self._passes, self._drafts = None, {}

    # ---- the pass over a step's tokens ---------------------------------------------------

    def follow(self, hidden_TE: Tensor, inputs: StepInputs, decision: SchedulerOutput) -> None:
        """Run the network over a step's tokens, once its ids are sampled.

        ``hidden`` are the target's last states. Collective over the tensor group.
        """
        network = self._chain
        if network is None:
            return
        count, size = decision.num_tokens, len(inputs.token_ids)
        is_decode, passes = decision.num_decodes == len(decision.rows), self._passes
        # A step of decodes is in fixed memory, padded to the size of a graph.
        if passes is not None and is_decode and size in passes.sizes:
            if self._last_RE is not None:
                self._last_RE[:count].copy_(hidden_TE[:count])
            self._keep(passes.replay(size), decision)
            return
        states_TX: Tensor | None = None
        if self.taps is not None:
            states_TX = self.taps.states(count)
        elif network.needs_states:
            states_TX = hidden_TE[:count]
        indices = self._token_indices(inputs, decision) + network.is_shifted
        states_TD = network.forward(
            self._ids_at(indices),
            states_TX,
            inputs.positions[:count],
            ForwardContext(
                attention=_attention_of(inputs, decision), kv_caches=self._kv_caches
            ),
        )
        self._keep(states_TD, decision)

    def _launch_pass(self, size: int) -> Tensor:
        """Launch the pass over a step of ``size`` decodes, which are in fixed memory."""
        network, inputs = self._chain, self._inputs
        assert network is not None and isinstance(inputs, DeviceInputs)
        step = inputs.views(size, size, size)
        assert step.rows is not None
        indices = step.rows.long() * self._row_len + step.positions + network.is_shifted
        states_TX: Tensor | None = None
        if self.taps is not None:
            states_TX = self.taps.states(size)
        elif self._last_RE is not None:
            states_TX = self._last_RE[:size]
        attention = AttentionMetadata(
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_tables=step.block_tables[0],
            slot_mapping=step.slot_mappings[0],
            max_query_len=1,
            max_seq_len=step.max_seq_len,
            num_decodes=size,
            rows=step.rows,
            # Drafts are several rows of one sequence.
            shares_rows=True,
            tree_masks=step.tree_masks,
        )
        context = ForwardContext(attention=attention, kv_caches=self._kv_caches)
        states_TD = network.forward(self._ids_at(indices), states_TX, step.positions, context)
        return self._begin.keep(states_TD)

    def _keep(self, states_TD: Tensor, decision: SchedulerOutput) -> None:
        """Keep the states of the sampled rows, where drafts begin."""
        sampled = decision.sampled
        if len(sampled) < decision.num_tokens:
            # The step's own indices are gone if the target's last layer dropped tokens.
            tokens = (np.cumsum(decision.num_scheduled_tokens) - 1)[sampled]
            indices = to_device(tokens.astype(np.int64), self._inputs.device)
            states_TD = states_TD.index_select(0, indices)
        self._begin.keep(states_TD)

    def _token_indices(self, inputs: StepInputs, decision: SchedulerOutput) -> Tensor:
        """int64 [T]: the index of each token of a step in the flat token table."""
        indices = to_device(_token_indices(decision, self._row_len), self._inputs.device)
        is_unknown = len(decision.behind_drafts) > 0 or inputs.tree_masks is not None
        if is_unknown and inputs.rows is not None:
            # The device alone has the positions of these decodes.
            count = decision.num_decodes
            rows = inputs.rows[:count].long()
            indices[:count] = rows * self._row_len + inputs.positions[:count]
        return indices

    def _ids_at(self, indices: Tensor) -> Tensor:
        """Ids of the token table. Those of a prompt table, and of rows without an id, are none
        of the vocabulary."""
        return self._flat_ids.index_select(0, indices).clamp_(0, self._last_id)

    # ---- proposals -----------------------------------------------------------------------

    def propose(
        self,
        wanted_NE: Tensor,
        inputs: StepInputs,
        decision: SchedulerOutput,
        token_ids_N: Tensor,
    ) -> Tensor | None:
        """Draft for the decision's ``proposals``: int64 [n, k], or None if no sequence wants
        drafts. The next step may verify them before the host has seen them. With dynamic trees
        int64 [n, 2 k]: the nodes' ids, then their parents.

        ``wanted`` are the target's states of the sampled rows. After `follow`. Collective over
        the tensor group.
        """
        wanted = decision.proposals
        if not len(wanted):
            return None
        if self._heads is not None:
            self._begin.keep(wanted_NE)
        count = int(wanted[:, 4].max())
        made = min(each for each in self._counts if each >= count)
        graphs = self._drafts.get(made) if count else None
        size = 0 if graphs is None else graphs.pick(len(wanted))
        self._begin.send(decision, inputs, token_ids_N, size or len(wanted))
        if not count:
            self._begin.batch(len(wanted))
            return None
        if graphs is None or not size:
            drafted = self._launch_drafts(len(wanted), made)
        else:
            drafted = graphs.replay(size)[: len(wanted)]
        return drafted[..., :count].flatten(1)

    def _launch_drafts(self, size: int, count: int) -> Tensor:
        """Launch ``count`` drafts of each of the first ``size`` sequences in fixed memory."""
        batch = self._begin.batch(size)
        if self._dynamic_limits is not None:
            nodes_n2k = self._draft_tree(batch, count)
            words_nk = tree_words(nodes_n2k[:, 1], self._dynamic_limits.depth)
            self._begin.store_words(words_nk, batch)
            self._begin.store(nodes_n2k[:, 0], batch)
            return nodes_n2k
        if count in self._trees or count in self._ranks:
            drafts_nk = self._draft_tree(batch, count)
        elif self._heads is not None:
            states_ND = self._begin.states.index_select(0, batch.sampled)
            next_ids = batch.next_ids.clamp(0, self._last_id)
            drafts_nk = self._heads.propose(states_ND, next_ids, count)
        else:
            assert self._chain is not None
            drafts_nk = self._draft_chain(self._chain, batch, count)
        self._begin.store(drafts_nk, batch)
        return drafts_nk

    def _draft_tree(self, batch: DraftBatch, count: int) -> Tensor:
        """The ids of the first ``count`` nodes; for dynamic trees also the parents."""
        ids_n = batch.next_ids.clamp(0, self._last_id)
        states_nD: Tensor | None = None
        if self._begin.states.shape[1]:
            states_nD = self._begin.states.index_select(0, batch.sampled)
        if count in self._trees:
            return self._trees[count].draft(states_nD, batch, ids_n)
        if self._dynamic_limits is not None:
            assert isinstance(self._heads, BeamHeads) and states_nD is not None
            width, depth, num_nodes, _ = self._dynamic_limits
            beams = self._heads.propose_beams(states_nD, ids_n, width, depth)
            return torch.stack(beam_nodes(*beams, num_nodes), dim=1)
        assert isinstance(self._heads, RankedHeads) and states_nD is not None
        widths, index_k = self._ranks[count]
        return self._heads.propose_ranks(states_nD, widths).index_select(1, index_k)

    def _level_context(self, level: LevelBatch) -> ForwardContext:
        """Tokens of one level of a tree."""
        return self._context_of(level.rows, level.slots, level.lengths, level.masks)

    def _draft_chain(self, network: ChainNetwork, batch: DraftBatch, count: int) -> Tensor:
        """The ids of ``count`` tokens, one after another."""
        drafted: list[Tensor] = []
        states_nD: Tensor | None = None
        ids_n = batch.next_ids.clamp(0, self._last_id)
        if network.is_shifted:
            states_nD = self._begin.states.index_select(0, batch.sampled)
            ids_n = network.draft_ids(states_nD)
            drafted.append(ids_n)
        for step in range(count - len(drafted)):
            states_nD = network.forward(
                ids_n.to(torch.int32),
                states_nD,
                batch.positions[step],
                self._chain_context(batch, step),
            )
            ids_n = network.draft_ids(states_nD)
            drafted.append(ids_n)
        return torch.stack(drafted, dim=1)

    def _chain_context(self, batch: DraftBatch, step: int) -> ForwardContext:
        """One token of each sequence."""
        return self._context_of(batch.rows, batch.slots[step], batch.lengths[step], None)

    def _context_of(
        self, rows_n: Tensor, slots_n: Tensor, lengths_n: Tensor, masks_n: Tensor | None
    ) -> ForwardContext:
        """Single tokens at these slots of these rows, which see all slots before, or those of
        their masks."""
        device = self._inputs.device
        count, tables_RM = len(rows_n), self._begin.block_tables
        # Operators of the CPU take one table a sequence, those of a GPU one table a row.
        is_by_row = device.type == "cuda"
        attention = AttentionMetadata(
            query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=device),
            seq_lens=lengths_n,
            block_tables=tables_RM if is_by_row else tables_RM.index_select(0, rows_n),
            slot_mapping=slots_n,
            max_query_len=1,
            max_seq_len=self._row_len - 1,
            num_decodes=count,
            rows=rows_n if is_by_row else None,
            shares_rows=masks_n is not None,
            tree_masks=masks_n,
        )
        return ForwardContext(attention=attention, kv_caches=self._kv_caches)


_Indices = npt.NDArray[np.int64]


def _token_indices(decision: SchedulerOutput, row_len: int) -> _Indices:
    """int64 [T]: the index of each token of a step in the flat token table."""
    chunks = decision.num_scheduled_tokens
    starts = np.cumsum(chunks) - chunks
    first = decision.rows.astype(np.int64) * row_len + decision.num_computed_tokens - starts
    indices: _Indices = np.arange(int(chunks.sum()), dtype=np.int64) + np.repeat(first, chunks)
    # The table has the ids of accepted paths at their positions.
    hidden = decision.hidden_rows
    indices[: len(hidden)] -= hidden
    return indices


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
        tree_masks=None if inputs.tree_masks is None else inputs.tree_masks[:num_entries],
    )
