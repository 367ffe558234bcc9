"""The engine's statistics as one line of the verbose log, under the names that tools read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import datetime, timezone

logger = logging.getLogger(__name__)

_NAMES = {
    "Active Request Count": "active_requests",
    "Context Requests": "context_requests",
    "Free KV cache blocks": "kv_free_blocks",
    "Iteration Counter": "iteration_counter",
    "Max KV cache blocks": "kv_max_blocks",
    "Max Request Count": "max_requests",
    "Reused KV cache blocks": "kv_reused_blocks",
    "Runtime CPU Memory Usage": "cpu_memory_bytes",
    "Runtime GPU Memory Usage": "gpu_memory_bytes",
    "Runtime Pinned Memory Usage": "pinned_memory_bytes",
    "Scheduled Requests": "scheduled_requests",
    "Tokens per KV cache block": "kv_tokens_per_block",
    "Total Context Tokens": "total_context_tokens",
    "Total Input Tokens": "total_input_tokens",
    "Total Output Tokens": "total_output_tokens",
    "Used KV cache blocks": "kv_used_blocks",
    "Waiting Requests": "waiting_requests",
}
_IN_FLIGHT = {
    "Generation Requests": "generation_requests",
    "MicroBatch ID": "micro_batch_id",
    "Paused Requests": "paused_requests",
}
_V1 = {
    "Empty Generation Slots": "empty_generation_slots",
    "Total Generation Tokens": "total_generation_tokens",
}


def is_logged() -> bool:
    """Whether the log is verbose enough for these lines."""
    return logger.isEnabledFor(logging.DEBUG)


def log_engine_stats(model: str, stats: Mapping[str, float]) -> None:
    """Write one JSON line of a group's last iteration and of all that the model has served,
    ``total_input_tokens`` and ``total_output_tokens``."""
    names = {**_NAMES, **(_V1 if stats.get("v1_batching") else _IN_FLIGHT)}
    values: dict[str, object] = {name: int(stats.get(key, 0)) for name, key in names.items()}
    num_blocks = stats.get("kv_max_blocks", 0)
    used = stats.get("kv_used_blocks", 0)
    values["Fraction used KV cache blocks"] = used / num_blocks if num_blocks else 0.0
    moment = datetime.fromtimestamp(stats.get("timestamp_us", 0) / 1e6, timezone.utc)
    values["Timestamp"] = moment.strftime("%m-%d-%Y %H:%M:%S.%f")
    logger.debug("%s: %s", model, json.dumps(values, sort_keys=True))
