"""The KV-cache blocks of one group: their owners, their reference counts and their content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from trimaran.worker.kv_cache.free_blocks import FreeBlocks, Retention
from trimaran.worker.kv_cache.host_pool import BlockHash, HostPool
from trimaran.worker.kv_cache.sequence_blocks import SequenceBlocks


class BlockPool:
    """A fixed set of blocks, each in use, or free, or free with reusable content.

    A free block keeps its hash until its next allocation, so a later sequence with the same
    prefix can still claim the block. Free blocks are allocated in this order: blocks without
    content, partial blocks, then by priority, then the least recently released. Every call is
    O(1) a block.

    With a ``host`` pool, evicted content moves there: `take_moves` returns the copies to make
    before the blocks are written.
    """

    def __init__(self, num_blocks: int, host: HostPool | None = None) -> None:
        self.num_blocks = num_blocks
        self.host = host
        self.set_partitions(bytes(num_blocks))
        self._moves: list[tuple[int, int]] = []
        self._ref_counts = [0] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._partial: set[int] = set()
        self.watched: Set[BlockHash] = frozenset()
        """Content whose arrival counts as a gain."""
        self.num_gains = 0
        """Times that watched content arrived, or that a free block with watched content was
        taken."""

    def set_partitions(self, partitions: bytes) -> None:
        """Set the L2 partition, 0 or 1, of each block. Must be called before the first
        allocation.

        Afterwards a sequence's blocks come from the partition of its first block, unless
        content of the other partition is much cheaper to evict.
        """
        self._partitions = partitions
        self._free = FreeBlocks(partitions)

    @property
    def num_free(self) -> int:
        """Unreferenced blocks."""
        return len(self._free)

    def allocate(self, count: int, table: Sequence[int] = ()) -> list[int] | None:
        """Take ``count`` blocks; None, with nothing taken, if too few are free.

        ``table``: the blocks of the sequence so far.
        """
        free = self._free
        if count > len(free):
            return None
        blocks: list[int] = []
        for _ in range(count):
            first = table or blocks
            blocks.append(
                free.pop(self._partitions[first[0]] if first else free.freer_partition)
            )
        for block in blocks:
            if block in self._hash_of:
                self._evict(block)
            self._ref_counts[block] = 1
        return blocks

    def _evict(self, block: int) -> None:
        if self.host is not None and block not in self._partial:
            slot = self.host.store(self._hash_of[block], self._free.priority_of(block))
            if slot is not None:
                self._moves.append((block, slot))
        self.forget(block)

    def take_moves(self) -> list[tuple[int, int]]:
        """Copies to the host as (block, slot); each is returned once.

        No slot comes twice, because copies run in any order: content that was replaced before
        this call is not copied.
        """
        block_of = {slot: block for block, slot in self._moves}
        self._moves.clear()
        return [(block, slot) for slot, block in block_of.items()]

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a free block is taken with its content."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                self._free.remove(block)
                self.num_gains += 1
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, last first: tails are evicted
        first."""
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} released more often than held"
            self._ref_counts[block] = count
            if count == 0:
                has_content, is_partial = block in self._hash_of, block in self._partial
                self._free.add(block, has_content=has_content, is_partial=is_partial)

    def publish(self, block: int, block_hash: BlockHash, *, is_partial: bool = False) -> None:
        """Make a block's content findable, unless another block has the same content.

        The block is full, or with ``is_partial`` the last block of a sequence that ended.
        """
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self.num_gains += block_hash in self.watched
            if is_partial:
                self._partial.add(block)

    def retain(self, block_hash: BlockHash, retention: Retention) -> None:
        """Set the retention of the block with this content, for when it is unreferenced."""
        block = self._block_of.get(block_hash)
        if block is not None:
            self._free.retain(block, retention)

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block with this content, in use or free."""
        return self._block_of.get(block_hash)

    def is_partial(self, block: int) -> bool:
        """Whether the block is partially filled."""
        return block in self._partial

    def is_shared(self, block: int) -> bool:
        """Whether several sequences reference the block."""
        return self._ref_counts[block] > 1

    def is_held(self, block: int) -> bool:
        """Whether a sequence references the block."""
        return self._ref_counts[block] > 0

    def forget(self, block: int) -> None:
        """Make the block's content unfindable."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self._free.forget(block)
            self._partial.discard(block)

    def drop(self, block_hash: BlockHash) -> None:
        """Make content unfindable, and its block the first to be evicted."""
        block = self._block_of.get(block_hash)
        if block is None:
            return
        self.forget(block)
        if not self._ref_counts[block]:
            self._free.remove(block)
            self._free.add(block, has_content=False)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless ``holders`` explain every reference count.

        ``holders`` are the block lists of all sequences. O(blocks); for tests.
        """
        counts = [0] * self.num_blocks
        for blocks in holders:
            assert len(set(blocks)) == len(blocks), f"a sequence holds a block twice: {blocks}"
            for block in blocks:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from the holders"
        free = {block for block, count in enumerate(counts) if count == 0}
        assert free == set(self._free), "the free list is not the set of unheld blocks"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of


class SwapKeys:
    """Keys for the blocks of preempted sequences, if content has no hashes.

    No host slot is freed while a step is planned. A copy of this step may read the slot, and
    another copy of the same step could then write the slot.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._num_owners = 0
        self._is_planning = False
        self._outdated: list[BlockHash] = []

    def begin_step(self) -> None:
        """Planning of a step begins."""
        self._is_planning = True

    def end_step(self) -> None:
        """All copies of the step are planned."""
        self._is_planning = False
        outdated, self._outdated = self._outdated, []
        self.forget_stored(outdated)

    def name(self, blocks: SequenceBlocks, num_full: int) -> None:
        """Give a sequence's full blocks unique keys."""
        if not blocks.hashes:
            self._num_owners += 1
            blocks.root = self._num_owners.to_bytes(8, "little")
        for index in range(len(blocks.hashes), num_full):
            blocks.hashes.append(blocks.root + index.to_bytes(4, "little"))

    def forget(self, blocks: SequenceBlocks) -> None:
        """Drop the keys and content of a sequence that will not resume from them."""
        for pool in self._pools:
            for block_hash in blocks.hashes:
                pool.drop(block_hash)
        self.forget_stored(blocks.hashes)
        blocks.hashes.clear()

    def forget_stored(self, hashes: Sequence[BlockHash]) -> None:
        """Free the host slots of this content."""
        if self._is_planning:
            self._outdated += hashes
            return
        hosts = [pool.host for pool in self._pools if pool.host is not None]
        for host in hosts:
            for block_hash in hashes:
                host.drop(block_hash)
