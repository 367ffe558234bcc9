"""The KV cache takes the least of what memory, a token count and the rows allow."""

import pytest
import torch

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import CacheConfig, SchedulerConfig
from trimaran.worker.kv_cache.sizing import CPU_MAX_BYTES, blocks_that_fit, free_bytes

LIMITS = SchedulerConfig(max_num_seqs=4, max_seq_len=100, max_input_len=100)
BLOCK_BYTES = 1000


def blocks(available_bytes, **cache):
    values = {"tokens_per_block": 32, "free_memory_fraction": 0.5, **cache}
    return blocks_that_fit(CacheConfig(**values), LIMITS, BLOCK_BYTES, available_bytes)


@pytest.mark.feature("parameter:kv_cache_free_gpu_mem_fraction")
def test_the_cache_takes_its_fraction_of_free_memory():
    assert blocks(10_000) == 5
    assert blocks(10_000, free_memory_fraction=0.9) == 9


def test_the_cache_is_no_larger_than_all_sequences_at_full_length():
    assert blocks(10**9) == 4 * 4


@pytest.mark.feature("parameter:max_tokens_in_paged_kv_cache")
def test_a_token_count_is_rounded_up_to_blocks_and_bounded_by_memory():
    assert blocks(10**9, max_tokens=65) == 3
    assert blocks(4_000, max_tokens=320) == 2


def test_a_cache_smaller_than_a_block_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"0\.50 may be used, and a block of 32 tokens"):
        blocks(1_999)


def test_cpu_ranks_of_a_host_share_a_bounded_part_of_its_memory():
    alone, shared = (free_bytes(torch.device("cpu"), ranks) for ranks in (1, 1000))

    assert 0 < shared < alone <= CPU_MAX_BYTES
