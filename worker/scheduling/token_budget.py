"""How a prompt that needs several steps is cut, and what it leaves to those behind it."""

from __future__ import annotations

from collections.abc import Sequence as List
from itertools import islice
from operator import attrgetter

from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.requests.request import KEY, Sequence

_MOST_SEEN = 32
"""Waiting sequences that are looked at."""

_REFUSED_STEPS = 4
"""Steps in which nothing is left to those that wait for blocks."""


class FairChunks:
    """Cuts what a sequence has to compute into parts of steps.

    One that needs more than a step leaves up to half of it to short prompts that wait, and
    stops at a block's end if it can.
    """

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        self._block_size = block_size
        self._shares = config.enable_chunked_context and not config.is_static
        self._refused_until = 0

    def refuse(self, step: int) -> None:
        """Who waits has found no blocks in this step, and will not soon."""
        self._refused_until = step + _REFUSED_STEPS

    def size(
        self,
        sequence: Sequence,
        missing: int,
        budget: int,
        waiting: List[Sequence],
        step: int,
    ) -> int:
        """Tokens to compute in ``step``, of ``missing`` ones and within ``budget``, above 0."""
        budget = max(1, budget)
        if missing <= budget:
            return missing
        if self._shares and step > self._refused_until:
            budget -= left_to_waiting(waiting, budget)
        return part_of_prompt(sequence.num_computed_tokens, budget, self._block_size)


def part_of_prompt(start: int, budget: int, block_size: int) -> int:
    """Tokens to compute after the first ``start``: up to a block's end if the budget allows."""
    aligned = (start + budget) // block_size * block_size - start
    return aligned if aligned > 0 else budget


def left_to_waiting(waiting: List[Sequence], budget: int) -> int:
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


_LAST_STEP = attrgetter("last_step")


class MicroBatches:
    """Shares the running sequences out over as many steps as are in flight.

    With p stages p steps run at once, one on each. They hold different sequences: what
    follows a token is known when it has left the last stage. A prompt is no such case, and
    its chunks follow each other in consecutive steps. Each step takes an equal share of the
    sequences that decode, so that stages neither wait for a large step nor run empty ones;
    what was scheduled longest ago goes first.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def pick(self, running: list[Sequence], step: int) -> list[Sequence]:
        """Those of ``running`` that ``step`` may take, in the same order."""
        prompts: list[Sequence] = []
        ready: list[Sequence] = []
        num_decoding = 0
        for sequence in running:
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                prompts.append(sequence)
                continue
            num_decoding += 1
            is_known = len(sequence.token_ids) > sequence.num_computed_tokens
            if is_known and not sequence.num_pending:
                ready.append(sequence)
        share = num_decoding // self.count + (step % self.count < num_decoding % self.count)
        share = max(1, share)
        if len(ready) > share:
            ready = sorted(ready, key=_LAST_STEP)[:share]
        return sorted(prompts + ready, key=KEY)
