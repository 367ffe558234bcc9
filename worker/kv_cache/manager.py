"""Each sequence's blocks: prefix reuse, growth, forks and reservations."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from trimaran.worker.kv_cache.block_pool import BlockPool, SwapKeys
from trimaran.worker.kv_cache.host_pool import HostPool
from trimaran.worker.kv_cache.prefix_finder import PrefixFinder, Window
from trimaran.worker.kv_cache.sequence_blocks import (
    Prefix,
    SequenceBlocks,
    Transfer,
    hash_of,
)

_NEVER = 1 << 62

BlockCopy = tuple[int, int, int]
"""KV group, source block, destination block."""


class KVCacheManager:
    """Allocates blocks of all KV groups together, so all tables of a sequence have equal
    length.

    A block is written by one sequence only, and only until it is full. Full blocks are shared
    by reference; a partial block that two sequences would write is copied. Reserved blocks are
    allocated only to the sequence that reserved them.

    With ``window``, the window of all layers in tokens, a sequence frees blocks outside of the
    window, except those of the ``num_sinks`` first tokens. With ``host_slots``, evicted content
    moves to the host, and is loaded when a sequence needs it. Without ``enable_reuse`` only the
    content of preempted sequences moves to the host, and only for these sequences. With
    ``is_reserving`` sequences have reservations. Sequences of more than ``switch_at`` tokens
    share no content with shorter sequences.
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
        is_reserving: bool = False,
        switch_at: int = 0,
    ) -> None:
        self.block_size = block_size
        self.separates_output = False
        """Whether no token of a prompt is found in an output, and no token of an output in a
        prompt. Set before any sequence starts."""
        self.switch_at = switch_at or _NEVER
        """Number of tokens above which all keys of a sequence have another rotation."""
        self.enable_reuse = enable_reuse
        self.window = Window(window, self.blocks_for(num_sinks), block_size)
        self.pools = [
            BlockPool(
                num_blocks,
                HostPool(host_slots, can_replace=enable_reuse) if host_slots else None,
            )
            for num_blocks in blocks_per_group
        ]
        self.hosts = [pool.host for pool in self.pools if pool.host is not None]
        # A sequence that moves past a shared block would free no block, but could allocate
        # another block.
        shares_held = not (window and is_reserving)
        self.prefixes = PrefixFinder(
            self.pools, block_size, self.window, shares_held=shares_held
        )
        self.num_blocks = min(blocks_per_group)
        self.num_reused_blocks = 0
        """Blocks that were found in the cache, over all sequences so far."""
        self._num_reserved = 0
        self._loads: list[Transfer] = []
        self._swap_keys = SwapKeys(self.pools)
        self._sources: list[tuple[int, int]] = []
        """(group, block) that only the planned step references, as sources of copies."""

    def set_partitions(self, partitions_per_group: Sequence[bytes | None]) -> None:
        """Set the L2 partition of each group's blocks. Call before any is handed out."""
        for pool, partitions in zip(self.pools, partitions_per_group, strict=True):
            if partitions is not None:
                pool.set_partitions(partitions)

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, including reserved blocks."""
        return min(pool.num_free for pool in self.pools)

    @property
    def num_available(self) -> int:
        """Blocks that a sequence without a reservation may take."""
        return self.num_free - self._num_reserved

    @property
    def num_gains(self) -> int:
        """A count that rises whenever more content of the sequence last given to `watch` may
        have become referenced."""
        return sum(pool.num_gains for pool in self.pools)

    def watch(self, blocks: SequenceBlocks) -> None:
        """Count in `num_gains` when content of this sequence arrives."""
        hashes = frozenset(blocks.hashes)
        for pool in self.pools:
            pool.watched = hashes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def max_held(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks that a sequence of ``num_tokens`` holds at once, if computed in such
        chunks."""
        num_blocks = self.blocks_for(num_tokens)
        if not self.window.num_tokens:
            return num_blocks
        num_seen = self.blocks_for(self.window.num_tokens + max_chunk) + 1
        return min(num_blocks, self.window.num_sinks + num_seen)

    def holds(self, num_sequences: int, num_tokens: int) -> bool:
        """Whether ``num_sequences`` of ``num_tokens`` fit, without any sharing."""
        return num_sequences * self.blocks_for(num_tokens) <= self.num_blocks

    def begin_step(self) -> None:
        """Planning of a step begins: content published before is written before the step
        starts."""
        self.prefixes.fresh.clear()
        self._swap_keys.begin_step()

    def end_step(self) -> None:
        """The step is planned, and takes no more blocks."""
        for group, block in self._sources:
            self.pools[group].release([block])
        self._sources.clear()
        self._swap_keys.end_step()

    def separate_long_contexts(self, blocks: SequenceBlocks, token_ids: array[int]) -> None:
        """Restrict a sequence that is about to start to content whose keys have its rotation,
        which depends on its length."""
        if len(token_ids) > self.switch_at and not blocks.is_long:
            blocks.is_long = True
            blocks.root = hash_of(blocks.root, array("i"))
            self.forget(blocks)
            blocks.hashes.clear()
            self.extend_hashes(blocks, token_ids)

    def start_hashes(
        self, blocks: SequenceBlocks, token_ids: array[int], num_prompt: int
    ) -> None:
        """Hash the full blocks of a new sequence, whose prompt has ``num_prompt`` tokens."""
        if self.separates_output:
            blocks.num_prompt = num_prompt
        self.extend_hashes(blocks, token_ids)

    def extend_hashes(self, blocks: SequenceBlocks, token_ids: array[int]) -> None:
        """Hash the full blocks among ``token_ids``, all known ids of the sequence."""
        if not self.enable_reuse:
            return
        size = self.block_size
        hashes = blocks.hashes
        while (len(hashes) + 1) * size <= len(token_ids):
            start = len(hashes) * size
            ids = token_ids[start : start + size]
            hashes.append(blocks.hash_at(len(hashes), ids, size))

    def _keep_ends(
        self, blocks: SequenceBlocks, token_ids: array[int], num_prompt: int, num_known: int
    ) -> None:
        """Record the block in which the prompt ended, and publish the partial last block."""
        size = self.block_size
        num_full, rest = divmod(num_known, size)
        if num_full != blocks.num_published or num_full > len(blocks.hashes):
            return
        at_prompt = num_prompt // size
        if num_prompt % size and at_prompt < num_full:
            ids = token_ids[at_prompt * size : (at_prompt + 1) * size]
            self.prefixes.keep_end(blocks, at_prompt, ids)
        last = [table[num_full] for table in blocks.tables] if rest else []
        if not last or any(map(BlockPool.is_shared, self.pools, last)):
            return
        ids = token_ids[num_full * size : num_known]
        block_hash = blocks.hash_at(num_full, ids, size)
        for pool, block in zip(self.pools, last, strict=True):
            pool.publish(block, block_hash, is_partial=True)
            if blocks.retention is not None:
                pool.retain(block_hash, blocks.retention.at(num_full * size))
        self.prefixes.keep_end(blocks, num_full, ids)

    def free_outside_window(self, blocks: SequenceBlocks, position: int) -> None:
        """Drop references to blocks that no query from ``position`` on sees; content stays
        findable.

        The block tables keep these blocks' numbers. Kernels never use their values, which stay
        finite whichever sequence writes them.
        """
        count = self.window.num_skipped_at(position)
        if count <= blocks.num_skipped:
            return
        first = self.window.num_sinks
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            pool.release(table[first + blocks.num_skipped : first + count])
        if blocks.max_blocks:
            # The reservation still allows as many blocks.
            self._num_reserved += count - blocks.num_skipped
        blocks.num_skipped = count

    def fork(
        self, child: SequenceBlocks, parent: SequenceBlocks, num_tokens: int, max_blocks: int
    ) -> list[BlockCopy]:
        """Give a sequence without blocks the first ``num_tokens`` of ``parent``.

        Full blocks are shared; the child gets a copy of a partial block, to be made before the
        step. ``max_blocks``, if not 0, is the child's reservation; the caller has checked it.
        """
        num_full = num_tokens // self.block_size
        for pool, mine, theirs in zip(self.pools, child.tables, parent.tables, strict=True):
            shared = theirs[:num_full]
            pool.share(self.window.held(shared, parent.num_skipped))
            mine += shared
        child.num_skipped = parent.num_skipped
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
        """Free blocks that are taken when a sequence of ``num_blocks`` starts with
        ``prefix``."""
        held = min(
            sum(map(pool.is_held, self.window.held(blocks, prefix.num_skipped)))
            for pool, blocks in zip(self.pools, prefix.shared, strict=True)
        )
        # If the source of a copy must stay, the copy takes a separate block.
        return num_blocks - held + prefix.keeps_last

    def begin(self, blocks: SequenceBlocks, prefix: Prefix) -> tuple[int, list[BlockCopy]]:
        """Give a sequence its prefix; the caller has checked that the blocks are available.

        Returns how many of its known tokens are cached, and the copies to make before the step.
        At least one token is left to compute, for its logits; its block is taken from the free
        blocks, or copied if a sequence references it.
        """
        copies: list[BlockCopy] = []
        for pool, table, shared in zip(self.pools, blocks.tables, prefix.shared, strict=True):
            pool.share(self.window.held(shared, prefix.num_skipped))
            table += shared
        for group, source in enumerate(prefix.last):
            pool = self.pools[group]
            if prefix.keeps_last:
                pool.share([source])
                self._sources.append((group, source))
            elif not pool.is_held(source):
                pool.share([source])
                pool.forget(source)
                blocks.tables[group].append(source)
                continue
            taken = pool.allocate(1, blocks.tables[group])
            assert taken is not None, "a prefix was begun without room for its last block"
            copies.append((group, source, taken[0]))
            # Forks that start in the same step would copy the block's former content.
            self.prefixes.fresh.add((group, taken[0]))
            blocks.tables[group] += taken
        num_shared = len(prefix.shared[0])
        blocks.num_published = num_shared
        if prefix.num_stored:
            self._load(blocks, prefix)
        blocks.num_skipped = prefix.num_skipped
        for index in range(num_shared):
            self._retain(blocks, index)
        if self.enable_reuse:
            self.num_reused_blocks += blocks.num_blocks
        return prefix.num_cached(self.block_size), copies

    def _load(self, blocks: SequenceBlocks, prefix: Prefix) -> None:
        """Take blocks for content in the host cache, and request the copies."""
        num_shared, left = len(prefix.shared[0]), self.window.skipped(prefix.num_skipped)
        wanted = [i for i in range(prefix.num_stored) if num_shared + i not in left]
        for group, slots in enumerate(prefix.stored):
            host, table = self.hosts[group], blocks.tables[group]
            # Pin first, so that content evicted below does not take these slots.
            host.pin([slots[i] for i in wanted])
            taken = self.pools[group].allocate(len(wanted), table)
            assert taken is not None, "a prefix was begun without room for what is loaded"
            block_of = dict(zip(wanted, taken, strict=True))
            # Blocks outside of the window are never read: any written block will do.
            filler = (taken or table or [0])[0]
            table += [block_of.get(i, filler) for i in range(len(slots))]
            blocks.load += [(group, slots[i], block_of[i]) for i in wanted]
        self._loads += blocks.load
        self.prefixes.under_way.update(blocks.hashes[num_shared : blocks.num_blocks])

    def loaded(self, blocks: SequenceBlocks) -> None:
        """The copies from the host are complete, or ordered before later work."""
        for group, slot, _ in blocks.load:
            self.hosts[group].unpin([slot])
        blocks.load = []
        self.prefixes.under_way.difference_update(blocks.hashes[: blocks.num_blocks])
        if not self.enable_reuse:
            # Free the host slots for sequences that still wait.
            self._swap_keys.forget_stored(blocks.hashes)

    def take_transfers(self) -> tuple[list[Transfer], list[Transfer]]:
        """Copies to and from the host that start before the step; each is returned once."""
        moves = [
            (group, *move)
            for group, pool in enumerate(self.pools)
            for move in pool.take_moves()
        ]
        loads, self._loads = self._loads, []
        return moves, loads

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Give the sequence blocks for ``num_tokens`` in all; False, with nothing taken, if too
        few are available."""
        count = self.blocks_for(num_tokens) - blocks.num_blocks
        if count <= 0:
            return True
        reserved = max(0, min(count, blocks.max_blocks - blocks.num_held))
        if count - reserved > self.num_available:
            return False
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            taken = pool.allocate(count, table)
            assert taken is not None
            table += taken
        self._num_reserved -= reserved
        return True

    def reserve(self, blocks: SequenceBlocks, num_blocks: int) -> None:
        """Reserve ``num_blocks`` to be held at once; the caller has checked that they are
        free."""
        blocks.max_blocks = num_blocks
        self._num_reserved += max(0, num_blocks - blocks.num_held)

    def publish(self, blocks: SequenceBlocks, num_tokens: int) -> int:
        """Make the full blocks among the first ``num_tokens`` findable.

        They are computed, or will be by the step that is being planned. Returns the number of
        tokens at which to call this again, or `separate_long_contexts`.
        """
        next_end = _NEVER
        if self.enable_reuse:
            self._publish(blocks, num_tokens)
            next_end = (blocks.num_published + 1) * self.block_size
        return next_end if blocks.is_long else min(next_end, self.switch_at + 1)

    def keep(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Keep a preempted sequence's content for its resumption. Call before `release`.

        Only without reuse and with a host cache, and not after the window has moved.
        """
        if self.hosts and not self.enable_reuse and not blocks.num_skipped:
            self._swap_keys.name(blocks, num_tokens // self.block_size)
            self._publish(blocks, num_tokens)

    def forget(self, blocks: SequenceBlocks) -> None:
        """Drop the content that `keep` kept for a sequence. Does nothing with reuse."""
        if not self.enable_reuse and blocks.hashes:
            self._swap_keys.forget(blocks)

    def _publish(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        end = min(num_tokens // self.block_size, len(blocks.hashes))
        left = self.window.skipped(blocks.num_skipped)
        for index in range(blocks.num_published, end):
            if index in left:
                continue
            for group, table in enumerate(blocks.tables):
                self.pools[group].publish(table[index], blocks.hashes[index])
                self.prefixes.fresh.add((group, table[index]))
            self._retain(blocks, index)
        blocks.num_published = max(blocks.num_published, end)

    def _retain(self, blocks: SequenceBlocks, index: int) -> None:
        if blocks.retention is None or not self.enable_reuse:
            return
        for pool in self.pools:
            pool.retain(blocks.hashes[index], blocks.retention.at(index * self.block_size))

    def end(
        self, blocks: SequenceBlocks, token_ids: array[int], num_prompt: int, num_computed: int
    ) -> None:
        """`release` a sequence of these ids, of which the first ``num_computed`` have KV, and
        make its partial last block findable."""
        if self.enable_reuse:
            num_known = min(num_computed, len(token_ids))
            self._keep_ends(blocks, token_ids, num_prompt, num_known)
        self.release(blocks)

    def release(self, blocks: SequenceBlocks) -> None:
        """Drop all blocks and the reservation; hashes stay for the next `begin`."""
        self._num_reserved -= max(0, blocks.max_blocks - blocks.num_held)
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            pool.release(self.window.held(table, blocks.num_skipped))
            table.clear()
        blocks.num_published = 0
        blocks.max_blocks = 0
        blocks.num_skipped = 0

    def check(self, holders: Sequence[SequenceBlocks]) -> None:
        """Raise AssertionError unless ``holders`` explain all blocks. For tests."""
        for group, pool in enumerate(self.pools):
            sources = [[block] for number, block in self._sources if number == group]
            held = [self.window.held(b.tables[group], b.num_skipped) for b in holders]
            pool.check([*held, *sources])
        for blocks in holders:
            assert len({len(table) for table in blocks.tables}) == 1
        for host in self.hosts:
            host.check()
        reserved = sum(max(0, b.max_blocks - b.num_held) for b in holders)
        assert self._num_reserved == reserved
        assert 0 <= reserved <= self.num_free, "more is reserved than free"
