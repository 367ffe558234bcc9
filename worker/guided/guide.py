"""A sequence's state in its grammar, and which ids are allowed next."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.comm.errors import RequestError


class Grammar:
    """A compiled guide, shared by all sequences that use it."""

    def __init__(self, xgrammar: ModuleType, compiled: Any, vocab_size: int) -> None:
        self._xgrammar = xgrammar
        self._compiled = compiled
        self.vocab_size = vocab_size
        self.num_bytes = int(compiled.memory_size_bytes)

    def start(self, end_id: int, output_ids: Iterable[int]) -> Guide:
        """The state after this output; ``end_id`` -1 means that no id ends the sequence.

        Raises:
            RequestError: the output does not follow the grammar.
        """
        matcher = self._xgrammar.GrammarMatcher(
            self._compiled, override_stop_tokens=[end_id] if end_id >= 0 else None
        )
        guide = Guide(self, matcher, has_end=end_id >= 0)
        for place, token_id in enumerate(output_ids):
            if not guide.accept(token_id):
                raise RequestError(
                    f"id {token_id} at place {place} of the output does not follow the guide"
                )
        return guide


class Guide:
    """One sequence's state in a grammar."""

    __slots__ = ("grammar", "has_end", "matcher")

    def __init__(self, grammar: Grammar, matcher: Any, *, has_end: bool) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.has_end = has_end
        """Whether an id ends the sequence."""

    def accept(self, token_id: int) -> bool:
        """Advance by one id; False, without a change, if the id is not allowed here."""
        if not self.has_end and token_id in self.matcher.stop_token_ids:
            return False
        return bool(self.matcher.accept_token(token_id))

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete: no id ends it, and nothing more is allowed."""
        if self.has_end or not self.matcher.is_completed():
            return False
        mask = blank_masks(1, self.grammar.vocab_size)
        self.matcher.fill_next_token_bitmask(mask, 0)
        self.forbid_ends(mask[0])
        return not mask.any()

    def forbid_ends(self, mask: npt.NDArray[np.int32]) -> None:
        """Mask the tokenizer's own end ids in an output that no id ends."""
        if not self.has_end:
            for token_id in self.matcher.stop_token_ids:
                mask[token_id // 32] &= ~np.left_shift(np.int32(1), np.int32(token_id % 32))


def blank_masks(count: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """[count, ceil(V / 32)]: bit masks that allow every id."""
    return np.full((count, -(-vocab_size // 32)), -1, dtype=np.int32)


class Masks:
    """Fills bit masks for the sequences of a step, with threads for several sequences."""

    def __init__(self) -> None:
        self._batch: Any = None

    def fill(self, guides: List[Guide]) -> npt.NDArray[np.int32]:
        """int32 [n, ceil(V / 32)]: bit ``id % 32`` of word ``id // 32`` allows the id."""
        masks = blank_masks(len(guides), guides[0].grammar.vocab_size)
        matchers = [guide.matcher for guide in guides]
        if len(matchers) == 1:
            matchers[0].fill_next_token_bitmask(masks, 0)
        else:
            if self._batch is None:
                self._batch = guides[0].grammar._xgrammar.BatchGrammarMatcher()
            self._batch.batch_fill_next_token_bitmask(matchers, masks)
        for guide, mask in zip(guides, masks, strict=True):
            guide.forbid_ends(mask)
        return masks
