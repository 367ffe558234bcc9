"""How many draft tokens each sequence verifies: as many as are expected to save time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as List

_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows up to which step times count as times of one size."""

_LEAST_GAIN = 1.03
"""Drafts are verified if the expected tokens a second rise by this factor."""

_NEW_SHARE = 0.2
"""Weight of a new time in the mean of its size."""

_OUTLIER = 3.0
"""A time of more than so many means counts as so many."""

_ENOUGH = 2
"""Times of a size without drafts that are measured before the first draft."""

_PLAIN_EVERY = 64
"""Of so many steps with drafts in a row, one step more runs without drafts: the time without
drafts grows with the lengths of the sequences."""

_PRIOR_RATE = 0.5
_RATE_SHARE = 0.08


class AcceptanceRate:
    """The probability that a draft token is accepted if all before it were, for one sequence.

    A running mean; the first trials weigh more.
    """

    __slots__ = ("_num_trials", "value")

    def __init__(self) -> None:
        self.value = _PRIOR_RATE
        self._num_trials = 0

    def observe(self, num_accepted: int, *, has_rejected: bool) -> None:
        """Take in the outcomes of drafts: accepted tokens, and whether one was rejected."""
        for outcome in [1.0] * num_accepted + [0.0] * has_rejected:
            self._num_trials += 1
            share = max(_RATE_SHARE, 1.0 / (self._num_trials + 2))
            self.value += (outcome - self.value) * share


class _Times:
    """Mean seconds of steps, by number of rows."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_EDGES) + 1)
        self._rows = [0.0] * (len(_EDGES) + 1)
        self._means = [0.0] * (len(_EDGES) + 1)

    def record(self, num_rows: int, seconds: float) -> None:
        size = bisect_left(_EDGES, num_rows)
        self.counts[size] += 1
        mean = self._means[size]
        share = max(_NEW_SHARE, 1.0 / self.counts[size])
        if mean:
            seconds = min(seconds, _OUTLIER * mean)
        self._means[size] += (seconds - mean) * share
        self._rows[size] += (num_rows - self._rows[size]) * share

    def is_known(self, num_rows: int) -> bool:
        return self.counts[bisect_left(_EDGES, num_rows)] >= _ENOUGH

    def estimate(self, num_rows: int) -> float | None:
        """Seconds of a step of so many rows, between the means of the sizes beside it. None if
        no smaller and no equal size was measured."""
        size = bisect_left(_EDGES, num_rows)
        lower = next((i for i in range(size, -1, -1) if self.counts[i]), None)
        if lower is None:
            return None
        if num_rows <= self._rows[lower]:
            return self._means[lower]
        upper = next((i for i in range(lower + 1, len(self.counts)) if self.counts[i]), None)
        if upper is None:
            return self._means[lower]
        place = (num_rows - self._rows[lower]) / (self._rows[upper] - self._rows[lower])
        return self._means[lower] + place * (self._means[upper] - self._means[lower])


class DraftController:
    """Chooses the draft rows of each step from acceptance rates and measured step times.

    A draft row at place j of a sequence with rate p adds p^j tokens to what a step yields. Rows
    are added in order of that number, as long as the expected tokens a second of the batch
    rise. Sizes of steps that were not measured yet count as fast as the largest smaller size,
    so that they get measured.
    """

    def __init__(self) -> None:
        self._plain = _Times()
        self._drafted = _Times()
        self._num_in_a_row = 0

    def record(self, num_rows: int, seconds: float, *, is_drafted: bool) -> None:
        """Take in the time of a step of decodes alone."""
        (self._drafted if is_drafted else self._plain).record(num_rows, seconds)

    def choose(self, num_decodes: int, rates: List[float], most: List[int]) -> list[int]:
        """The number of draft rows of each candidate, beside ``num_decodes`` decode rows.

        Candidate i accepts with rate ``rates[i]`` and has ``most[i]`` draft tokens.
        """
        chosen = [0] * len(rates)
        plain_s = self._plain.estimate(num_decodes)
        if plain_s is None or not self._plain.is_known(num_decodes):
            return chosen
        if self._num_in_a_row >= _PLAIN_EVERY:
            self._num_in_a_row = 0
            return chosen
        gains = [
            (rate**place, number)
            for number, (rate, count) in enumerate(zip(rates, most, strict=True))
            for place in range(1, count + 1)
        ]
        gains.sort(reverse=True)
        plain_rate = num_decodes / plain_s
        best_rate, best_count, tokens = plain_rate * _LEAST_GAIN, 0, float(num_decodes)
        for count, (gain, _) in enumerate(gains, 1):
            tokens += gain
            rate = tokens / self._seconds(num_decodes + count, plain_s)
            if rate > best_rate:
                best_rate, best_count = rate, count
        for _, number in gains[:best_count]:
            chosen[number] += 1
        self._num_in_a_row += best_count > 0
        return chosen

    def _seconds(self, num_rows: int, plain_s: float) -> float:
        """Expected seconds of a step with drafts, of so many rows in all."""
        drafted = self._drafted.estimate(num_rows)
        if drafted is not None:
            return drafted
        return self._plain.estimate(num_rows) or plain_s
