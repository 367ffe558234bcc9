"""Tool calls as a list of calls in Python's syntax: Llama 3.2, Llama 4, LFM2."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.server.openai.parsing.output_parser import ToolParser
from trimaran.server.openai.parsing.scanner import MalformedError, Scanner, Steps
from trimaran.server.openai.parsing.structural_tags import (
    Pieces,
    Schema,
    Tag,
    const,
    json_schema,
    repeated,
    sequence,
)

_NAMES = {"true": "True", "false": "False", "null": "None"}
_NAME = re.compile(r"[\w.\-]+")
_PLAIN = re.compile(r"""[^'"\\,()\[\]{}]+""")
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class PythonicToolParser(ToolParser):
    """A list of calls in Python's syntax, as the whole output or between two literals."""

    opening: str = ""
    closing: str = ""

    @property
    def is_at_start(self) -> bool:
        """See `ToolParser`."""
        return not self.opening

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,) if self.opening else ()

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return self.openings

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        yield from scanner.space()
        yield from scanner.expect("[")
        while True:
            yield from scanner.space()
            name = yield from scanner.until(("(",))
            if not (_NAME.fullmatch(name) if opening else name in scanner.tools):
                raise MalformedError
            scanner.call(name)
            scanner.arguments("{")
            yield from self._values(scanner)
            scanner.arguments("}")
            following = yield from scanner.space()
            if following != ",":
                yield from scanner.expect("]")
                break
            yield from scanner.expect(",")
        yield from scanner.space()
        if self.closing:
            yield from scanner.take(self.closing)

    def _values(self, scanner: Scanner) -> Steps:
        num_values = 0
        while True:
            first = yield from scanner.space()
            if first == ")":
                yield from scanner.char()
                return
            if first == ",":
                yield from scanner.char()
                yield from scanner.space()
            key = yield from scanner.until(("=",))
            separator = ", " if num_values else ""
            parts: list[str] = []
            yield from self._expression(scanner, parts)
            value = _python_value("".join(parts))
            scanner.arguments(f"{separator}{json.dumps(key.strip())}: {value}")
            num_values += 1

    def _expression(self, scanner: Scanner, parts: list[str]) -> Steps:
        """The text of a value, up to a comma or the end of the call."""
        depth, quote, is_escaped = 0, "", False
        while True:
            if not is_escaped:
                parts.append(scanner.run(_PLAIN))
            found = yield from scanner.peek()
            if not found:
                raise MalformedError
            if quote:
                quote = "" if found == quote and not is_escaped else quote
                is_escaped = found == "\\" and not is_escaped
            elif found in "'\"":
                quote = found
            elif depth == 0 and found in ",)":
                return
            elif found in _OPENING:
                depth += 1
            elif found in _CLOSING:
                depth -= 1
            yield from scanner.char()
            parts.append(found)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls: values are JSON, which the form reads as well."""
        calls = []
        for name, schema in tools.items():
            properties = schema.get("properties") or {}
            required = [key for key in properties if key in (schema.get("required") or ())]
            elements = [const(f"{name}(")]
            for number, key in enumerate(required):
                elements.append(const(f"{', ' if number else ''}{key}="))
                elements.append(json_schema(properties[key]))
            # Without a required value no comma may come first.
            others = [key for key in properties if key not in required] if required else []
            for key in others:
                value = sequence(const(f", {key}="), json_schema(properties[key]))
                elements.append({"type": "optional", "content": value})
            calls.append(sequence(*elements, const(")")))
        calls_tag = repeated(calls, ", ", is_one=is_one)
        begin, end = pieces.text(self.opening), pieces.text(self.closing)
        return sequence(*begin, const("["), calls_tag, const("]"), *end)


def _python_value(text: str) -> str:
    """A literal of Python, or a JSON value, as JSON."""
    try:
        return json.dumps(ast.literal_eval(_NAMES.get(text.strip(), text.strip())),
                          ensure_ascii=False)  # fmt: skip
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
