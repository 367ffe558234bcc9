"""What a sequence that is about to start need not compute."""

from __future__ import annotations

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.kv_cache.sequence_blocks import Prefix
from trimaran.worker.requests.request import Sequence


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
