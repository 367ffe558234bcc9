"""Finds the cached blocks with which a new sequence can begin, attention windows included."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from trimaran.worker.kv_cache.block_pool import BlockPool
from trimaran.worker.kv_cache.host_pool import BlockHash
from trimaran.worker.kv_cache.sequence_blocks import Prefix, SequenceBlocks, hash_of


@dataclass(frozen=True, slots=True)
class Window:
    """The last so many tokens and the blocks of the first ones, its sinks.

    Blocks behind the sinks that no query sees any more stay in a sequence's tables, which
    are read by position, but are held no longer: ``num_left`` counts them.
    """

    num_tokens: int
    """0 where some layer sees everything."""

    num_sinks: int
    """Blocks that are seen from everywhere."""

    block_size: int

    def num_unseen(self, position: int) -> int:
        """Blocks behind the sinks that no query from this position on sees."""
        return max(0, (position - self.num_tokens + 1) // self.block_size - self.num_sinks)

    def left(self, num_left: int) -> range:
        """The places in a table of the ``num_left`` blocks that are held no more."""
        return range(self.num_sinks, self.num_sinks + num_left)

    def held(self, table: list[int], num_left: int) -> list[int]:
        """The blocks of a table that are held."""
        if not num_left:
            return table
        left = self.left(num_left)
        return table[: left.start] + table[left.stop :]


class BlockEnds:
    """Remembers one block for each beginning: the partial last one of a sequence that ended,
    or the one that its prompt ended in. The oldest is forgotten first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ids: dict[BlockHash, array[int]] = {}

    def put(self, parent: BlockHash, token_ids: array[int]) -> None:
        """Remember the block with these ids, which stands behind ``parent``."""
        self._ids.pop(parent, None)
        self._ids[parent] = token_ids
        if len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]

    def drop(self, parent: BlockHash) -> None:
        """The block is gone."""
        self._ids.pop(parent, None)

    def match(self, parent: BlockHash, wanted: array[int]) -> tuple[BlockHash, int] | None:
        """A block's hash, and how many of ``wanted`` it begins with: half of them at least,
        as beginning with it has a price."""
        ids = self._ids.get(parent)
        if ids is None:
            return None
        count, most = 0, min(len(ids), len(wanted))
        while count < most and ids[count] == wanted[count]:
            count += 1
        if count == 0 or 2 * count < len(wanted):
            return None
        return hash_of(parent, ids), count


class PrefixFinder:
    """Looks for a sequence's first tokens in the pools of all KV groups; it takes nothing.

    A step copies before it computes, and loads from the host take a while: it is told what
    the step being planned fills and what is on its way, neither of which can be copied.
    """

    def __init__(
        self, pools: list[BlockPool], block_size: int, window: Window, *, shares_held: bool
    ) -> None:
        """Without ``shares_held`` a prefix ends at the first referenced block."""
        self._pools = pools
        self._hosts = [pool.host for pool in pools if pool.host is not None]
        self._block_size = block_size
        self._window = window
        self._shares_held = shares_held
        self._ends = BlockEnds(min(pool.num_blocks for pool in pools))
        self.fresh: set[tuple[int, int]] = set()
        """Groups and blocks that the step being planned fills."""
        self.under_way: set[BlockHash] = set()
        """Content that is being copied from the host."""

    def find(
        self, blocks: SequenceBlocks, num_tokens: int, token_ids: array[int] | None = None
    ) -> Prefix:
        """The cached content that a sequence of ``num_tokens`` known tokens can start with.

        With its ``token_ids``, a partial block counts too.
        """
        found: list[list[int]] = [[] for _ in self._pools]
        for block_hash in blocks.hashes:
            hits = [pool.lookup(block_hash) for pool in self._pools]
            if None in hits or not (self._shares_held or self._is_free(hits)):
                break
            for group, block in enumerate(hits):
                assert block is not None
                found[group].append(block)
        prefix = self._split(found, num_tokens)
        if self._hosts and not prefix.last:
            prefix = self._add_stored(prefix, blocks.hashes, num_tokens)
        if token_ids is not None and not prefix.last and not prefix.num_stored:
            prefix = self._add_end(prefix, blocks, token_ids)
        if not self._window.num_tokens:
            return prefix
        num_left = self._window.num_unseen(prefix.num_cached(self._block_size))
        return prefix._replace(num_left=num_left)

    def find_fork(self, parent: SequenceBlocks, num_tokens: int) -> Prefix:
        """The same for a fork of ``parent``, which has computed ``num_tokens``."""
        if parent.num_left:
            return self._split([[] for _ in parent.tables], num_tokens)
        num_blocks = -(-num_tokens // self._block_size)
        return self._split([table[:num_blocks] for table in parent.tables], num_tokens)

    def keep_end(self, parent: BlockHash, token_ids: array[int]) -> None:
        """Let others begin within the block of these ids, which stands behind ``parent``."""
        self._ends.put(parent, token_ids)

    def _is_free(self, blocks: list[int | None]) -> bool:
        """Whether these blocks, one a group, are unreferenced."""
        pairs = zip(self._pools, blocks, strict=True)
        return not any(pool.is_held(block) for pool, block in pairs if block is not None)

    def _split(self, found: list[list[int]], num_tokens: int) -> Prefix:
        num_shared = min(len(found[0]), (num_tokens - 1) // self._block_size)
        last = [blocks[num_shared] for blocks in found if len(blocks) > num_shared]
        # A step copies before it computes: what it fills itself can be shared, not copied.
        if any(item in self.fresh for item in enumerate(last)):
            last = []
        num_last = num_tokens - 1 - num_shared * self._block_size if last else 0
        return Prefix([blocks[:num_shared] for blocks in found], last, num_last)

    def _add_stored(self, prefix: Prefix, hashes: list[BlockHash], num_tokens: int) -> Prefix:
        """Behind what the device has, what the host has."""
        first = len(prefix.shared[0])
        end = min((num_tokens - 1) // self._block_size, len(hashes))
        if first < end and hashes[first] in self.under_way:
            return prefix._replace(is_under_way=True)
        stored: list[list[int]] = [[] for _ in self._hosts]
        for block_hash in hashes[first:end]:
            hits = [host.lookup(block_hash) for host in self._hosts]
            if None in hits:
                break
            for group, slot in enumerate(hits):
                assert slot is not None
                stored[group].append(slot)
        return prefix._replace(stored=stored)

    def _add_end(self, prefix: Prefix, blocks: SequenceBlocks, token_ids: array[int]) -> Prefix:
        """Behind full blocks one whose first tokens are wanted."""
        num_shared = len(prefix.shared[0])
        start = num_shared * self._block_size
        # One token is left to compute.
        wanted = token_ids[start : min(start + self._block_size, len(token_ids) - 1)]
        parent = blocks.parent_of(num_shared)
        matched = self._ends.match(parent, wanted)
        if matched is None:
            return prefix
        block_hash, count = matched
        last = [b for pool in self._pools if (b := pool.lookup(block_hash)) is not None]
        if len(last) < len(self._pools):
            self._ends.drop(parent)
            return prefix
        if any(item in self.fresh for item in enumerate(last)):
            return prefix
        is_full = not self._pools[0].is_partial(last[0])
        return prefix._replace(last=last, num_last=count, keeps_last=is_full)
