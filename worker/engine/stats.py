"""The gauges that the engine reports about its last iteration."""

from __future__ import annotations

import time

import psutil
import torch

from trimaran.comm.messages.messages import STATS_KEYS
from trimaran.worker.engine.loading import LoadedEngine
from trimaran.worker.scheduling.data_parallel import DataParallelScheduler, DataParallelStep
from trimaran.worker.scheduling.scheduler import Scheduler
from trimaran.worker.scheduling.step_plan import ScheduledStep
from trimaran.worker.steps.step_times import StepTimes


class EngineStats:
    """Remembers what the last step held; an idle engine reports no request."""

    def __init__(
        self,
        loaded: LoadedEngine,
        scheduler: Scheduler | DataParallelScheduler,
        times: StepTimes,
    ) -> None:
        self._loaded = loaded
        self._scheduler = scheduler
        self._times = times
        self._process = psutil.Process()
        self._last: ScheduledStep | DataParallelStep | None = None
        self._num_active = 0

    def record(self, step: ScheduledStep | DataParallelStep) -> None:
        """Note a step that was just scheduled."""
        self._last = step
        self._num_active = self._scheduler.num_active

    def values(self) -> dict[str, float]:
        """One value for each of ``STATS_KEYS``."""
        values: dict[str, float] = {
            **self._of_requests(),
            **self._of_cache(),
            **self._of_adapters(),
            **self._of_memory(),
            "micro_batch_id": self._scheduler.micro_batch,
            "v1_batching": self._scheduler.config.is_v1,
            "empty_generation_slots": self._scheduler.num_empty_slots,
            "iteration_counter": self._scheduler.step,
            "timestamp_us": time.time_ns() // 1000,
            **self._times.values(),
        }
        assert values.keys() == set(STATS_KEYS)
        return values

    def _of_requests(self) -> dict[str, float]:
        last = self._last if self._scheduler.has_requests else None
        active = self._scheduler.num_active if last is None else self._num_active
        scheduled = 0 if last is None else last.num_scheduled
        context = 0 if last is None else last.num_context
        pauses = self._scheduler.preemptions
        return {
            "active_requests": active,
            "max_requests": len(self._loaded.caches) * self._loaded.limits.max_num_seqs,
            "scheduled_requests": scheduled,
            "context_requests": context,
            "waiting_requests": active - scheduled,
            "generation_requests": scheduled - context,
            "paused_requests": pauses.num_waiting,
            "paused_sequences": pauses.num_sequences,
            "paused_tokens": pauses.num_tokens,
            "total_context_tokens": 0 if last is None else last.num_context_tokens,
            "total_generation_tokens": 0 if last is None else last.num_generation_tokens,
        }

    def _of_cache(self) -> dict[str, float]:
        caches = self._loaded.caches
        hosts = [host for cache in caches for host in cache.hosts]
        num_blocks = sum(cache.num_blocks for cache in caches)
        num_free = sum(cache.num_free for cache in caches)
        return {
            "kv_max_blocks": num_blocks,
            "kv_free_blocks": num_free,
            "kv_used_blocks": num_blocks - num_free,
            "kv_tokens_per_block": caches[0].block_size,
            "kv_reused_blocks": sum(cache.num_reused_blocks for cache in caches),
            "kv_host_max_blocks": sum(host.num_slots for host in hosts),
            "kv_host_used_blocks": sum(host.num_used for host in hosts),
            "kv_host_moved_blocks": sum(host.num_stored for host in hosts),
            "kv_host_loaded_blocks": sum(host.num_loaded for host in hosts),
        }

    def _of_adapters(self) -> dict[str, float]:
        lanes = self._loaded.adapters
        return {
            "lora_host_adapters": lanes[0].num_on_host,
            "lora_device_adapters": sum(lane.num_on_device for lane in lanes),
            "lora_used_adapters": sum(lane.num_used for lane in lanes),
            "lora_loaded_adapters": sum(lane.num_loaded for lane in lanes),
        }

    def _of_memory(self) -> dict[str, float]:
        device = self._loaded.runner.inputs.device
        is_gpu = device.type == "cuda"
        return {
            "cpu_memory_bytes": self._process.memory_info().rss,
            "gpu_memory_bytes": torch.cuda.memory_allocated(device) if is_gpu else 0,
            "pinned_memory_bytes": self._loaded.runner.pinned_bytes,
        }
