"""How far the sequences of an engine will grow before they end, as far as one can tell."""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np
import numpy.typing as npt

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.request import Sequence

_MEMORY = 256
"""Ended sequences that an estimate rests on, roughly: older ones count ever less."""


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
        self._num_ends = 1.0
        self._num_tokens = float(expected_output_tokens)
        self.has_beams = False
        """Whether there ever were any; until then nobody looks for them."""

    def observe(self, num_output_tokens: int, is_at_limit: bool) -> None:
        """A sequence ended after so many tokens of output, at its length limit or before."""
        kept = 1.0 - 1.0 / _MEMORY
        self._num_ends = kept * self._num_ends + (not is_at_limit)
        self._num_tokens = kept * self._num_tokens + num_output_tokens

    def expected(self, num_left: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Tokens still to come of sequences that may have ``num_left`` more."""
        rate = self._num_ends / max(self._num_tokens, 1.0)
        if rate * float(num_left.max(initial=0.0)) < 1e-6:
            return num_left
        return -np.expm1(-rate * num_left) / rate

    def peak(self, sequences: List[Sequence]) -> tuple[float, float]:
        """The most tokens that ``sequences`` hold at once until they end, and hold now.

        Each is taken to start now if it has not: its known tokens are held, and more come.
        """
        if self.has_beams:
            sequences = [
                each for s in sequences for each in ((s,) if s.beams is None else s.beams.beams)
            ]
        num_known = np.array([len(s.token_ids) + s.num_pending for s in sequences], float)
        limits = np.array([s.max_len for s in sequences], float)
        growth = self.expected(np.maximum(limits - num_known, 0.0))
        order = np.argsort(-growth)
        held = np.cumsum(num_known[order])
        survivors = np.arange(1, len(sequences) + 1)
        return float((held + survivors * growth[order]).max()), float(held[-1])

    def has_room(
        self, running: List[Sequence], newcomer: Sequence, cache: KVCacheManager, share: float
    ) -> bool:
        """Whether the peak of both, as far as foretold, fits a share of the cache."""
        peak, held = self.peak([*running, newcomer])
        # Shared blocks are held once, and of the last block of each half is empty.
        num_held = (cache.num_blocks - cache.num_free) * cache.block_size
        shared = max(0.0, held - len(newcomer.token_ids) - num_held)
        room = cache.num_blocks * cache.block_size * share
        return peak - shared + len(running) * cache.block_size / 2 <= room
