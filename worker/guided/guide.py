"""A request's guide on rank 0: the ids that may come next, once its process has found them."""

from __future__ import annotations

from collections.abc import Sequence as List
from itertools import count

import numpy as np
import numpy.typing as npt

from trimaran.comm.errors import RequestError
from trimaran.worker.guided.guide_process import SLOW_S
from trimaran.worker.guided.mask_process import MaskProcess

Mask = npt.NDArray[np.int32]
"""int32 [ceil(V / 32)]: bit ``id % 32`` of word ``id // 32`` lets the id come."""

_SLOW_STEPS = 10

_numbers = count(1)


class Grammar:
    """One request's hold on the process that compiled its guide. Owned by the engine's thread.

    Requests with the same guide share a process. The process is given back when the guides of
    all sequences of the request are closed.
    """

    def __init__(self, process: MaskProcess, step_timeout_s: float) -> None:
        self.process = process
        self._step_timeout_s = step_timeout_s
        self._slow_s = 0.0
        self._num_guides = 0

    def start(self, end_id: int, output_ids: List[int]) -> Guide:
        """Ask for the mask after this output; ``end_id`` -1 means that no id ends one."""
        guide = self._new(end_id)
        self.process.ask(guide, output_ids)
        return guide

    def fork(self, guide: Guide) -> Guide:
        """Another sequence with the start state of ``guide``. Requests no mask."""
        copy = self._new(guide.end_id)
        copy.mask, copy.is_complete = guide.mask, guide.is_complete
        return copy

    def _new(self, end_id: int) -> Guide:
        self._num_guides += 1
        return Guide(self, next(_numbers), end_id)

    def closed(self) -> None:
        """A guide of this request is closed."""
        self._num_guides -= 1
        if not self._num_guides:
            self.release()

    def release(self) -> None:
        """Give the process back."""
        self.process.release()

    def took(self, seconds: float) -> RequestError | None:
        """Count the time of one slow mask; an error if the request's share is used up."""
        self._slow_s += seconds
        is_short = self.process.is_wanted_elsewhere
        limit_s = self._step_timeout_s * (1 if is_short else _SLOW_STEPS)
        if self._slow_s <= limit_s:
            return None
        return RequestError(
            f"guided_decoding_guide takes more than {limit_s:g} s in masks of over {SLOW_S:g} "
            "s of processor time each. Make the guide less ambiguous: fewer ways to derive the "
            "same text; or serve with a larger --guide-step-timeout: the limit is "
            f"{_SLOW_STEPS} times that value, or once that value while all --guide-processes "
            "are in use."
        )


class Guide:
    """One sequence's state in its grammar.

    The mask of a position is requested as soon as the previous id is known, and computed while
    other steps run. The sequence joins no step before the mask has arrived.
    """

    __slots__ = ("end_id", "error", "grammar", "is_complete", "mask", "number")

    def __init__(self, grammar: Grammar, number: int, end_id: int) -> None:
        self.grammar = grammar
        self.number = number
        self.end_id = end_id
        self.mask: Mask | None = None
        """The ids that may come next; None until they are known."""
        self.is_complete = False
        """Whether the output ends here: no end id exists, and the guide allows no further
        id.
        """
        self.error: RequestError | None = None
        """Why no mask comes."""

    @property
    def is_settled(self) -> bool:
        """Whether the mask is there, or will not come."""
        return self.mask is not None or self.error is not None

    def fork(self) -> Guide:
        """Another sequence of the request that starts where this guide does."""
        return self.grammar.fork(self)

    def accept(self, token_id: int) -> bool:
        """Advance by one id and request the next mask; False if the guide forbids the id."""
        mask = self.mask
        assert mask is not None, "an id was sampled without its mask"
        if not mask[token_id >> 5] >> (token_id & 31) & 1:
            return False
        self.mask = None
        self.grammar.process.ask(self, (token_id,))
        return True

    def settle(self, mask: Mask, seconds: float, *, is_complete: bool) -> None:
        """Accept the requested mask; ``seconds`` is the time of a slow mask."""
        self.error = self.grammar.took(seconds)
        if self.error is None:
            self.mask, self.is_complete = mask, is_complete

    def close(self) -> None:
        """The sequence has ended."""
        self.grammar.process.drop(self)
        self.grammar.closed()
