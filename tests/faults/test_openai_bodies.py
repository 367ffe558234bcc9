"""Long and deep bodies on the OpenAI port: other clients are not disturbed.

Each test sends one kind of body, several at once, beside a long greedy stream and a probe.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bystanders import Watched
from served import DEMO_MODEL, Served, init_repo, run_trimaran

from trimaran.bench.serving.free_ports import free_ports

pytestmark = pytest.mark.timeout(400)

MAX_GAP_S = 1.0
MAX_GROWTH_MB = 200.0
GUIDE_PROCESSES_MB = 450.0
"""Processes that compile guides are ended when one takes too long, and started again."""
MANY = 128
"""The largest batch, and the largest ``n``."""
AT_ONCE = 3
TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"""
CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MB = 1 << 20


class OpenServed(Served):
    """A server with an OpenAI port."""

    openai_port = 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenServed]:
    folder = tmp_path_factory.mktemp("openai")
    done = run_trimaran(
        "build", "--checkpoint", str(DEMO_MODEL), "--output", str(folder / "engine"),
        "--max-input-len", "896", "--max-batch-size", str(MANY),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fill = f"tokenizer_dir:{DEMO_MODEL},engine_dir:{folder / 'engine'},decoupled_mode:True"
    fill += ",guided_decoding_backend:xgrammar"
    fill += f",triton_max_batch_size:{MANY}"
    init_repo(str(folder / "models"), "--defaults", "--fill", fill)
    (folder / "chat.jinja").write_text(TEMPLATE)
    (port,) = free_ports(1)
    flags = (
        "--openai-port", str(port), "--chat-template", str(folder / "chat.jinja"),
        # A form with a schema for each argument.
        "--tool-call-parser", "kimi_k3",
    )  # fmt: skip
    with OpenServed(folder / "models", 1, flags, folder / "serve.log") as served:
        served.openai_port = port
        # Helper processes of the first long body or text must run before memory is measured.
        with ThreadPoolExecutor(4) as clients:
            long = {"model": "ensemble", "messages": [user("a " * 200_000)]}
            guided = {**chat("a"), "response_format": {"type": "json_object"}}
            list(clients.map(lambda each: post(served, CHAT, each), [long, guided] * 4))
        yield served


def post(server: OpenServed, path: str, body: Any) -> tuple[int, str]:
    """Status and the first 4,000 characters of the answer, all of which is read."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.openai_port, timeout=300)
    with contextlib.closing(connection):
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read(4000).decode(errors="replace")
        while reply.read(MB):
            continue
        return reply.status, text


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(text: Any, **others: Any) -> dict[str, Any]:
    return {"model": "ensemble", "messages": [user(text)], "max_tokens": 8, **others}


def response(given: Any, **others: Any) -> dict[str, Any]:
    return {"model": "ensemble", "input": given, "max_output_tokens": 8, **others}


def tool(number: int = 0, schema: Any = None) -> dict[str, Any]:
    function = {"name": f"f{number}", "parameters": schema or {"type": "object"}}
    return {"type": "function", "function": function}


def nested(opening: str, closing: str, depth: int) -> bytes:
    """A chat whose content is so deep."""
    text = opening * depth + "1" + closing * depth
    start = b'{"model": "ensemble", "messages": [{"role": "user", "content": '
    return start + text.encode() + b"}]}"


def recursive_schema() -> dict[str, Any]:
    """Definitions that refer to each other."""
    ref = {"$ref": "#/$defs/d0"}
    definitions = {
        f"d{n}": {
            "type": "object",
            "properties": {
                f"p{m}": {"$ref": f"#/$defs/d{(n * 7 + m) % 60}"} for m in range(20)
            },
        }
        for n in range(60)
    }
    return {"type": "object", "properties": {"a": ref}, "$defs": definitions}


def called(schema: Any, count: int = 1) -> dict[str, Any]:
    """A chat in which one of some functions must be called."""
    return chat("a", tools=[tool(n, schema) for n in range(count)], tool_choice="required")


def endless_schema(width: int) -> dict[str, Any]:
    """A definition that is any of itself."""
    itself = {"$ref": "#/$defs/d"}
    return {
        "type": "object", "properties": {"a": itself},
        "$defs": {"d": {"anyOf": [itself] * width}},
    }  # fmt: skip


def shared_schema(count: int) -> dict[str, Any]:
    """So many arguments, and as many definitions that each of them may need."""
    return {
        "type": "object",
        "properties": {f"p{n}": {"$ref": "#/$defs/d0"} for n in range(count)},
        "$defs": {f"d{n}": {"type": "integer", "description": "y" * 20} for n in range(count)},
    }


def parts(kind: str, count: int, **member: Any) -> list[dict[str, Any]]:
    return [{"type": kind, **member}] * count


def formed(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return chat("a", response_format=form)


ATTACKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "100,000 messages": (CHAT, lambda: {**chat(""), "messages": [user("a")] * 100_000}),
    "10,000 messages of a stream": (
        CHAT, lambda: {**chat("", stream=True), "messages": [user("a")] * 10_000},
    ),
    "100 messages in 16 KB": (CHAT, lambda: {**chat(""), "messages": [user("a" * 90)] * 100}),
    "lists in lists": (CHAT, lambda: nested("[", "]", 100_000)),
    "objects in objects": (CHAT, lambda: nested('{"a":', "}", 2_000_000)),
    "20 MB of content": (CHAT, lambda: chat("a " * (10 * MB))),
    "10 MB of a tool's schema": (
        CHAT, lambda: chat("a", tools=[tool(0, {"description": "x" * (10 * MB)})]),
    ),
    "512 tools, one required": (
        CHAT,
        lambda: chat("a", tools=[tool(n) for n in range(512)], tool_choice="required"),
    ),
    "a schema of definitions that refer to each other": (
        CHAT, lambda: formed(recursive_schema()),
    ),
    "a schema of 20,000 properties": (
        CHAT,
        lambda: formed({
            "type": "object",
            "properties": {f"p{n}": {"type": "string"} for n in range(20_000)},
        }),
    ),
    "a schema that is deep": (
        CHAT,
        lambda: formed(json.loads('{"type":"array","items":' * 400 + "{}" + "}" * 400)),
    ),
    "an enumeration of 200,000 words": (
        CHAT, lambda: formed({"enum": [f"word {n}" for n in range(200_000)]}),
    ),
    "a pattern of nested repetitions": (
        CHAT, lambda: formed({"type": "string", "pattern": "^((a{1,200}){1,200}){1,200}$"}),
    ),
    "4,096 biases": (
        CHAT, lambda: chat("a", logit_bias={str(n): 1 for n in range(4096)}, n=64),
    ),
    "a million biases": (
        CHAT, lambda: chat("a", logit_bias={str(n): 1 for n in range(1_000_000)}),
    ),
    "1,024 stop words and 128 choices": (
        CHAT, lambda: chat("a", stop=[f" th{n}" for n in range(1024)], n=MANY, max_tokens=64),
    ),
    "a million stop words": (TEXT, lambda: {
        "model": "ensemble", "prompt": "a", "stop": [f"w{n}" for n in range(1_000_000)],
    }),
    "128 choices with log-probabilities": (
        CHAT,
        lambda: chat(
            "a " * 400, n=MANY, max_tokens=100, logprobs=True, top_logprobs=20, ignore_eos=True
        ),
    ),
    "128 choices with log-probabilities, streamed": (
        CHAT,
        lambda: chat(
            "a " * 400, n=MANY, max_tokens=50, logprobs=True, top_logprobs=20, stream=True,
            ignore_eos=True,
        ),
    ),
    "4,096 prompts": (TEXT, lambda: {"model": "ensemble", "prompt": ["a"] * 4096}),
    "128 prompts of 16 choices": (
        TEXT, lambda: {"model": "ensemble", "prompt": ["a b c"] * MANY, "n": 16},
    ),
    "4 million ids": (TEXT, lambda: {"model": "ensemble", "prompt": [5] * 4_000_000}),
    "50,000 items": (
        RESPONSE, lambda: response([{"role": "user", "content": "a"}] * 50_000),
    ),
    "50,000 calls": (
        RESPONSE,
        lambda: response([
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        ] * 50_000),
    ),
    "20 MB of metadata": (
        RESPONSE, lambda: response("a", metadata={"x": "x" * (20 * MB)}, stream=True),
    ),
    "a million members of metadata": (
        RESPONSE, lambda: response("a", metadata={str(n): [] for n in range(1_000_000)}),
    ),
    "20 MB in the choice of a tool": (
        RESPONSE,
        lambda: response("a", tool_choice={"type": "auto", "x": ["y"] * (5 * MB)}),
    ),
    "20 MB of a user's name": (RESPONSE, lambda: response("a", user="x" * (20 * MB))),
    "chat options that are long": (
        CHAT, lambda: chat("a", chat_template_kwargs={"x": ["y"] * (4 * MB)}),
    ),
    "a long name of the model": (CHAT, lambda: {**chat("a"), "model": "m" * (30 * MB)}),
    "many unknown members": (CHAT, lambda: {**chat("a"), **{f"m{n}": 1 for n in range(10**6)}}),
    "20,000 functions": (CHAT, lambda: chat("a", tools=[tool(n) for n in range(20_000)])),
    "20,000 functions for a response": (
        RESPONSE,
        lambda: response("a", tools=[
            {"type": "function", "name": f"f{n}"} for n in range(20_000)
        ]),
    ),
    "100,000 allowed functions": (
        CHAT,
        lambda: chat("a", tools=[tool()], tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [tool()] * 100_000},
        }),
    ),
    "a function of an endless type": (CHAT, lambda: called(endless_schema(200))),
    "64 functions of an endless type": (CHAT, lambda: called(endless_schema(20), 64)),
    "arguments that share 3,000 definitions": (CHAT, lambda: called(shared_schema(3000))),
    "arguments that share 100 definitions, in 16 KB": (
        CHAT, lambda: called(shared_schema(100)),
    ),
    "50,000 images": (
        CHAT, lambda: chat(parts("image_url", 50_000, image_url={"url": "data:,"})),
    ),
    "an image of 20 MB": (
        CHAT,
        lambda: chat(parts(
            "image_url", 1, image_url={"url": "data:image/png;base64," + "A" * (20 * MB)},
        )),
    ),
    "400,000 parts of a message": (CHAT, lambda: chat(parts("text", 400_000, text="a"))),
    "a million prompts without ids": (
        TEXT, lambda: {"model": "ensemble", "prompt": [[]] * 1_000_000},
    ),
    "4,096 prompts of 1,000 ids": (
        TEXT, lambda: {"model": "ensemble", "prompt": [[5] * 1000] * 4096},
    ),
    "128 prompts of 64 KB": (
        TEXT, lambda: {"model": "ensemble", "prompt": ["a " * (32 << 10)] * MANY},
    ),
    "a stop word of 20 MB": (CHAT, lambda: chat("a", stop="x" * (20 * MB))),
    "16 stop words of a megabyte": (
        TEXT, lambda: {"model": "ensemble", "prompt": "a", "stop": ["ab" * (MB // 2)] * 16},
    ),
    "200,000 parts of an item": (
        RESPONSE,
        lambda: response([
            {"role": "user", "content": parts("input_text", 200_000, text="a")}
        ]),
    ),
    "20,000 images of items": (
        RESPONSE,
        lambda: response([
            {"role": "user", "content": parts("input_image", 1, image_url="data:,")}
        ] * 20_000),
    ),
    "a reasoning of 400,000 parts": (
        RESPONSE,
        lambda: response([
            {"type": "reasoning", "content": parts("reasoning_text", 400_000, text="a")}
        ]),
    ),
    "20 MB that a function returned": (
        RESPONSE,
        lambda: response([
            {"type": "function_call_output", "call_id": "c", "output": "a " * (10 * MB)}
        ]),
    ),
    "100,000 messages to tokenize": (
        "/tokenize", lambda: {"model": "ensemble", "messages": [user("a")] * 100_000},
    ),
    "20,000 functions to tokenize": (
        "/tokenize",
        lambda: {
            "model": "ensemble", "messages": [user("a")],
            "tools": [tool(n) for n in range(20_000)],
        },
    ),
    "a million tokens as texts": (
        "/tokenize",
        lambda: {"model": "ensemble", "prompt": "a " * 500_000, "return_token_strs": True},
    ),
    "60 MB to load a model": (
        "/v1/models/ensemble/load", lambda: {"parameters": "x" * (60 * MB)},
    ),
    "20 MB to embed": ("/v1/embeddings", lambda: {"input": "a " * (10 * MB)}),
    "texts to tokenize": (
        "/tokenize", lambda: {"model": "ensemble", "prompt": "a " * (10 * MB)},
    ),
    "ids to detokenize": (
        "/detokenize", lambda: {"model": "ensemble", "tokens": [5] * 1_000_000},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_no_body_disturbs_other_clients(server, name, capsys):
    path, make = ATTACKS[name]
    made = make()
    body = made if isinstance(made, bytes) else json.dumps(made).encode()
    with (
        Watched(server.http_port, server.process.pid) as watched,
        ThreadPoolExecutor(AT_ONCE) as clients,
    ):
        answers = list(clients.map(lambda _: post(server, path, body), range(AT_ONCE)))
    seen = watched.seen
    with capsys.disabled():
        statuses = [status for status, _ in answers]
        print(f"\n  {name}: {statuses} {answers[0][1][:160]!r}\n    {seen}")
    assert all(status < 500 or status in (501, 503) for status, _ in answers), answers[0][1]
    assert seen.failure == ""
    assert seen.num_events > 5
    assert seen.stream_gap_s < MAX_GAP_S
    assert seen.health_s < MAX_GAP_S
    is_guided = b"json_schema" in body[-200:] or b"json_schema" in body[:200]
    assert seen.grown_mb < MAX_GROWTH_MB + (GUIDE_PROCESSES_MB if is_guided else 0.0)


def test_no_process_of_the_server_was_restarted(server):
    log = server.log()
    assert "restart" not in log.lower()
    assert "Traceback" not in log
    assert Path(server.log_path).exists()
