"""OpenAI's harmony form, which gpt-oss writes: messages on channels, some to functions.

The form and its tokens are those of the harmony response format
(https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimaran.server.openai.parsing.output_parser import ToolParser
from trimaran.server.openai.parsing.scanner import (
    END,
    Kind,
    Reader,
    Scanner,
    Steps,
    without_last_space,
)
from trimaran.server.openai.parsing.structural_tags import (
    Pieces,
    Schema,
    Tag,
    const,
    json_schema,
    repeated,
    sequence,
)

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>",
)  # fmt: skip
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_TO = ("to=", " to=")
"""A recipient may come before the channel, right behind the prompt's ``<|start|>assistant``."""

_FUNCTIONS = "functions."
_ENDS = (_END, _CALL, _RETURN, _START)
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_ON_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class HarmonyToolParser(ToolParser):
    """The whole output: reasoning on the channel ``analysis``, calls as messages to functions,
    and texts.

    Messages to other recipients than functions count as reasoning: they are for tools that
    no request offers.
    """

    @property
    def openings(self) -> tuple[str, ...]:
        """See `ToolParser`."""
        return ()

    @property
    def is_whole(self) -> bool:
        """See `ToolParser`."""
        return True

    @property
    def literals(self) -> str:
        """See `ToolParser`."""
        return "".join((_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN))

    def read(self, scanner: Scanner, opening: str) -> Steps:
        """See `ToolParser`. An output that begins with no header continues a text."""
        scanner.forget()
        told: set[Kind] = set()
        begun = yield from scanner.take(_CHANNEL, _START, *_TO)
        while True:
            if begun:
                header = yield from _header(scanner, begun)
                if not header:
                    return
                ended = yield from _body(scanner, header, told)
            else:
                ended = yield from scanner.until(_ENDS, _joined(scanner, Kind.TEXT, told))
            if ended == _START:
                begun = ended
                continue
            following = yield from scanner.space()
            if following == END:
                return
            begun = yield from scanner.take(_CHANNEL, _START)

    def structure(self, tools: Mapping[str, Schema], pieces: Pieces, *, is_one: bool) -> Tag:
        """The structural tag of a call; the end of a call ends the output."""
        calls = [
            sequence(
                *pieces.text(f"{_CHANNEL}commentary to={_FUNCTIONS}{name} {_CONSTRAIN}json"),
                *pieces.text(_MESSAGE),
                json_schema(schema),
            )
            for name, schema in tools.items()
        ]
        return repeated(calls, "", is_one=True)

    def answer(self, content: Tag, pieces: Pieces) -> Tag:
        """The structural tag of an answer with this content."""
        return sequence(*pieces.text(f"{_CHANNEL}final{_MESSAGE}"), content)

    def behind_reasoning(self, content: Tag, pieces: Pieces) -> Tag:
        """The structural tag of these messages with reasoning before, or without."""
        reasoning = sequence(
            *pieces.text(f"{_CHANNEL}analysis{_MESSAGE}"),
            {"type": "any_text", "excludes": [_END]},
            *pieces.text(f"{_END}{_START}"),
            const("assistant"),
        )
        return sequence({"type": "optional", "content": reasoning}, content)


def _header(scanner: Scanner, begun: str) -> Reader:
    """A message's header that begins so. Empty at the end: the rest of a header that was cut
    off is no text, unless the header may be a text."""
    parts = [begun]
    read = yield from scanner.until((_MESSAGE,), parts.append)
    if read:
        return "".join(parts)
    header = "".join(parts)
    if begun in _TO and _CHANNEL not in header:
        scanner.text(header)
    return ""


def _body(scanner: Scanner, header: str, told: set[Kind]) -> Reader:
    """A message behind its header; the literal that ends the message, or empty."""
    recipient = _RECIPIENT.search(header)
    name = recipient.group(1) if recipient is not None else ""
    channel = _ON_CHANNEL.search(header)
    if name.startswith(_FUNCTIONS) and scanner.tools:
        ended = yield from _arguments(scanner, name.removeprefix(_FUNCTIONS))
        return ended
    is_foreign = bool(name) and not name.startswith(_FUNCTIONS)
    if is_foreign or (channel is not None and channel.group(1) == "analysis"):
        kind = Kind.REASONING if scanner.has_reasoning else Kind.TEXT
        scanner.is_reasoning = kind is Kind.REASONING
        yield from scanner.space()
        emit = without_last_space(_joined(scanner, kind, told))
    else:
        emit = _joined(scanner, Kind.TEXT, told)
    ended = yield from scanner.until(_ENDS, emit)
    scanner.is_reasoning = False
    return ended


def _arguments(scanner: Scanner, name: str) -> Reader:
    """The arguments of a call, which are JSON; the literal that ends the call, or empty."""
    scanner.call(name)
    has_arguments = False

    def emit(text: str) -> None:
        nonlocal has_arguments
        has_arguments = True
        scanner.arguments(text)

    yield from scanner.space()
    ended = yield from scanner.until(_ENDS, without_last_space(emit))
    if ended and not has_arguments:
        scanner.arguments("{}")
    return ended


def _joined(scanner: Scanner, kind: Kind, told: set[Kind]) -> Callable[[str], None]:
    """Passes the text of a message on, behind a line break if messages of its kind came
    before."""
    separator = "\n" if kind in told else ""

    def emit(text: str) -> None:
        nonlocal separator
        if text:
            scanner.emit(kind, separator + text)
            separator = ""
            told.add(kind)

    return emit
