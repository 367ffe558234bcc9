"""The library's side of a guide: a compiled grammar, and one matcher for each sequence."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt


class CompiledGuide:
    """A compiled guide. Only processes that can be killed hold a compiled guide."""

    def __init__(self, xgrammar: ModuleType, compiled: Any, vocab_size: int) -> None:
        self._xgrammar = xgrammar
        self._compiled = compiled
        self.vocab_size = vocab_size

    def start(self, end_id: int) -> Matcher:
        """The state before the first id; ``end_id`` -1 means that no id ends the output."""
        stops = [end_id] if end_id >= 0 else None
        matcher = self._xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=stops)
        return Matcher(matcher, has_end=end_id >= 0)


class Matcher:
    """The state of one output in its grammar. A call takes microseconds to hours."""

    __slots__ = ("_has_end", "_matcher", "_stop_ids")

    def __init__(self, matcher: Any, *, has_end: bool) -> None:
        self._matcher = matcher
        self._has_end = has_end
        # Without an end id the masks forbid the tokenizer's end ids too.
        self._stop_ids = () if has_end else tuple(matcher.stop_token_ids)

    def accept(self, token_id: int) -> bool:
        """Advance by one id; False, with nothing changed, if the id may not come here."""
        return token_id not in self._stop_ids and bool(self._matcher.accept_token(token_id))

    def fill(self, masks: npt.NDArray[np.int32], row: int) -> bool:
        """Set bit ``id % 32`` of word ``id // 32`` of a row for each allowed next id.

        Returns whether the output is complete: no end id exists, and no further id is allowed.
        ``masks`` is int32 [rows, ceil(V / 32)].
        """
        mask = masks[row]
        mask[:] = -1
        self._matcher.fill_next_token_bitmask(masks, row)
        for token_id in self._stop_ids:
            mask[token_id // 32] &= ~np.left_shift(np.int32(1), np.int32(token_id % 32))
        return not self._has_end and not mask.any() and bool(self._matcher.is_completed())

    def begin_drafts(self, token_id: int) -> bool:
        """Advance by a draft id, to be taken back; False, with nothing changed, if the id may
        not come here or ends the output."""
        return token_id not in self._matcher.stop_token_ids and self.accept(token_id)

    def end_drafts(self, count: int) -> None:
        """Take the last ``count`` ids back."""
        if count:
            self._matcher.rollback(count)
