"""How many draft tokens each sequence verifies: as many as are expected to save time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as List

import numpy as np
import numpy.typing as npt

from trimaran.worker.speculation.tree_rates import TreeShape

_EDGES = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 320,
    384, 448, 512, 768, 1024,
)  # fmt: skip
"""Numbers of rows up to which step times count as times of one size. CUDA graphs have sizes of
this kind, so that the last rows of a size cost nothing."""

_MIN_GAIN = 1.03
"""Drafts are verified if the expected tokens a second rise by this factor."""

_NEW_SHARE = 0.2
"""Weight of a new time in the mean of its size."""

_OUTLIER = 3.0
"""A time of more than so many means counts as so many."""

_ENOUGH = 2
"""Times of a size without drafts that are measured before the first draft."""

_PLAIN_EVERY = 128
"""After so many steps with drafts, some run without drafts: the time without drafts grows with
the lengths of the sequences."""

_LARGER_AT = 64
"""After so many of these steps a larger size than theirs is measured again."""

_SPARE_STEPS, _FULL_STEPS = 8, 8
"""After so many steps in a row that verify fewer drafts than a network makes, the network makes
as many as the most of these; after so many that verify all, it makes more."""

_MOST_FULL_STEPS = 64
"""Each time that more are not verified, twice as many steps pass before the network makes more,
up to this number."""

_FEW = 3
"""A draft at some position counts as verified if one sequence in so many verifies it. On an
H200 a token of all drafts takes 4 % of a step of 64 requests."""

_PRIOR_RATE = 0.5
_RATE_SHARE = 0.04
_TYPICAL_SHARE = 0.005
_PRIOR_TRIALS = 4
_RETURN_SHARE = 0.02


class AcceptanceRate:
    """The probability that a draft token is accepted if all before it were, for one sequence.

    A running mean; the first trials weigh more. A sequence begins with the ``typical`` rate of
    others, and returns to it as long as no trial comes.
    """

    __slots__ = ("_min_share", "_num_trials", "_typical", "value")

    def __init__(self, typical: AcceptanceRate | None = None) -> None:
        self._typical = typical
        self.value: float = _PRIOR_RATE if typical is None else typical.value
        self._min_share = _TYPICAL_SHARE if typical is None else _RATE_SHARE
        self._num_trials = 0

    def idle(self) -> None:
        """A step had no trial."""
        if self._typical is not None:
            self.value += (self._typical.value - self.value) * _RETURN_SHARE

    def observe(self, num_accepted: int, *, has_rejected: bool) -> None:
        """Take in the outcomes of drafts: accepted tokens, and whether one was rejected."""
        value, trials, least = self.value, self._num_trials, self._min_share
        if self._typical is not None:
            self._typical.observe(num_accepted, has_rejected=has_rejected)
        if (trials + 1 + _PRIOR_TRIALS) * least >= 1.0:
            # All of these trials have the same share.
            value = 1.0 - (1.0 - value) * (1.0 - least) ** num_accepted
            self.value = value * (1.0 - least) if has_rejected else value
            return
        for number in range(num_accepted + has_rejected):
            trials += 1
            share = 1.0 / (trials + _PRIOR_TRIALS)
            share = max(share, least)
            value += ((number < num_accepted) - value) * share
        self.value, self._num_trials = value, trials


class _Times:
    """Mean seconds of steps, by number of rows."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_EDGES) + 1)
        self._means = [0.0] * (len(_EDGES) + 1)

    def record(self, num_rows: int, seconds: float) -> None:
        """Take in a step's time."""
        size = bisect_left(_EDGES, num_rows)
        self.counts[size] += 1
        mean = self._means[size]
        share = max(_NEW_SHARE, 1.0 / self.counts[size])
        if mean:
            seconds = min(seconds, _OUTLIER * mean)
        self._means[size] += (seconds - mean) * share

    def is_known(self, num_rows: int) -> bool:
        """Whether steps of this size were measured often enough."""
        return self.counts[bisect_left(_EDGES, num_rows)] >= _ENOUGH

    def forget_above(self, num_rows: int) -> None:
        """Forget the time of the next larger measured size."""
        size = bisect_left(_EDGES, num_rows) + 1
        larger = next((i for i in range(size, len(self.counts)) if self.counts[i]), None)
        if larger is not None:
            self.counts[larger], self._means[larger] = 0, 0.0

    @property
    def min_rows(self) -> float:
        """The least number of rows of a measured size; infinite if none was measured."""
        size = next((i for i, count in enumerate(self.counts) if count), 0)
        return (0, *_EDGES)[size] + 1 if self.counts[size] else math.inf

    def estimates(self, num_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds of steps of so many rows, between the means of the measured sizes beside
        them. Some size must have been measured."""
        known = [size for size, count in enumerate(self.counts) if count]
        rows = [(*_EDGES, 2 * _EDGES[-1])[size] for size in known]
        return np.interp(num_rows, rows, [self._means[size] for size in known])


class DraftController:
    """Chooses the draft rows of each step from acceptance rates and measured step times.

    A draft row at position j of a sequence with rate p adds p^j tokens to what a step yields.
    Rows are added in order of that number, as long as the expected tokens a second of the batch
    rise. Sizes of steps that were not measured yet count as fast as the largest smaller size,
    so that they get measured.
    """

    def __init__(self) -> None:
        self._plain = _Times()
        self._drafted = _Times()
        self._num_in_a_row = 0
        self._was_drafted = False
        self.is_measuring = False
        """Whether the last choice was no drafts because their alternative is to be measured."""

    def record(self, num_rows: int, seconds: float, *, is_drafted: bool) -> None:
        """Take in the time of a step of decodes alone, in order of steps."""
        is_first = self._was_drafted and not is_drafted
        self._was_drafted = is_drafted
        # The first step without drafts is planned after the result of a step with drafts;
        # later ones may be planned while the device works.
        if not is_first:
            (self._drafted if is_drafted else self._plain).record(num_rows, seconds)

    def choose(
        self,
        num_decodes: int,
        rates: List[float],
        most: List[int],
        room: int,
        shape: TreeShape | None = None,
    ) -> list[int]:
        """The number of draft rows of each candidate, beside ``num_decodes`` decode rows.

        Candidate i accepts with rate ``rates[i]`` and has ``most[i]`` draft tokens: a chain, or
        the first nodes of a tree of this ``shape``. The candidates together get ``room`` rows
        at most.
        """
        self.is_measuring = self._is_to_measure(num_decodes)
        if self.is_measuring or not rates:
            return [0] * len(rates)
        positions = np.arange(1, max(most) + 1)[:, None]
        is_draft = positions <= np.array(most)
        gains = _gains(np.array(rates), positions, shape)[is_draft]
        numbers = np.broadcast_to(np.arange(len(rates)), is_draft.shape)[is_draft]
        order = np.argsort(-gains, kind="stable")[:room]
        num_rows = num_decodes + np.arange(len(order) + 1)
        tokens = np.concatenate(([num_decodes], num_decodes + np.cumsum(gains[order])))
        speeds = tokens / self._seconds(num_rows)
        best = int(np.argmax(speeds))
        if speeds[best] <= speeds[0] * _MIN_GAIN:
            best = 0
        self._num_in_a_row += best > 0
        if best and self._num_in_a_row == _LARGER_AT:
            # A larger size that was disturbed when it was measured gets another chance.
            self._drafted.forget_above(num_decodes + best)
        chosen: list[int] = np.bincount(numbers[order[:best]], minlength=len(rates)).tolist()
        return chosen

    def _is_to_measure(self, num_decodes: int) -> bool:
        """Whether the time of steps without drafts is unknown, or was measured long ago."""
        is_old = self._num_in_a_row >= _PLAIN_EVERY
        if is_old:
            self._num_in_a_row = 0
        return is_old or not self._plain.is_known(num_decodes)

    def _seconds(self, num_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Expected seconds of steps of so many rows in all, the first one without drafts."""
        seconds = self._plain.estimates(num_rows)
        is_drafted = num_rows >= self._drafted.min_rows
        is_drafted[0] = False
        if is_drafted.any():
            seconds[is_drafted] = self._drafted.estimates(num_rows[is_drafted])
        # More rows save no time: a step without drafts that seems slower was disturbed.
        least: npt.NDArray[np.float64] = np.maximum(seconds, seconds[0])
        return least


def _gains(
    rates: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], shape: TreeShape | None
) -> npt.NDArray[np.float64]:
    """[positions, candidates]: the tokens that a draft row at each position adds. They do not
    rise with the position, so that the best rows of a candidate are its first ones."""
    if shape is None:
        gains: npt.NDArray[np.float64] = rates**positions
        return gains
    count = len(positions)
    gains = rates ** shape.depths[:count, None] * shape.shares[:count, None]
    # A node that adds less than nodes behind it counts as their mean: a step verifies the
    # first nodes, and some of these may be the price of better ones.
    starts = _falling_blocks(gains.mean(axis=1).tolist())
    lengths = np.diff([*starts, count])
    means = np.add.reduceat(gains, starts, axis=0) / lengths[:, None]
    return np.minimum.accumulate(np.repeat(means, lengths, axis=0), axis=0)


def _falling_blocks(gains: List[float]) -> list[int]:
    """The starts of blocks whose means fall, each as short as possible (the pooling of adjacent
    violators of isotonic regression)."""
    blocks: list[tuple[int, float, int]] = []
    for start, gain in enumerate(gains):
        block = start, gain, 1
        while blocks and blocks[-1][1] * block[2] < block[1] * blocks[-1][2]:
            first, total, length = blocks.pop()
            block = first, total + block[1], length + block[2]
        blocks.append(block)
    return [start for start, _, _ in blocks]


class DraftReach:
    """How many tokens a network drafts for each sequence: as many as steps verify, except in
    few sequences.

    Batches of similar numbers of sequences have a number of their own, which a change of the
    batch's size does not have to find again.
    """

    def __init__(self, counts: List[int]) -> None:
        """A network drafts one of these numbers of tokens, in order, at first the last one."""
        self._counts = counts
        self._sizes: dict[int, _SizeReach] = {}

    def value_of(self, num_sequences: int) -> int:
        """The tokens of each of so many sequences."""
        return self._counts[self._size_of(num_sequences).index]

    def observe(self, num_sequences: int, verified: List[int]) -> None:
        """A step of so many sequences verifies these numbers of drafts, one or more."""
        used = sorted(verified, reverse=True)[(len(verified) - 1) // _FEW]
        self._size_of(num_sequences).observe(used, self._counts)

    def _size_of(self, num_sequences: int) -> _SizeReach:
        size = num_sequences.bit_length()
        if size not in self._sizes:
            self._sizes[size] = _SizeReach(len(self._counts) - 1)
        return self._sizes[size]


class _SizeReach:
    """The index of the drafted number among the possible ones, for batches of one size."""

    __slots__ = ("_has_grown", "_most_used", "_num_full", "_num_spare", "_patience", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self._num_spare = self._num_full = self._most_used = 0
        self._patience, self._has_grown = _FULL_STEPS, False

    def observe(self, used: int, counts: List[int]) -> None:
        """A step verifies ``used`` drafts."""
        if used < counts[self.index]:
            self._num_spare, self._num_full = self._num_spare + 1, 0
            self._most_used = max(self._most_used, used)
        else:
            self._num_spare, self._num_full, self._most_used = 0, self._num_full + 1, 0
        if self._num_spare >= _SPARE_STEPS:
            self.index = min(self.index, bisect_left(counts, self._most_used))
            self._num_spare = self._most_used = 0
            self._patience = min(2 * self._patience, _MOST_FULL_STEPS)
            self._has_grown = False
        elif self._num_full >= (_FULL_STEPS if self._has_grown else self._patience):
            if self._has_grown:
                self._patience = _FULL_STEPS
            self.index = min(self.index + 1, len(counts) - 1)
            self._num_full, self._has_grown = 0, True
