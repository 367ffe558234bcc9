"""The text of one sequence as it grows: detokenized, cut at a stop word, echoed or not."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimaran.server.models.detokenizer import IncrementalDetokenizer
from trimaran.server.models.sequence_outputs import Progress
from trimaran.server.models.stop_text import StopText


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
