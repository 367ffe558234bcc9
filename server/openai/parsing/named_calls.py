"""Tool calls as names and JSON arguments between special tokens: DeepSeek, Kimi."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.server.openai.parsing.output_parser import ToolParser
from trimaran.server.openai.parsing.scanner import MalformedError, Scanner, Steps
from trimaran.server.openai.parsing.structural_tags import (
    Pieces,
    Schema,
    Tag,
    json_schema,
    repeated,
    sequence,
)

_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
_NUMBER: Tag = {"type": "regex", "pattern": "[0-9]{1,4}"}


@dataclass(frozen=True, slots=True)
class DeepSeekToolParser(ToolParser):
    """Names and JSON arguments between literals."""

    before_name: str = ""
    before_arguments: str = "<｜tool▁sep｜>"
    after_arguments: str = ""
    begins: str = "<｜tool▁calls▁begin｜>"
    ends: str = "<｜tool▁calls▁end｜>"
    begin: str = "<｜tool▁call▁begin｜>"
    end: str = "<｜tool▁call▁end｜>"
    separator: str = "\n"
    other_begins: tuple[str, ...] = ()
    """Further spellings of ``begins`` that models write."""

    other_ends: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return (self.begins, *self.other_begins)

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return self.openings

    @property
    def literals(self) -> str:
        """See `ToolParser`. The grammar has the first spellings alone."""
        return "".join((*self.other_begins, *self.other_ends))

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`."""
        while True:
            yield from scanner.space()
            yield from scanner.expect(self.begin + self.before_name)
            name = yield from scanner.until((self.before_arguments,))
            if not name.strip():
                raise MalformedError
            self._begin(scanner, name.strip())
            yield from scanner.json_value(scanner.arguments)
            yield from scanner.space()
            yield from scanner.expect(self.after_arguments.lstrip() + self.end)
            following = yield from scanner.space()
            if following != self.begin[0]:
                return
            read = yield from scanner.take(self.ends, *self.other_ends)
            if read:
                return

    def _begin(self, scanner: Scanner, name: str) -> None:
        scanner.call(name)

    def _name(self, name: str, pieces: Pieces) -> list[Tag]:
        """The forms of a name in the grammar."""
        return pieces.text(f"{self.begin}{self.before_name}{name}{self.before_arguments}")

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of calls."""
        calls = [
            sequence(
                *self._name(name, pieces),
                json_schema(schema),
                *pieces.text(f"{self.after_arguments}{self.end}"),
            )
            for name, schema in tools.items()
        ]
        calls_tag = repeated(calls, self.separator, is_one=is_one)
        return sequence(*pieces.text(self.begins), calls_tag, *pieces.text(self.ends))


@dataclass(frozen=True, slots=True)
class KimiToolParser(DeepSeekToolParser):
    """Names as ``functions.NAME:NUMBER``, which is the call's id too: the chat template writes
    the ids of earlier calls."""

    before_arguments: str = "<|tool_call_argument_begin|>"
    begins: str = "<|tool_calls_section_begin|>"
    ends: str = "<|tool_calls_section_end|>"
    begin: str = "<|tool_call_begin|>"
    end: str = "<|tool_call_end|>"
    separator: str = ""
    other_begins: tuple[str, ...] = ("<|tool_call_section_begin|>",)
    other_ends: tuple[str, ...] = ("<|tool_call_section_end|>",)

    def _begin(self, scanner: Scanner, name: str) -> None:
        found = _NUMBERED.fullmatch(name)
        assert found is not None
        scanner.call(found.group(1), name)

    def _name(self, name: str, pieces: Pieces) -> list[Tag]:
        before = pieces.text(f"{self.begin}functions.{name}:")
        return [*before, _NUMBER, *pieces.text(self.before_arguments)]
