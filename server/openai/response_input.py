"""The items of a response's input, as the messages of a chat."""

from __future__ import annotations

import re
from typing import Any

from trimaran.server.openai.errors import ApiError
from trimaran.server.openai.fields import Fields

_MESSAGE = re.compile(r"messages\[(\d+)\]")


class ResponseInput:
    """The messages of ``instructions`` and ``input``.

    What an assistant wrote between two other items is one message: reasoning, a text and calls.
    """

    def __init__(self, fields: Fields) -> None:
        """Read the members.

        Raises:
            ApiError: no input, or an item of another kind.
        """
        self._places: list[str] = []
        """Where each message begins in the request."""

        self.messages: list[dict[str, Any]] = []
        instructions = fields.text("instructions")
        if instructions:
            self._add("instructions", {"role": "system", "content": instructions})
        given = fields.take("input")
        if isinstance(given, str):
            self._add("input", {"role": "user", "content": given})
            return
        if not isinstance(given, list) or not given:
            raise ApiError("'input' must be a string or a list of items", param="input")
        for number, item in enumerate(given):
            where = f"input[{number}]"
            if not isinstance(item, dict):
                raise ApiError(f"'{where}' must be an object", param=where)
            self._add_item(where, item)

    def named(self, error: ApiError) -> ApiError:
        """An error of a message as an error of the item that the message is made of."""

        def place(found: re.Match[str]) -> str:
            return self._places[int(found.group(1))]

        param = error.param
        if param is None or _MESSAGE.match(param) is None:
            return error
        text = _MESSAGE.sub(place, str(error))
        return ApiError(
            text, param=_MESSAGE.sub(place, param), code=error.code, kind=error.kind
        )

    def _add(self, where: str, message: dict[str, Any]) -> dict[str, Any]:
        self._places.append(where)
        self.messages.append(message)
        return message

    def _add_item(self, where: str, item: dict[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(where, item)
        elif kind == "reasoning":
            text = _reasoning_text(item)
            if text:
                thought = {"role": "assistant", "content": None, "reasoning_content": text}
                self._add(where, thought)
        elif kind == "function_call":
            message: dict[str, Any] = {"role": "assistant", "content": None}
            message = self._open() or self._add(where, message)
            message.setdefault("tool_calls", []).append(_call(item))
        elif kind == "function_call_output":
            output = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            self._add(where, {"role": "tool", **output})
        else:
            raise ApiError(
                f"'{where}' has the type {str(kind)[:50]!r} but must be message, "
                "function_call, function_call_output or reasoning",
                param=where,
            )

    def _add_message(self, where: str, item: dict[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        message = self._open() if role == "assistant" else None
        if message is None or message["content"] is not None or "tool_calls" in message:
            self._add(where, {"role": role, "content": content})
        else:
            message["content"] = content

    def _open(self) -> dict[str, Any] | None:
        """The last message if an assistant writes the message."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return None


def _reasoning_text(item: dict[str, Any]) -> str:
    """The reasoning of an item. Summaries, and what is encrypted, are for others."""
    parts = item.get("content")
    if not isinstance(parts, list):
        return ""
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _call(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}
