"""Paused sequences take turns with running ones, where the host keeps what they computed."""

from __future__ import annotations

from collections.abc import Sequence as List
from itertools import takewhile

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Sequence

_TURN_STEPS = 32
"""Steps that a sequence stays paused at least, before another one makes room for it."""
_STEPS_BETWEEN = 2
"""From one turn to the next at least: so many blocks take a while to copy."""
_PATIENCE = 8
"""Steps until it is tried again, where nobody could make room."""


class Turns:
    """Chooses who makes room for the sequence that was paused first.

    It is one that has more output: so all of a batch end together, where else those who were
    paused would end alone, in steps that read all weights for few. A turn costs two copies
    beside the steps, and the tokens of a block that was not full.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._next: Sequence | None = None
        self._paused_at = 0
        self._not_before = 0

    def begin_step(
        self, running: List[Sequence], waiting: List[Sequence], step: int
    ) -> Sequence | None:
        """Who is to be paused before ``step`` is planned, if somebody waits for a turn."""
        if not self._cache.hosts or not waiting:
            return None
        first = waiting[0]
        if not first.is_preempted or first.num_pending:
            return None
        if step < max(first.paused_at + _TURN_STEPS, self._not_before):
            return None
        num_blocks = self._cache.blocks_for(len(first.token_ids) + 1)
        if self.is_next(first) and num_blocks <= self._cache.num_available:
            # Room was made; what it waits for is something else.
            return None
        maker = self._most_advanced(running, first)
        if maker is None or not self._has_host_room(waiting, maker):
            self._not_before = step + _PATIENCE
            return None
        self._next, self._paused_at = first, first.paused_at
        self._not_before = step + _STEPS_BETWEEN
        return maker

    def is_next(self, sequence: Sequence) -> bool:
        """Whether room was made for this one since it was paused."""
        return sequence is self._next and sequence.paused_at == self._paused_at

    def _most_advanced(self, running: List[Sequence], first: Sequence) -> Sequence | None:
        """Of no higher priority, with more output, and more to come than a turn."""
        best, most = None, first.num_output_tokens
        for sequence in running:
            count = sequence.num_output_tokens
            if count > most and (
                sequence.key[0] >= first.key[0]
                and sequence.max_len - len(sequence.token_ids) > _TURN_STEPS
                and sequence.is_alone
                and not sequence.blocks.num_left
            ):
                best, most = sequence, count
        return best

    def _has_host_room(self, waiting: List[Sequence], maker: Sequence) -> bool:
        """Whether the host can keep what this one computed beside all that is paused."""
        paused = [maker, *takewhile(lambda sequence: sequence.is_preempted, waiting)]
        blocks_for = self._cache.blocks_for
        needed = sum(blocks_for(len(sequence.token_ids)) for sequence in paused)
        return needed <= self._cache.hosts[0].num_slots
