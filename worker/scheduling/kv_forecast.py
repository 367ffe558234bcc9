"""How far the sequences of an engine will grow before they end, as far as one can tell."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Sequence

_MEMORY = 256
"""Ended sequences that an estimate rests on, roughly: older ones count ever less."""
_PRIOR = 0.25
"""Of how many ended sequences the first guess weighs as much."""


@dataclass(slots=True)
class _Foretold:
    """What is foretold of some sequences, and what it adds up to."""

    num_sequences: int
    parts: list[npt.NDArray[np.float64]]
    """[2, n] each: the tokens of n sequences or further beams, known ones and those to come."""

    num_entries: int
    """All n together."""

    num_blocks: int
    """Blocks that hold what is known, each counted as often as it is shared."""

    most_tokens: float
    """If all ended together."""

    most_blocks: int
    """If all went to their limits."""

    def join(self, other: _Foretold) -> None:
        """Count in others too."""
        self.num_sequences += other.num_sequences
        self.parts += other.parts
        self.num_entries += other.num_entries
        self.num_blocks += other.num_blocks
        self.most_tokens += other.most_tokens
        self.most_blocks += other.most_blocks


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
        self._running: _Foretold | None = None
        self._newcomer: Sequence | None = None
        """Whom `has_room` was asked about last in this admission."""

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

    def begin_admission(self) -> None:
        """Forget who runs: until the next call newcomers join them, and nothing else is new."""
        self._running = self._newcomer = None

    def has_room(
        self, running: List[Sequence], newcomer: Sequence, cache: KVCacheManager
    ) -> bool:
        """Whether the peak of both, as far as foretold, fits the cache.

        Within an admission ``running`` are looked at once, then those that join them.
        """
        if cache.window.num_tokens:
            # Sequences let go of what no layer sees any more.
            return True
        size = cache.block_size
        known = self._foretell_running(running, size)
        own = self._foretell([newcomer], size)
        self._newcomer = newcomer
        # Shared blocks are held once.
        num_held = cache.num_blocks - cache.num_free
        room = cache.num_blocks + max(0, known.num_blocks - num_held)
        # None holds more than at its limit.
        if known.most_blocks + own.most_blocks <= room:
            return True
        # Of the last block of each, half is empty.
        room_tokens = (room - (known.num_entries + own.num_entries) / 2) * size
        # The peak is no higher than if all ended together, which needs no order.
        if known.most_tokens + own.most_tokens <= room_tokens:
            return True
        return self._peak([*known.parts, *own.parts]) <= room_tokens

    def _peak(self, parts: List[npt.NDArray[np.float64]]) -> float:
        """The most tokens that sequences hold at once until they end.

        Each is taken to start now if it has not: its known tokens are held, and more come.
        """
        known, growth = np.concatenate(parts, axis=1)
        order = np.argsort(-growth)
        held = np.cumsum(known[order])
        survivors = np.arange(1, len(known) + 1)
        return float((held + survivors * growth[order]).max())

    def _foretell_running(self, running: List[Sequence], block_size: int) -> _Foretold:
        known = self._running
        if known is None or len(running) != known.num_sequences + 1:
            known = self._running = self._foretell(running, block_size)
        else:
            assert self._newcomer is not None
            known.join(self._foretell([self._newcomer], block_size))
        return known

    def _foretell(self, sequences: List[Sequence], block_size: int) -> _Foretold:
        known = [len(s.token_ids) for s in sequences]
        pending = [s.num_pending for s in sequences]
        most_known = [s.max_len - 1 for s in sequences]
        for beam, num_shared in self._further_beams(sequences, block_size):
            known.append(len(beam.token_ids) - num_shared)
            pending.append(0)
            most_known.append(beam.max_len - 1 - num_shared)
        num_held, limits = np.array(known, float), np.array(most_known, float)
        num_known = num_held + np.array(pending, float)
        growth = self.expected(np.maximum(limits - num_known, 0.0))
        most = np.maximum(limits, num_known)
        return _Foretold(
            num_sequences=len(sequences),
            parts=[np.stack((num_known, growth))],
            num_entries=len(known),
            num_blocks=int(np.ceil(num_held / block_size).sum()),
            most_tokens=float((num_known + growth).sum()),
            most_blocks=int(np.ceil(most / block_size).sum()),
        )

    def _further_beams(
        self, sequences: List[Sequence], block_size: int
    ) -> Iterator[tuple[Sequence, int]]:
        """All beams but the first of each request, and what they share of the prompt."""
        for sequence in sequences if self.has_beams else ():
            if sequence.beams is not None:
                num_shared = sequence.num_prompt_tokens // block_size * block_size
                yield from ((beam, num_shared) for beam in sequence.beams.beams[1:])
