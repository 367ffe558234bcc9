"""Which blocks each sequence has: prefix reuse, growth, forks and reservations."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from trimaran.worker.kv_cache.block_pool import BlockHash, BlockPool

BlockCopy = tuple[int, int, int]
"""KV group, source block, destination block."""


def root_hash(cache_salt: bytes, adapter_id: int) -> BlockHash:
    """The parent of a sequence's first block: content is shared only under equal roots."""
    return blake2b(cache_salt, digest_size=16, key=adapter_id.to_bytes(8, "little")).digest()


class SequenceBlocks:
    """One sequence's blocks: a block table a KV group, and the hashes of its full blocks."""

    __slots__ = ("hashes", "max_blocks", "num_published", "root", "tables")

    def __init__(self, num_groups: int, root: BlockHash) -> None:
        self.root = root
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.hashes: list[BlockHash] = []
        self.num_published = 0
        self.max_blocks = 0
        """Blocks a group reserved for the whole life; 0 means none."""

    @property
    def num_blocks(self) -> int:
        """Blocks in each table."""
        return len(self.tables[0])


class Prefix(NamedTuple):
    """Blocks, a list a group, that hold the first tokens of a sequence about to start."""

    shared: list[list[int]]
    last: list[int]
    """Where the prefix covers all tokens, the block of the last one, one a group: that
    token is computed again, so the block cannot be shared."""


class KVCacheManager:
    """Hands out blocks of all KV groups together, so all tables of a sequence are as long.

    A block is written by one sequence only and only until it is full. Full blocks are
    shared by reference; a partial block that two sequences would write is copied. Blocks
    that are reserved are never handed to anybody but their reserver.
    """

    def __init__(
        self, blocks_per_group: Sequence[int], block_size: int, *, enable_reuse: bool
    ) -> None:
        self.block_size = block_size
        self.enable_reuse = enable_reuse
        self.pools = [BlockPool(num_blocks) for num_blocks in blocks_per_group]
        self.num_blocks = min(blocks_per_group)
        self.num_reused_blocks = 0
        """Blocks that did not have to be computed, over all sequences so far."""
        self._num_reserved = 0
        self._fresh: set[tuple[int, int]] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, reserved ones included."""
        return min(pool.num_free for pool in self.pools)

    @property
    def num_available(self) -> int:
        """Blocks that may be handed to a sequence without reservation."""
        return self.num_free - self._num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def begin_step(self) -> None:
        """What was published until now is written before the next step starts."""
        self._fresh.clear()

    def extend_hashes(self, blocks: SequenceBlocks, token_ids: array[int]) -> None:
        """Hash the blocks that ``token_ids``, all known ids of the sequence, have filled."""
        if not self.enable_reuse:
            return
        size = self.block_size
        hashes = blocks.hashes
        while (len(hashes) + 1) * size <= len(token_ids):
            start = len(hashes) * size
            parent = hashes[-1] if hashes else blocks.root
            content = token_ids[start : start + size].tobytes()
            hashes.append(blake2b(parent + content, digest_size=16).digest())

    def find_prefix(self, blocks: SequenceBlocks, num_tokens: int) -> Prefix:
        """The cached content that a sequence of ``num_tokens`` known tokens can start with."""
        found: list[list[int]] = [[] for _ in self.pools]
        for block_hash in blocks.hashes if self.enable_reuse else ():
            hits = [pool.lookup(block_hash) for pool in self.pools]
            if None in hits:
                break
            for group, block in enumerate(hits):
                assert block is not None
                found[group].append(block)
        return self._split(found, num_tokens)

    def find_fork(self, parent: SequenceBlocks, num_tokens: int) -> Prefix:
        """The same for a fork of ``parent``, which has computed ``num_tokens``."""
        num_blocks = self.blocks_for(num_tokens)
        return self._split([table[:num_blocks] for table in parent.tables], num_tokens)

    def _split(self, found: list[list[int]], num_tokens: int) -> Prefix:
        num_shared = min(len(found[0]), (num_tokens - 1) // self.block_size)
        last = [blocks[num_shared] for blocks in found if len(blocks) > num_shared]
        # A step copies before it computes: what it fills itself can be shared, not copied.
        if any(item in self._fresh for item in enumerate(last)):
            last = []
        return Prefix([blocks[:num_shared] for blocks in found], last)

    def blocks_to_take(self, prefix: Prefix, num_blocks: int) -> int:
        """Free blocks used up when a sequence of ``num_blocks`` starts with ``prefix``."""
        held = min(
            sum(map(pool.is_held, blocks))
            for pool, blocks in zip(self.pools, prefix.shared, strict=True)
        )
        return num_blocks - held

    def begin(
        self, blocks: SequenceBlocks, prefix: Prefix, num_tokens: int
    ) -> tuple[int, list[BlockCopy]]:
        """Give a sequence its prefix; the caller has seen that the blocks are available.

        Returns how many of its ``num_tokens`` known tokens need not be computed, and the
        copies to make before the step. At least one token is left to compute, for its
        logits; its block is taken over from the free ones, or copied if somebody holds it.
        """
        copies: list[BlockCopy] = []
        for pool, table, shared in zip(self.pools, blocks.tables, prefix.shared, strict=True):
            pool.share(shared)
            table += shared
        for group, source in enumerate(prefix.last):
            pool = self.pools[group]
            if not pool.is_held(source):
                pool.share([source])
                pool.forget(source)
                blocks.tables[group].append(source)
                continue
            taken = pool.allocate(1)
            assert taken is not None, "a prefix was begun without room for its last block"
            copies.append((group, source, taken[0]))
            blocks.tables[group] += taken
        num_shared = len(prefix.shared[0])
        blocks.num_published = num_shared
        self.num_reused_blocks += blocks.num_blocks
        return (num_tokens - 1 if prefix.last else num_shared * self.block_size), copies

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` in all; False, with nothing taken, if there is none."""
        count = self.blocks_for(num_tokens) - blocks.num_blocks
        if count <= 0:
            return True
        reserved = max(0, min(count, blocks.max_blocks - blocks.num_blocks))
        if count - reserved > self.num_available:
            return False
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            taken = pool.allocate(count)
            assert taken is not None
            table += taken
        self._num_reserved -= reserved
        return True

    def reserve(self, blocks: SequenceBlocks, num_blocks: int) -> None:
        """Promise that the sequence can grow to ``num_blocks``; the caller has checked."""
        blocks.max_blocks = num_blocks
        self._num_reserved += max(0, num_blocks - blocks.num_blocks)

    def publish(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Make the full blocks among the first ``num_tokens`` findable.

        They are computed, or will be by the step that is being planned.
        """
        if not self.enable_reuse:
            return
        end = min(num_tokens // self.block_size, len(blocks.hashes))
        for index in range(blocks.num_published, end):
            for group, table in enumerate(blocks.tables):
                self.pools[group].publish(table[index], blocks.hashes[index])
                self._fresh.add((group, table[index]))
        blocks.num_published = max(blocks.num_published, end)

    def release(self, blocks: SequenceBlocks) -> None:
        """Drop all blocks and the reservation; the hashes stay for the next `begin`."""
        self._num_reserved -= max(0, blocks.max_blocks - blocks.num_blocks)
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            pool.release(table)
            table.clear()
        blocks.num_published = 0
        blocks.max_blocks = 0

    def check(self, holders: Sequence[SequenceBlocks]) -> None:
        """Raise AssertionError unless ``holders`` explain all blocks. For tests."""
        for group, pool in enumerate(self.pools):
            pool.check([blocks.tables[group] for blocks in holders])
        for blocks in holders:
            assert len({len(table) for table in blocks.tables}) == 1
        reserved = sum(max(0, b.max_blocks - b.num_blocks) for b in holders)
        assert self._num_reserved == reserved
        assert 0 <= reserved <= self.num_free, "more is reserved than free"
