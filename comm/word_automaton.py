"""Finds the first of many words that a growing text, or list of ids, ends with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

SymbolT = TypeVar("SymbolT", str, int)


class WordState(Generic[SymbolT]):
    """The state of an automaton after the symbols so far: the longest tail that begins a
    word."""

    __slots__ = ("depth", "ends_word", "fallback", "following", "high", "low")

    def __init__(
        self, depth: int, low: int, high: int, fallback: WordState[SymbolT] | None
    ) -> None:
        self.depth = depth
        """Length of the tail."""
        self.low, self.high = low, high
        """The range of the sorted words that begin with the tail."""
        self.fallback: WordState[SymbolT] | None = fallback
        """The state of the longest proper suffix of the tail that begins a word."""
        self.ends_word = False
        """Whether the tail, or a suffix of it, is a word."""
        self.following: dict[SymbolT, WordState[SymbolT]] = {}
        """The states of the next symbols that were seen here."""


class WordAutomaton(Generic[SymbolT]):
    """An Aho-Corasick automaton that creates states on their first visit.

    A symbol costs one dictionary look-up, for any number of words. The first visit of a state
    costs two binary searches over the sorted words. The construction only sorts the words.
    Memory holds the words and the visited states, while a complete automaton would hold a state
    for each symbol of each word.

    States are shared: any number of sequences may use one automaton, each with its current
    state. Used in one thread.
    """

    def __init__(self, words: Iterable[Sequence[SymbolT]]) -> None:
        """Sort the words; empty words are left out."""
        found: set[Any] = set(words)
        self._words = sorted(word for word in found if word)
        self.start: WordState[SymbolT] = WordState(0, 0, len(self._words), None)
        """The state before the first symbol."""

    def __bool__(self) -> bool:
        return bool(self._words)

    def next(self, state: WordState[SymbolT], symbol: SymbolT) -> WordState[SymbolT]:
        """The state after one more symbol."""
        found = state.following.get(symbol)
        return self._reach(state, symbol) if found is None else found

    def after(
        self, symbols: Iterable[SymbolT], state: WordState[SymbolT] | None = None
    ) -> WordState[SymbolT]:
        """The state after more symbols, words among them or not; by default from the start."""
        found = self.start if state is None else state
        for symbol in symbols:
            found = self.next(found, symbol)
        return found

    def num_ending(self, state: WordState[SymbolT]) -> int:
        """Symbols of the longest word that the tail of a state ends with; 0 if none does."""
        found: WordState[SymbolT] | None = state
        while found is not None and found.depth:
            # The word that is the tail itself sorts before those that go on.
            if len(self._words[found.low]) == found.depth:
                return found.depth
            found = found.fallback
        return 0

    def _reach(self, state: WordState[SymbolT], symbol: SymbolT) -> WordState[SymbolT]:
        """Create the state after ``symbol``, and its fallback states.

        Each visited suffix shortens the tail, so the average cost of a symbol over a sequence
        is constant.
        """
        visited: list[WordState[SymbolT]] = []
        suffix: WordState[SymbolT] | None = state
        found: WordState[SymbolT] | None = None
        while suffix is not None and found is None:
            visited.append(suffix)
            suffix = suffix.fallback
            found = None if suffix is None else suffix.following.get(symbol)
        reached = self.start if found is None else found
        for suffix in reversed(visited):
            reached = self._child(suffix, symbol, reached) or reached
            suffix.following[symbol] = reached
        return reached

    def _child(
        self, state: WordState[SymbolT], symbol: SymbolT, fallback: WordState[SymbolT]
    ) -> WordState[SymbolT] | None:
        """The state of the tail followed by ``symbol``; None if no word has this prefix."""
        words, depth = self._words, state.depth

        def next_symbol(word: Any) -> Any:
            return word[depth]

        low, high = state.low, state.high
        # The word equal to the tail sorts before longer words.
        low += low < high and len(words[low]) == depth
        low = bisect_left(words, symbol, low, high, key=next_symbol)
        high = bisect_right(words, symbol, low, high, key=next_symbol)
        if low == high:
            return None
        child = WordState(depth + 1, low, high, fallback)
        child.ends_word = fallback.ends_word or len(words[low]) == depth + 1
        return child
