"""The growing text of one sequence: detokenized, cut at stop words, echoed or not."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimaran.server.models.sequence_outputs import Progress
from trimaran.server.models.tokenizer import IncrementalDetokenizer


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


@dataclass(slots=True)
class TextAnswer:
    """One sequence's detokenizer and stop words, and what was shown of it."""

    detokenizer: IncrementalDetokenizer
    stop: StopText
    progress: Progress
    _parts: list[str] = field(default_factory=list)

    def push(self, ids: list[int]) -> str:
        """The text that may be shown after these ids."""
        return self._shown(self.stop.push(self.detokenizer.push(ids)))

    def push_each(self, ids: list[int]) -> tuple[str, int]:
        """The same, id by id up to the end of a stop word; and how many these are."""
        deltas = []
        for token in ids:
            deltas.append(self.push([token]))
            if self.stop.is_matched:
                break
        return "".join(deltas), len(deltas)

    def finish(self, rest: str) -> str:
        """The last text; ``rest`` is what the detokenizer still had."""
        return self._shown(self.stop.push(rest, is_last=True))

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._parts)

    def _shown(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text
