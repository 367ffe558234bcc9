"""Finds the cached prefix of a new sequence, with attention windows."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from trimaran.worker.kv_cache.block_pool import BlockPool
from trimaran.worker.kv_cache.host_pool import BlockHash
from trimaran.worker.kv_cache.sequence_blocks import Prefix, SequenceBlocks


@dataclass(frozen=True, slots=True)
class Window:
    """A window of tokens, and the blocks of the first tokens, the sinks.

    Blocks after the sinks that left the window stay in a sequence's tables, which are indexed
    by position, but are no longer referenced: ``num_skipped`` is their number.
    """

    num_tokens: int
    """0 if a layer has no window."""

    num_sinks: int
    """Blocks of the sinks."""

    block_size: int

    def num_skipped_at(self, position: int) -> int:
        """Blocks after the sinks that no query from this position on sees."""
        return max(0, (position - self.num_tokens + 1) // self.block_size - self.num_sinks)

    def skipped(self, num_skipped: int) -> range:
        """Indices in a table of the ``num_skipped`` blocks that left the window."""
        return range(self.num_sinks, self.num_sinks + num_skipped)

    def held(self, table: list[int], num_skipped: int) -> list[int]:
        """The blocks of a table that are still referenced."""
        if not num_skipped:
            return table
        left = self.skipped(num_skipped)
        return table[: left.start] + table[left.stop :]


class _PartialBlock(NamedTuple):
    hash: BlockHash
    token_ids: array[int]
    prompt_part: int
    """See `SequenceBlocks.prompt_part`."""


class PartialBlocks:
    """Records one block for each parent: the partial last block of a sequence that ended, or
    the block in which its prompt ended. The oldest entry is dropped first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: dict[BlockHash, _PartialBlock] = {}

    def put(self, parent: BlockHash, block: _PartialBlock) -> None:
        """Record a block, which follows ``parent``."""
        self._blocks.pop(parent, None)
        self._blocks[parent] = block
        if len(self._blocks) > self._most:
            del self._blocks[next(iter(self._blocks))]

    def drop(self, parent: BlockHash) -> None:
        """The block is gone."""
        self._blocks.pop(parent, None)

    def match(
        self, parent: BlockHash, wanted: array[int], prompt_part: int
    ) -> tuple[BlockHash, int] | None:
        """A block's hash, and the number of ``wanted`` ids at the beginning of the block, of
        which ``prompt_part`` are the prompt's.

        At least half of the ids must match, because the block must be copied.
        """
        block = self._blocks.get(parent)
        if block is None:
            return None
        ids = block.token_ids
        count, most = 0, min(len(ids), len(wanted))
        if prompt_part != block.prompt_part:
            # Behind the shorter part a token is the prompt's here and the output's there.
            most = min(most, prompt_part, block.prompt_part)
        while count < most and ids[count] == wanted[count]:
            count += 1
        if count == 0 or 2 * count < len(wanted):
            return None
        return block.hash, count


class PrefixFinder:
    """Searches the pools of all KV groups for a sequence's first tokens; takes no blocks.

    A step makes its copies before it computes, and loads from the host take time. So the finder
    tracks the blocks that the planned step fills and the content being loaded; neither can be
    the source of a copy.
    """

    def __init__(
        self, pools: list[BlockPool], block_size: int, window: Window, *, shares_held: bool
    ) -> None:
        """Without ``shares_held`` a prefix ends before the first referenced block."""
        self._pools = pools
        self._hosts = [pool.host for pool in pools if pool.host is not None]
        self._block_size = block_size
        self._window = window
        self._shares_held = shares_held
        self._ends = PartialBlocks(min(pool.num_blocks for pool in pools))
        self.fresh: set[tuple[int, int]] = set()
        """(group, block) that the planned step fills."""
        self.under_way: set[BlockHash] = set()
        """Content that is being loaded from the host."""

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
        num_skipped = self._window.num_skipped_at(prefix.num_cached(self._block_size))
        return prefix._replace(num_skipped=num_skipped)

    def find_fork(self, parent: SequenceBlocks, num_tokens: int) -> Prefix:
        """The prefix of a fork of ``parent``, which has computed ``num_tokens``."""
        if parent.num_skipped:
            return self._split([[] for _ in parent.tables], num_tokens)
        num_blocks = -(-num_tokens // self._block_size)
        return self._split([table[:num_blocks] for table in parent.tables], num_tokens)

    def keep_end(self, blocks: SequenceBlocks, index: int, token_ids: array[int]) -> None:
        """Record a sequence's block ``index``, which has these ids, for later prefixes."""
        size = self._block_size
        block_hash = blocks.hash_at(index, token_ids, size)
        block = _PartialBlock(block_hash, token_ids, blocks.prompt_part(index, size))
        self._ends.put(blocks.parent_of(index), block)

    def _is_free(self, blocks: list[int | None]) -> bool:
        """Whether these blocks, one a group, are unreferenced."""
        pairs = zip(self._pools, blocks, strict=True)
        return not any(pool.is_held(block) for pool, block in pairs if block is not None)

    def _split(self, found: list[list[int]], num_tokens: int) -> Prefix:
        num_shared = min(len(found[0]), (num_tokens - 1) // self._block_size)
        last = [blocks[num_shared] for blocks in found if len(blocks) > num_shared]
        # A step copies before it computes: blocks that it fills can be shared, but not copied.
        if any(item in self.fresh for item in enumerate(last)):
            last = []
        num_last = num_tokens - 1 - num_shared * self._block_size if last else 0
        return Prefix([blocks[:num_shared] for blocks in found], last, num_last)

    def _add_stored(self, prefix: Prefix, hashes: list[BlockHash], num_tokens: int) -> Prefix:
        """Extend a prefix on the device by content in the host cache."""
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
        """Extend a prefix of full blocks by the first tokens of another block."""
        num_shared = len(prefix.shared[0])
        start = num_shared * self._block_size
        # One token is left to compute.
        wanted = token_ids[start : min(start + self._block_size, len(token_ids) - 1)]
        parent = blocks.parent_of(num_shared)
        prompt_part = blocks.prompt_part(num_shared, self._block_size)
        matched = self._ends.match(parent, wanted, prompt_part)
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
