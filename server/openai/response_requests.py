"""Bodies of ``/v1/responses``, read as the chats that they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.server.openai.errors import ApiError
from trimaran.server.openai.fields import Fields, list_of
from trimaran.server.openai.requests import ChatModel, GenerationRequest, read_chat
from trimaran.server.openai.sampling import IGNORED

_SAME = (
    "model", "temperature", "top_p", "parallel_tool_calls", "service_tier", "stream", "seed",
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
    "ignore_eos", "min_tokens", "chat_template_kwargs", "cache_salt",
    "max_draft_tokens",
)  # fmt: skip
"""Members of the same meaning in a chat."""

_REFUSED = {
    "previous_response_id": "is not served: answers are not kept. Send the whole input.",
    "conversation": "is not served: answers are not kept. Send the whole input.",
    "prompt": "is not served: templates are not kept. Send the input itself.",
    "background": "is not served. Leave it out, and read the answer or its stream.",
    "top_logprobs": "is served by /v1/chat/completions",
    "max_tool_calls": "is not served: no tool is called by the server",
    "context_management": "is not served. Leave it out.",
    "moderation": "is not served. Leave it out.",
}
MAX_REPEATED_LENGTH = 1 << 20
_LOG_PROBS = "message.output_text.logprobs"
_ECHOED = (
    "instructions", "max_output_tokens", "metadata", "temperature", "top_p", "text",
    "reasoning", "truncation", "user",
)  # fmt: skip
"""Members that an answer repeats."""


def read_response(fields: Fields, chat_models: Mapping[str, ChatModel]) -> GenerationRequest:
    """The request of ``/v1/responses``, with its prompt rendered.

    Raises:
        ApiError: a member is wrong, unknown, or not served.
    """
    members = fields.plain()
    repeated = _repeated(members)
    for name, reason in _REFUSED.items():
        fields.refuse(name, reason)
    chat: dict[str, Any] = {name: fields.take(name) for name in _SAME}
    chat["max_completion_tokens"] = fields.integer("max_output_tokens", 1, 1 << 30)
    chat["messages"] = _messages(fields)
    tools = [_tool(tool, n) for n, tool in enumerate(fields.items("tools") or [])]
    if tools:
        chat["tools"] = tools
    choice = fields.take("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    chat["response_format"] = _response_format(fields)
    reasoning = fields.member("reasoning")
    if reasoning is not None:
        chat["reasoning_effort"] = reasoning.text("effort")
        # The reasoning comes whole.
        reasoning.finish("summary", "generate_summary")
    if fields.choice("truncation", "auto", "disabled") == "auto":
        raise ApiError(
            "'truncation' is 'auto' but no input is cut. Leave it out, and send a shorter "
            "input where it is too long.",
            param="truncation",
        )
    _check_included(fields)
    fields.take("stream_options")
    fields.finish(*IGNORED, "instructions")
    found = read_chat(Fields({k: v for k, v in chat.items() if v is not None}), chat_models)
    found.repeated = repeated
    return found


def _repeated(members: dict[str, Any]) -> dict[str, Any]:
    """The members that an answer repeats, in a stream with each event of the whole response.

    Raises:
        ApiError: too long for that.
    """
    repeated = {name: members.get(name) for name in _ECHOED}
    repeated["tools"] = members.get("tools") or []
    repeated["tool_choice"] = members.get("tool_choice") or "auto"
    repeated["parallel_tool_calls"] = members.get("parallel_tool_calls") is not False
    left = MAX_REPEATED_LENGTH
    for name, value in repeated.items():
        left = _left(left, value)
        if left < 0:
            raise ApiError(
                f"{', '.join(repeated)} may have at most {MAX_REPEATED_LENGTH} characters and "
                f"values together, because the answer repeats them. Shorten '{name}'.",
                param=name,
            )
    return repeated


def _left(left: int, value: object) -> int:
    """What a value leaves of a number of characters and values; below 0: too little."""
    waiting = [value]
    while waiting and left >= 0:
        item = waiting.pop()
        if isinstance(item, dict):
            left -= sum(map(len, item))
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        left -= len(item) if isinstance(item, str) else 1
    return left


def _check_included(fields: Fields) -> None:
    """Refuse log-probabilities. The other additions belong to items that answers never have."""
    included = list_of(fields, "include", str, "strings", 64) or []
    if _LOG_PROBS in included:
        raise ApiError(
            f"'include' names {_LOG_PROBS}. Ask /v1/chat/completions for 'logprobs'.",
            param="include",
        )


def _messages(fields: Fields) -> list[Any]:
    """The items of the input as messages of a chat."""
    instructions = fields.text("instructions")
    messages: list[Any] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = fields.take("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError("'input' must be a string or a list of items", param="input")
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise ApiError(f"'{where}' must be an object", param=where)
        _add_item(messages, item, where)
    return messages


def _add_item(messages: list[Any], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        # Calls that follow each other are one message, as they were written.
        if messages and "tool_calls" in messages[-1]:
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append(
            {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        )
    elif kind != "reasoning":
        raise ApiError(
            f"'{where}' has the type {str(kind)[:50]!r} but must be message, function_call, "
            "function_call_output or reasoning",
            param=where,
        )


def _tool(tool: Any, number: int) -> dict[str, Any]:
    """A tool in the form of chats."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        where = f"tools[{number}]"
        raise ApiError(f"'{where}' must be a tool of the type 'function'", param=where)
    function = {name: value for name, value in tool.items() if name not in ("type", "strict")}
    return {"type": "function", "function": function}


def _response_format(fields: Fields) -> dict[str, Any] | None:
    text = fields.member("text")
    if text is None:
        return None
    form = text.take("format")
    text.choice("verbosity", "medium")
    text.finish()
    if form is None:
        return None
    if not isinstance(form, dict):
        raise ApiError("'text.format' must be an object", param="text.format")
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form
