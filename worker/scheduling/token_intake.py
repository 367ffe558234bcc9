"""Takes in sampled ids: they become output, complete blocks, and may end their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import RequestStatus, Sequence
from trimaran.worker.scheduling.guided_sequences import GuidedSequences
from trimaran.worker.scheduling.step_plan import Emission


class TokenIntake:
    """Appends sampled ids to their sequences, and finds the sequences that end.

    Most ids only become output. A sequence names the number of tokens from which an id needs a
    closer look: one that may end the sequence, or fills a block.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        guided: GuidedSequences,
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        """``finish`` ends a sequence, wherever it is."""
        self._cache = cache
        self._guided = guided
        self._finish = finish

    def take(self, pairs: Iterable[tuple[Sequence, int]], emitted: list[Emission]) -> None:
        """Take in sequences with their next ids, in order, into ``emitted``. Ids of sequences
        that have ended meanwhile are dropped."""
        not_finished = FinishReason.NOT_FINISHED
        for sequence, token_id in pairs:
            sequence.num_pending -= 1
            if sequence.status is RequestStatus.FINISHED:
                continue
            if token_id in sequence.end_ids:
                self._finish(sequence, FinishReason.END_ID)
                emitted.append((sequence, -1, FinishReason.END_ID))
                continue
            sequence.token_ids.append(token_id)
            reason = not_finished
            if sequence.stop_state or len(sequence.token_ids) >= sequence.look_at:
                if not self._guided.accept(sequence, token_id, self._finish):
                    continue
                reason = self._look_at(sequence, token_id)
            emitted.append((sequence, token_id, reason))

    def _look_at(self, sequence: Sequence, token_id: int) -> FinishReason:
        """Hash a block that the new token fills, and end the sequence if the token does."""
        num_known, block_size = len(sequence.token_ids), self._cache.block_size
        if num_known % block_size == 0:
            self._cache.extend_hashes(sequence.blocks, sequence.token_ids)
        next_end = (num_known // block_size + 1) * block_size
        request = sequence.request
        is_always = request.may_get_stuck or request.ends_after_drafts
        sequence.look_at = 0 if is_always else min(sequence.max_len, next_end)
        reason = sequence.ends_by(token_id)
        if reason is not FinishReason.NOT_FINISHED:
            self._finish(sequence, reason)
        return reason
