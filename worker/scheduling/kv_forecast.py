"""The forecast of KV cache growth: the peak until the running sequences have ended."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Sequence

_MEMORY = 256
"""Ended sequences that an estimate rests on, roughly: older ones count less and less."""
_PRIOR = 0.25
"""Weight of the first guess, in ended sequences."""


@dataclass(slots=True)
class _Forecast:
    """The expected growth of some sequences, and its sums."""

    num_sequences: int
    parts: list[npt.NDArray[np.float64]]
    """[2, n] each: known tokens, and tokens to come, of n sequences or further beams."""

    num_entries: int
    """The sum of all n."""

    num_blocks: int
    """Blocks of the known tokens; a shared block counts once for each sequence."""

    most_tokens: float
    """Tokens held if all sequences ended at the same step."""

    max_blocks: int
    """Blocks held if all sequences reached their length limits."""

    def join(self, other: _Forecast) -> None:
        """Add other sequences."""
        self.num_sequences += other.num_sequences
        self.parts += other.parts
        self.num_entries += other.num_entries
        self.num_blocks += other.num_blocks
        self.most_tokens += other.most_tokens
        self.max_blocks += other.max_blocks


class KVForecast:
    """Predicts the peak use of the KV cache, so that admission causes no preemption soon after.

    Every output token is assumed to end its sequence with the same probability: observed ends
    over observed tokens. A sequence that reached its length limit adds tokens and no end. This
    is the maximum-likelihood estimate for an exponential distribution with censored samples. In
    a workload without ends every sequence is expected to reach its limit.

    The peak is that of the past-future scheduler (Gong et al., ASPLOS 2025): it occurs when
    some sequence ends, and all that outlive it have grown by the tokens that it had left.
    """

    def __init__(self, expected_output_tokens: int) -> None:
        self._num_ends = _PRIOR
        self._num_tokens = _PRIOR * expected_output_tokens
        self.has_beams = False
        """Whether any sequence ever had beams; until then none are looked for."""
        self._running: _Forecast | None = None
        self._newcomer: Sequence | None = None
        """The sequence that `has_room` was asked about last in this admission."""

    def observe(self, num_output_tokens: int, is_at_limit: bool) -> None:
        """A sequence ended after this many output tokens, at its length limit or before."""
        kept = 1.0 - 1.0 / _MEMORY
        self._num_ends = kept * self._num_ends + (not is_at_limit)
        self._num_tokens = kept * self._num_tokens + num_output_tokens

    def expected(self, num_left: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Expected further tokens of sequences that may have ``num_left`` more, elementwise."""
        rate = self._num_ends / max(self._num_tokens, _PRIOR)
        if rate * float(num_left.max(initial=0.0)) < 1e-6:
            return num_left
        return -np.expm1(-rate * num_left) / rate

    def begin_admission(self) -> None:
        """Forget the running sequences. Until the next call they change by newcomers alone."""
        self._running = self._newcomer = None

    def has_room(
        self, running: List[Sequence], newcomer: Sequence, cache: KVCacheManager
    ) -> bool:
        """Whether the predicted peak of ``running`` and ``newcomer`` fits the cache.

        An admission looks at each running sequence once, and then at each newcomer.
        """
        if cache.window.num_tokens:
            # Sequences free the blocks that their window has left, so they hardly grow.
            return True
        size = cache.block_size
        known = self._forecast_running(running, size)
        own = self._forecast([newcomer], size)
        self._newcomer = newcomer
        # Shared blocks are held once.
        num_held = cache.num_blocks - cache.num_free
        room = cache.num_blocks + max(0, known.num_blocks - num_held)
        # A sequence holds most blocks at its length limit.
        if known.max_blocks + own.max_blocks <= room:
            return True
        # The last block of a sequence is half empty on average.
        room_tokens = (room - (known.num_entries + own.num_entries) / 2) * size
        # An upper bound of the peak that needs no sorting: all end at the same step.
        if known.most_tokens + own.most_tokens <= room_tokens:
            return True
        return self._peak([*known.parts, *own.parts]) <= room_tokens

    def _peak(self, parts: List[npt.NDArray[np.float64]]) -> float:
        """The most tokens that the sequences hold at once until they end.

        Sequences that have not started count as if they started now.
        """
        known, growth = np.concatenate(parts, axis=1)
        order = np.argsort(-growth)
        held = np.cumsum(known[order])
        survivors = np.arange(1, len(known) + 1)
        return float((held + survivors * growth[order]).max())

    def _forecast_running(self, running: List[Sequence], block_size: int) -> _Forecast:
        known = self._running
        if known is None or len(running) != known.num_sequences + 1:
            known = self._running = self._forecast(running, block_size)
        else:
            assert self._newcomer is not None
            known.join(self._forecast([self._newcomer], block_size))
        return known

    def _forecast(self, sequences: List[Sequence], block_size: int) -> _Forecast:
        known = [len(s.token_ids) for s in sequences]
        pending = [s.num_pending for s in sequences]
        max_known = [s.max_len - 1 for s in sequences]
        for beam, num_shared in self._further_beams(sequences, block_size):
            known.append(len(beam.token_ids) - num_shared)
            pending.append(0)
            max_known.append(beam.max_len - 1 - num_shared)
        num_held, limits = np.array(known, float), np.array(max_known, float)
        num_known = num_held + np.array(pending, float)
        growth = self.expected(np.maximum(limits - num_known, 0.0))
        most = np.maximum(limits, num_known)
        return _Forecast(
            num_sequences=len(sequences),
            parts=[np.stack((num_known, growth))],
            num_entries=len(known),
            num_blocks=int(np.ceil(num_held / block_size).sum()),
            most_tokens=float((num_known + growth).sum()),
            max_blocks=int(np.ceil(most / block_size).sum()),
        )

    def _further_beams(
        self, sequences: List[Sequence], block_size: int
    ) -> Iterator[tuple[Sequence, int]]:
        """All beams but the first of each request, with the prompt tokens that they share."""
        for sequence in sequences if self.has_beams else ():
            if sequence.beams is not None:
                num_shared = sequence.num_prompt_tokens // block_size * block_size
                yield from ((beam, num_shared) for beam in sequence.beams.beams[1:])
