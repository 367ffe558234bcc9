"""Whether a sequence that waits has a place now: blocks, and what it can start with."""

from __future__ import annotations

from typing import NamedTuple

from trimaran.worker.config import SchedulerConfig
from trimaran.worker.kv_cache.manager import BlockCopy, KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import Prefix
from trimaran.worker.limits import most_held
from trimaran.worker.prefixes import find_prefix
from trimaran.worker.request import Sequence


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


def find_place(
    sequence: Sequence,
    step: int,
    config: SchedulerConfig,
    cache: KVCacheManager,
    *,
    can_grow_later: bool,
    num_kept: int,
) -> Place | None:
    """A place, or None if there is no room; ``step`` is the one being planned.

    ``can_grow_later`` asks for the next token's room alone, and that ``num_kept`` blocks
    stay free beside it.
    """
    num_known, sampling = len(sequence.token_ids), sequence.request.sampling
    max_blocks = most_held(sampling, max(num_known, sequence.max_len - 1), config, cache)
    num_blocks = max_blocks
    if can_grow_later:
        num_blocks = min(max_blocks, most_held(sampling, num_known + 1, config, cache))
    room = cache.num_available - num_kept
    if sequence.beams is not None:
        room -= sequence.beams.num_further_blocks(cache, num_blocks)
    prefix = find_prefix(sequence, step, cache)
    if prefix.keeps_last and cache.blocks_to_take(prefix, num_blocks) > room:
        # The block that it only copies takes room, which it may never find beside its own.
        prefix = find_prefix(sequence, step, cache, takes_parts=False)
    if prefix.is_under_way or cache.blocks_to_take(prefix, num_blocks) > room:
        return None
    return Place(prefix, prefix.num_cached(cache.block_size), max_blocks)
