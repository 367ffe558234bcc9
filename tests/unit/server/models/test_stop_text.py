"""Stop words in growing text, against a search through all words at each delta."""

from __future__ import annotations

import random

import pytest

from trimaran.comm.word_automaton import WordAutomaton
from trimaran.server.models.stop_text import StopText


class PlainStopText:
    """The same by searching the held text for each word."""

    def __init__(self, words) -> None:
        self._words = tuple(word for word in words if word)
        self._held = ""
        self.is_matched = False

    def push(self, text, is_last=False):
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

    def _longest_beginning(self, text):
        longest = max(len(word) for word in self._words) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(word.startswith(tail) for word in self._words):
                return length
        return 0


def drawn_case(seed):
    """Words, and the deltas of a text that is made of beginnings of words."""
    draw = random.Random(seed)
    alphabet = draw.choice(("ab", "abc", "abcdé🙂 "))
    shortest = draw.choice((0, 1, 4))
    words = [
        "".join(draw.choices(alphabet, k=draw.randint(shortest, shortest + 6)))
        for _ in range(draw.choice((0, 1, 3, 40)))
    ]
    parts = [word[: draw.randint(0, len(word))] for word in draw.choices(words or ["b"], k=15)]
    text = "".join(part + draw.choice(alphabet) * draw.randint(0, 2) for part in parts)
    deltas = []
    while text:
        size = draw.randint(0, draw.choice((1, 9)))
        deltas.append(text[:size])
        text = text[size:]
    return words, deltas


@pytest.mark.parametrize("seed", range(300))
def test_every_delta_is_that_of_a_search_through_all_words(seed):
    words, deltas = drawn_case(seed)
    fast, plain = StopText(WordAutomaton(words)), PlainStopText(words)
    for number, delta in enumerate(deltas):
        is_last = number == len(deltas) - 1
        assert fast.push(delta, is_last) == plain.push(delta, is_last)
        assert fast.is_matched == plain.is_matched


@pytest.mark.parametrize("seed", range(20))
def test_stop_words_are_found_however_the_text_is_cut(seed):
    draw = random.Random(seed)
    text = "".join(draw.choice("abc") for _ in range(60))
    words = tuple("".join(draw.choice("abc") for _ in range(4)) for _ in range(3))
    ends = [text.find(word) + len(word) for word in words if word in text]
    stop, shown, start = StopText(WordAutomaton(words)), [], 0
    while start < len(text):
        end = start + draw.randint(1, 7)
        shown.append(stop.push(text[start:end], is_last=end >= len(text)))
        start = end
    assert stop.is_matched == bool(ends)
    # A chunk with two stop words is cut at the stop word that ends first.
    assert "".join(shown) == text[: min(ends, default=len(text))]
