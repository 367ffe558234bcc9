"""Whether a sequence that waits has a place now: blocks, and what it can start with."""

from __future__ import annotations

from typing import NamedTuple

from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import BlockCopy, KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import Prefix
from trimaran.worker.requests.request import Sequence
from trimaran.worker.scheduling.limits import most_held


def find_prefix(
    sequence: Sequence, step: int, cache: KVCacheManager, *, takes_parts: bool = True
) -> Prefix:
    """Its parent's prompt, or whatever is cached; ``step`` is the one being planned.

    Without ``takes_parts`` nothing of a block that only begins as the sequence does.
    """
    if sequence.request.sampling.return_context_logits and not sequence.num_output_tokens:
        # A token whose KV is found has no logits.
        return Prefix([[] for _ in cache.pools], [])
    parent, num_known = sequence.parent, len(sequence.token_ids)
    if parent is not None and parent.blocks.is_long != sequence.blocks.is_long:
        parent = None
    if parent is not None and parent.blocks.load:
        # Its blocks are being written; what the host has of them is waited for below.
        parent = None
    if parent is not None and parent.row >= 0 and not sequence.num_output_tokens:
        is_running = parent.last_step == step
        computed = parent.num_computed_before if is_running else parent.num_computed_tokens
        if computed >= num_known:
            return cache.prefixes.find_fork(parent.blocks, num_known)
    token_ids = sequence.token_ids if takes_parts else None
    return cache.prefixes.find(sequence.blocks, num_known, token_ids)


class Place(NamedTuple):
    """A place that is free until anything else is taken."""

    prefix: Prefix
    num_cached: int
    """Tokens that need not be computed."""

    max_blocks: int
    """Blocks that the sequence holds at once, at most."""

    def take(
        self, sequence: Sequence, cache: KVCacheManager, *, is_reserved: bool
    ) -> list[BlockCopy]:
        """Begin the sequence; with ``is_reserved`` it can grow to its end for certain."""
        blocks, prefix = sequence.blocks, self.prefix
        sequence.num_computed_tokens, copies = cache.begin(blocks, prefix)
        if sequence.figures is not None:
            num_prompt_blocks = cache.blocks_for(sequence.num_prompt_tokens)
            sequence.figures.started(num_prompt_blocks, blocks.num_blocks, len(prefix.last))
        if is_reserved:
            cache.reserve(blocks, self.max_blocks)
            if sequence.beams is not None:
                sequence.beams.reserve(cache, self.max_blocks)
        return copies


class _Refusal(NamedTuple):
    """What is known of the sequence that was refused last."""

    key: tuple[int, ...]
    """Another one if it has run meanwhile."""

    num_held: int
    """Blocks of its prefix that others held: more only if the cache tells so."""

    num_gains: int
    """`KVCacheManager.num_gains`, then."""


class PlaceFinder:
    """Finds places in one cache.

    Whoever waits for room is asked for again at every step. What the cache has of it, which
    takes as long to find as its prompt is, is looked for only once there may be room.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self._config = config
        self._cache = cache
        self._refusal = _Refusal((), 0, 0)

    def find(
        self, sequence: Sequence, step: int, *, can_grow_later: bool, num_kept: int
    ) -> Place | None:
        """A place, or None if there is no room; ``step`` is the one being planned.

        ``can_grow_later`` asks for the next token's room alone, and that ``num_kept`` blocks
        stay free beside it.
        """
        cache, config = self._cache, self._config
        num_known, sampling = len(sequence.token_ids), sequence.request.sampling
        max_blocks = most_held(sampling, max(num_known, sequence.max_len - 1), config, cache)
        num_blocks = max_blocks
        if can_grow_later:
            num_blocks = min(max_blocks, most_held(sampling, num_known + 1, config, cache))
        room = cache.num_available - num_kept
        if sequence.beams is not None:
            room -= sequence.beams.num_further_blocks(cache, num_blocks)
        last = self._refusal
        is_known = last.key == sequence.key and last.num_gains == cache.num_gains
        if is_known and num_blocks - last.num_held > room:
            return None
        prefix = find_prefix(sequence, step, cache)
        if prefix.keeps_last and cache.blocks_to_take(prefix, num_blocks) > room:
            # The block that it only copies takes room, which it may never find beside its own.
            prefix = find_prefix(sequence, step, cache, takes_parts=False)
        num_taken = cache.blocks_to_take(prefix, num_blocks)
        if num_taken > room:
            self._remember(sequence, num_blocks - num_taken)
            return None
        if prefix.is_under_way:
            return None
        return Place(prefix, prefix.num_cached(cache.block_size), max_blocks)

    def _remember(self, sequence: Sequence, num_held: int) -> None:
        # A fork has what its parent has, and windows move with what is found.
        if sequence.parent is None and not self._cache.window.num_tokens:
            self._cache.watch(sequence.blocks)
            self._refusal = _Refusal(sequence.key, num_held, self._cache.num_gains)
