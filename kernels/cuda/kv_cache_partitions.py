"""The layout of a KV cache on the two partitions of a GPU's L2 cache.

If a head's tokens of a block fill exactly one stripe of a partition, the heads alternate
between the partitions. If in addition the blocks of a sequence begin on the same partition, and
keys and values have the same layout, all KV of a head and sequence lies on one partition, and
the multiprocessors there can read it.
"""

from __future__ import annotations

from torch import Tensor

from trimaran.kernels.cuda.l2_partitions import (
    PAGE_BYTES,
    STRIPE_BYTES,
    L2Partitions,
    changes,
    partitions_of,
)

# Shapes: B tokens of a block, K key-value heads, H head size.


def stripe_tokens(head_bytes: int) -> int:
    """Tokens of a block whose heads, of this many bytes a token, fill one stripe each."""
    return STRIPE_BYTES // head_bytes


def keys_go_first(
    num_layers: int, num_heads: int, block_head_bytes: int, mask: int
) -> bool | None:
    """Whether a block stores the keys of all layers before their values (True), or layer by
    layer.

    ``num_heads`` key-value heads of ``block_head_bytes`` each, in memory whose partition
    alternates by ``mask``; 0 for memory without partitions. None if neither order keeps each
    head on one partition.
    """
    half = num_heads * block_head_bytes
    block = 2 * num_layers * half
    if not mask or block_head_bytes != STRIPE_BYTES or num_heads % 2 or block > PAGE_BYTES:
        return None
    if block.bit_count() != 1:
        return None
    orders = {False: half, True: num_layers * half}
    return next((first for first, apart in orders.items() if not changes(apart, mask)), None)


def block_partitions(memory: Tensor, partitions: L2Partitions) -> bytes | None:
    """For each block [blocks, ...] the partition of its first byte, 0 or 1; None if a layer's
    layout differs from that of the first layer.
    """
    num_bytes = memory[0].nbytes
    if num_bytes.bit_count() != 1 or num_bytes > PAGE_BYTES or memory.data_ptr() % num_bytes:
        return None
    first = memory.data_ptr()
    return bytes(
        partitions.partition(first + block * num_bytes) for block in range(len(memory))
    )


def partitions_of_heads(kv_cache: Tensor) -> L2Partitions | None:
    """The partitions of a layer's cache [blocks, 2, B, K, H], if its heads alternate between
    them.
    """
    partitions = partitions_of(kv_cache)
    if partitions is None:
        return None
    address = kv_cache.data_ptr()
    if address not in partitions.fitting:
        partitions.fitting[address] = _fits(kv_cache, partitions.mask)
    return partitions if partitions.fitting[address] else None


def _fits(kv_cache: Tensor, mask: int) -> bool:
    size = kv_cache.element_size()
    block, half, token, head = (size * stride for stride in kv_cache.stride()[:4])
    is_dense = token * kv_cache.shape[2] == head == STRIPE_BYTES
    is_even = not (kv_cache.shape[3] % 2 or kv_cache.data_ptr() % (2 * head))
    # Keys and values differ by one bit of their addresses, which is clear in the keys' address:
    # the addition then carries into no other bit.
    is_bit = half.bit_count() == 1 and head * kv_cache.shape[3] <= half <= PAGE_BYTES // 2
    is_clear = not (kv_cache.data_ptr() & half or block % (2 * half))
    return is_dense and is_even and is_bit and is_clear and not changes(half, mask)
