"""When a sequence may start that will have to make room, and be computed anew, later."""

from __future__ import annotations

from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Sequence

_OPERATIONS_PER_BYTE = {"cuda": 160.0, "cpu": 5.0}
"""What a device computes in 16 bit while it moves a byte: an H200 at 680 TFLOP/s and 4.25 TB/s,
two processor cores. Others differ by less than it takes to matter."""


def tokens_per_read(config: PretrainedConfig, device_type: str) -> float:
    """Tokens of prompts that take as long to compute as the weights take to be read once.

    A weight of 16 bit is two bytes and two operations for a token; of a mixture's experts all
    are read, and some compute.
    """
    width = {"float32": 2.0}.get(config.dtype, 1.0)
    return width * _OPERATIONS_PER_BYTE[device_type] * _weights_per_used(config)


def _weights_per_used(config: PretrainedConfig) -> float:
    """Weights of a layer with experts over those that one token uses."""
    if not config.num_experts:
        return 1.0
    heads = config.num_attention_heads + config.num_key_value_heads
    common = 2 * config.hidden_size * heads * config.head_size
    common += 3 * config.hidden_size * config.shared_expert_intermediate_size
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    used = common + config.num_experts_per_tok * expert
    return (common + config.num_experts * expert) / used


class RecomputePrice:
    """Weighs a row that is used now against the KV cache that is thrown away later.

    Until the blocks run out, a newcomer's tokens come in steps that others pay for. Later they
    would share steps with those who wait now, if that is fewer than run. Both sides count in
    reads of the weights, which is what a step of few rows costs.
    """

    def __init__(self, cache: KVCacheManager, tokens_per_read: float) -> None:
        """With 0 ``tokens_per_read`` nobody starts who will have to make room."""
        self._cache = cache
        self._tokens_per_read = tokens_per_read

    def pays(self, newcomer: Sequence, num_running: int, num_waiting: int) -> bool:
        """Whether one of ``num_waiting`` should start beside the running ones all the same."""
        if newcomer.beams is not None:
            return False
        num_known = len(newcomer.token_ids)
        num_rows = num_running + 1
        room = self._cache.num_available * self._cache.block_size - num_known
        num_steps = min(room / num_rows, newcomer.max_len - num_known)
        if num_steps <= 0:
            return False
        num_saved = num_steps / max(1, min(num_rows, num_waiting))
        return num_saved * self._tokens_per_read > num_known + num_steps
