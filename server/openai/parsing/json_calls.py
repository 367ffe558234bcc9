"""Tool calls as JSON objects with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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
    tag_of,
)

_NAME = re.compile(r"[\w\-./]+")
_NUMBER: Tag = {"type": "regex", "pattern": "[0-9]{1,3}"}


@dataclass(frozen=True, slots=True)
class JsonCall:
    """``{NAME: ..., ARGUMENTS: {...}}``."""

    arguments_name: str = "arguments"
    key: str = "name"
    """The member that holds the function's name."""

    id_key: str = ""
    """A member before the name that numbers the calls of an output; empty: none."""

    others: tuple[str, ...] = ("arguments", "parameters")
    """Names of the arguments that are read as well."""

    must_be_known: bool = False
    """Whether the name of no tool makes the object a text."""

    def read(self, scanner: Scanner) -> Steps:
        """Read one object. The first name and the first arguments count.

        Raises:
            MalformedError: no such object.
        """
        yield from scanner.space()
        yield from scanner.expect("{")
        name, before, has_arguments = "", list[str](), False
        while True:
            first = yield from scanner.space()
            if first == "}":
                break
            yield from scanner.expect('"')
            key = yield from scanner.json_text()
            yield from scanner.space()
            yield from scanner.expect(":")
            yield from scanner.space()
            if key == self.key and not name:
                yield from scanner.expect('"')
                name = yield from scanner.json_text()
                self._begin(scanner, name)
                scanner.arguments("".join(before))
            elif key in self.others and not has_arguments:
                has_arguments = True
                yield from self._arguments(scanner, before, is_known=bool(name))
            else:
                yield from scanner.json_value(lambda _: None)
            following = yield from scanner.space()
            if following == ",":
                yield from scanner.expect(",")
        yield from scanner.expect("}")
        if not name:
            raise MalformedError
        if not has_arguments:
            scanner.arguments("{}")

    def _begin(self, scanner: Scanner, name: str) -> None:
        if not name or (self.must_be_known and name not in scanner.tools):
            raise MalformedError
        scanner.call(name)

    def _arguments(self, scanner: Scanner, before: list[str], *, is_known: bool) -> Steps:
        """Pass the arguments on, or keep them until the name is known."""
        first = yield from scanner.space()
        emit = scanner.arguments if is_known else before.append
        if first == "{":
            yield from scanner.json_value(emit)
            return
        parts: list[str] = []
        yield from scanner.json_value(parts.append)
        emit(_as_object("".join(parts)))

    def tag(self, name: str, schema: Schema) -> Tag:
        """The call of one tool."""
        begin = f'"{self.key}": {json.dumps(name)}, "{self.arguments_name}": '
        if not self.id_key:
            return tag_of("{" + begin, json_schema(schema), "}")
        numbered = sequence(_NUMBER, const('", ' + begin), json_schema(schema))
        return tag_of(f'{{"{self.id_key}": "', numbered, "}")


def _as_object(text: str) -> str:
    """Arguments that are a JSON text within a string, or nothing."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedError from None
    if value is None:
        return "{}"
    return value if isinstance(value, str) else text


@dataclass(frozen=True, slots=True)
class HermesToolParser(ToolParser):
    """A JSON object between two literals."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    call: JsonCall = field(default_factory=JsonCall)

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        yield from self.call.read(scanner)
        yield from scanner.space()
        yield from scanner.take(self.closing)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        tags = []
        for name, schema in tools.items():
            tag = self.call.tag(name, schema)
            begin = [*pieces.text(self.opening + "\n"), const(tag["begin"])]
            end = [const(tag["end"]), *pieces.text("\n" + self.closing)]
            tags.append(sequence(*begin, tag["content"], *end))
        return repeated(tags, "\n", is_one=is_one)


@dataclass(frozen=True, slots=True)
class LlamaToolParser(ToolParser):
    """The whole output is JSON objects with semicolons between."""

    call: JsonCall = field(
        default_factory=lambda: JsonCall(arguments_name="parameters", must_be_known=True)
    )

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return ("<|python_tag|>",)

    @property
    def is_at_start(self) -> bool:
        """See `ToolParser`."""
        return True

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        if not opening:
            yield from scanner.space()
            yield from scanner.take(*self.openings)
        while True:
            yield from self.call.read(scanner)
            following = yield from scanner.space()
            if following not in (";", ","):
                return
            yield from scanner.expect(following)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        tags = [self.call.tag(name, schema) for name, schema in tools.items()]
        return repeated(tags, "; ", is_one=is_one)


@dataclass(frozen=True, slots=True)
class MistralToolParser(ToolParser):
    """A literal, then a list of JSON objects, or a name and its arguments."""

    opening: str = "[TOOL_CALLS]"
    closing: str = ""
    call: JsonCall = field(default_factory=JsonCall)

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        first = yield from scanner.space()
        if first not in ("[", "{"):
            yield from self._named(scanner)
            return
        yield from scanner.take("[")
        while True:
            yield from self.call.read(scanner)
            following = yield from scanner.space()
            if following != ",":
                yield from scanner.take("]")
                break
            yield from scanner.expect(",")
        if self.closing:
            yield from scanner.space()
            yield from scanner.take(self.closing)

    def _named(self, scanner: Scanner) -> Steps:
        """``NAME[CALL_ID]ID[ARGS]{...}``, with or without the literals and the id."""
        name = yield from scanner.chars(_NAME)
        read, call_id = (yield from scanner.take("[ARGS]", "[CALL_ID]")), ""
        if read == "[CALL_ID]":
            call_id = yield from scanner.until(("[ARGS]",))
        first = yield from scanner.space()
        if not name or first != "{":
            raise MalformedError
        scanner.call(name, call_id.strip())
        yield from scanner.json_value(scanner.arguments)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        tags = [self.call.tag(name, schema) for name, schema in tools.items()]
        calls = repeated(tags, ", ", is_one=is_one)
        closing = pieces.text(self.closing)
        return sequence(*pieces.text(self.opening), const("["), calls, const("]"), *closing)


@dataclass(frozen=True, slots=True)
class CohereToolParser(MistralToolParser):
    """A list of JSON objects between special tokens, as Command A and Command R7B write them;
    answers stand between tokens of their own."""

    opening: str = "<|START_ACTION|>"
    closing: str = "<|END_ACTION|>"
    call: JsonCall = field(
        default_factory=lambda: JsonCall("parameters", "tool_name", "tool_call_id")
    )

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.opening,)

    @property
    def frames(self) -> tuple[str, ...]:
        """See `ToolParser`. The last two are those of Command A's successors."""
        return ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
