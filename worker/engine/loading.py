"""Loads one rank: model, KV cache, adapters and warm-up, from a configuration."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.comm.stages.world_group import WorldGroup
from trimaran.comm.topology import ParallelLayout
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.sampling import CpuSampling
from trimaran.worker.config.engine_config import EngineConfig, LoraConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import MAX_ROWS
from trimaran.worker.engine.draft_networks import load_network
from trimaran.worker.execution.cache_maker import CacheMaker
from trimaran.worker.execution.cuda_graphs import choose_graphs
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.input_batch import InputBatch
from trimaran.worker.execution.model_runner import ModelRunner
from trimaran.worker.execution.warm_up import (
    load_product_kernels,
    peak_step_bytes,
    run_small_steps,
)
from trimaran.worker.experts.balance import balance_experts
from trimaran.worker.experts.loads import ExpertLoads
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.kv_cache.sizing import blocks_that_fit, free_bytes
from trimaran.worker.lora.adapter_messages import OutgoingAdapter, Row
from trimaran.worker.lora.layout import AdapterLayout
from trimaran.worker.lora.manager import AdapterManager
from trimaran.worker.lora.store import AdapterStore, HostSlots, Slots
from trimaran.worker.models.first_layer_table import (
    make_first_layer_table,
    uses_first_layer_table,
)
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.models.registry import load_model
from trimaran.worker.parallel.sum_norms import choose_sums_and_norms
from trimaran.worker.scheduling.preemption import tokens_per_read

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedEngine:
    """A rank that is loaded and warm: its runner, its caches and the limits that hold."""

    config: EngineConfig
    device: torch.device
    depth: int
    """Steps in flight."""

    runner: ModelRunner
    caches: list[KVCacheManager]
    """The caches of each dp rank that this process schedules, its own first."""

    limits: SchedulerConfig
    """The configured limits, lowered to those of the model."""

    vocab_size: int
    adapters: list[AdapterManager]
    """The managers of each dp rank, like ``caches``."""

    sampling_backend: str
    stages: str
    """Layers of each pipeline stage."""

    expert_loads: ExpertLoads | None
    """None for a model without experts."""

    links: PipelineLinks

    def facts(self, topology: ParallelLayout) -> dict[str, Any]:
        """Facts for front ends, logs and metrics."""
        model, limits, cache = self.runner.model, self.limits, self.caches[0]
        return {
            "max_batch_size": limits.max_num_seqs * topology.dp_size,
            "max_num_tokens": limits.max_num_batched_tokens,
            "max_seq_len": limits.max_seq_len,
            "max_input_len": limits.max_input_len,
            "serves_guides": bool(self.config.guided.backend),
            "lookahead": limits.speculation.lookahead_sizes,
            "max_draft_len": limits.speculation.max_per_request,
            "vocab_size": self.vocab_size,
            "end_ids": model.config.eos_token_ids,
            "vocab_size_padded": model.vocab_size_padded,
            "logits_dtype": "float32",
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_dtype": model.kv_cache_dtype,
            "device": str(model.device),
            "world_size": topology.world_size,
            "tp_size": topology.tp_size,
            "pp_size": topology.pp_size,
            "dp_size": topology.dp_size,
            "stages": self.stages,
            "tokens_per_block": cache.block_size,
            "max_blocks": cache.num_blocks * topology.dp_size,
            "reuses_blocks": cache.enable_reuse,
            "lora_host_bytes": self.adapters[0].host_bytes,
            "depth": self.depth,
            "cuda_graphs": self.runner.num_graphs,
            "prompt_graphs": self.runner.num_prompt_graphs,
            "backends": {
                **model.backends(),
                "sampling": self.sampling_backend,
                "lora": "triton" if model.device.type == "cuda" else model.backends()["linear"],
            },
        }


def load_engine(
    config: EngineConfig,
    topology: ParallelLayout,
    tp: TensorParallelGroup,
    device: torch.device,
    group: WorldGroup,
) -> LoadedEngine:
    """Load this rank's weights, agree on the cache's size, allocate and warm up. Collective.

    Raises:
        ConfigError: the configuration asks for what this engine cannot do.
    """
    depth = _depth(config, topology, device)
    sizes, prompt_sizes = choose_graphs(config, topology, device)
    choose_sums_and_norms(config, tp, device)
    model = load_model(config, topology, tp, device, expert_ranks=group.expert_ranks)
    kernel = _sampling_kernel(model, device)
    limits = _limits(config, model)
    _make_first_layer_table_if_used(config, model, tp, group)
    network, taps = load_network(config, topology, tp, model, group)
    maker = CacheMaker(config.cache, limits, model, topology, network, taps)
    inputs = _make_inputs(limits, maker.block_size, device, depth, kernel, model.switch_at)
    expert_loads = _count_experts(config, model, inputs)
    links = _connect_stages(group, model, limits, topology, len(taps))

    def make_runner(num_blocks: int) -> ModelRunner:
        for group in maker.groups + maker.draft_groups:
            group.allocate(num_blocks, maker.block_size, device)
        inputs.use_spare_block(num_blocks)
        vocab = model.config.vocab_size
        runner = ModelRunner(model, maker.groups, inputs, vocab, tp, depth, kernel, links)
        runner.expert_loads = expert_loads
        maker.prepare_drafts(runner)
        return runner

    step_bytes = 0
    if device.type == "cuda":
        # This runner is dropped afterwards: it holds the memory of its blocks.
        first = make_runner(inputs.max_blocks)
        step_bytes = _first_steps(first, config, limits, sizes, prompt_sizes)
        step_bytes += maker.staged_bytes
        del first
    available = free_bytes(device, len(topology.local_ranks)) - step_bytes
    mine = blocks_that_fit(maker.config, limits, maker.block_bytes, available)
    num_blocks = _agreed(mine, tp, device, group)
    runner = make_runner(num_blocks)
    maker.find_partitions()
    # Before graphs are captured, because they record the layers' adapter kernels.
    budget = adapter_bytes(config.lora, topology, device, step_bytes)
    budget, is_leader = _agreed(budget, tp, device, group), topology.rank == 0
    adapters = load_adapters(config, runner, limits, budget, group, is_leader=is_leader)
    _warm_up(runner, limits, sizes, prompt_sizes, has_adapters=config.lora.has_graphs)
    num_slots = _agreed(maker.host_slots(), tp, device, group)
    caches = maker.make(runner, num_blocks, num_slots, topology)
    managers = [adapters, *(adapters.for_other_dp_rank() for _ in caches[1:])]
    backend = "torch" if kernel is None else kernel.name
    return LoadedEngine(
        config, device, depth, runner, caches, limits, model.config.vocab_size, managers,
        backend, _stage_sizes(model, topology, group), expert_loads, links,
    )  # fmt: skip


def _depth(config: EngineConfig, topology: ParallelLayout, device: torch.device) -> int:
    """Steps in flight, if the configuration leaves them open."""
    # On the CPU a step runs where the host would plan the next one: overlap only delays.
    default = 2 if device.type == "cuda" else 1
    return config.scheduler.depth or max(default, topology.pp_size)


def _make_first_layer_table_if_used(
    config: EngineConfig, model: CausalLM, tp: TensorParallelGroup, group: WorldGroup
) -> None:
    """Let the model look up its first product if all ranks can and should. Collective."""
    device = model.device
    memory = torch.cuda.mem_get_info(device) if device.type == "cuda" else None
    mine = uses_first_layer_table(config, model, memory)
    if _agreed(int(mine), tp, device, group):
        make_first_layer_table(model, config.scheduler.max_num_batched_tokens)


def _connect_stages(
    group: WorldGroup,
    model: CausalLM,
    limits: SchedulerConfig,
    topology: ParallelLayout,
    num_taps: int,
) -> PipelineLinks:
    """Links of this rank to other stages, also for reports of expert loads. The inputs of
    ``num_taps`` layers travel with the hidden states. Collective."""
    most_tokens = max(limits.max_num_batched_tokens, limits.max_num_rows)
    return PipelineLinks.connect(
        group,
        topology,
        model.device,
        (most_tokens, (1 + num_taps) * model.config.hidden_size),
        model.dtype,
        has_reports=bool(model.config.num_experts),
    )


def _count_experts(
    config: EngineConfig, model: CausalLM, inputs: InputBatch | DeviceInputs
) -> ExpertLoads | None:
    """Count the tokens of each expert, and balance experts if the configuration asks for it.

    Counting is part of captured graphs, so this comes before any capture.
    """
    num_tokens = inputs.num_tokens if isinstance(inputs, DeviceInputs) else None
    expert_loads = ExpertLoads.of(model, num_tokens)
    balance_experts(model, expert_loads, config.experts)
    return expert_loads


def _warm_up(
    runner: ModelRunner,
    limits: SchedulerConfig,
    graphs: list[int],
    prompts: list[int],
    *,
    has_adapters: bool,
) -> None:
    """Run steps of every kind, then capture graphs of these sizes. Collective."""
    run_small_steps(runner, limits)
    if graphs:
        runner.capture_graphs(graphs, prompts, has_adapters=has_adapters)
    if runner.expert_loads is not None:
        # Tokens of warm-up steps do not count.
        runner.expert_loads.reset()


def _stage_sizes(model: CausalLM, topology: ParallelLayout, group: WorldGroup) -> str:
    """Layers of each pipeline stage. Collective."""
    sizes = group.all_gather((topology.pp_rank, len(model.layers)))
    return "+".join(str(size) for _, size in sorted(set(sizes)))


def _sampling_kernel(model: CausalLM, device: torch.device) -> CpuSampling | None:
    if device.type != "cpu" or model.backends()["linear"] == "torch":
        return None
    # Our kernels have their own threads. Torch's threads would spin after every larger
    # operation of the sampler, and the step would wait for cores.
    torch.set_num_threads(1)
    return CpuSampling(load_library())


def _first_steps(
    runner: ModelRunner,
    config: EngineConfig,
    limits: SchedulerConfig,
    graphs: list[int],
    prompts: list[int],
) -> int:
    """Load kernels, then measure the device memory, in bytes, that the largest steps need.

    With ``graphs`` the memory of graphs is added, also of those of ``prompts`` tokens, and with
    a network that drafts the memory of its inputs. The cache is freed. Collective over the
    stages, which run steps together.
    """
    if not config.deterministic:
        # Before memory is divided, because kernels take some.
        load_product_kernels(runner, limits)
    prompt_bytes, decode_bytes = peak_step_bytes(runner, limits)
    step_bytes = max(prompt_bytes, decode_bytes)
    for group in runner.groups + runner.draft_groups:
        group.free()
    if graphs:
        # Each graph keeps the memory of its largest step.
        fraction = max(prompts, default=0) / limits.max_num_batched_tokens
        step_bytes += max(decode_bytes, int(fraction * prompt_bytes))
    return step_bytes + runner.draft_bytes


def _make_inputs(
    limits: SchedulerConfig,
    block_size: int,
    device: torch.device,
    depth: int,
    kernel: CpuSampling | None,
    switch_at: int,
) -> InputBatch | DeviceInputs:
    rows, length = limits.max_num_seqs, limits.max_seq_len
    if device.type == "cuda":
        tokens = limits.max_num_batched_tokens
        inputs = DeviceInputs(rows, length, tokens, block_size, device, depth, switch_at)
        inputs.most_sampled = limits.max_num_rows
        return inputs
    return InputBatch(rows, length, block_size, 1, device, depth, kernel, switch_at)


def _limits(config: EngineConfig, model: CausalLM) -> SchedulerConfig:
    """The configured limits, lowered to the model's, with its tokens per read of weights, and
    with the rows of output that is computed again on a GPU in deterministic mode."""
    longest = model.config.max_position_embeddings
    scheduler = config.scheduler
    scheduler = dataclasses.replace(
        scheduler, tokens_per_read=tokens_per_read(model.config, model.device.type)
    )
    if config.deterministic and model.device.type == "cuda":
        # The CPU's kernels of prompts and of decodes round alike.
        rows = min(scheduler.max_num_batched_tokens, MAX_ROWS)
        rows = max(scheduler.max_num_rows, rows)
        scheduler = dataclasses.replace(scheduler, max_recompute_rows=rows)
    if config.parallel.pp_size > 1:
        # Rank 0 tells the first stage all ids, drafts among them.
        speculation = dataclasses.replace(scheduler.speculation, is_overlapped=False)
        scheduler = dataclasses.replace(scheduler, speculation=speculation)
    if scheduler.max_seq_len <= longest:
        return scheduler
    logger.info("max_seq_len lowered from %d to the model's %d", scheduler.max_seq_len, longest)
    return dataclasses.replace(
        scheduler, max_seq_len=longest, max_input_len=min(scheduler.max_input_len, longest)
    )


def _agreed(mine: int, tp: TensorParallelGroup, device: torch.device, group: WorldGroup) -> int:
    """The smallest of all ranks' numbers. Collective."""
    every = tp.all_gather(torch.tensor([mine], dtype=torch.int64, device=device), 0)
    return group.minimum(int(every.min()))


def adapter_bytes(
    config: LoraConfig,
    topology: ParallelLayout,
    device: torch.device,
    step_bytes: int,
) -> int:
    """Device memory of this rank for adapters in use: the configured fraction of the memory
    that the model, the KV cache and a step (``step_bytes``) leave."""
    left = max(0, free_bytes(device, len(topology.local_ranks)) - step_bytes)
    return int(left * config.gpu_memory_fraction)


def load_adapters(
    config: EngineConfig,
    runner: ModelRunner,
    limits: SchedulerConfig,
    budget: int,
    group: WorldGroup,
    *,
    is_leader: bool,
) -> AdapterManager:
    """Let a runner's layers take adapters, and load those of the folder. Collective.

    Adapters in use take ``budget`` bytes, with at most one adapter per row. The leader alone
    reads the folder: its files may change before another rank would read them.
    """
    lora, model = config.lora, runner.model
    layout = AdapterLayout(model)
    layout.join(group.all_gather(layout.sizes()))
    largest = max(group.all_gather(layout.largest_size(lora.max_adapter_size)))
    num_rows, element_bytes = limits.max_num_seqs, model.dtype.itemsize
    size = min(budget // element_bytes, num_rows * largest)
    is_gpu = model.device.type == "cuda"
    slots: Slots
    if is_gpu:
        # Imported late, because a CPU needs no Triton.
        from trimaran.worker.lora.device_slots import DeviceSlots

        memory = torch.empty(size, dtype=model.dtype, device=model.device)
        slots = DeviceSlots(
            layout, model.adapters, memory, num_rows, lora.max_adapter_size,
            num_rows=limits.max_num_rows, is_deterministic=config.deterministic,
        )  # fmt: skip
    else:
        slots = HostSlots(model.context.ops, model.adapters)
    store = AdapterStore(
        model,
        layout,
        slots,
        num_rows,
        is_always_active=is_gpu and config.deterministic and size > 0,
    )
    manager = AdapterManager(layout, lora, element_bytes, size, num_rows)
    manager.is_packed = store.is_packed
    found = manager.prefetch() if is_leader else iter(())
    while (adapter := group.all_gather(_next_of(found))[0]) is not None:
        number, rows, chunks = adapter
        store.expect(number, rows)
        for chunk in chunks:
            store.take_chunk(number, chunk)
        # The packed shards are much smaller than the whole adapter.
        store.wait_for(number)
    if manager.num_on_host:
        logger.info("%d LoRA adapters of %s", manager.num_on_host, lora.prefetch_dir)
    runner.adapters = store
    return manager


def _next_of(
    found: Iterator[tuple[int, OutgoingAdapter]],
) -> tuple[int, list[Row], list[bytes]] | None:
    """The leader's message to all ranks about the next adapter; None after the last."""
    for number, outgoing in found:
        return number, outgoing.rows, list(map(bytes, outgoing.chunks()))
    return None
