"""Tool calls as functions and parameters in tags: Qwen3-Coder, MiniMax, DeepSeek, GLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.server.openai.parsing.argument_types import ArgumentType, argument_type
from trimaran.server.openai.parsing.output_parser import ToolParser
from trimaran.server.openai.parsing.scanner import (
    END,
    MalformedError,
    Reader,
    Scanner,
    Steps,
)
from trimaran.server.openai.parsing.structural_tags import (
    Pieces,
    Schema,
    Tag,
    json_schema,
    repeated,
    sequence,
)

_AS_TEXT, _AS_JSON = '" string="true">', '" string="false">'
_NAME = re.compile(r"[^\s<]+")
_LINE_BREAK: Tag = {"type": "regex", "pattern": "\\n?"}


@dataclass(frozen=True, slots=True)
class XmlToolParser(ToolParser):
    """Functions and parameters as tags, whose values are texts or JSON by their schema."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    function: str = "<function="
    name_end: str = ">"
    function_end: str = "</function>"
    parameter: str = "<parameter="
    key_ends: tuple[str, ...] = (">",)
    parameter_end: str = "</parameter>"
    style: str = "qwen_xml"
    """The style of the parameters in structural tags."""

    has_line_breaks: bool = True
    """Whether a line break before a value and one behind are no part of the value."""

    may_lack_opening: bool = False
    """Whether models leave the opening out at times."""

    holds_several: bool = False
    """Whether several functions may come between the opening and the closing."""

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening, self.function) if self.may_lack_opening else (self.opening,)

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        if opening == self.opening:
            yield from scanner.space()
            yield from scanner.expect(self.function)
        yield from self._function(scanner)
        while self.holds_several:
            yield from scanner.space()
            read = yield from scanner.take(self.function)
            if not read:
                break
            yield from self._function(scanner)
        yield from scanner.space()
        yield from scanner.take(self.closing)

    def _function(self, scanner: Scanner) -> Steps:
        name = yield from scanner.until((self.name_end,))
        if not name.strip():
            raise MalformedError
        call = Call(scanner, name.strip())
        while True:
            following = yield from scanner.space()
            read = yield from scanner.take(self.parameter)
            if not read:
                break
            parts: list[str] = []
            told = yield from scanner.until(self.key_ends, parts.append)
            if not told:
                raise MalformedError
            kind = call.begin_value("".join(parts))
            if told in (_AS_TEXT, _AS_JSON):
                kind = ArgumentType(frozenset(("string",))) if told == _AS_TEXT else None
            if self.has_line_breaks:
                yield from scanner.take("\n")
            ends = (f"\n{self.parameter_end}",) if self.has_line_breaks else ()
            yield from call.value(kind, (*ends, self.parameter_end))
        call.end(following)
        yield from scanner.take(self.function_end)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        begin, end = f"{self.opening}\n", f"\n{self.closing}"
        around = ("", "") if self.holds_several else (begin, end)
        calls = [
            sequence(
                *pieces.text(f"{around[0]}{self.function}{name}{self.name_end}\n"),
                {**json_schema(schema), "style": self.style},
                *pieces.text(f"\n{self.function_end}{around[1]}"),
            )
            for name, schema in tools.items()
        ]
        found = repeated(calls, "\n", is_one=is_one)
        if not self.holds_several:
            return found
        return sequence(*pieces.text(begin), found, *pieces.text(end))


@dataclass(frozen=True, slots=True)
class GlmToolParser(ToolParser):
    """A name, and keys and values as tags of their own."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        name = yield from self._name(scanner)
        call = Call(scanner, name)
        while True:
            following = yield from scanner.space()
            read = yield from scanner.take("<arg_key>")
            if not read:
                break
            key = yield from scanner.until(("</arg_key>",))
            yield from scanner.space()
            yield from scanner.expect("<arg_value>")
            yield from call.value(call.begin_value(key.strip()), ("</arg_value>",))
        call.end(following)
        yield from scanner.take(self.closing)

    def _name(self, scanner: Scanner) -> Reader:
        """The name, which ends at white space or a tag. A tag must follow.

        Raises:
            MalformedError: the text is no call.
        """
        yield from scanner.space()
        name = yield from scanner.chars(_NAME)
        yield from scanner.space()
        tag = yield from scanner.take("<arg_key>", self.closing)
        if not name or not tag:
            raise MalformedError
        scanner.push(tag)
        return name

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        calls = [
            sequence(
                *pieces.text(f"{self.opening}{name}"),
                _LINE_BREAK,
                {**json_schema(schema), "style": "glm_xml"},
                *pieces.text(self.closing),
            )
            for name, schema in tools.items()
        ]
        return repeated(calls, "\n", is_one=is_one)


class Call:
    """The arguments of a call as they are read, value after value."""

    def __init__(self, scanner: Scanner, name: str) -> None:
        self._scanner = scanner
        self._schema = scanner.tools.get(name, {})
        self._num_values = 0
        scanner.call(name)
        scanner.arguments("{")

    def begin_value(self, key: str) -> ArgumentType | None:
        """Write a key; the type of its value, where the schema tells the type."""
        separator = ", " if self._num_values else ""
        self._num_values += 1
        self._scanner.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        return argument_type(self._schema, key)

    def value(self, kind: ArgumentType | None, ends: tuple[str, ...]) -> Steps:
        """Read a value up to one of ``ends``.

        Raises:
            MalformedError: the output ends within the value.
        """
        scanner = self._scanner
        if kind is not None and kind.is_any_text:
            scanner.arguments('"')
            read = yield from scanner.until(ends, lambda c: scanner.arguments(escaped(c)))
            if not read:
                raise MalformedError
            scanner.arguments('"')
            return
        parts: list[str] = []
        read = yield from scanner.until(ends, parts.append)
        if not read:
            raise MalformedError
        scanner.arguments((kind or ArgumentType()).json_of("".join(parts)))

    def end(self, following: str) -> None:
        """Close the arguments before the character that follows.

        Raises:
            MalformedError: the output has ended: the call was cut off.
        """
        if following == END:
            raise MalformedError
        self.close()

    def close(self) -> None:
        """Close the arguments."""
        self._scanner.arguments("}")


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
