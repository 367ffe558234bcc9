"""The number of KV-cache blocks, from a token count or from free memory."""

from __future__ import annotations

import logging

import torch

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import CacheConfig, SchedulerConfig
from trimaran.worker.config.host_limits import free_memory_bytes

logger = logging.getLogger(__name__)

CPU_FRACTION = 0.5
"""Fraction of a CPU host's free memory for the cache; other processes need the rest."""

CPU_MAX_BYTES = 4 << 30
"""Upper limit of a rank's cache on the CPU."""


def free_bytes(device: torch.device, ranks_on_host: int) -> int:
    """Bytes available to this rank's cache, before ``free_memory_fraction``."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    each_bytes = int(free_memory_bytes() * CPU_FRACTION) // ranks_on_host
    return min(each_bytes, CPU_MAX_BYTES)


def blocks_that_fit(
    cache: CacheConfig, scheduler: SchedulerConfig, block_bytes: int, available_bytes: int
) -> int:
    """Blocks of this rank's cache, all KV groups together ``block_bytes`` each.

    Limited by all rows at full length, and by ``max_tokens`` if set.

    Raises:
        ConfigError: not a single block fits.
    """
    size = cache.tokens_per_block
    useful = scheduler.max_num_seqs * -(-scheduler.max_seq_len // size)
    fitting = int(available_bytes * cache.free_memory_fraction) // block_bytes
    asked = -(-cache.max_tokens // size) if cache.max_tokens else useful
    num_blocks = min(asked, useful, fitting)
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has room for no block: {available_bytes / 2**20:.0f} MiB are free, "
            f"of which {cache.free_memory_fraction:.2f} may be used, and a block of {size} "
            f"tokens takes {block_bytes / 2**20:.2f} MiB. Free memory, raise "
            "kv_cache_free_gpu_mem_fraction, or use more ranks."
        )
    if num_blocks * size < scheduler.max_seq_len:
        logger.warning(
            "the KV cache holds %d tokens, fewer than max_seq_len %d: longer requests are "
            "refused",
            num_blocks * size,
            scheduler.max_seq_len,
        )
    return num_blocks
