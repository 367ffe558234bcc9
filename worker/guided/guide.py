"""A sequence's place in its grammar, and which ids may come next there."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.comm.errors import RequestError


class Grammar:
    """A compiled guide, shared by all sequences that follow it."""

    def __init__(self, xgrammar: ModuleType, compiled: Any, vocab_size: int) -> None:
        self._xgrammar = xgrammar
        self._compiled = compiled
        self.vocab_size = vocab_size

    def start(self, end_id: int, output_ids: Iterable[int]) -> Guide:
        """Where a sequence with this output stands; ``end_id`` -1 means that no id ends one.

        Raises:
            RequestError: the output does not follow the grammar.
        """
        # Without an end id an output ends where nothing else can follow.
        matcher = self._xgrammar.GrammarMatcher(
            self._compiled,
            override_stop_tokens=[end_id] if end_id >= 0 else None,
            terminate_without_stop_token=end_id < 0,
        )
        guide = Guide(self, matcher)
        for place, token_id in enumerate(output_ids):
            if not guide.accept(token_id):
                raise RequestError(
                    f"id {token_id} at place {place} of the output does not follow the guide"
                )
        return guide


class Guide:
    """One sequence's place in a grammar."""

    __slots__ = ("grammar", "matcher")

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        self.grammar = grammar
        self.matcher = matcher

    def accept(self, token_id: int) -> bool:
        """Go on by one id; False, with nothing changed, if it may not come here."""
        return bool(self.matcher.accept_token(token_id))

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self.matcher.is_terminated())


class Masks:
    """Fills bit masks for the sequences of a step, in threads where there are several."""

    def __init__(self) -> None:
        self._batch: Any = None

    def fill(self, guides: List[Guide]) -> npt.NDArray[np.int32]:
        """int32 [n, ceil(V / 32)]: bit ``id % 32`` of word ``id // 32`` lets the id come."""
        vocab_size = guides[0].grammar.vocab_size
        masks = np.full((len(guides), -(-vocab_size // 32)), -1, dtype=np.int32)
        matchers = [guide.matcher for guide in guides]
        if len(matchers) == 1:
            matchers[0].fill_next_token_bitmask(masks, 0)
            return masks
        if self._batch is None:
            self._batch = guides[0].grammar._xgrammar.BatchGrammarMatcher()
        self._batch.batch_fill_next_token_bitmask(matchers, masks)
        return masks
