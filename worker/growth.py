"""How far the sequences of an engine will grow before they end, as far as one can tell."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List

import numpy as np
import numpy.typing as npt

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.request import Sequence

_MEMORY = 256
"""Ended sequences that an estimate rests on, roughly: older ones count ever less."""
_PRIOR = 0.25
"""Of how many ended sequences the first guess weighs as much."""


class GrowthForecast:
    """Foretells the peak of the KV cache, so that admission need not preempt soon after.

    Every token of output is taken to end its sequence with the same probability: ends that
    were seen, by tokens that were seen. Those that ran into their length limit count with
    their tokens alone, which is the maximum-likelihood estimate for an exponential
    distribution with censored samples. A workload without ends gets its full lengths.

    The peak is that of the past-future scheduler (Gong et al., ASPLOS 2025): it occurs when
    some sequence ends, and then all that outlive it have grown by what that one had left.
    """

    def __init__(self, expected_output_tokens: int) -> None:
        self._num_ends = _PRIOR
        self._num_tokens = _PRIOR * expected_output_tokens
        self.has_beams = False
        """Whether there ever were any; until then nobody looks for them."""

    def observe(self, num_output_tokens: int, is_at_limit: bool) -> None:
        """A sequence ended after so many tokens of output, at its length limit or before."""
        kept = 1.0 - 1.0 / _MEMORY
        self._num_ends = kept * self._num_ends + (not is_at_limit)
        self._num_tokens = kept * self._num_tokens + num_output_tokens

    def expected(self, num_left: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Tokens still to come of sequences that may have ``num_left`` more."""
        rate = self._num_ends / max(self._num_tokens, _PRIOR)
        if rate * float(num_left.max(initial=0.0)) < 1e-6:
            return num_left
        return -np.expm1(-rate * num_left) / rate

    def peak(self, sequences: List[Sequence], block_size: int) -> float:
        """The most blocks that ``sequences`` hold at once until they end.

        Each is taken to start now if it has not: its known tokens are held, and more come.
        Of the last block of each, half is empty; but none holds more than at its limit.
        """
        known = [len(s.token_ids) + s.num_pending for s in sequences]
        most_known = [s.max_len - 1 for s in sequences]
        for beam, num_shared in self._further_beams(sequences, block_size):
            known.append(len(beam.token_ids) - num_shared)
            most_known.append(beam.max_len - 1 - num_shared)
        num_known, limits = np.array(known, float), np.array(most_known, float)
        growth = self.expected(np.maximum(limits - num_known, 0.0))
        order = np.argsort(-growth)
        held = np.cumsum(num_known[order])
        survivors = np.arange(1, len(known) + 1)
        tokens = float((held + survivors * growth[order]).max())
        most = float(np.ceil(np.maximum(limits, num_known) / block_size).sum())
        return min(tokens / block_size + len(known) / 2, most)

    def _further_beams(
        self, sequences: List[Sequence], block_size: int
    ) -> Iterator[tuple[Sequence, int]]:
        """All beams but the first of each request, and what they share of the prompt."""
        for sequence in sequences if self.has_beams else ():
            if sequence.beams is not None:
                num_shared = sequence.num_prompt_tokens // block_size * block_size
                yield from ((beam, num_shared) for beam in sequence.beams.beams[1:])

    def has_room(
        self, running: List[Sequence], newcomer: Sequence, cache: KVCacheManager
    ) -> bool:
        """Whether the peak of both, as far as foretold, fits the cache."""
        if cache.window.num_tokens:
            # Sequences let go of what no layer sees any more.
            return True
        size = cache.block_size
        # Shared blocks are held once.
        num_held = cache.num_blocks - cache.num_free
        known = sum(cache.blocks_for(len(s.token_ids)) for s in running)
        for beam, num_shared in self._further_beams(running, size):
            known += cache.blocks_for(len(beam.token_ids) - num_shared)
        return (
            self.peak([*running, newcomer], size) - max(0, known - num_held) <= cache.num_blocks
        )
