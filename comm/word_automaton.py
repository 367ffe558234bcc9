"""Finds the first of many words that a growing text, or list of ids, ends with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

SymbolT = TypeVar("SymbolT", str, int)


class WordState(Generic[SymbolT]):
    """What an automaton knows of the symbols so far: the longest tail that begins a word."""

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
    """An Aho-Corasick automaton whose states are made when they are first reached.

    A symbol costs one dictionary look-up, however many words there are. The first visit of a
    state costs two binary searches over the sorted words. Making the automaton sorts the words
    and does nothing else, so that memory holds the words and the states that were reached,
    where a complete automaton would hold a state for each symbol of each word.

    States are shared: any number of sequences may use one automaton, each with a state of its
    own. Used in one thread.
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
        """Make the state after ``symbol``, and those that it falls back to.

        Each suffix that is visited shortens the tail, so that this costs a constant a symbol
        on average over a sequence.
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
        """The state of the tail with ``symbol`` behind it; None if no word begins so."""
        words, depth = self._words, state.depth

        def next_symbol(word: Any) -> Any:
            return word[depth]

        low, high = state.low, state.high
        # The word that is the tail itself sorts before those that go on.
        low += low < high and len(words[low]) == depth
        low = bisect_left(words, symbol, low, high, key=next_symbol)
        high = bisect_right(words, symbol, low, high, key=next_symbol)
        if low == high:
            return None
        child = WordState(depth + 1, low, high, fallback)
        child.ends_word = fallback.ends_word or len(words[low]) == depth + 1
        return child
