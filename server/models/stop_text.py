"""The text of an answer as its ids arrive, and stop words in it, whatever tokens spell them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimaran.comm.word_automaton import WordAutomaton
from trimaran.server.inference.request import Tensor
from trimaran.server.models.sample_inputs import SampleInputs
from trimaran.server.models.sequence_outputs import Progress
from trimaran.server.models.tokenizer import IncrementalDetokenizer

MANY_WORDS = 1 << 10
"""More words than these are read and sorted in a thread: that takes over a millisecond."""

StopWords = WordAutomaton[str]

_NO_WORDS: StopWords = WordAutomaton(())
"""Shared: it has no word, so that nothing is ever looked up in it."""


def read_stop_words(
    inputs: Mapping[str, Tensor], name: str, num_samples: int, *, is_batched: bool
) -> list[StopWords]:
    """The stop words of each sample; samples of equal words share them.

    Raises:
        RequestError: not UTF-8.
    """
    known: dict[tuple[str, ...], StopWords] = {}
    found = []
    for index in range(num_samples):
        words = tuple(SampleInputs(inputs, index, is_batched).texts(name))
        if not words:
            found.append(_NO_WORDS)
            continue
        if words not in known:
            known[words] = WordAutomaton(words)
        found.append(known[words])
    return found


class StopText:
    """Passes text through until a stop word is complete.

    The longest tail that could begin a stop word is held back. The stop word itself
    stays in the text, unless ``hides_word``; what follows it is cut. A character costs the
    same however many words there are.
    """

    def __init__(self, words: StopWords, *, hides_word: bool = False) -> None:
        self._words = words
        self._hides_word = hides_word
        self._state = words.start
        self._held = ""
        """As long as the state's tail, which it equals."""
        self.is_matched = False

    def push(self, text: str, is_last: bool = False) -> str:
        """The text that may be shown now; with ``is_last`` no text is held back."""
        if self.is_matched:
            return ""
        words, state = self._words, self._state
        if not words:
            return text
        for index, character in enumerate(text):
            state = state.following.get(character) or words.next(state, character)
            if state.ends_word:
                self.is_matched = True
                shown = self._held + text[: index + 1]
                num_hidden = words.num_ending(state) if self._hides_word else 0
                return shown[: len(shown) - num_hidden]
        self._state = state
        text = self._held + text
        num_shown = len(text) if is_last else len(text) - state.depth
        self._held = text[num_shown:]
        return text[:num_shown]


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
