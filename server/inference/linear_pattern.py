"""Regular expressions whose match takes a time that grows with the text alone.

A pattern of Python's `re` becomes a nondeterministic automaton (Thompson, "Regular expression
search algorithm", 1968). The simulation advances all states at once and caches each set of
states that comes up. No pattern can therefore take time that is exponential in the length of
a client's text. Like RE2, the automaton has no lookaround and no backreferences.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser as syntax  # type: ignore[attr-defined]
else:
    import sre_parse as syntax

MAX_STATES = 10_000
"""States of an automaton; a repetition counts once for each time that it is written out."""
_MAX_STEPS = 50_000
"""Steps from one set of states to the next that are kept."""

_Character = Callable[[str], bool]
_CATEGORIES: dict[str, _Character] = {
    f"CATEGORY_{no}{name}": (
        lambda c, p=re.compile(rf"\{letter}"): p.match(c) is not None  # type: ignore[misc]
    )
    for name, small in (("DIGIT", "d"), ("SPACE", "s"), ("WORD", "w"))
    for no, letter in (("", small), ("NOT_", small.upper()))
}
_PLACES: dict[str, Callable[[str, str], bool]] = {
    "AT_BEGINNING": lambda before, behind: not before,
    "AT_BEGINNING_STRING": lambda before, behind: not before,
    "AT_END": lambda before, behind: not behind,
    "AT_END_STRING": lambda before, behind: not behind,
    "AT_BOUNDARY": lambda before, behind: _is_word(before) != _is_word(behind),
    "AT_NON_BOUNDARY": lambda before, behind: _is_word(before) == _is_word(behind),
}
_KNOWN_FLAGS = int(re.IGNORECASE | re.DOTALL | re.UNICODE)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


@dataclass(slots=True)
class _State:
    """A state that one character leaves, or none."""

    following: list[int]
    takes: _Character | None = None
    is_here: Callable[[str, str], bool] | None = None
    """For a state that no character leaves: whether the simulation may leave the state between
    these two characters.
    """


class LinearPattern:
    """A pattern that is searched for in texts of one line."""

    def __init__(self, pattern: str, flags: int = 0) -> None:
        """``flags`` may be `re.IGNORECASE`.

        Raises:
            ValueError: the pattern is none, or has parts that only backtracking finds.
        """
        self._states: list[_State] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = syntax.parse(pattern, flags)
            self._end = self._new([])
            self._start = self._sequence(parsed.data, int(parsed.state.flags), self._end)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
        self._steps: dict[tuple[frozenset[int], str, str], frozenset[int] | None] = {}

    def search(self, text: str) -> bool:
        """Whether the pattern is anywhere in a text."""
        states: frozenset[int] | None = frozenset()
        before = ""
        for behind in (*text, ""):
            assert states is not None
            step = (states, before, behind)
            if step in self._steps:
                states = self._steps[step]
            else:
                states = self._step(*step)
                if len(self._steps) >= _MAX_STEPS:
                    self._steps.clear()
                self._steps[step] = states
            if states is None:
                return True
            before = behind
        return False

    def _step(self, states: frozenset[int], before: str, behind: str) -> frozenset[int] | None:
        """The states behind one more character; None: the pattern has ended before it."""
        # A match may begin at each place.
        waiting, seen, found = [self._start, *states], {self._start, *states}, set()
        while waiting:
            index = waiting.pop()
            if index == self._end:
                return None
            state = self._states[index]
            if state.takes is not None:
                if behind and state.takes(behind):
                    found.update(state.following)
            elif state.is_here is None or state.is_here(before, behind):
                waiting += [each for each in state.following if each not in seen]
                seen.update(state.following)
        return frozenset(found)

    # ---- the automaton, from its end to its start -------------------------------------------

    def _new(
        self,
        following: list[int],
        takes: _Character | None = None,
        is_here: Callable[[str, str], bool] | None = None,
    ) -> int:
        if len(self._states) >= MAX_STATES:
            raise ValueError(f"it has more than {MAX_STATES} states; shorten it")
        self._states.append(_State(following, takes, is_here))
        return len(self._states) - 1

    def _sequence(self, parts: Iterable[Any], flags: int, end: int) -> int:
        """The first state of parts that lead to ``end``."""
        if unknown := flags & ~_KNOWN_FLAGS:
            raise ValueError(f"it has the flags {re.RegexFlag(unknown)!r}; leave these out")
        for operation, value in reversed(list(parts)):
            end = self._part(str(operation), value, flags, end)
        return end

    def _part(self, operation: str, value: Any, flags: int, end: int) -> int:
        if operation == "SUBPATTERN":
            _group, added, removed, inner = value
            return self._sequence(inner, (flags | added) & ~removed, end)
        if operation == "BRANCH":
            return self._new([self._sequence(each, flags, end) for each in value[1]])
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            return self._repeat(least, most, inner, flags, end)
        if operation == "AT":
            return self._new([end], is_here=_PLACES[str(value)])
        takes = _character(operation, value, flags)
        if takes is None:
            raise ValueError(
                f"it has {operation}, which the matching in linear time does not know; write "
                "it without lookaround, backreferences, conditions and possessive repetitions"
            )
        return self._new([end], takes)

    def _repeat(self, least: int, most: Any, inner: Any, flags: int, end: int) -> int:
        if most == syntax.MAXREPEAT:
            # A loop whose way out is `end`.
            loop = self._new([end])
            self._states[loop].following.append(self._sequence(inner, flags, loop))
            end = loop
        else:
            out = end
            for _ in range(int(most) - least):
                end = self._new([out, self._sequence(inner, flags, end)])
        for _ in range(least):
            end = self._sequence(inner, flags, end)
        return end


def _character(operation: str, value: Any, flags: int) -> _Character | None:
    """Whether a character is one that this part of a pattern takes; None: it takes others."""
    if operation == "ANY":
        return (lambda c: True) if flags & re.DOTALL else (lambda c: c != "\n")
    if operation in ("LITERAL", "NOT_LITERAL", "RANGE"):
        low, high = value if operation == "RANGE" else (value, value)
        is_inside = operation != "NOT_LITERAL"
        if not flags & re.IGNORECASE:
            return lambda c: (low <= ord(c) <= high) == is_inside
        return lambda c: any(low <= ord(f) <= high for f in _forms(c)) == is_inside
    if operation == "CATEGORY":
        return _CATEGORIES[str(value)]
    if operation != "IN":
        return None
    is_inside = str(value[0][0]) != "NEGATE"
    items = [_character(str(op), item, flags) for op, item in value if str(op) != "NEGATE"]
    return lambda c: any(item is not None and item(c) for item in items) == is_inside


def _forms(character: str) -> set[str]:
    """A character in each case; forms of several characters are none."""
    forms = (character, character.lower(), character.upper())
    return {form for form in forms if len(form) == 1}
