"""The search for the fastest candidate; timing is a callable, so that any clock can serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from trimaran.kernels.tables.grouped_table import Cut, GroupedShape, TritonCut
from trimaran.kernels.tables.product_table import Choice, GemmShape, SkinnyShape

_GAIN = 0.99
"""A candidate must take at most this share of the best time, in two comparisons."""

_EARLY_TILES = (1, 2, 3, 5, 8)
"""Values tried with the best tile shape: weights in flight before the rows are ready."""

TimeProduct = Callable[[Choice], float]
Pair = tuple[Cut, Cut]
TimePair = Callable[[Pair | None], float]


def best_product(
    time_us: TimeProduct, candidates: Sequence[GemmShape | SkinnyShape]
) -> tuple[Choice, float, float]:
    """The fastest tile shape, or None for the derived rule; the time by that rule, and the
    best time."""
    best: Choice = None
    first_us = best_us = time_us(None)
    best, best_us = _better(time_us, best, best_us, candidates)
    if isinstance(best, GemmShape):
        paced = [replace(best, max_early=tiles) for tiles in _EARLY_TILES]
        best, best_us = _better(time_us, best, best_us, paced)
    return best, first_us, best_us


def _better(
    time_us: TimeProduct,
    best: Choice,
    best_us: float,
    candidates: Iterable[GemmShape | SkinnyShape],
) -> tuple[Choice, float]:
    for cut in candidates:
        if time_us(cut) >= _GAIN * best_us:
            continue
        # The clock may have changed since the best time was measured.
        best_us = time_us(best)
        if (trial_us := time_us(cut)) < _GAIN * best_us:
            best, best_us = cut, trial_us
    return best, best_us


def best_pair(time_us: TimePair, candidates: Sequence[Cut]) -> tuple[Pair | None, float, float]:
    """The fastest tile shapes of both products of a layer's experts, of one kernel; None for
    the derived rule. With the time by that rule, and the best time."""
    best: Pair | None = None
    first_us = best_us = time_us(None)
    for family in (GroupedShape, TritonCut):
        cuts = [cut for cut in candidates if isinstance(cut, family)]
        if not cuts:
            continue
        pair: Pair = (cuts[0], cuts[0])
        pair_us = time_us(pair)
        for place in (0, 1):
            for cut in cuts[1:]:
                other: Pair = (cut, pair[1]) if place == 0 else (pair[0], cut)
                if (other_us := time_us(other)) < pair_us:
                    pair, pair_us = other, other_us
        if pair_us < _GAIN * best_us and time_us(pair) < _GAIN * time_us(best):
            best, best_us = pair, pair_us
    return best, first_us, best_us
