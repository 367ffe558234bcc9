"""Incremental text of one sequence: whole UTF-8 characters, every space, no text twice."""

from __future__ import annotations

from collections.abc import Iterable

from trimaran.server.models.tokenizer import Tokenizer

# Ids before a new one that settle its text, as a leading space does.
_CONTEXT_IDS = 6
# A character has at most 4 bytes, so at most 3 ids wait for its last byte.
_MAX_OPEN_IDS = 3
# The window is cut to its context again when it is this long: decoding one that is longer
# costs more than the second decoding that the cut takes.
_MAX_WINDOW_IDS = 24
# A model that emits only broken bytes must not make each step decode all of them again.
_MAX_HELD_IDS = 32
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns ids into deltas whose concatenation is the text of all ids.

    Two windows over the ids are decoded, with and without the new ones, and their
    difference is the delta; ids that end inside a character wait for more.
    The cost of a step does not grow with the sequence.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: list[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Skipped ids have no text; as context they would hide the space before the next.
        self._dropped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids = self._kept(prompt_ids)
        self._num_shown, self._shown_text = 0, ""
        self._show(len(self._ids))

    def push(self, ids: list[int], is_last: bool = False) -> str:
        """The text that these ids complete; with ``is_last`` all that is left."""
        self._ids += self._kept(ids)
        if len(self._ids) == self._num_shown:
            return ""
        end, text = self._complete(is_last)
        if end == self._num_shown:
            return ""
        delta = text[len(self._shown_text) :]
        if end < _MAX_WINDOW_IDS:
            self._num_shown, self._shown_text = end, text
        else:
            self._show(end)
        return delta

    def _complete(self, is_last: bool) -> tuple[int, str]:
        """How many ids make whole characters, and the text of these."""
        num_ids = len(self._ids)
        text = self._decode(self._ids)
        if is_last or not text.endswith(_REPLACEMENT):
            return num_ids, text
        first = max(self._num_shown, num_ids - 1 - _MAX_OPEN_IDS)
        for end in range(num_ids - 1, first, -1):
            part = self._decode(self._ids[:end])
            if not part.endswith(_REPLACEMENT):
                return end, part
        if num_ids - self._num_shown > _MAX_HELD_IDS:
            return num_ids, text
        return self._num_shown, self._shown_text

    def _show(self, end: int) -> None:
        """Make the last of the first ``end`` ids the context of those that follow."""
        size = min(_CONTEXT_IDS, end)
        text = self._decode(self._ids[end - size : end])
        # A context that starts inside a character could spoil the bytes that follow it.
        for _ in range(_MAX_OPEN_IDS):
            if size == end or not text.startswith(_REPLACEMENT):
                break
            size += 1
            text = self._decode(self._ids[end - size : end])
        self._ids = self._ids[end - size :]
        self._num_shown = size
        self._shown_text = text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def _kept(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token not in self._dropped]
