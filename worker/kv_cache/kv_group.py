"""Layers with equal KV cache entries, and their pool of blocks on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.kernels.cuda import l2_partitions
from trimaran.kernels.cuda.kv_cache_partitions import (
    block_partitions,
    keys_go_first,
    stripe_tokens,
)
from trimaran.worker.attention.backend import KVCacheSpec


class KVGroup:
    """Layers with equal specs, and their block-major pool of blocks."""

    def __init__(self, spec: KVCacheSpec, layers: list[int], partition_mask: int = 0) -> None:
        self.spec = spec
        self.layers = layers
        self._partition_mask = partition_mask
        self.pool: Tensor | None = None
        self.memory: Tensor | None = None
        """The tensor that ``pool`` is a view of, with its dims in the order of memory."""
        self.partitions: bytes | None = None
        """The L2 partition in which each block of ``memory`` begins, if partitions are used."""

    @property
    def partitioned_block_size(self) -> int:
        """Tokens of a block such that each head lies in one L2 partition; 0 if no size
        achieves this.
        """
        count = stripe_tokens(self.spec.head_size * self.spec.dtype.itemsize)
        return count if self._keys_go_first(count) is not None else 0

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block, over all layers of the group."""
        return self.spec.token_bytes * block_size * len(self.layers)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate the pool [blocks + 1, layers, 2, B, K, H], 1 instead of 2 for latent
        vectors; the last block is a spare block.

        On a GPU the tokens of a head are adjacent in memory, because a kernel reads one head at
        a time; on a CPU the heads of a token are. Where heads would otherwise cross L2
        partitions, the keys of all layers come before their values.
        """
        num_kinds, _, heads, size = self.spec.block_shape(block_size)
        shape = [num_blocks + 1, len(self.layers), num_kinds, block_size, heads, size]
        order = list(range(6))
        if device.type == "cuda":
            order[3:5] = 4, 3
            if self._keys_go_first(block_size):
                order[1:3] = 2, 1
        in_memory = [shape[dim] for dim in order]
        self.memory = torch.empty(in_memory, dtype=self.spec.dtype, device=device)
        # The order only swaps neighbours and is therefore its own inverse.
        self.pool = self.memory.permute(order)

    def _keys_go_first(self, block_size: int) -> bool | None:
        num_kinds, _, heads, size = self.spec.block_shape(block_size)
        if num_kinds != 2:
            return None
        head_bytes = block_size * size * self.spec.dtype.itemsize
        return keys_go_first(len(self.layers), heads, head_bytes, self._partition_mask)

    def find_partitions(self) -> None:
        """Find the L2 partition of each block, if heads lie in single partitions."""
        assert self.pool is not None and self.memory is not None
        if self._keys_go_first(self.pool.shape[3]) is None:
            return
        partitions = l2_partitions.measure(self.memory)
        if partitions is not None:
            self.partitions = block_partitions(self.memory[:-1], partitions)
        if self.partitions is None:
            l2_partitions.forget(self.memory)

    def free(self) -> None:
        """Free the pool."""
        if self.memory is not None:
            l2_partitions.forget(self.memory)
        self.pool = self.memory = self.partitions = None


def group_layers(specs: Sequence[KVCacheSpec], partition_mask: int = 0) -> list[KVGroup]:
    """Group layers by equal spec, in order of first appearance.

    ``partition_mask``: address bits that determine the L2 partition; 0 if they are not used.
    """
    groups: dict[KVCacheSpec, KVGroup] = {}
    for layer, spec in enumerate(specs):
        groups.setdefault(spec, KVGroup(spec, [], partition_mask)).layers.append(layer)
    return list(groups.values())


def layer_views(groups: list[KVGroup]) -> list[Tensor]:
    """Each layer's view of its group's pool, in order of layers."""
    views: dict[int, Tensor] = {}
    for group in groups:
        assert group.pool is not None
        for index, layer in enumerate(group.layers):
            views[layer] = group.pool[:, index]
    return [views[layer] for layer in sorted(views)]
