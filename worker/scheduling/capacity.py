"""Whether a sequence fits the KV cache: ever, as its request arrives; now, as it starts."""

from __future__ import annotations

from typing import NamedTuple

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import BlockCopy, KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import Prefix
from trimaran.worker.requests.request import Request, Sequence
from trimaran.worker.scheduling.beam_group import num_further_blocks


def check_limits(request: Request, config: SchedulerConfig, cache: KVCacheManager) -> None:
    """Refuse a request that the limits can never admit.

    Raises:
        RequestError: names the value, the limit and the remedy.
    """
    num_prompt, sampling = request.num_prompt_tokens, request.sampling
    num_seqs = max(sampling.num_return_sequences, sampling.beam_width)
    if num_seqs > config.max_num_seqs:
        name = "beam_width" if sampling.beam_width > 1 else "num_return_sequences"
        raise RequestError(
            f"{name} is {num_seqs} but this engine runs at most "
            f"{config.max_num_seqs} sequences at once. Ask for fewer."
        )
    total = num_prompt + request.sampling.max_tokens
    longest = max(num_prompt, total - 1)
    num_blocks = max_held(sampling, longest, config, cache)
    num_blocks += num_further_blocks(sampling, cache, num_prompt, num_blocks)
    if num_blocks > cache.num_blocks:
        raise RequestError(
            f"a prompt of {num_prompt} tokens and {request.sampling.max_tokens} new ones "
            f"need {num_blocks} KV cache blocks of {cache.block_size} tokens but the "
            f"cache has {cache.num_blocks}. Shorten the prompt, lower max_tokens, or "
            "give the engine a larger KV cache."
        )
    if sampling.beam_width > 1 and num_prompt <= cache.switch_at < total - 1:
        raise RequestError(
            f"beam_width is {sampling.beam_width} and a prompt of {num_prompt} tokens with "
            f"{sampling.max_tokens} new ones outgrows the {cache.switch_at} tokens up to which "
            "the model's positions are those of short contexts, which beams cannot do. Lower "
            f"max_tokens to {cache.switch_at + 1 - num_prompt}, or ask for one beam."
        )
    if not config.enable_chunked_context and num_prompt > config.max_num_batched_tokens:
        raise RequestError(
            f"a prompt of {num_prompt} tokens exceeds the {config.max_num_batched_tokens} "
            "tokens of one step (max_num_tokens). Shorten it, or enable chunked context."
        )


def max_held(
    sampling: SamplingParams, num_tokens: int, config: SchedulerConfig, cache: KVCacheManager
) -> int:
    """Blocks that one sequence of ``num_tokens`` holds at once."""
    if sampling.num_return_sequences > 1 or sampling.beam_width > 1:
        # A block that has left one sequence's window may be in another's: all are kept.
        return cache.blocks_for(num_tokens)
    return cache.max_held(num_tokens, config.max_num_batched_tokens)


class Allocation(NamedTuple):
    """Blocks for one sequence, which are free until anything else is taken."""

    prefix: Prefix
    num_cached: int
    """Tokens that need not be computed."""

    max_blocks: int
    """Blocks that the sequence holds at once, at most."""

    def take(
        self, sequence: Sequence, cache: KVCacheManager, *, is_reserved: bool
    ) -> list[BlockCopy]:
        """Begin the sequence; with ``is_reserved`` its longest output has room for certain.

        Returns the copies of partial blocks that its first step makes.
        """
        blocks, prefix = sequence.blocks, self.prefix
        sequence.num_computed_tokens, copies = cache.begin(blocks, prefix)
        if sequence.figures is not None:
            num_prompt_blocks = cache.blocks_for(sequence.num_prompt_tokens)
            sequence.figures.started(num_prompt_blocks, blocks.num_blocks - bool(prefix.last))
        if is_reserved:
            cache.reserve(blocks, self.max_blocks)
            if sequence.beams is not None:
                sequence.beams.reserve(cache, self.max_blocks)
        return copies


class _Refusal(NamedTuple):
    """The sequence that was refused last, and the cache at that time."""

    key: tuple[int, ...]
    """`Sequence.key`, which changes when the sequence runs meanwhile."""

    num_held: int
    """Blocks of its prefix that other sequences held. The cache reports any increase."""

    num_gains: int
    """`KVCacheManager.num_gains` at that time."""


class CapacityCheck:
    """Finds blocks for waiting sequences in one cache.

    The first waiting sequence asks in every step. A lookup in the prefix cache takes as long as
    the prompt is, so it happens only when there may be room.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self._config = config
        self._cache = cache
        self._refusal = _Refusal((), 0, 0)

    def find(
        self, sequence: Sequence, step: int, *, can_grow_later: bool, num_kept: int
    ) -> Allocation | None:
        """Blocks for ``sequence``, or None if too few are free. ``step`` is being planned.

        With ``can_grow_later`` the blocks of the next token suffice. ``num_kept`` blocks stay
        free beside them.
        """
        cache, config = self._cache, self._config
        num_known, sampling = len(sequence.token_ids), sequence.request.sampling
        max_blocks = max_held(sampling, max(num_known, sequence.max_len - 1), config, cache)
        num_blocks = max_blocks
        if can_grow_later:
            num_blocks = min(max_blocks, max_held(sampling, num_known + 1, config, cache))
        room = cache.num_available - num_kept
        if sequence.beams is not None:
            room -= sequence.beams.num_further_blocks(cache, num_blocks)
        last = self._refusal
        is_known = last.key == sequence.key and last.num_gains == cache.num_gains
        if is_known and num_blocks - last.num_held > room:
            return None
        prefix = find_prefix(sequence, step, cache)
        if prefix.keeps_last and cache.blocks_to_take(prefix, num_blocks) > room:
            # The partial block to copy from takes room too, which may never be there.
            prefix = find_prefix(sequence, step, cache, takes_parts=False)
        num_taken = cache.blocks_to_take(prefix, num_blocks)
        if num_taken > room:
            self._record_refusal(sequence, num_blocks - num_taken)
            return None
        if prefix.is_under_way:
            return None
        return Allocation(prefix, prefix.num_cached(cache.block_size), max_blocks)

    def _record_refusal(self, sequence: Sequence, num_held: int) -> None:
        # A fork shares what its parent holds, and windows move with the prefix that is found:
        # neither is reported as a gain.
        if sequence.parent is None and not self._cache.window.num_tokens:
            self._cache.watch(sequence.blocks)
            self._refusal = _Refusal(sequence.key, num_held, self._cache.num_gains)


def find_prefix(
    sequence: Sequence, step: int, cache: KVCacheManager, *, takes_parts: bool = True
) -> Prefix:
    """The cached prefix of a sequence that is about to start: its parent's prompt, or whatever
    the prefix cache has. ``step`` is being planned.

    Without ``takes_parts`` only whole blocks count.
    """
    if sequence.request.sampling.return_context_logits and not sequence.num_output_tokens:
        # A token whose KV is found has no logits.
        return Prefix([[] for _ in cache.pools], [])
    parent, num_known = sequence.parent, len(sequence.token_ids)
    if parent is not None and parent.blocks.is_long != sequence.blocks.is_long:
        parent = None
    if parent is not None and parent.blocks.load:
        # Its blocks are being swapped in; the lookup below finds and awaits the same copies.
        parent = None
    if parent is not None and parent.row >= 0 and not sequence.num_output_tokens:
        is_running = parent.last_step == step
        computed = parent.num_computed_before if is_running else parent.num_computed_tokens
        if computed >= num_known:
            return cache.prefixes.find_fork(parent.blocks, num_known)
    token_ids = sequence.token_ids if takes_parts else None
    return cache.prefixes.find(sequence.blocks, num_known, token_ids)
