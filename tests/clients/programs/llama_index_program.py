"""LlamaIndex's OpenAI class, unmodified, against the URL in the first argument."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI
from pydantic import BaseModel

PROMPT = "It was"
CHAT = [ChatMessage(role="user", content=PROMPT)]
# The class has the context sizes of OpenAI's own models alone.
SETTINGS: dict[str, Any] = {
    "model": "gpt-4o-mini", "api_base": sys.argv[1], "api_key": "none", "temperature": 0,
}  # fmt: skip


class Answer(BaseModel):
    """A form that a model fills."""

    first: bool
    second: bool


def add(a: bool, b: bool) -> bool:
    """Add two bits."""
    return a ^ b


async def _texts(llm: OpenAI) -> list[str]:
    stream = await llm.astream_chat(CHAT)
    parts = [part.delta or "" async for part in stream]
    return [(await llm.acomplete(PROMPT)).text, "".join(parts)]


def main() -> None:
    """Fail where the class does not get what it asks for."""
    llm = OpenAI(**SETTINGS, max_tokens=12)
    text = llm.complete(PROMPT).text
    assert text
    assert llm.chat(CHAT).message.content == text
    assert "".join(part.delta or "" for part in llm.stream_complete(PROMPT)) == text
    assert "".join(part.delta or "" for part in llm.stream_chat(CHAT)) == text
    assert asyncio.run(_texts(llm)) == [text, text]

    long = OpenAI(**SETTINGS, max_tokens=400, strict=True)
    form = long.as_structured_llm(Answer).complete(PROMPT).raw
    assert isinstance(form, Answer), form
    tools = [FunctionTool.from_defaults(add)]
    answer = long.chat_with_tools(tools, user_msg=PROMPT, tool_required=True)
    (call,) = long.get_tool_calls_from_response(answer)
    assert call.tool_name == "add" and set(call.tool_kwargs) == {"a", "b"}, call
    print("all answers are as they should be")


if __name__ == "__main__":
    main()
