"""The caches of adapters of an engine that is being loaded, and the room that they have."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import LoraConfig, SchedulerConfig
from trimaran.worker.execution.model_runner import ModelRunner
from trimaran.worker.kv_cache.sizing import free_bytes
from trimaran.worker.lora.layout import AdapterLayout
from trimaran.worker.lora.manager import AdapterManager
from trimaran.worker.lora.sent import OutgoingAdapter, Row
from trimaran.worker.lora.store import AdapterStore, HostSlots, Slots

logger = logging.getLogger(__name__)


def adapter_bytes(
    config: LoraConfig,
    topology: ParallelLayout,
    device: torch.device,
    step_bytes: int,
) -> int:
    """Memory that this rank has for adapters in use: a share of what the model, the KV cache
    and a step's own ``step_bytes`` leave."""
    left = max(0, free_bytes(device, len(topology.local_ranks)) - step_bytes)
    return int(left * config.gpu_memory_fraction)


def load_adapters(
    config: LoraConfig,
    runner: ModelRunner,
    limits: SchedulerConfig,
    budget: int,
    links: PipelineLinks,
    *,
    is_leader: bool,
    is_deterministic: bool,
) -> AdapterManager:
    """Let a runner's layers take adapters, and load those of the folder. Collective.

    ``budget`` bytes are there for adapters in use, at most one a row. The leader alone reads
    the folder, whose files may be others by the time that others would.
    """
    model = runner.model
    layout = AdapterLayout(model)
    layout.join(links.all_gather(layout.sizes()))
    largest = max(links.all_gather(layout.largest_size(config.max_adapter_size)))
    num_rows, element_bytes = limits.max_num_seqs, model.dtype.itemsize
    size = min(budget // element_bytes, num_rows * largest)
    is_gpu = model.device.type == "cuda"
    slots: Slots
    if is_gpu:
        # Imported only now: a CPU needs no Triton.
        from trimaran.worker.lora.device_slots import DeviceSlots

        memory = torch.empty(size, dtype=model.dtype, device=model.device)
        slots = DeviceSlots(
            layout, model.adapters, memory, num_rows, config.max_adapter_size,
            is_deterministic=is_deterministic,
        )  # fmt: skip
    else:
        slots = HostSlots(model.context.ops, model.adapters)
    store = AdapterStore(
        model,
        layout,
        slots,
        num_rows,
        is_always_active=is_gpu and is_deterministic and size > 0,
    )
    manager = AdapterManager(layout, config, element_bytes, size, num_rows)
    manager.is_packed = store.is_packed
    found = manager.prefetch() if is_leader else iter(())
    while (told := links.all_gather(_next_of(found))[0]) is not None:
        number, rows, pieces = told
        store.expect(number, rows)
        for piece in pieces:
            store.take_piece(number, piece)
        # What is cut out of it is much less than the whole.
        store.wait_for(number)
    if manager.num_on_host:
        logger.info("%d LoRA adapters of %s", manager.num_on_host, config.prefetch_dir)
    runner.adapters = store
    return manager


def _next_of(
    found: Iterator[tuple[int, OutgoingAdapter]],
) -> tuple[int, list[Row], list[bytes]] | None:
    """What the leader tells all ranks of the next adapter; None where there is no other."""
    for number, outgoing in found:
        return number, outgoing.rows, list(map(bytes, outgoing.pieces()))
    return None
