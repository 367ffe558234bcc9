"""How a step's token budget is shared out: chunked prefill, and a pipeline's micro-batches."""

from __future__ import annotations

from collections.abc import Sequence as List
from itertools import islice
from operator import attrgetter

from trimaran.worker.requests.request import KEY, Sequence

_LAST_STEP = attrgetter("last_step")

_MAX_SEEN = 32
"""Waiting sequences that are looked at."""

_BLOCKED_STEPS = 4
"""Steps in which no budget is left to waiting sequences after one found no blocks."""


class ChunkedPrefill:
    """Cuts the tokens that a sequence misses into chunks of steps.

    A sequence that needs more than one step leaves up to half of its budget to short prompts
    that wait. Its chunk stops at a block's end if that is possible.
    """

    def __init__(self, block_size: int, *, leaves_room: bool) -> None:
        """Without ``leaves_room`` no budget is left to prompts that wait."""
        self._block_size = block_size
        self._leaves_room = leaves_room
        self._blocked_until = 0

    def out_of_blocks(self, step: int) -> None:
        """A waiting sequence found no blocks in ``step``, and probably will not soon."""
        self._blocked_until = step + _BLOCKED_STEPS

    def size(
        self,
        sequence: Sequence,
        missing: int,
        budget: int,
        waiting: List[Sequence],
        step: int,
    ) -> int:
        """Tokens to compute in ``step``: 1 to ``missing``, and within ``budget``."""
        budget = max(1, budget)
        if missing <= budget:
            return missing
        if self._leaves_room and step > self._blocked_until:
            budget -= left_to_waiting(waiting, budget)
        return chunk_size(sequence.num_computed_tokens, budget, self._block_size)


def chunk_size(start: int, budget: int, block_size: int) -> int:
    """Tokens to compute after the first ``start``: up to a block's end if the budget allows."""
    aligned = (start + budget) // block_size * block_size - start
    return aligned if aligned > 0 else budget


def left_to_waiting(waiting: List[Sequence], budget: int) -> int:
    """Tokens of ``budget``, half of it at most, into which whole prompts of ``waiting`` fit.

    Longer prompts are not counted. They follow each other: side by side no prompt would be
    done earlier, and the first one later.
    """
    left = budget // 2
    taken = 0
    for sequence in islice(waiting, _MAX_SEEN):
        length = len(sequence.token_ids)
        if taken + length <= left:
            taken += length
    return taken


class MicroBatches:
    """Shares the running sequences out over as many steps as a pipeline has in flight.

    With p stages p steps run at once, one on each stage, and they hold different sequences: the
    next decode of a sequence is possible once its token has left the last stage. Prompts have
    no such limit, and their chunks follow each other in consecutive steps. Each step takes an
    equal quota of the decoding sequences, so stages neither wait for a large step nor run empty
    ones. Sequences that were scheduled longest ago go first.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def pick(self, running: list[Sequence], step: int) -> list[Sequence]:
        """The sequences of ``running`` that ``step`` may take, in the same order."""
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
        quota = num_decoding // self.count + (step % self.count < num_decoding % self.count)
        quota = max(1, quota)
        if len(ready) > quota:
            ready = sorted(ready, key=_LAST_STEP)[:quota]
        return sorted(prompts + ready, key=KEY)
