"""Parses generated text into reasoning, text and tool calls as the text comes.

A form of `tool_formats` is a coroutine that reads characters from a `Scanner`, so that the
cuts depend on the characters alone: no split of the text changes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from trimaran.server.openai.parsing.reasoning_formats import Reasoning
from trimaran.server.openai.parsing.scanner import (
    SPACE,
    MalformedError,
    Reader,
    Scanner,
    Segment,
    Steps,
    without_last_space,
)


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

    @property
    def is_whole(self) -> bool:
        """Whether the form covers the output as a whole, its reasoning and texts among it."""
        return False

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """The openings that end a reasoning, whose closing some models leave out there. Text
        that is no call stays reasoning."""
        return ()

    @property
    def frames(self) -> tuple[str, ...]:
        """Literals around texts that are no part of the texts; the first two are the opening
        and the closing of an answer."""
        return ()

    @property
    def literals(self) -> str:
        """Literals of the form that no call holds."""
        return ""

    @abstractmethod
    def read(self, scanner: Scanner, opening: str) -> Steps:
        """Read the tool calls behind ``opening``.

        Raises:
            MalformedError: the text is no tool call.
        """


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
        self._scanner = Scanner(tools or {}, has_reasoning=reasoning is not None)
        self._tool_parser = tool_parser
        self._reasoning = reasoning
        self._starts_in_reasoning = starts_in_reasoning
        self._has_text = False
        self._steps = self._run()
        next(self._steps)

    @property
    def is_reasoning(self) -> bool:
        """Whether the next characters are reasoning, as far as is known."""
        return self._scanner.is_reasoning

    def feed(self, text: str) -> list[Segment]:
        """The segments that a part of the text completes."""
        self._scanner.give(text)
        self._steps.send(None)
        return self._scanner.taken()

    def finish(self) -> list[Segment]:
        """The last segments."""
        self._scanner.close()
        for _ in self._steps:
            pass
        return self._scanner.taken()

    def _run(self) -> Steps:
        if self._tool_parser is not None and self._tool_parser.is_whole:
            yield from self._tool_parser.read(self._scanner, "")
            return
        if self._reasoning is not None:
            yield from self._reason(self._reasoning)
        yield from self._begin()
        while True:
            opening = yield from self._text()
            if not opening:
                return
            self._tell((yield from self._read(opening)))

    def _reason(self, reasoning: Reasoning) -> Steps:
        """The reasoning, and tool calls that ended the reasoning."""
        scanner, tool_parser = self._scanner, self._tool_parser
        if not self._starts_in_reasoning:
            yield from scanner.space()
            read = yield from scanner.take(reasoning.opening, reasoning.closing)
            if not read:
                scanner.push(scanner.kept)
                return
            if read == reasoning.closing:
                # Some templates let a model skip the reasoning so.
                yield from scanner.space()
                return
        openings = tool_parser.ends_reasoning if tool_parser is not None else ()
        ends = [reasoning.closing, *(openings if scanner.tools else ())]
        scanner.forget()
        yield from scanner.space()
        emit = without_last_space(scanner.reason)
        while True:
            scanner.is_reasoning = True
            read = yield from scanner.until(ends, emit)
            scanner.is_reasoning = False
            if read in (reasoning.closing, ""):
                yield from scanner.space()
                return
            given_back = yield from self._read(read)
            if not given_back:
                return
            scanner.forget()
            emit(given_back)

    def _begin(self) -> Steps:
        """Tool calls that are the whole output."""
        tool_parser = self._tool_parser
        if tool_parser is not None and tool_parser.is_at_start:
            self._tell((yield from self._read("")))

    def _tell(self, text: str) -> None:
        """Text that might have been a call."""
        self._scanner.text(text)
        self._has_text = self._has_text or bool(text)

    def _read(self, opening: str) -> Reader:
        """Tool calls; the text that is none, or empty."""
        scanner, tool_parser = self._scanner, self._tool_parser
        assert tool_parser is not None
        before = scanner.num_calls
        scanner.keep(opening)
        try:
            yield from tool_parser.read(scanner, opening)
        except MalformedError:
            # The text before a call's name is given back. The written part of a call stays.
            return scanner.kept if scanner.num_calls == before else ""
        return ""

    def _text(self) -> Reader:
        """Text up to an opening, which is returned; empty at the end. White space before an
        opening, and behind the last call, is no text."""
        scanner = self._scanner
        scanner.forget()
        tool_parser = self._tool_parser
        openings = tool_parser.openings if tool_parser is not None and scanner.tools else ()
        frames = tool_parser.frames if tool_parser is not None else ()
        spaces = ""

        def emit(text: str) -> None:
            nonlocal spaces
            is_cut = bool(openings or scanner.num_calls)
            words = text.strip(SPACE) if is_cut else text
            if not words:
                spaces += text
                return
            before, _, after = text.partition(words)
            if self._has_text or not scanner.num_calls:
                scanner.text(spaces + before)
            scanner.text(words)
            spaces, self._has_text = after, True

        opening = yield from scanner.until((*openings, *frames), emit)
        while opening in frames:
            opening = yield from scanner.until((*openings, *frames), emit)
        if not opening and not scanner.num_calls:
            scanner.text(spaces)
        return opening
