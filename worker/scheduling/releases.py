"""The blocks of sequences that gave up their place, freed once no step writes them any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Sequence


class Releases:
    """Frees blocks, at once where it can."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._done_step = 0
        self._waiting: deque[Sequence] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        """Sequences whose blocks a step in flight still writes."""
        return iter(self._waiting)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks now."""
        if sequence.beams is not None:
            self._cache.release(sequence.blocks)
            sequence.beams.release(self._cache)
            return
        self._cache.end(
            sequence.blocks,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            sequence.num_computed_tokens,
        )

    def pause(self, sequence: Sequence) -> None:
        """Free the blocks of one that makes room; the host may keep what is its own."""
        if sequence.is_alone:
            self._cache.keep(sequence.blocks, sequence.num_computed_tokens)
        self.release(sequence)

    def release_later(self, sequence: Sequence) -> None:
        """Free the blocks when the last step that computes tokens of it is done."""
        if sequence.last_step > self._done_step:
            self._waiting.append(sequence)
        else:
            self._cache.forget(sequence.blocks)
            self.release(sequence)

    def step_done(self, step: int) -> None:
        """This step writes no more."""
        self._done_step = step
        for _ in range(len(self._waiting)):
            self.release_later(self._waiting.popleft())
