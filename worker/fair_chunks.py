"""How a prompt that needs several steps is cut, and what it leaves to those behind it."""

from __future__ import annotations

from itertools import islice

from trimaran.worker.request import Sequence

_MOST_SEEN = 32
"""Waiting sequences that are looked at."""


def part_of_prompt(start: int, budget: int, block_size: int) -> int:
    """Tokens to compute after the first ``start``: up to a block's end if the budget allows."""
    aligned = (start + budget) // block_size * block_size - start
    return aligned if aligned > 0 else budget


def left_to_waiting(waiting: list[Sequence], budget: int) -> int:
    """Tokens of ``budget``, half of it at most, in which whole prompts of ``waiting`` fit.

    Prompts that do not fit are not counted: long ones follow each other, for side by side
    none of them would be done earlier, and the first of them later.
    """
    left = budget // 2
    taken = 0
    for sequence in islice(waiting, _MOST_SEEN):
        length = len(sequence.token_ids)
        if taken + length <= left:
            taken += length
    return taken
