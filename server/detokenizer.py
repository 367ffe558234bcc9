"""Incremental text of one sequence: whole UTF-8 characters, every space, no text twice."""

from __future__ import annotations

from trimaran.server.tokenizer import Tokenizer

# Ids of the prompt that give the first new id its context (a leading space).
_CONTEXT_IDS = 6
# A model that emits only broken bytes must not make each step decode all of them again.
_MAX_HELD_IDS = 32
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns ids into deltas whose concatenation is the text of all ids.

    Two windows over the ids are decoded, with and without the new ones, and their
    difference is the delta; a text that ends inside a character waits for more ids.
    The cost of a step does not grow with the sequence.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: list[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = prompt_ids[-_CONTEXT_IDS:]
        self._num_shown = len(self._ids)
        self._shown_text = tokenizer.decode(self._ids, self._skip)

    def push(self, ids: list[int], is_last: bool = False) -> str:
        """The text that these ids complete; with ``is_last`` all that is left."""
        if not ids and not is_last:
            return ""
        self._ids += ids
        text = self._tokenizer.decode(self._ids, self._skip)
        num_held = len(self._ids) - self._num_shown
        is_open = text.endswith(_REPLACEMENT) and num_held <= _MAX_HELD_IDS
        if is_open and not is_last:
            return ""
        delta = text[len(self._shown_text) :]
        # The ids just shown become the context of the next ones.
        self._ids = self._ids[self._num_shown :][-_CONTEXT_IDS:] or self._ids
        self._num_shown = len(self._ids)
        self._shown_text = self._tokenizer.decode(self._ids, self._skip)
        return delta
