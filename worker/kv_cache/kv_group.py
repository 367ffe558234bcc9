"""Layers that keep KV alike, and their one pool of blocks on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.worker.attention.backend import KVCacheSpec


class KVGroup:
    """Layers with equal specs, and their one pool of blocks, block-major."""

    def __init__(self, spec: KVCacheSpec, layers: list[int]) -> None:
        self.spec = spec
        self.layers = layers
        self.pool: Tensor | None = None
        self.memory: Tensor | None = None
        """What ``pool`` is a view of, as it lies in memory."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers of the group."""
        return self.spec.token_bytes * block_size * len(self.layers)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Make the pool [blocks + 1, layers, 2, B, K, H], 1 instead of 2 for latent vectors;
        the last block is a spare one.

        On a GPU a head's tokens lie side by side in memory, one read for a kernel that
        takes a head at a time; on a CPU a token's heads do.
        """
        num_kinds, _, heads, size = self.spec.block_shape(block_size)
        shape = [num_blocks + 1, len(self.layers), num_kinds, block_size, heads, size]
        if device.type == "cuda":
            shape[3:5] = heads, block_size
        pool = torch.empty(shape, dtype=self.spec.dtype, device=device)
        self.memory = pool
        self.pool = pool.transpose(3, 4) if device.type == "cuda" else pool

    def free(self) -> None:
        """Let the pool go."""
        self.pool = self.memory = None


def group_layers(specs: Sequence[KVCacheSpec]) -> list[KVGroup]:
    """Layers by equal spec, in order of first appearance."""
    groups: dict[KVCacheSpec, KVGroup] = {}
    for layer, spec in enumerate(specs):
        groups.setdefault(spec, KVGroup(spec, [])).layers.append(layer)
    return list(groups.values())


def layer_views(groups: list[KVGroup]) -> list[Tensor]:
    """Each layer's part of its group's pool, in order of layers."""
    views: dict[int, Tensor] = {}
    for group in groups:
        assert group.pool is not None
        for place, layer in enumerate(group.layers):
            views[layer] = group.pool[:, place]
    return [views[layer] for layer in sorted(views)]
