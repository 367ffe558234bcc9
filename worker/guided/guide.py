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

_NO_MASKS: Mask = np.empty((0, 0), np.int32)

_SLOW_STEPS = 10

_numbers = count(1)


class Grammar:
    """One request's lease of the process that compiled its guide. Owned by the engine's thread.

    Requests with the same guide share a process. The process is given back when the guides of
    all sequences of the request are closed.
    """

    def __init__(self, process: MaskProcess, step_timeout_s: float) -> None:
        self.process = process
        self._step_timeout_s = step_timeout_s
        self._slow_s = 0.0
        self._num_guides = 0

    def start(self, end_id: int, output_ids: List[int], draft_ids: List[int] = ()) -> Guide:
        """Request the mask after this output, and the masks after each of the draft ids behind
        the output; ``end_id`` -1 means that no id ends an output."""
        guide = self._new(end_id)
        guide.ask(output_ids, draft_ids)
        return guide

    def fork(self, guide: Guide) -> Guide:
        """Another sequence with the start state of ``guide``. Requests no mask."""
        copy = self._new(guide.end_id)
        copy.masks, copy.is_complete = guide.masks[:1], guide.is_complete
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
    other steps run. The sequence joins no step before the mask has arrived. Masks of the
    positions behind draft ids come with the mask, so that one step can verify these ids.
    """

    __slots__ = (
        "_asked_drafts", "draft_ids", "end_id", "error", "grammar",
        "is_complete", "masks", "new_ids", "number",
    )  # fmt: skip

    def __init__(self, grammar: Grammar, number: int, end_id: int) -> None:
        self.grammar = grammar
        self.number = number
        self.end_id = end_id
        self.masks: Mask = _NO_MASKS
        """[n, words]: the ids that may come next, and the ids that may come after each of
        ``draft_ids``; empty until the masks arrive."""
        self.draft_ids: List[int] = ()
        """The draft ids that the guide allows and whose masks are known."""
        self.new_ids: list[int] = []
        """Ids that followed since masks were requested."""
        self._asked_drafts: List[int] = ()
        self.is_complete = False
        """Whether the output ends here: no end id exists, and the guide allows no further
        id.
        """
        self.error: RequestError | None = None
        """Why no mask comes."""

    @property
    def is_answered(self) -> bool:
        """Whether the mask is there, or will not come."""
        return bool(len(self.masks)) or self.error is not None

    def fork(self) -> Guide:
        """Another sequence of the request that starts where this guide does."""
        return self.grammar.fork(self)

    @property
    def mask(self) -> Mask | None:
        """The ids that may come next; None until they are known."""
        return self.masks[0] if len(self.masks) else None

    def accept(self, token_id: int) -> bool:
        """Take in one more id; False if the guide forbids the id.

        Call `ask` behind the last id. All ids but the last must be ``draft_ids``, in order.
        """
        place = len(self.new_ids)
        assert place < len(self.masks), "an id was sampled without its mask"
        if not self.masks[place, token_id >> 5] >> (token_id & 31) & 1:
            return False
        self.new_ids.append(token_id)
        return True

    def ask(self, token_ids: List[int], draft_ids: List[int] = ()) -> None:
        """Advance by these ids, and request the next mask and the masks behind draft ids."""
        self.masks, self.draft_ids, self.new_ids = _NO_MASKS, (), []
        self._asked_drafts = draft_ids
        self.grammar.process.ask(self, token_ids, draft_ids)

    def accept_masks(self, masks: Mask, seconds: float, *, is_complete: bool) -> None:
        """Accept the requested masks; ``seconds`` is the time of a slow first mask."""
        self.error = self.grammar.took(seconds)
        if self.error is None:
            self.masks, self.is_complete = masks, is_complete
            self.draft_ids = self._asked_drafts[: len(masks) - 1]

    def close(self) -> None:
        """The sequence has ended."""
        self.grammar.process.drop(self)
        self.grammar.closed()
