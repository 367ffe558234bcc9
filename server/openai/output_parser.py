"""Parses generated text into reasoning, text and tool calls as the text comes.

A format of `tool_formats` is a coroutine that is given one character after the other, so that
the cuts depend on the characters alone: no split of the text changes them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Reader = Generator[None, str, str]
"""Reads characters and returns text."""

Steps = Generator[None, str, None]

_END = ""
"""Given behind the last character."""

_SPACE = " \t\r\n"
_DIGITS = "-+.0123456789eE"


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


class MalformedError(Exception):
    """The text is no tool call after all."""


class Scanner:
    """The characters of an output, and the segments found so far."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """``tools`` are the schemas of the parameters of each function."""
        self.tools = tools
        self.num_calls = 0
        self._segments: list[tuple[Kind, list[str]]] = []
        """The parts of each segment: to grow a text by a character costs a copy of the text."""

        self._kept: list[str] = []
        self._keeps = True
        self._pushed = ""

    # ---- segments -----------------------------------------------------------------------

    def emit(self, kind: Kind, text: str) -> None:
        """Add a segment, or text to the last one."""
        if kind is Kind.CALL:
            self.num_calls += 1
        elif not text:
            return
        elif self._segments and self._segments[-1][0] is kind:
            self._segments[-1][1].append(text)
            return
        self._segments.append((kind, [text]))

    def taken(self) -> list[Segment]:
        """The segments since the last call."""
        found, self._segments = self._segments, []
        return [Segment(kind, _without_halves("".join(parts))) for kind, parts in found]

    def call(self, name: str) -> None:
        """A call begins; what was read is not text any more."""
        self.emit(Kind.CALL, name)
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

    # ---- reading ------------------------------------------------------------------------

    def keep(self, text: str = "") -> None:
        """Keep the characters that follow, behind ``text``: they may be text after all."""
        self._kept = list(text)
        self._keeps = True

    def forget(self) -> None:
        """Forget the characters that were kept, and keep no more."""
        self._kept = []
        self._keeps = False

    @property
    def kept(self) -> str:
        """The characters that were read since `keep`, unless `forget` came behind."""
        return "".join(self._kept)

    def char(self) -> Reader:
        """The next character; empty at the end."""
        if self._pushed:
            found, self._pushed = self._pushed[0], self._pushed[1:]
        else:
            found = yield
        if self._keeps and found:
            self._kept.append(found)
        return found

    def push(self, text: str) -> None:
        """Give characters back, to be read again."""
        self._pushed = text + self._pushed
        if text:
            del self._kept[-len(text) :]

    def space(self) -> Reader:
        """Pass white space; the character behind it, which is not read yet."""
        while True:
            found = yield from self.char()
            if found == _END or found not in _SPACE:
                self.push(found)
                return found

    def expect(self, literal: str) -> Steps:
        """Read a literal.

        Raises:
            MalformedError: other characters come.
        """
        for wanted in literal:
            found = yield from self.char()
            if found != wanted:
                raise MalformedError

    def take(self, *literals: str) -> Reader:
        """Read one of several literals, the first that fits; empty if none does."""
        read = ""
        while any(literal.startswith(read) for literal in literals):
            if read in literals:
                return read
            found = yield from self.char()
            if found == _END:
                break
            read += found
        self.push(read)
        return ""

    def until(
        self, literals: Sequence[str], emit: Callable[[str], None] | None = None
    ) -> Reader:
        """Read up to one of these literals, which is read too; the text before it. With
        ``emit`` the text goes there as it comes, and the literal is returned, or empty at the
        end.

        Raises:
            MalformedError: the end comes first, without ``emit``.
        """
        held, text = "", []
        while True:
            found = yield from self.char()
            if found == _END:
                if emit is None:
                    raise MalformedError
                emit(held)
                return ""
            held += found
            while held and not any(literal.startswith(held) for literal in literals):
                if emit is not None:
                    emit(held[0])
                else:
                    text.append(held[0])
                held = held[1:]
            if held in literals:
                return held if emit is not None else "".join(text)

    # ---- JSON ---------------------------------------------------------------------------

    def json_text(self) -> Reader:
        """The value of a JSON string whose first quotation mark was read.

        Raises:
            MalformedError: no JSON string.
        """
        quoted, is_escaped = '"', False
        while True:
            found = yield from self.char()
            if found == _END:
                raise MalformedError
            quoted += found
            if is_escaped:
                is_escaped = False
            elif found == "\\":
                is_escaped = True
            elif found == '"':
                break
        try:
            value: str = json.loads(quoted, strict=False)
        except ValueError:
            raise MalformedError from None
        return value

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
        elif first != _END and (first in _DIGITS or first.isalpha()):
            while True:
                found = yield from self.char()
                if found == _END or not (found in _DIGITS or found.isalpha()):
                    self.push(found)
                    return
                emit(found)
        else:
            raise MalformedError

    def _nested(self, emit: Callable[[str], None]) -> Steps:
        """An object or a list, up to its end."""
        depth, in_text, is_escaped = 0, False, False
        while True:
            found = yield from self.char()
            if found == _END:
                raise MalformedError
            emit(found)
            if in_text:
                if is_escaped:
                    is_escaped = False
                elif found == "\\":
                    is_escaped = True
                elif found == '"':
                    in_text = False
            elif found == '"':
                in_text = True
            elif found in "{[":
                depth += 1
            elif found in "]}":
                depth -= 1
                if depth == 0:
                    return


def _without_halves(text: str) -> str:
    """A text whose unpaired surrogates, which models may escape, are replacement characters."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class ToolParser(ABC):
    """Reads the tool calls that follow an opening literal of one tool format."""

    __slots__ = ()

    @property
    @abstractmethod
    def openings(self) -> tuple[str, ...]:
        """Literals that begin tool calls anywhere in the text."""

    @property
    def is_at_start(self) -> bool:
        """Whether the output as a whole may be tool calls, without an opening."""
        return False

    @abstractmethod
    def read(self, scanner: Scanner, opening: str) -> Steps:
        """Read the tool calls behind ``opening``.

        Raises:
            MalformedError: the text is no tool call.
        """


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The literals around the reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"


class OutputParser:
    """Parses one output. Takes the text in any parts; costs a constant a character."""

    def __init__(
        self,
        tool_parser: ToolParser | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        reasoning: Reasoning | None = None,
        *,
        starts_in_reasoning: bool = False,
    ) -> None:
        """``starts_in_reasoning``: the prompt ends with the reasoning's opening."""
        self._scanner = Scanner(tools or {})
        self._tool_parser = tool_parser
        self._reasoning = reasoning
        self._starts_in_reasoning = starts_in_reasoning
        self._has_text = False
        self._steps = self._run()
        next(self._steps)

    def feed(self, text: str) -> list[Segment]:
        """The segments that a part of the text completes."""
        send = self._steps.send
        for character in text:
            send(character)
        return self._scanner.taken()

    def finish(self) -> list[Segment]:
        """The last segments."""
        while True:
            try:
                self._steps.send(_END)
            except StopIteration:
                return self._scanner.taken()

    def _run(self) -> Steps:
        if self._reasoning is not None:
            yield from self._reason(self._reasoning)
        yield from self._begin()
        while True:
            opening = yield from self._text()
            if not opening:
                return
            yield from self._read(opening)

    def _reason(self, reasoning: Reasoning) -> Steps:
        scanner = self._scanner
        if not self._starts_in_reasoning:
            yield from scanner.space()
            read = yield from scanner.take(reasoning.opening)
            if not read:
                scanner.push(scanner.kept)
                return
        scanner.forget()
        yield from scanner.space()
        emit = _without_last_space(scanner.reason)
        yield from scanner.until((reasoning.closing,), emit)
        yield from scanner.space()

    def _begin(self) -> Steps:
        """Tool calls that are the whole output."""
        tool_parser = self._tool_parser
        if tool_parser is not None and tool_parser.is_at_start:
            yield from self._read("")

    def _read(self, opening: str) -> Steps:
        """Tool calls, or the text that is none."""
        scanner, tool_parser = self._scanner, self._tool_parser
        assert tool_parser is not None
        before = scanner.num_calls
        scanner.keep(opening)
        try:
            yield from tool_parser.read(scanner, opening)
        except MalformedError:
            # The text before a call's name is given back. The written part of a call stays.
            given_back = scanner.kept if scanner.num_calls == before else ""
            scanner.text(given_back)
            self._has_text = self._has_text or bool(given_back)

    def _text(self) -> Reader:
        """Text up to an opening, which is returned; empty at the end. White space before an
        opening, and behind the last call, is no text."""
        scanner = self._scanner
        scanner.forget()
        openings = self._tool_parser.openings if self._tool_parser is not None else ()
        spaces = ""

        def emit(character: str) -> None:
            nonlocal spaces
            is_space = character in _SPACE and bool(openings or scanner.num_calls)
            if is_space and character:
                spaces += character
                return
            if character:
                if self._has_text or not scanner.num_calls:
                    scanner.text(spaces)
                scanner.text(character)
                spaces, self._has_text = "", True

        opening = yield from scanner.until(openings, emit)
        if not opening and not scanner.num_calls:
            scanner.text(spaces)
        return opening


def _without_last_space(emit: Callable[[str], None]) -> Callable[[str], None]:
    """Passes text on, but for white space at its end."""
    spaces = ""

    def passed(text: str) -> None:
        nonlocal spaces
        rest = text.rstrip(_SPACE)
        if not rest:
            spaces += text
            return
        emit(spaces + rest)
        spaces = text[len(rest) :]

    return passed
