"""Reads the characters of an output, in any parts, and collects the segments found so far."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

Reader = Generator[None, None, str]
"""Reads characters and returns text; pauses where the next character has not come yet."""

Steps = Generator[None, None, None]

END = ""
"""Read behind the last character."""

SPACE = " \t\r\n"
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
"""A number, or a name such as ``null``."""

_IN_STRING = re.compile(r'[^"\\]+')
_IN_VALUE = re.compile(r'(?s:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")++')
"""What lies between two brackets of a JSON value, whole strings among it."""

_SPACES = re.compile(f"[{SPACE}]+")
_LOOSE = json.JSONDecoder(strict=False)
"""Takes line breaks within strings, which models write."""

_NOTHING = re.compile(r"(?!)")
_MAX_LITERAL = 64
_MAX_CACHED = 64


class Kind(Enum):
    """What a segment is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"
    """A call begins: the text is the function's name."""
    ARGUMENTS = "arguments"
    """A part of the JSON of the last call's arguments."""


@dataclass(slots=True)
class Segment:
    """A part of an output."""

    kind: Kind
    text: str
    call_id: str = ""
    """The id of a call whose form has ids."""


class MalformedError(Exception):
    """The text is no tool call after all."""


class Scanner:
    """The characters of an output, and the segments found so far.

    Readers decide by the characters alone: runs of characters that mean nothing special are
    passed on at once, and where the parts of the text end makes no difference.
    """

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]], *, has_reasoning: bool = True
    ) -> None:
        """``tools`` are the schemas of the parameters of each function; ``has_reasoning``:
        reasoning is told apart from the text."""
        self.tools = tools
        self.has_reasoning = has_reasoning
        self.num_calls = 0
        self.is_reasoning = False
        """Whether the next characters are reasoning, as far as is known."""

        self._segments: list[tuple[Kind, list[str], str]] = []
        """The parts of each segment, and its call's id: to grow a text by a character costs a
        copy of the text."""

        self._kept: list[str] = []
        self._keeps = True
        self._text = ""
        self._place = 0
        """The place of the next character in `_text`."""

        self._is_over = False

    # ---- segments -----------------------------------------------------------------------

    def emit(self, kind: Kind, text: str, call_id: str = "") -> None:
        """Add a segment, or text to the last one."""
        if kind is Kind.CALL:
            self.num_calls += 1
        elif not text:
            return
        elif self._segments and self._segments[-1][0] is kind:
            self._segments[-1][1].append(text)
            return
        self._segments.append((kind, [text], call_id))

    def taken(self) -> list[Segment]:
        """The segments since the last call."""
        found, self._segments = self._segments, []
        return [
            Segment(kind, _without_halves("".join(parts)), call_id)
            for kind, parts, call_id in found
        ]

    def call(self, name: str, call_id: str = "") -> None:
        """A call begins; what was read is not text any more."""
        self.emit(Kind.CALL, name, call_id)
        self.forget()

    def arguments(self, text: str) -> None:
        """A part of the last call's arguments."""
        self.emit(Kind.ARGUMENTS, text)

    def reason(self, text: str) -> None:
        """A part of the reasoning."""
        self.emit(Kind.REASONING, text)

    def text(self, text: str) -> None:
        """A part of the text."""
        self.emit(Kind.TEXT, text)

    # ---- characters ---------------------------------------------------------------------

    def give(self, text: str) -> None:
        """The next part of the output, behind what waits for more characters: at most the
        beginning of a literal."""
        self._text, self._place = self._text[self._place :] + text, 0

    def close(self) -> None:
        """No further part comes."""
        self._is_over = True

    def keep(self, text: str = "") -> None:
        """Keep the characters that follow, behind ``text``: they may be text after all."""
        self._kept = [text]
        self._keeps = True

    def forget(self) -> None:
        """Forget the characters that were kept, and keep no more."""
        self._kept = []
        self._keeps = False

    @property
    def kept(self) -> str:
        """The characters that were read since `keep`, unless `forget` came behind."""
        return "".join(self._kept)

    def _read_to(self, place: int) -> str:
        """Read up to a place of the text that is here."""
        found = self._text[self._place : place]
        self._place = place
        if self._keeps:
            self._kept.append(found)
        return found

    def peek(self) -> Reader:
        """The next character, which is not read yet; empty at the end."""
        while self._place == len(self._text):
            if self._is_over:
                return END
            yield
        return self._text[self._place]

    def char(self) -> Reader:
        """The next character; empty at the end."""
        while self._place == len(self._text):
            if self._is_over:
                return END
            yield
        return self._read_to(self._place + 1)

    def run(self, pattern: re.Pattern[str]) -> str:
        """The characters of a pattern that are here already; empty for none."""
        match = pattern.match(self._text, self._place)
        return self._read_to(match.end()) if match is not None else ""

    def chars(self, pattern: re.Pattern[str]) -> Reader:
        """The characters of a class; the character behind them, or the end, has come."""
        parts: list[str] = []
        while True:
            parts.append(self.run(pattern))
            if self._place < len(self._text) or self._is_over:
                return "".join(parts)
            yield

    def push(self, text: str) -> None:
        """Give characters back that were just read, to be read again."""
        if not text:
            return
        self._text, self._place = text + self._text[self._place :], 0
        if self._keeps:
            self._kept = [self.kept[: -len(text)]]

    def space(self) -> Reader:
        """Pass white space; the character behind it, which is not read yet."""
        while True:
            if self._place < len(self._text):
                found = self._text[self._place]
                if found not in SPACE:
                    return found
                self.run(_SPACES)
            elif self._is_over:
                return END
            else:
                yield

    # ---- literals -----------------------------------------------------------------------

    def expect(self, literal: str) -> Steps:
        """Read a literal.

        Raises:
            MalformedError: other characters come.
        """
        read = yield from self.take(literal)
        if read != literal:
            raise MalformedError

    def take(self, *literals: str) -> Reader:
        """Read one of several literals, none a beginning of another; empty if none comes."""
        while True:
            for literal in literals:
                if self._text.startswith(literal, self._place):
                    return self._read_to(self._place + len(literal))
            rest = self._text[self._place : self._place + _MAX_LITERAL]
            if self._is_over or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def until(
        self, literals: Sequence[str], emit: Callable[[str], None] | None = None
    ) -> Reader:
        """Read up to one of these literals, none a beginning of another; that literal is read
        too. The text before it is returned; with ``emit`` that text goes there as it comes, and
        the literal is returned, or empty at the end.

        Raises:
            MalformedError: the end comes first, without ``emit``.
        """
        parts: list[str] = []
        tell = parts.append if emit is None else emit
        whole, beginning = _searches(tuple(literals))
        while True:
            text = self._text
            match = whole.search(text, self._place)
            if match is not None:
                end = match.start()
            elif self._is_over:
                end = len(text)
            else:
                # The beginning of a literal waits for its next characters.
                tail = max(self._place, len(text) - _MAX_LITERAL)
                found = beginning.search(text, tail)
                end = found.start() if found is not None else len(text)
            if end > self._place:
                tell(self._read_to(end))
            if match is not None:
                literal = self._read_to(match.end())
                return literal if emit is not None else "".join(parts)
            if self._is_over:
                if emit is None:
                    raise MalformedError
                return ""
            yield

    # ---- JSON ---------------------------------------------------------------------------

    def json_text(self) -> Reader:
        """The value of a JSON string whose first quotation mark was read.

        Raises:
            MalformedError: no JSON string.
        """
        parts = ['"']
        yield from self._string(parts.append)
        try:
            value: str = _LOOSE.decode("".join(parts))
        except ValueError:
            raise MalformedError from None
        return value

    def _string(self, emit: Callable[[str], None]) -> Steps:
        """The rest of a JSON string, with its last quotation mark."""
        is_escaped = False
        while True:
            run = "" if is_escaped else self.run(_IN_STRING)
            if run:
                emit(run)
            found = yield from self.char()
            if found == END:
                raise MalformedError
            emit(found)
            if is_escaped:
                is_escaped = False
            elif found == "\\":
                is_escaped = True
            elif found == '"':
                return

    def json_value(self, emit: Callable[[str], None]) -> Steps:
        """Pass the text of a JSON value on as it comes.

        Raises:
            MalformedError: no JSON value begins.
        """
        first = yield from self.space()
        if first in ("{", "["):
            yield from self._nested(emit)
        elif first == '"':
            yield from self.char()
            text = yield from self.json_text()
            emit(json.dumps(text, ensure_ascii=False))
        elif first != END and _WORD.match(first):
            word = yield from self.chars(_WORD)
            emit(word)
        else:
            raise MalformedError

    def _nested(self, emit: Callable[[str], None]) -> Steps:
        """An object or a list, up to its end."""
        depth = 0
        while True:
            run = self.run(_IN_VALUE)
            if run:
                emit(run)
            found = yield from self.char()
            if found == END:
                raise MalformedError
            emit(found)
            if found == '"':
                yield from self._string(emit)
            elif found in "{[":
                depth += 1
            elif found in "]}":
                depth -= 1
                if depth == 0:
                    return


@lru_cache(maxsize=_MAX_CACHED)
def _searches(literals: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Finds one of these literals, and the beginning of one at the end of a text."""
    assert all(0 < len(literal) <= _MAX_LITERAL for literal in literals)
    if not literals:
        return _NOTHING, _NOTHING
    beginnings = (
        literal[:count] for literal in literals for count in range(len(literal) - 1, 0, -1)
    )
    return (
        re.compile("|".join(map(re.escape, literals))),
        re.compile(rf"(?:{'|'.join(map(re.escape, beginnings))})\Z"),
    )


def _without_halves(text: str) -> str:
    """A text whose unpaired surrogates, which models may escape, are replacement characters."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def without_last_space(emit: Callable[[str], None]) -> Callable[[str], None]:
    """Passes text on, but for white space at its end."""
    spaces = ""

    def passed(text: str) -> None:
        nonlocal spaces
        rest = text.rstrip(SPACE)
        if not rest:
            spaces += text
            return
        emit(spaces + rest)
        spaces = text[len(rest) :]

    return passed
