"""Which blocks each sequence has: prefix reuse, growth, forks and reservations."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from trimaran.worker.kv_cache.block_pool import BlockPool
from trimaran.worker.kv_cache.free_blocks import Retention
from trimaran.worker.kv_cache.host_pool import BlockHash, HostPool

BlockCopy = tuple[int, int, int]
"""KV group, source block, destination block."""

Transfer = tuple[int, int, int]
"""KV group, and of a move to the host a block and a slot, of a load a slot and a block."""


class RetentionPlan(NamedTuple):
    """How long each block of one request is kept, by the place of its first token."""

    ranges: tuple[tuple[int, int, Retention], ...]
    """First token, end (exclusive), and what holds between."""

    output: Retention = Retention()
    """For what is generated."""

    num_prompt_tokens: int = 0

    def at(self, token: int) -> Retention:
        """What holds for the block that begins with this token."""
        if token >= self.num_prompt_tokens:
            return self.output
        for first, end, retention in self.ranges:
            if first <= token < end:
                return retention
        return Retention()


def root_hash(cache_salt: bytes, adapter_id: int) -> BlockHash:
    """The parent of a sequence's first block: content is shared only under equal roots."""
    return blake2b(cache_salt, digest_size=16, key=adapter_id.to_bytes(8, "little")).digest()


class SequenceBlocks:
    """One sequence's blocks: a block table a KV group, and the hashes of its full blocks."""

    __slots__ = (
        "hashes", "load", "max_blocks", "num_left", "num_published", "retention",
        "root", "tables",
    )  # fmt: skip

    def __init__(self, num_groups: int, root: BlockHash) -> None:
        self.root = root
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.hashes: list[BlockHash] = []
        self.num_published = 0
        self.max_blocks = 0
        """Blocks that a group reserved for it to hold at once; 0 means none."""
        self.num_left = 0
        """Blocks behind the sinks that are in the tables, but held no more: no query sees
        them again."""
        self.retention: RetentionPlan | None = None
        self.load: list[Transfer] = []
        """Copies from the host that are under way."""

    @property
    def num_blocks(self) -> int:
        """Blocks in each table."""
        return len(self.tables[0])

    @property
    def num_held(self) -> int:
        """Of these, those that are still held."""
        return self.num_blocks - self.num_left


class Prefix(NamedTuple):
    """Blocks, a list a group, that hold the first tokens of a sequence about to start."""

    shared: list[list[int]]
    last: list[int]
    """Where the prefix covers all tokens, the block of the last one, one a group: that
    token is computed again, so the block cannot be shared."""

    stored: Sequence[list[int]] = ()
    """Slots of the host that hold what follows, if any group has a host pool."""

    num_left: int = 0
    """Blocks behind the sinks that need not be held: no query will see them."""

    is_under_way: bool = False
    """What follows is just being copied from the host for another sequence."""

    @property
    def num_stored(self) -> int:
        """Blocks of each group to be copied from the host, or left out."""
        return len(self.stored[0]) if self.stored else 0


class KVCacheManager:
    """Hands out blocks of all KV groups together, so all tables of a sequence are as long.

    A block is written by one sequence only and only until it is full. Full blocks are
    shared by reference; a partial block that two sequences would write is copied. Blocks
    that are reserved are never handed to anybody but their reserver.

    With ``window``, no layer sees more than so many tokens back, ``num_sinks`` first ones
    aside: a sequence holds no block that only earlier tokens are in. With ``host_slots``,
    content that is evicted moves to the host, and comes back when it is wanted.
    """

    def __init__(
        self,
        blocks_per_group: Sequence[int],
        block_size: int,
        *,
        enable_reuse: bool,
        window: int = 0,
        num_sinks: int = 0,
        host_slots: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_reuse = enable_reuse
        self.window = window
        self._sink_blocks = self.blocks_for(num_sinks)
        has_host = host_slots > 0 and enable_reuse
        self.pools = [
            BlockPool(num_blocks, HostPool(host_slots) if has_host else None)
            for num_blocks in blocks_per_group
        ]
        self.hosts = [pool.host for pool in self.pools if pool.host is not None]
        self.num_blocks = min(blocks_per_group)
        self.num_reused_blocks = 0
        """Blocks that did not have to be computed, over all sequences so far."""
        self._num_reserved = 0
        self._fresh: set[tuple[int, int]] = set()
        self._under_way: set[BlockHash] = set()
        self._loads: list[Transfer] = []

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

    def most_held(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that a sequence of ``num_tokens`` holds at once, computed in such chunks."""
        num_blocks = self.blocks_for(num_tokens)
        if not self.window:
            return num_blocks
        seen = self._sink_blocks + self.blocks_for(self.window + max_chunk) + 1
        return min(num_blocks, seen)

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
        prefix = self._split(found, num_tokens)
        if self.hosts and not prefix.last:
            prefix = self._add_stored(prefix, blocks.hashes, num_tokens)
        return self._leave_out(prefix, num_tokens) if self.window else prefix

    def _add_stored(self, prefix: Prefix, hashes: list[BlockHash], num_tokens: int) -> Prefix:
        """Behind what the device has, what the host has."""
        first, end = len(prefix.shared[0]), (num_tokens - 1) // self.block_size
        if first < end and hashes[first] in self._under_way:
            return prefix._replace(is_under_way=True)
        stored: list[list[int]] = [[] for _ in self.hosts]
        for block_hash in hashes[first:end]:
            hits = [host.lookup(block_hash) for host in self.hosts]
            if None in hits:
                break
            for group, slot in enumerate(hits):
                assert slot is not None
                stored[group].append(slot)
        return prefix._replace(stored=stored)

    def _leave_out(self, prefix: Prefix, num_tokens: int) -> Prefix:
        num_cached = (len(prefix.shared[0]) + prefix.num_stored) * self.block_size
        first = num_tokens - 1 if prefix.last else num_cached
        return prefix._replace(num_left=self._num_unseen(first))

    def _num_unseen(self, position: int) -> int:
        """Blocks behind the sinks that no query from this position on sees."""
        return max(0, (position - self.window + 1) // self.block_size - self._sink_blocks)

    def leave_behind(self, blocks: SequenceBlocks, position: int) -> None:
        """Stop holding what no query from ``position`` on sees; it may still be found.

        Their places in the tables keep the blocks' numbers, which hold some sequence's
        values: finite, and never looked at.
        """
        count = self._num_unseen(position)
        if count <= blocks.num_left:
            return
        first, end = self._sink_blocks + blocks.num_left, self._sink_blocks + count
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            pool.release(table[first:end])
        if blocks.max_blocks:
            # It may take as many again.
            self._num_reserved += count - blocks.num_left
        blocks.num_left = count

    def _held(self, table: list[int], num_left: int) -> list[int]:
        if not num_left:
            return table
        first = self._sink_blocks
        return table[:first] + table[first + num_left :]

    def find_fork(self, parent: SequenceBlocks, num_tokens: int) -> Prefix:
        """The same for a fork of ``parent``, which has computed ``num_tokens``."""
        if parent.num_left:
            return self._split([[] for _ in parent.tables], num_tokens)
        num_blocks = self.blocks_for(num_tokens)
        return self._split([table[:num_blocks] for table in parent.tables], num_tokens)

    def _split(self, found: list[list[int]], num_tokens: int) -> Prefix:
        num_shared = min(len(found[0]), (num_tokens - 1) // self.block_size)
        last = [blocks[num_shared] for blocks in found if len(blocks) > num_shared]
        # A step copies before it computes: what it fills itself can be shared, not copied.
        if any(item in self._fresh for item in enumerate(last)):
            last = []
        return Prefix([blocks[:num_shared] for blocks in found], last)

    def fork(
        self, child: SequenceBlocks, parent: SequenceBlocks, num_tokens: int, max_blocks: int
    ) -> list[BlockCopy]:
        """Give a sequence without blocks the first ``num_tokens`` of ``parent``.

        Full blocks are shared; of a partial one the child gets a copy, to be made before
        the step. It may hold ``max_blocks`` from now on, if not 0; the caller has checked.
        """
        num_full = num_tokens // self.block_size
        for pool, mine, theirs in zip(self.pools, child.tables, parent.tables, strict=True):
            shared = theirs[:num_full]
            pool.share(self._held(shared, parent.num_left))
            mine += shared
        child.num_left = parent.num_left
        if max_blocks:
            self.reserve(child, max_blocks)
        has_room = self.grow(child, num_tokens)
        assert has_room, "a sequence was forked without room for its partial block"
        return [
            (group, theirs[num_full], mine[num_full])
            for group, (mine, theirs) in enumerate(
                zip(child.tables, parent.tables, strict=True)
            )
            if child.num_blocks > num_full
        ]

    def blocks_to_take(self, prefix: Prefix, num_blocks: int) -> int:
        """Free blocks used up when a sequence of ``num_blocks`` starts with ``prefix``."""
        held = min(
            sum(map(pool.is_held, self._held(blocks, prefix.num_left)))
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
            pool.share(self._held(shared, prefix.num_left))
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
        if prefix.num_stored:
            self._load(blocks, prefix)
        blocks.num_left = prefix.num_left
        if blocks.retention is not None:
            for index in range(num_shared):
                self._retain(blocks, index)
        self.num_reused_blocks += blocks.num_blocks
        num_cached = (num_shared + prefix.num_stored) * self.block_size
        return (num_tokens - 1 if prefix.last else num_cached), copies

    def _load(self, blocks: SequenceBlocks, prefix: Prefix) -> None:
        """Take blocks for what the host has, and ask for the copies."""
        num_shared, sinks = len(prefix.shared[0]), self._sink_blocks
        left = range(sinks, sinks + prefix.num_left)
        wanted = [i for i in range(prefix.num_stored) if num_shared + i not in left]
        for group, slots in enumerate(prefix.stored):
            host, table = self.hosts[group], blocks.tables[group]
            # First, so that what is evicted now does not take their slots.
            host.pin([slots[i] for i in wanted])
            taken = self.pools[group].allocate(len(wanted))
            assert taken is not None, "a prefix was begun without room for what is loaded"
            places = dict(zip(wanted, taken, strict=True))
            # Never looked at where it is left out: any block will do that is written.
            filler = (taken or table or [0])[0]
            table += [places.get(i, filler) for i in range(len(slots))]
            blocks.load += [(group, slots[i], places[i]) for i in wanted]
        self._loads += blocks.load
        self._under_way.update(blocks.hashes[num_shared : blocks.num_blocks])

    def loaded(self, blocks: SequenceBlocks) -> None:
        """The copies from the host are made, or ordered before whatever comes next."""
        for group, slot, _ in blocks.load:
            self.hosts[group].unpin([slot])
        blocks.load = []
        self._under_way.difference_update(blocks.hashes[: blocks.num_blocks])

    def take_transfers(self) -> tuple[list[Transfer], list[Transfer]]:
        """Moves to the host and loads from it, to be begun before the step; told once."""
        moves = [
            (group, *move)
            for group, pool in enumerate(self.pools)
            for move in pool.take_moves()
        ]
        loads, self._loads = self._loads, []
        return moves, loads

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` in all; False, with nothing taken, if there is none."""
        count = self.blocks_for(num_tokens) - blocks.num_blocks
        if count <= 0:
            return True
        reserved = max(0, min(count, blocks.max_blocks - blocks.num_held))
        if count - reserved > self.num_available:
            return False
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            taken = pool.allocate(count)
            assert taken is not None
            table += taken
        self._num_reserved -= reserved
        return True

    def reserve(self, blocks: SequenceBlocks, num_blocks: int) -> None:
        """Promise that it can hold ``num_blocks`` at once; the caller has checked."""
        blocks.max_blocks = num_blocks
        self._num_reserved += max(0, num_blocks - blocks.num_held)

    def publish(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Make the full blocks among the first ``num_tokens`` findable.

        They are computed, or will be by the step that is being planned.
        """
        if not self.enable_reuse:
            return
        end = min(num_tokens // self.block_size, len(blocks.hashes))
        left = range(self._sink_blocks, self._sink_blocks + blocks.num_left)
        for index in range(blocks.num_published, end):
            if index in left:
                continue
            for group, table in enumerate(blocks.tables):
                self.pools[group].publish(table[index], blocks.hashes[index])
                self._fresh.add((group, table[index]))
            if blocks.retention is not None:
                self._retain(blocks, index)
        blocks.num_published = max(blocks.num_published, end)

    def _retain(self, blocks: SequenceBlocks, index: int) -> None:
        assert blocks.retention is not None
        for pool in self.pools:
            pool.retain(blocks.hashes[index], blocks.retention.at(index * self.block_size))

    def release(self, blocks: SequenceBlocks) -> None:
        """Drop all blocks and the reservation; the hashes stay for the next `begin`."""
        self._num_reserved -= max(0, blocks.max_blocks - blocks.num_held)
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            pool.release(self._held(table, blocks.num_left))
            table.clear()
        blocks.num_published = 0
        blocks.max_blocks = 0
        blocks.num_left = 0

    def check(self, holders: Sequence[SequenceBlocks]) -> None:
        """Raise AssertionError unless ``holders`` explain all blocks. For tests."""
        for group, pool in enumerate(self.pools):
            pool.check([self._held(b.tables[group], b.num_left) for b in holders])
        for blocks in holders:
            assert len({len(table) for table in blocks.tables}) == 1
        for host in self.hosts:
            host.check()
        reserved = sum(max(0, b.max_blocks - b.num_held) for b in holders)
        assert self._num_reserved == reserved
        assert 0 <= reserved <= self.num_free, "more is reserved than free"
