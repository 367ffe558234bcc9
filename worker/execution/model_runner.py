"""Runs one scheduled step on this rank: inputs, the stage's layers, and the stage's end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.kernels.cpu.sampling import CpuSampling
from trimaran.kernels.kv_quantization import as_bytes
from trimaran.worker.attention.backend import AttentionMetadata, ForwardContext
from trimaran.worker.attention.taps import LayerTaps
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.execution.cuda_graphs import CudaGraphs, fits_prompt_graph
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.draft_runner import DraftRunner
from trimaran.worker.execution.input_batch import InputBatch, StepInputs
from trimaran.worker.execution.prompt_tables import PromptTables
from trimaran.worker.execution.stage_ends import EarlierStage, LastStage, stage_end
from trimaran.worker.execution.step_result import ModelRunnerOutput
from trimaran.worker.execution.tree_paths import DeviceTreePaths, TreePaths, move_entries
from trimaran.worker.experts.loads import ExpertLoads
from trimaran.worker.kv_cache.host_copies import HostCopies, begin_transfers
from trimaran.worker.kv_cache.kv_group import KVGroup, layer_views
from trimaran.worker.lora.store import AdapterStore
from trimaran.worker.models.drafting.interfaces import DraftNetwork
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_times import DeviceClock
from trimaran.worker.steps.step_types import SchedulerOutput

if TYPE_CHECKING:
    from trimaran.worker.execution.whole_steps import WholeSteps

_MIN_SPARED = 1024
"""Skipped queries of a step that save more time than the extra launches take."""


class ModelRunner:
    """The model, its KV cache and its rows on this rank's device.

    `execute_model` launches a step without waiting for the device. A pipeline stage receives
    hidden states from the preceding stage; the last stage samples.
    """

    def __init__(
        self,
        model: CausalLM,
        groups: list[KVGroup],
        inputs: InputBatch | DeviceInputs,
        vocab_size: int,
        tp: TensorParallelGroup,
        depth: int,
        kernel: CpuSampling | None = None,
        links: PipelineLinks | None = None,
    ) -> None:
        self.model = model
        self.tp = tp
        self.groups = groups
        self.inputs = inputs
        links = links or PipelineLinks()
        self._group = links.group
        self.end = stage_end(model, inputs, vocab_size, tp, depth, kernel, links)
        self._previous = links.previous
        self._tokens_across_dp = model.context.tokens_across_dp
        self._prompt_tables = PromptTables(vocab_size, inputs.device)
        self._kv_caches = layer_views(groups)
        self._clock = DeviceClock(inputs.device)
        self._is_deterministic = model.context.ops.is_deterministic
        self._graphs: CudaGraphs | None = None
        self._prompt_graphs: CudaGraphs | None = None
        self._adapter_graphs: CudaGraphs | None = None
        self._whole: WholeSteps | None = None
        self._whole_graphs: list[CudaGraphs] = []
        self.adapters: AdapterStore | None = None
        self.expert_loads: ExpertLoads | None = None
        """None unless the model's expert loads are counted."""

        self.shares_rows = False
        """Whether any step may have several decodes of a sequence: a token and its drafts."""

        self.recomputes_rows = False
        """Whether a step that computes known output again has a decode for each token. Without
        ``shares_rows`` no graph serves such a step."""

        self.hosts: list[HostCopies] = []
        """Each group's host memory, if blocks are kept there."""
        self.draft_groups: list[KVGroup] = []
        """The cache of a network that drafts: its blocks follow those of the first group."""
        self.draft_hosts: list[HostCopies] = []
        """Host memory of ``draft_groups``, each with the slots of the first group."""
        self.drafting: DraftRunner | None = None
        """Runs a network that drafts, after each step."""

        self._taps: LayerTaps | None = None
        self._fixed_TD: Tensor | None = None
        """Fixed memory of a later stage's graphs for the preceding stage's hidden states."""

    def use_network(
        self, network: DraftNetwork, groups: list[KVGroup], limits: SchedulerConfig
    ) -> None:
        """Draft with ``network``, whose cache is in ``groups``. Before graphs are captured."""
        self.draft_groups = groups
        assert isinstance(self.end, LastStage), "networks draft in the last stage"
        caches = layer_views(groups)
        self.drafting = DraftRunner(network, caches, self.inputs, self.model, limits)
        self.end.drafting = self.drafting
        self._taps = self.drafting.taps

    def use_taps(self, layers: tuple[int, ...], limits: SchedulerConfig) -> None:
        """Keep the inputs of ``layers`` for a network in a later stage. Before graphs are
        captured."""
        model = self.model
        sizes = (
            max(limits.max_num_batched_tokens, limits.max_num_rows),
            model.config.hidden_size,
        )
        self._taps = LayerTaps(
            layers, *sizes, model.dtype, self.inputs.device, model.stage.layers
        )
        assert isinstance(self.end, EarlierStage), "the last stage has the network"
        self.end.taps = self._taps

    @property
    def draft_bytes(self) -> int:
        """Device memory of a network's inputs."""
        drafting = 0 if self.drafting is None else self.drafting.num_bytes
        return drafting + (0 if self._taps is None else self._taps.num_bytes)

    def use_trees(self, limits: SchedulerConfig) -> None:
        """Verify drafts that are trees. After `use_network`."""
        rows = max(limits.max_num_rows, limits.max_num_seqs)
        dynamic_limits = limits.speculation.dynamic_limits
        self.inputs.use_trees(0 if dynamic_limits is None else dynamic_limits.num_nodes)
        if not isinstance(self.end, LastStage):
            # Decisions name the entries of accepted paths here.
            return
        if isinstance(self.inputs, DeviceInputs):
            self.end.trees = DeviceTreePaths(self.inputs, rows)
        else:
            self.end.trees = TreePaths(self.inputs, rows)
        self.end.groups, self.end.draft_groups = self.groups, self.draft_groups
        if self.drafting is not None:
            self.drafting.use_trees(self.end.trees)

    def capture_graphs(
        self, sizes: list[int], prompt_sizes: list[int], *, has_adapters: bool
    ) -> None:
        """From now on run decodes, and small steps with prompts, from CUDA graphs; also decodes
        with adapters if the engine ``has_adapters``."""
        pool = torch.cuda.graph_pool_handle()
        self._graphs = CudaGraphs("sequences", sizes, self._launch_decode, pool)
        self._prompt_graphs = CudaGraphs("tokens", prompt_sizes, self._launch_prompts, pool)
        assert isinstance(self.inputs, DeviceInputs)
        self.inputs.pad(max(sizes + prompt_sizes))
        if self._previous is not None:
            shape = max(sizes + prompt_sizes), self.model.config.hidden_size
            self._fixed_TD = torch.zeros(
                shape, dtype=self.model.dtype, device=self.inputs.device
            )
        self._adapter_graphs = CudaGraphs(
            "sequences with adapters",
            sizes if has_adapters else [],
            self._launch_adapters,
            pool,
        )
        self._whole = self.end.whole_steps()
        if self._whole is not None:
            self._whole_graphs = self._whole.make_graphs(sizes, self._launch_decode, pool)
        for graphs in self._all_graphs():
            if graphs.sizes:
                graphs.capture(self.inputs.device)
        if self.drafting is not None:
            self.drafting.capture(sizes, pool)
        self._tokens_across_dp.most_tokens = 0

    def _all_graphs(self) -> list[CudaGraphs]:
        kinds = self._graphs, self._prompt_graphs, self._adapter_graphs, *self._whole_graphs
        return [graphs for graphs in kinds if graphs is not None]

    def graph_size(self, num_tokens: int) -> int:
        """The size of the graph for so many decodes; 0 if no graph is large enough."""
        return 0 if self._graphs is None else self._graphs.pick(num_tokens)

    @property
    def num_graphs(self) -> int:
        """Captured sizes of decode steps."""
        return 0 if self._graphs is None else len(self._graphs)

    @property
    def num_prompt_graphs(self) -> int:
        """Captured sizes of steps with prompts."""
        return 0 if self._prompt_graphs is None else len(self._prompt_graphs)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory of this rank."""
        is_gpu = self.inputs.device.type == "cuda"
        hosts = self.hosts + self.draft_hosts
        blocks = sum(host.num_bytes for host in hosts) if is_gpu else 0
        return self.inputs.pinned_bytes + blocks

    @property
    def loaded_step(self) -> int:
        """The last step whose copies from the host cache are complete, like those of all
        earlier steps."""
        hosts = self.hosts + self.draft_hosts
        return min((host.done_step for host in hosts), default=0)

    def close(self) -> None:
        """Free graphs and host memory. Before the tensor group's communicator is closed."""
        if self.adapters is not None:
            self.adapters.close()
        for graphs in self._all_graphs():
            graphs.close()
        self._graphs = self._prompt_graphs = self._adapter_graphs = None
        self._whole, self._whole_graphs = None, []
        if self.drafting is not None:
            self.drafting.close()
        for host in self.hosts + self.draft_hosts:
            host.close()
        self.hosts, self.draft_hosts = [], []

    @torch.inference_mode()
    def move_adapters(self, ops: list[Any]) -> None:
        """Carry out operations on adapters before the next step; see `lora.store`."""
        assert self.adapters is not None
        self.adapters.carry_out(ops)

    @torch.inference_mode()
    def execute_model(self, decision: SchedulerOutput) -> ModelRunnerOutput:
        """Launch one step. Collective over the tensor group."""
        marks = self._clock.begin()
        decision = self.inputs.resolved(decision)
        if len(decision.path_moves) and not isinstance(self.end, LastStage):
            moves = to_device(decision.path_moves.T.astype("int64"), self.inputs.device)
            # Trees need equal layers, which are one group.
            move_entries(self.groups[0], moves[0], moves[1])
        if self.adapters is not None:
            self.adapters.begin_step(decision)
        for row in decision.finished_rows:
            self.end.leave(row)
            self._prompt_tables.leave(row)
        for new in decision.new_rows:
            self.end.enter(new)
            if self._previous is None:
                self._prompt_tables.enter(new, self.model.dtype)
        self.end.rewrite(decision)
        if len(decision.transfers):
            begin_transfers(self.hosts, decision.step, decision.transfers)
            for host in self.draft_hosts:
                begin_transfers([host], decision.step, decision.transfers)
        if len(decision.block_copies):
            self._copy_blocks(decision)
        if self._whole is not None and self._graphs_for(decision) is self._graphs:
            output = self._whole.run(decision, self._tokens_across_dp.most_tokens, marks)
            if output is not None:
                return output
        hidden_TD, inputs = self._run_model(decision)
        return self.end.finish(hidden_TD, inputs, decision, marks)

    def run_alone(self, decision: SchedulerOutput) -> None:
        """Run a step to its end before any stage begins another step; while loading.
        Collective.

        In a pipeline, a later stage's GPU waits for its input on the device. Loading a kernel
        waits for the GPU, and would then delay the rank that sends the input.
        """
        self.execute_model(decision).wait()
        if not (self.model.stage.is_first and self.model.stage.is_last):
            self._group.all_gather(None)

    def _run_model(self, decision: SchedulerOutput) -> tuple[Tensor, StepInputs]:
        """Hidden states of the step's tokens, from a graph's replay or from single launches."""
        graphs = self._graphs_for(decision)
        size = 0
        if graphs is not None:
            # Data-parallel ranks that share experts all run the graph size of the largest step.
            size = graphs.pick(max(decision.num_tokens, self._tokens_across_dp.most_tokens))
        if self.adapters is not None:
            self.adapters.prepare(size)
        inputs = self.inputs.prepare(decision, size)
        hidden_TD: Tensor | None = None
        if self._previous is not None:
            hidden_TD = self._previous.receive(decision.num_tokens)
            if self._taps is not None:
                hidden_TD = self._taps.split(hidden_TD)
        if graphs is not None and size:
            if hidden_TD is not None and self._fixed_TD is not None:
                self._fixed_TD[: len(hidden_TD)].copy_(hidden_TD)
            return graphs.replay(size)[: decision.num_tokens], inputs
        if not self._prompt_tables.is_empty:
            hidden_TD = self._prompt_tables.embed(
                decision, inputs.token_ids, self.model.embed_tokens
            )
        wanted = self._wanted(inputs)
        with self._counting(wanted, decision):
            hidden_TD = self._forward(
                inputs, decision.num_decodes, hidden_TD, wanted,
                shares_rows=self._shares_rows(decision),
            )  # fmt: skip
        if wanted is not None:
            inputs.logits_indices = None
        return hidden_TD, inputs

    def _counting(
        self, wanted: Tensor | None, decision: SchedulerOutput
    ) -> AbstractContextManager[None]:
        """Excludes the last layer from expert counts if no result of the step is sampled."""
        is_narrow = wanted is not None
        if is_narrow and not len(decision.sampled) and self.expert_loads is not None:
            return self.expert_loads.skip_last_layer()
        return nullcontext()

    def _shares_rows(self, decision: SchedulerOutput) -> bool:
        """Whether several decodes of the step may be of one sequence."""
        return self.shares_rows or (self.recomputes_rows and decision.num_recomputed > 0)

    def _graphs_for(self, decision: SchedulerOutput) -> CudaGraphs | None:
        """The graphs for this kind of step; None for steps with features that graphs lack."""
        is_decode = decision.num_decodes == len(decision.rows)
        if is_decode and not self.shares_rows and self._shares_rows(decision):
            return None
        if self.model.adapters.has_tokens:
            return self._adapter_graphs if is_decode else None
        if is_decode:
            return self._graphs
        # The kernel of prompts, which serves all rows of such a graph, has no masks of trees.
        has_graph = self._prompt_tables.is_empty and not len(decision.tree_masks)
        has_graph = has_graph and fits_prompt_graph(decision)
        return self._prompt_graphs if has_graph else None

    def _wanted(self, inputs: StepInputs) -> Tensor | None:
        """The tokens that the step samples after, if the last layer can skip the others once it
        has stored their keys and values; else None.

        Adapters go by a token's index in the step, and dp ranks that share experts have agreed
        on the number of tokens, so neither allows it.
        """
        wanted = inputs.logits_indices
        if wanted is None or self.end.needs_all:
            return None
        if self.model.adapters.has_tokens or self._tokens_across_dp.most_tokens:
            return None
        # A product needs a row even if no row samples: take the last token of the first
        # sequence.
        return wanted if len(wanted) else inputs.query_start_loc[1:2].long() - 1

    def _wanted_attention(
        self, inputs: StepInputs, wanted: Tensor | None
    ) -> AttentionMetadata | None:
        """The wanted tokens as decodes, if it pays that the last layer skips the other queries.

        Only on a GPU, and not in deterministic mode: a token's rounding may then depend on the
        tokens beside it.
        """
        if wanted is None or self._is_deterministic:
            return None
        rows, lengths = inputs.sampled_rows, inputs.sampled_lengths
        if inputs.tree_masks is not None:
            # Lengths of paths are no lengths in the cache.
            return None
        if len(inputs.token_ids) - len(wanted) < _MIN_SPARED or rows is None:
            return None
        if not len(rows):
            rows, lengths = inputs.rows, inputs.seq_lens[:1]
        assert rows is not None and lengths is not None
        return AttentionMetadata(
            query_start_loc=torch.arange(
                len(wanted) + 1, dtype=torch.int32, device=wanted.device
            ),
            seq_lens=lengths,
            block_tables=inputs.block_tables[0],
            slot_mapping=inputs.slot_mappings[0].index_select(0, wanted),
            max_query_len=1,
            max_seq_len=inputs.max_seq_len,
            num_decodes=len(wanted),
            rows=rows[: len(wanted)],
        )

    def _forward(
        self,
        inputs: StepInputs,
        num_decodes: int,
        hidden_TD: Tensor | None = None,
        wanted: Tensor | None = None,
        *,
        shares_rows: bool | None = None,
    ) -> Tensor:
        """Hidden states of a step. ``shares_rows``: that of the runner by default."""
        if shares_rows is None:
            shares_rows = self.shares_rows
        context = ForwardContext(
            attention=_metadata(inputs, num_decodes, shares_rows),
            kv_caches=self._kv_caches,
            wanted=wanted,
            wanted_attention=self._wanted_attention(inputs, wanted),
            taps=self._taps,
        )
        return self.model.forward(inputs.token_ids, inputs.positions, context, hidden_TD)

    def _launch_decode(self, size: int) -> Tensor:
        """Launch a decode of ``size`` sequences, with the rows in fixed memory."""
        assert isinstance(self.inputs, DeviceInputs)
        self._tokens_across_dp.most_tokens = size
        return self._forward(self.inputs.views(size, size, size), size, self._fixed(size))

    def _launch_adapters(self, size: int) -> Tensor:
        """Launch a decode of ``size`` sequences, with the rows and adapters in fixed memory."""
        assert self.adapters is not None
        with self.adapters.captured(size):
            return self._launch_decode(size)

    def _launch_prompts(self, size: int) -> Tensor:
        """Launch a step of ``size`` tokens, with the sequences in fixed memory.

        The number of decodes is unknown at capture, so the prompt kernel, which takes any
        number of queries a sequence, serves all sequences.
        """
        assert isinstance(self.inputs, DeviceInputs)
        self._tokens_across_dp.most_tokens = size
        inputs = self.inputs.views(size, size, size)
        inputs.max_query_len = size
        return self._forward(inputs, 0, self._fixed(size))

    def _fixed(self, size: int) -> Tensor | None:
        """The fixed memory of the preceding stage's hidden states, if there is such a stage.

        Returns a copy, because layers may overwrite their input.
        """
        return None if self._fixed_TD is None else self._fixed_TD[:size].clone()

    def _copy_blocks(self, decision: SchedulerOutput) -> None:
        """Make the step's block copies; all sources are read before any block is written."""
        for number in range(len(self.groups)):
            copies = decision.block_copies[decision.block_copies[:, 0] == number]
            if not len(copies):
                continue
            pairs = to_device(copies[:, 1:].T.astype("int64"), self.inputs.device)
            followers = self.draft_groups if number == 0 else []
            for group in (self.groups[number], *followers):
                assert group.pool is not None
                pool = as_bytes(group.pool)
                pool.index_copy_(0, pairs[1], pool.index_select(0, pairs[0]))


def _metadata(inputs: StepInputs, num_decodes: int, shares_rows: bool) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        block_tables=inputs.block_tables[0],
        slot_mapping=inputs.slot_mappings[0],
        max_query_len=inputs.max_query_len,
        max_seq_len=inputs.max_seq_len,
        num_decodes=num_decodes,
        has_past=inputs.has_past,
        rows=inputs.rows,
        shares_rows=shares_rows,
        tree_masks=inputs.tree_masks,
    )
