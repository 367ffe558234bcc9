"""The messages of a chat, in the form that chat templates read."""

from __future__ import annotations

import json
from typing import Any

from trimaran.server.openai.errors import ApiError
from trimaran.server.openai.fields import Fields

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def read_messages(fields: Fields, *, takes_parts: bool, knows_developer: bool) -> list[Any]:
    """The messages. Texts in parts become one text, unless the template ``takes_parts``;
    ``developer`` becomes ``system``, unless the template ``knows_developer``.

    Raises:
        ApiError: no messages, or a message of another form.
    """
    given = fields.items("messages")
    if not given:
        raise ApiError("'messages' must hold at least one message", param="messages")
    found = []
    for number, message in enumerate(given):
        if _is_plain(message):
            found.append(dict(message))
        else:
            where = f"messages[{number}]"
            if not isinstance(message, dict):
                raise ApiError(f"'{where}' must be an object", param=where)
            found.append(_message(message, where, takes_parts=takes_parts))
        if message["role"] == "developer" and not knows_developer:
            found[-1]["role"] = "system"
    return found


def _is_plain(message: Any) -> bool:
    """Whether a message holds a text and no calls, so that templates take the message as it
    is."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        and message.get("tool_calls") is None
    )


def _message(message: dict[str, Any], where: str, *, takes_parts: bool) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ApiError(f"'{where}.role' must be a string", param=f"{where}.role")
    converted = dict(message)
    if isinstance(content, list):
        parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        converted["content"] = (
            [{"type": "text", "text": text} for text in parts]
            if takes_parts
            else "\n".join(parts)
        )
    elif content is not None and not isinstance(content, str):
        raise ApiError(
            f"'{where}.content' must be a string or a list of parts", param=f"{where}.content"
        )
    if message.get("tool_calls") is not None:
        converted["tool_calls"] = _tool_calls(message["tool_calls"], where)
    if role == "assistant" and content is None:
        # Templates take an absent text for an empty text, and some fail on an absent text.
        converted["content"] = ""
    return converted


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise ApiError(
            f"'{where}' has the type {str(kind)[:50]!r}: only text is served. Leave images, "
            "sounds and files out.",
            param=where,
        )
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise ApiError(f"'{where}.text' must be a string", param=where)
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects, which templates write as JSON."""
    path = f"{where}.tool_calls"
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ApiError(f"'{path}' must be a list of objects", param=path)
    found = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"'{path}' must hold calls of functions by name", param=path)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                read = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError):
                read = None
            if isinstance(read, dict):
                function = {**function, "arguments": read}
        found.append({**call, "function": function})
    return found
