"""The text of one sequence as its ids arrive."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimaran.server.models.sequence_outputs import Progress
from trimaran.server.models.stop_text import StopText
from trimaran.server.models.tokenizer import IncrementalDetokenizer


@dataclass(slots=True)
class TextAnswer:
    """One sequence's detokenizer, stop words and emitted text."""

    detokenizer: IncrementalDetokenizer
    stop: StopText
    progress: Progress
    _parts: list[str] = field(default_factory=list)

    def push(self, ids: list[int]) -> str:
        """The text that may be shown after these ids."""
        return self._shown(self.stop.push(self.detokenizer.push(ids)))

    def push_each(self, ids: list[int]) -> tuple[str, int]:
        """Push id by id up to the end of a stop word: the text, and the number of ids used."""
        deltas = []
        for token in ids:
            deltas.append(self.push([token]))
            if self.stop.is_matched:
                break
        return "".join(deltas), len(deltas)

    def finish(self, rest: str) -> str:
        """The last text; ``rest`` is the text that the detokenizer still held."""
        return self._shown(self.stop.push(rest, is_last=True))

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._parts)

    def _shown(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text
