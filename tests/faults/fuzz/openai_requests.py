"""Random requests to the OpenAI port: every route, with honest and dishonest members."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from cases import Case
from http_requests import json_piece, with_manners
from model_fields import GUIDES, MODELS, WORDS
from pieces import Piece

_GETS = (
    "/v1/models",
    "/v1/models/ensemble",
    "/v1/models/x",
    "/health",
    "/health/live",
    "/health/ready",
    "/chat",
    "/metrics",
    "/version",
    "/",
)
_ANY: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**31, 2**64, 10**30, 1e308, float("nan"), "", "x", "\ud800", [],
    {}, [[]], [None], {"a": 1}, "\x00", [{}],
)  # fmt: skip
_SCHEMAS: tuple[Any, ...] = (
    {"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}},
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
    {"type": "string", "pattern": "^((a?){30}a{30})+$"}, {"enum": ["a", 1, None]}, {}, True,
    {"type": "array", "maxItems": 10**9}, {"type": "string", "maxLength": 100_000},
    {"anyOf": [{"type": "number"}] * 300}, {"properties": {"": {}}}, {"$ref": "http://x/y"},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}},
     "$defs": {"d": {"anyOf": [{"$ref": "#/$defs/d"}] * 40}}},
    {"properties": {f"p{n}": {"$ref": "#/$defs/d"} for n in range(80)},
     "$defs": {"d": {"enum": ["e" * 40] * 40}}},
    {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]},
)  # fmt: skip
_FIELDS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 3, 8, 200), "n": (1, 2, 8, 128), "temperature": (0, 0.7, 2),
    "top_p": (0.1, 1), "top_k": (1, 50), "min_p": (0.1,), "seed": (1, 2**63),
    "stop": ("the", ["a", " night"], ["\n"] * 16), "stream": (True, True, False),
    "logit_bias": ({"5": 100}, {str(n): -100 for n in range(300)}, {"x": 1}),
    "presence_penalty": (-2, 1), "frequency_penalty": (1,), "repetition_penalty": (1.2,),
    "ignore_eos": (True,), "user": ("u",), "stream_options": ({"include_usage": True},),
    "min_tokens": (2,), "cache_salt": ("s",), "metadata": ({"a": "b"},),
    "service_tier": ("auto", "flex"), "skip_special_tokens": (False,), "store": (False,),
    "max_draft_tokens": (0, 2, 1000), "prompt_cache_key": ("k",), "safety_identifier": ("x",),
}  # fmt: skip
"""Members of all routes, with values that one of them takes."""

_FIELDS_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/completions": {
        "echo": (True,), "best_of": (2,), "suffix": ("x",), "add_special_tokens": (False,),
        "logprobs": (0, 2, 5),
    },
    "/v1/chat/completions": {
        "max_completion_tokens": (8,), "parallel_tool_calls": (True, False),
        "reasoning_effort": ("low", "none"), "documents": ([{"text": "a"}], [{}] * 50),
        "add_generation_prompt": (True, False), "continue_final_message": (True, False),
        "modalities": (["text"], ["audio"]), "chat_template": ("{{ messages }}",),
        "functions": ([],), "prediction": (None,),
    },
    "/v1/responses": {
        "instructions": ("the", ""), "parallel_tool_calls": (True, False),
        "reasoning": ({"effort": "low", "summary": "auto"}, {}), "previous_response_id": ("r",),
        "text": ({"format": {"type": "json_object"}}, {"verbosity": "low"}, {
            "format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}},
        }),
        "truncation": ("disabled", "auto"), "tool_choice": ("auto", "none", "required", {
            "type": "function", "name": "f0",
        }),
        "include": (["message.output_text.logprobs"], ["reasoning.encrypted_content"]),
        "max_tool_calls": (1,), "background": (False, True),
    },
    "/tokenize": {
        "add_special_tokens": (True, False), "return_token_strs": (True, False),
        "add_generation_prompt": (False,), "continue_final_message": (True,),
    },
}  # fmt: skip
"""Members of one route."""


def openai_case(rng: random.Random) -> Case:
    """A random request to the OpenAI port."""
    if rng.random() < 0.1:
        target = rng.choice(_GETS)
        case = with_manners(rng, f"openai: GET {target}", "GET", target, "")
        return Case(**{**case.to_dict(), "port": "openai"})
    path = rng.choices(tuple(_ROUTES), _WEIGHTS)[0]
    malice = rng.choice((0.0, 0.0, 0.1, 0.4))
    value = {"model": "ensemble", **_ROUTES[path](rng)}
    own = _FIELDS_OF.get(path, {})
    known = own if path.endswith("tokenize") else {**_FIELDS, **own}
    for name in rng.sample(tuple(known), min(len(known), rng.choice((0, 0, 1, 2, 3, 6)))):
        value[name] = rng.choice(known[name])
    if path == "/v1/responses" and "max_tokens" in value:
        value["max_output_tokens"] = value.pop("max_tokens")
    for name in tuple(value):
        if rng.random() < malice:
            value[name] = _dishonest(rng)
    if rng.random() < malice / 4:
        value["model"] = rng.choice((*MODELS, "", "x" * 9000, "ensemble:x"))
    case = with_manners(rng, f"openai: {path}", "POST", path, _body(rng, value))
    return Case(**{**case.to_dict(), "port": "openai"})


def _body(rng: random.Random, value: Any) -> Piece:
    """JSON, sometimes with a member that is long."""
    if rng.random() < 0.9:
        return json_piece(rng, value)
    count = rng.choice((1000, 60_000, 400_000))
    text = json.dumps(value)[:-1]
    before, item, after = rng.choice(_LONG)
    times = max(1, count // max(1, len(item) // 4))
    return [text, before, {"times": times, "of": item + ","}, item, after]


_FUNCTION = '{"type":"function","function":{"name":"f"}}'
_LONG = (
    (', "messages": [', '{"role":"user","content":"a"}', "]}"),
    (', "messages": [{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"),
    (', "messages": [{"role":"user","content":[',
     '{"type":"image_url","image_url":{"url":"data:,"}}', "]}]}"),
    (', "input": [', '{"role":"user","content":"a"}', "]}"),
    (', "input": [{"role":"user","content":[', '{"type":"input_text","text":"a"}', "]}]}"),
    (', "input": [', '{"type":"function_call_output","call_id":"c","output":"a"}', "]}"),
    (', "input": [{"type":"reasoning","content":[', '{"text":"a"}', "]}]}"),
    (', "stop": [', '"w"', "]}"),
    (', "stop": "', "ab", '"}'),
    (', "logit_bias": {', '"7":1', "}}"),
    (', "metadata": {"a": "', "é\\n", '"}}'),
    (', "prompt": [', "7", "]}"),
    (', "prompt": [', "[]", "]}"),
    (', "prompt": [', "[7,8]", "]}"),
    (', "prompt": [', '"a"', "]}"),
    (', "chat_template_kwargs": {"a": [', "[[]]", "]}}"),
    (', "documents": [', '{"text":"a"}', "]}"),
    (', "tools": [', '{"type":"function"}', "]}"),
    (', "tools": [', _FUNCTION, "]}"),
    (', "tools": [', '{"type":"function","name":"f"}', "]}"),
    (f', "tools": [{_FUNCTION}], "tool_choice": {{"type":"allowed_tools",'
     '"allowed_tools":{"mode":"required","tools":[', _FUNCTION, "]}}}"),
    (', "tool_choice": "required", "tools": [{"type":"function","function":{"name":"f",'
     '"parameters":{"properties":{"a":{"enum":[', '"e"', "]}}}}}]}"),
    (', "response_format": {"type":"json_schema","json_schema":{"schema":{"anyOf":[',
     '{"$ref":"#"}', "]}}}}"),
    (', "tokens": [', "5", "]}"),
)  # fmt: skip
"""Members that hold one thing many times: the text before, the thing, the text behind."""


def _dishonest(rng: random.Random) -> Any:
    value = rng.choice(_ANY)
    for _ in range(rng.choice((0, 0, 0, 1, 90, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.choice((1, 5, 40, 300))))


def _content(rng: random.Random) -> Any:
    if rng.random() < 0.7:
        return _text(rng)
    parts: list[Any] = [{"type": "text", "text": _text(rng)} for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.2:
        parts.append({"type": "image_url", "image_url": {"url": "data:,"}})
    if rng.random() < 0.2:
        kind = rng.choice(("input_text", "output_text", "input_image", "input_file", "refusal"))
        parts.append({"type": kind, "text": "a"})
    return parts


def _messages(rng: random.Random) -> list[Any]:
    roles = ("user", "user", "assistant", "system", "developer", "tool", "x")
    found: list[Any] = []
    for _ in range(rng.choice((1, 1, 2, 5, 60))):
        message = {"role": rng.choice(roles), "content": _content(rng)}
        if message["role"] == "assistant" and rng.random() < 0.3:
            call = {"name": "f0", "arguments": rng.choice(("{}", "{", '{"a":1}'))}
            message["tool_calls"] = [{"id": "c", "type": "function", "function": call}]
        if message["role"] == "tool":
            message["tool_call_id"] = "c"
        found.append(message)
    return found


def _tools(rng: random.Random) -> list[Any]:
    return [
        {"type": "function", "function": {"name": f"f{n}", "parameters": rng.choice(_SCHEMAS)}}
        for n in range(rng.choice((1, 2, 30)))
    ]


def _chat(rng: random.Random) -> dict[str, Any]:
    value: dict[str, Any] = {"messages": _messages(rng), "max_tokens": rng.choice((1, 8, 60))}
    if rng.random() < 0.2:
        value |= {"logprobs": True, "top_logprobs": rng.choice((0, 2, 20))}
    if rng.random() < 0.2:
        choices = ("auto", "none", "required", {"type": "function", "function": {"name": "f0"}})
        value |= {"tools": _tools(rng), "tool_choice": rng.choice(choices)}
    if rng.random() < 0.2:
        schema = {"name": "x", "schema": rng.choice(_SCHEMAS)}
        value["response_format"] = rng.choice((
            {"type": "json_object"}, {"type": "text"},
            {"type": "json_schema", "json_schema": schema},
        ))  # fmt: skip
    if rng.random() < 0.1:
        value["chat_template_kwargs"] = {"enable_thinking": True, "x": [1]}
    return value


def _completion(rng: random.Random) -> dict[str, Any]:
    prompt = rng.choice((
        _text(rng), [_text(rng), "b"], [5, 6, 7], [[5], [6, 7]], ["a"] * 80, [10**9], [-1],
    ))  # fmt: skip
    value = {"prompt": prompt, "max_tokens": rng.choice((1, 8, 60))}
    if rng.random() < 0.2:
        value["logprobs"] = rng.choice((0, 2, 5))
    if rng.random() < 0.1:
        kind, guide = rng.choice(GUIDES)
        value[f"guided_{kind}"] = guide
    return value


def _response(rng: random.Random) -> dict[str, Any]:
    items: list[Any] = [
        {"role": rng.choice(("user", "assistant")), "content": _content(rng)},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": _text(rng)}]},
        {"type": "function_call", "call_id": "c", "name": "f0", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": _text(rng)},
        {"type": "reasoning"}, {"type": "item_reference"}, 1,
    ]  # fmt: skip
    given = _text(rng) if rng.random() < 0.5 else rng.choices(items, (9, 2, 3, 3, 1, 1, 1), k=4)
    value: dict[str, Any] = {"input": given, "max_output_tokens": rng.choice((1, 8, 60))}
    if rng.random() < 0.2:
        value["instructions"] = _text(rng)
    if rng.random() < 0.2:
        value["tools"] = [
            {"type": "function", "name": f"f{n}", "parameters": rng.choice(_SCHEMAS)}
            for n in range(3)
        ]
    return value


def _tokens(rng: random.Random) -> dict[str, Any]:
    return rng.choice((
        {"prompt": _text(rng)}, {"messages": _messages(rng)},
        {"prompt": "a", "return_token_strs": 1},
        {"prompt": _text(rng), "return_token_strs": True},
        {"messages": _messages(rng), "add_generation_prompt": False, "tools": _tools(rng)},
    ))  # fmt: skip


_ROUTES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/tokenize": _tokens,
    "/detokenize": lambda rng: {"tokens": rng.choices((0, 5, 600, -1, 10**9), k=5)},
    "/v1/embeddings": lambda rng: {"input": _text(rng)},
    "/v1/x": _chat,
    "/v1/models/x/load": lambda rng: {"parameters": {"config": _text(rng)}},
    "/v1/models/ensemble/unload": lambda rng: {},
}
_WEIGHTS = (16, 10, 10, 4, 4, 2, 2, 1, 1)
