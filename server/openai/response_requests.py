"""Bodies of ``/v1/responses``, read as the chats that they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.server.openai.errors import ApiError
from trimaran.server.openai.fields import Fields, length_left, list_of
from trimaran.server.openai.requests import ChatModel, GenerationRequest, read_chat
from trimaran.server.openai.response_input import ResponseInput
from trimaran.server.openai.sampling import IGNORED, MAX_TOP_LOGPROBS

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
    given = ResponseInput(fields)
    chat["messages"] = given.messages
    tools = [_tool(tool, n) for n, tool in enumerate(fields.items("tools") or [])]
    if tools:
        chat["tools"] = tools
    chat["tool_choice"] = _tool_choice(fields.take("tool_choice"))
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
    _read_log_probs(fields, chat)
    fields.take("stream_options")
    fields.finish(*IGNORED, "instructions")
    chat = {name: value for name, value in chat.items() if value is not None}
    try:
        found = read_chat(Fields(chat), chat_models)
    except ApiError as error:
        raise given.named(error) from None
    found.repeated = repeated
    found.guide_members = tuple(
        "text.format" if name == "response_format" else name for name in found.guide_members
    )
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
        left = length_left(left, value)
        if left < 0:
            raise ApiError(
                f"{', '.join(repeated)} may have at most {MAX_REPEATED_LENGTH} characters and "
                f"values together, because the answer repeats them. Shorten '{name}'.",
                param=name,
            )
    return repeated


def _read_log_probs(fields: Fields, chat: dict[str, Any]) -> None:
    """Whether the answer has log-probabilities. The other additions that ``include`` may name
    belong to items that answers never have."""
    included = list_of(fields, "include", str, "strings", 64) or []
    num_top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if _LOG_PROBS in included:
        chat["logprobs"], chat["top_logprobs"] = True, num_top or 0
    elif num_top:
        raise ApiError(
            f"'top_logprobs' needs '{_LOG_PROBS}' in 'include'", param="top_logprobs"
        )


def _tool(tool: Any, number: int) -> dict[str, Any]:
    """A tool in the form of chats."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        where = f"tools[{number}]"
        raise ApiError(f"'{where}' must be a tool of the type 'function'", param=where)
    function = {name: value for name, value in tool.items() if name not in ("type", "strict")}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    """A choice in the form of chats."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return _named(choice)
    tools = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(tools, list):
        allowed = {"mode": choice.get("mode"), "tools": [_named(tool) for tool in tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(tool: Any) -> dict[str, Any]:
    name = tool.get("name") if isinstance(tool, dict) else None
    return {"type": "function", "function": {"name": name}}


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
