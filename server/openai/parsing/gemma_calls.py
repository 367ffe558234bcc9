"""Tool calls as Gemma writes them: objects whose texts stand between special tokens.

The form of Gemma 4 is that of https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4;
FunctionGemma has other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.server.openai.parsing.argument_types import ArgumentType
from trimaran.server.openai.parsing.output_parser import ToolParser
from trimaran.server.openai.parsing.scanner import END, MalformedError, Scanner, Steps
from trimaran.server.openai.parsing.structural_tags import (
    Pieces,
    Schema,
    Tag,
    const,
    json_schema,
    repeated,
    sequence,
)

_MAX_DEPTH = 32
_EXACT = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const", "pattern", "format",
          "minLength", "maxLength")  # fmt: skip
"""Members that the form's own grammar does not follow."""

_DEFINITIONS = ("$defs", "definitions")

_BARE = re.compile(r"[^,}\]]+")

Emit = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GemmaToolParser(ToolParser):
    """``call:NAME{KEY:VALUE,...}`` between literals; keys stand bare."""

    opening: str = "<|tool_call>"
    closing: str = "<tool_call|>"
    quote: str = '<|"|>'

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    @property
    def literals(self) -> str:
        """See `ToolParser`. JSON would write the quote in another way."""
        return self.quote

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        yield from scanner.space()
        yield from scanner.expect("call:")
        name = yield from scanner.until(("{",))
        if not name.strip():
            raise MalformedError
        scanner.call(name.strip())
        yield from self._object(scanner, scanner.arguments, 0)
        yield from scanner.space()
        yield from scanner.take(self.closing)

    def _object(self, scanner: Scanner, emit: Emit, depth: int) -> Steps:
        """The rest of an object whose brace was read."""
        emit("{")
        separator = ""
        while True:
            first = yield from scanner.space()
            if first in (",", "}"):
                yield from scanner.char()
                if first == "}":
                    emit("}")
                    return
                continue
            parts: list[str] = []
            quoted = yield from scanner.take(self.quote, '"')
            if quoted == '"':
                key = yield from scanner.json_text()
                yield from scanner.space()
                yield from scanner.expect(":")
            else:
                end = f"{quoted}:"
                read = yield from scanner.until((end,), parts.append)
                if not read:
                    raise MalformedError
                key = "".join(parts).strip()
            emit(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._value(scanner, emit, depth + 1)

    def _list(self, scanner: Scanner, emit: Emit, depth: int) -> Steps:
        """The rest of a list whose bracket was read."""
        emit("[")
        separator = ""
        while True:
            first = yield from scanner.space()
            if first in (",", "]"):
                yield from scanner.char()
                if first == "]":
                    emit("]")
                    return
                continue
            emit(separator)
            separator = ", "
            yield from self._value(scanner, emit, depth + 1)

    def _value(self, scanner: Scanner, emit: Emit, depth: int) -> Steps:
        if depth > _MAX_DEPTH:
            raise MalformedError
        yield from scanner.space()
        read = yield from scanner.take(self.quote, "{", "[", '"')
        if read == "{":
            yield from self._object(scanner, emit, depth)
        elif read == "[":
            yield from self._list(scanner, emit, depth)
        elif read == '"':
            text = yield from scanner.json_text()
            emit(json.dumps(text, ensure_ascii=False))
        elif read:
            emit('"')
            ended = yield from scanner.until((read,), lambda c: emit(_escaped(c)))
            if not ended:
                raise MalformedError
            emit('"')
        else:
            yield from _bare(scanner, emit)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        calls = [
            sequence(
                *pieces.text(f"{self.opening}call:{name}"),
                self._arguments(schema, pieces),
                *pieces.text(self.closing),
            )
            for name, schema in tools.items()
        ]
        return repeated(calls, "", is_one=is_one)

    def _arguments(self, schema: Schema, pieces: Pieces) -> Tag:
        # Parts of a schema that refers to definitions would lack the definitions.
        if any(name in schema for name in _DEFINITIONS):
            return json_schema(schema)
        return self._tag(schema, pieces, 0)

    def _tag(self, schema: Any, pieces: Pieces, depth: int) -> Tag:
        """The form of a value; JSON, which is read as well, where the schema is too rich."""
        if not isinstance(schema, Mapping) or any(name in schema for name in _EXACT):
            return json_schema(schema if isinstance(schema, Mapping) else {})
        kind = schema.get("type")
        if kind == "string":
            quote = pieces.text(self.quote)
            return sequence(*quote, {"type": "any_text", "excludes": [self.quote]}, *quote)
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and properties and depth < _MAX_DEPTH:
            return self._properties(schema, properties, pieces, depth)
        return json_schema(schema)

    def _properties(
        self, schema: Schema, properties: Mapping[str, Any], pieces: Pieces, depth: int
    ) -> Tag:
        """An object with its required members first."""
        required = [key for key in properties if key in (schema.get("required") or ())]
        if not required:
            return json_schema(schema)
        elements = [const("{")]
        for number, key in enumerate(required):
            elements.append(const(f"{',' if number else ''}{_key(key)}:"))
            elements.append(self._tag(properties[key], pieces, depth + 1))
        for key in properties:
            if key not in required:
                value = self._tag(properties[key], pieces, depth + 1)
                each = sequence(const(f",{_key(key)}:"), value)
                elements.append({"type": "optional", "content": each})
        return sequence(*elements, const("}"))


def _bare(scanner: Scanner, emit: Emit) -> Steps:
    """A number or a word, up to the end of the member.

    Raises:
        MalformedError: there is none, or the output ends.
    """
    text = yield from scanner.chars(_BARE)
    following = yield from scanner.peek()
    if following == END:
        raise MalformedError
    emit(ArgumentType().json_of(text.strip()))


def _key(key: str) -> str:
    return key if key.isidentifier() else json.dumps(key, ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
