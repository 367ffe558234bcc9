"""Stop words as text: found wherever they stand, across the borders of tokens."""

from __future__ import annotations


class StopText:
    """Passes text through until a stop word is complete.

    The longest tail that could begin a stop word is held back. The stop word itself
    stays in the text; what follows it is cut.
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = tuple(word for word in words if word)
        self._held = ""
        self.is_matched = False

    def push(self, text: str, is_last: bool = False) -> str:
        """What may be shown now; with ``is_last`` nothing is held back."""
        if self.is_matched:
            return ""
        if not self._words:
            return text
        text = self._held + text
        self._held = ""
        ends = [start + len(w) for w in self._words if (start := text.find(w)) >= 0]
        if ends:
            self.is_matched = True
            return text[: min(ends)]
        if is_last:
            return text
        num_held = self._longest_beginning(text)
        if num_held:
            self._held = text[-num_held:]
            return text[:-num_held]
        return text

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest tail of ``text`` that begins a stop word."""
        longest = max(len(word) for word in self._words) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(word.startswith(tail) for word in self._words):
                return length
        return 0
