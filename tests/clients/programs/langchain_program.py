"""LangChain's OpenAI classes, unmodified, against the URL in the first argument."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

PROMPT = "It was"
SETTINGS: dict[str, Any] = {
    "model": "gpt-4o-mini", "base_url": sys.argv[1], "api_key": "none", "temperature": 0,
}  # fmt: skip


class Answer(BaseModel):
    """A form that a model fills."""

    first: bool
    second: bool


@tool
def add(a: bool, b: bool) -> bool:
    """Add two bits."""
    return a ^ b


async def _text(chat: ChatOpenAI) -> tuple[str, str]:
    whole = await chat.ainvoke(PROMPT)
    parts = [part.content async for part in chat.astream(PROMPT)]
    return str(whole.content), "".join(map(str, parts))


def main() -> None:
    """Fail where a class does not get what it asks for."""
    chat = ChatOpenAI(**SETTINGS, max_tokens=12)
    whole = chat.invoke(PROMPT)
    usage = whole.usage_metadata
    assert usage is not None and usage["output_tokens"] == 12, usage
    assert whole.response_metadata["finish_reason"] == "length"
    parts = list(chat.stream(PROMPT, stream_usage=True))
    assert "".join(str(part.content) for part in parts) == whole.content
    counted = [part.usage_metadata for part in parts if part.usage_metadata]
    assert [each["total_tokens"] for each in counted] == [usage["total_tokens"]], counted
    assert [answer.content for answer in chat.batch([PROMPT, PROMPT])] == [whole.content] * 2
    assert asyncio.run(_text(chat)) == (whole.content, whole.content)
    told = chat.bind(logprobs=True, top_logprobs=2).invoke(PROMPT)
    assert len(told.response_metadata["logprobs"]["content"]) == 12

    long = ChatOpenAI(**SETTINGS, max_tokens=400)
    form = long.with_structured_output(Answer, method="json_schema").invoke(PROMPT)
    assert isinstance(form, Answer), form
    called = long.bind_tools([add], tool_choice="add", strict=True).invoke(PROMPT)
    (call,) = called.tool_calls
    assert call["name"] == "add" and set(call["args"]) == {"a", "b"}, call

    plain = OpenAI(**SETTINGS, max_tokens=12)
    assert "".join(plain.stream(PROMPT)) == plain.invoke(PROMPT)
    output = plain.generate([PROMPT, PROMPT], stop=["the"]).llm_output
    assert output is not None and output["token_usage"]["completion_tokens"] > 0
    spoken = ChatOpenAI(**SETTINGS, max_tokens=12, use_responses_api=True).invoke(PROMPT)
    assert spoken.text == whole.content
    try:
        ChatOpenAI(**{**SETTINGS, "model": "absent"}).invoke(PROMPT)
    except openai.NotFoundError as error:
        assert "'absent' does not exist" in str(error)
    else:
        raise AssertionError("a model that does not exist has answered")
    print("all answers are as they should be")


if __name__ == "__main__":
    main()
