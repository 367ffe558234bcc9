"""Random HTTP requests: every route, with honest and mutated paths, heads and bodies."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import mutations
from cases import Case
from infer_bodies import binary_body, generate_body, infer_body
from model_fields import MODELS, choose_model
from pieces import Piece, weight

_GETS = (
    "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/models/{M}",
    "/v2/models/{M}/ready", "/v2/models/{M}/config", "/v2/models/{M}/stats", "/v2/logging",
    "/v2/models/{M}/versions/1", "/v2/models/{M}/versions/1/config", "/v2/trace/setting",
    "/v2/models/{M}/trace/setting", "/v2/systemsharedmemory/status",
    "/v2/cudasharedmemory/status", "/v2/systemsharedmemory/region/{M}/status",
    "/v2/cudasharedmemory/region/{M}/status",
)  # fmt: skip
_POSTS = (
    "/v2/repository/index", "/v2/repository/models/{M}/load", "/v2/repository/{M}/index",
    "/v2/repository/models/{M}/unload", "/v2/repository/x/models/{M}/load", "/v2/logging",
    "/v2/trace/setting", "/v2/models/{M}/trace/setting", "/v2/systemsharedmemory/unregister",
    "/v2/systemsharedmemory/region/{M}/register", "/v2/cudasharedmemory/unregister",
    "/v2/systemsharedmemory/region/{M}/unregister", "/v2/cudasharedmemory/region/{M}/register",
)  # fmt: skip
_METHODS = (
    "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get",
    "PRI", "X" * 300, "GE T", "", "PO\x00ST",
)  # fmt: skip
_NAMES = (
    "none",
    "",
    "..",
    "%2e%2e%2f",
    "%",
    "%ff",
    "%00",
    "a" * 5000,
    "é",
    "a/b",
    "stats",
    "*",
)
_HEADERS = (
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Content-Length: 0",
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 5, 5",
    "Content-Length: 1e3", "Content-Encoding: gzip", "Content-Encoding: br",
    "Expect: 100-continue",
    "Content-Encoding: deflate", "Expect: x", "Upgrade: websocket", "Upgrade: h2c",
    "Connection: upgrade, http2-settings", "HTTP2-Settings: AAMAAABkAAQAAP__",
    "Inference-Header-Content-Length: 0", "Inference-Header-Content-Length: -5",
    "Inference-Header-Content-Length: 99999999999999999999999",
    "Inference-Header-Content-Length: x", "Accept-Encoding: gzip", "Accept-Encoding: deflate",
    "Accept-Encoding: gzip;q=0, identity;q=nan", "endpoint-load-metrics-format: text",
    "endpoint-load-metrics-format: json", "endpoint-load-metrics-format: \x01",
    "Authorization: Basic !!!", "Authorization: Bearer",
    "Content-Type: application/x-x; charset=x",
    "traceparent: 00-00-00-00", "triton-request-timeout: nan", "X: " + "y" * 70_000,
    "Range: bytes=0-", "Cookie: " + "a=b;" * 2000, "Host: [::1", " folded: x", "no colon",
    "Content-Length : 3", "\x00: \x00", "A: \xff",
)  # fmt: skip
_SMALL: tuple[Any, ...] = (
    {}, {"ready": True}, {"ready": "x"}, {"parameters": {"unload_dependents": True}}, None,
    {"parameters": {"config": "{}"}}, {"parameters": {"config": "[" * 3000}}, [], 0, "x",
    {"parameters": {"config": "{}", "file:1/model.py": "cHJpbnQoMSk="}},
    {"parameters": {"file:../../x": "!!!!"}}, {"trace_level": ["TIMESTAMPS"]},
    {"trace_rate": "-1", "trace_count": "99999999999999999999"}, {"trace_mode": "x"},
    {"trace_level": None, "log_frequency": 1e400}, {"log_verbose_level": 2},
    {"log_verbose_level": 0}, {"log_verbose_level": 2**70}, {"log_format": "ISO8601"},
    {"log_format": "x"}, {"log_file": "/nonexistent/trimaran/fuzz"}, {"log_info": "x"},
    {"name": "r", "key": "/k", "offset": -1, "byte_size": 2**64}, {"raw_handle": {"b64": "="}},
)  # fmt: skip
_LONG_TEXT = {"times": 1 << 18, "of": "a "}


def http_case(rng: random.Random) -> Case:
    """A random request, or some on one connection."""
    make = rng.choices(
        (_plain, _inference, _uploaded, _pipelined), (3, 9, 1, 1)
    )[0]  # fmt: skip
    return make(rng)


def _request(
    method: str, target: str, headers: list[str], body: Piece, *, has_length: bool = True
) -> list[Piece]:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
    if has_length:
        lines.append(f"Content-Length: {_length(body)}")
    return ["\r\n".join(lines) + "\r\n\r\n", body]


def _length(body: Piece) -> int:
    return len(mutations.built(body))


def _target(rng: random.Random, route: str) -> str:
    name = rng.choice(MODELS) if rng.random() < 0.8 else rng.choice(_NAMES)
    target = route.replace("{M}", name)
    roll = rng.random()
    if roll < 0.08:
        target = mutations.of_text(rng, target).replace("\n", "%0a").replace(" ", "%20")
    elif roll < 0.12:
        target += rng.choice(("/", "?a=b", "?" + "x" * 9000, "#", "/../..", "//", "%2f", ";"))
    elif roll < 0.14:
        target = rng.choice(("http://x", "http://", "https://x:99999", "*")) + target
    return target


def _plain(rng: random.Random) -> Case:
    is_get = rng.random() < 0.5
    route = rng.choice(_GETS if is_get else _POSTS)
    method = "GET" if is_get else "POST"
    if rng.random() < 0.1:
        method = rng.choice(_METHODS)
    body: Piece = "" if is_get and rng.random() < 0.9 else {"json": rng.choice(_SMALL)}
    if rng.random() < 0.2:
        body = mutations.of_bytes(rng, mutations.built(body))
    return with_manners(rng, f"{method} {route}", method, _target(rng, route), body)


def _inference(rng: random.Random) -> Case:
    kind = rng.choice(("generate", "generate_stream", "generate_stream", "infer", "binary"))
    model = choose_model(rng, is_unary=kind in ("infer", "binary"))
    malice = rng.choice((0.0, 0.0, 0.1, 0.4))
    headers: list[str] = []
    body: Piece
    if kind == "binary":
        body, length = binary_body(rng, model, malice)
        headers.append(f"Inference-Header-Content-Length: {length}")
    else:
        make: Callable[..., Any] = infer_body if kind == "infer" else generate_body
        body = json_piece(rng, make(rng, model, malice))
    route = "/v2/models/{M}/" + ("infer" if kind == "binary" else kind)
    target = route.replace("{M}", model)
    if rng.random() < 0.05:
        target = _target(rng, route)
    return with_manners(rng, f"{kind} of {model}", "POST", target, body, headers)


def json_piece(rng: random.Random, value: Any) -> Piece:
    """A value as JSON, most often as it is."""
    roll = rng.random()
    if roll < 0.85:
        return {"json": value}
    if roll < 0.95:
        return mutations.of_bytes(rng, json.dumps(value).encode())
    # Megabytes of something in the middle, and two of the same name.
    filler = rng.choice(("[],", '"",', "1,", "{},", "[", " ", '"a":1,', "1e9,", "\\u0000"))
    count = rng.choice((1000, 60_000, 400_000))
    many = {"times": count, "of": filler}
    text = json.dumps(value)
    return rng.choice((
        [text[:-1], ', "x": [', many, "0]}"], [text[:-1], ', "x": {', many, '"b": 0}}'],
        [text[:-1], ', "text_input": "', many, '"}'], [many, text], [text, many],
    ))  # fmt: skip


def with_manners(
    rng: random.Random, name: str, method: str, target: str, body: Piece,
    headers: list[str] | None = None,
) -> Case:  # fmt: skip
    """A request sent and left as honest clients do, or not."""
    headers, has_length, then = list(headers or ()), True, ""
    roll = rng.random()
    if roll < 0.1:
        coding = rng.choice(("gzip", "zlib", "deflate"))
        body = {coding: body}
        headers.append(f"Content-Encoding: {'deflate' if coding != 'gzip' else 'gzip'}")
        then = f", as {coding}"
        if rng.random() < 0.2:
            body = {"first": rng.randint(1, max(1, _length(body))), "of": body}
    elif roll < 0.2:
        body = {"chunks": rng.choice((1, 7, 1000, 1 << 20)), "of": body}
        if weight(body) > 100_000:
            body["chunks"] = 1 << 16
        if rng.random() < 0.3:
            body = mutations.of_bytes(rng, mutations.built(body))
        headers.append("Transfer-Encoding: chunked")
        has_length, then = False, ", in chunks"
    elif roll < 0.25:
        lie = rng.choice((0, 1, -1, _length(body) + 10, 1 << 31, 64 << 20, 65 << 20))
        headers.append(f"Content-Length: {lie}")
        has_length, then = rng.random() < 0.1, ", of another length"
    if rng.random() < 0.15:
        headers += rng.sample(_HEADERS, rng.randint(1, 3))
        then += ", with odd headers"
    parts = _request(method, target, headers, body, has_length=has_length)
    return _left(rng, name + then, parts)


def _left(rng: random.Random, name: str, parts: list[Piece]) -> Case:
    roll = rng.random()
    if roll < 0.7:
        return Case(name, parts=[parts])
    if roll < 0.85:
        left = rng.choice((0.0, 0.01, 0.1, 0.5, 2.0))
        return Case(f"{name}, left early", parts=[parts], leaves_after_s=left)
    if roll < 0.9:
        return Case(f"{name}, never read", parts=[parts], leaves_after_s=3.0, reads=False)
    if roll < 0.95:
        return Case(f"{name}, half closed", parts=[parts], half_closes=True)
    whole = mutations.built(parts)
    if len(whole) > 20_000:
        return Case(name, parts=[parts])
    cut = rng.randint(1, len(whole))
    head, tail = mutations.piece_of(whole[:cut]), mutations.piece_of(whole[cut:])
    return Case(f"{name}, in two parts", parts=[head, tail], pause_s=rng.choice((0.05, 0.5)))


def _uploaded(rng: random.Random) -> Case:
    """Megabytes, honest in form."""
    count = rng.choice((1 << 16, 1 << 19, 1 << 22))
    text = rng.choice(("a ", "a", "日", "\\n", "</s>", ". ", "aé"))
    opening = '{"max_tokens": 4, "text_input": "a", '
    body: Piece = rng.choice((
        ['{"max_tokens": 4, "text_input": "', {"times": count, "of": text}, '"}'],
        [opening, '"stop_words": [', {"times": count // 4, "of": '"w7",'}, '"x"]}'],
        [opening, '"embedding_bias_words": [', {"times": count // 4, "of": '"b",'}, '"x"]}'],
        ['{"max_tokens": 4, "text_input": [', {"times": count // 8, "of": '"a",'}, '"x"]}'],
        {"times": count, "of": rng.choice(("[],", "{", "x", "\x00", " ", '"'))},
    ))  # fmt: skip
    headers = []
    if rng.random() < 0.3:
        body = {"gzip": body}
        headers = ["Content-Encoding: gzip"]
        if rng.random() < 0.5:
            headers.append("Inference-Header-Content-Length: 100")
    route = rng.choice((
        "/v2/models/ensemble/generate", "/v2/models/ensemble/generate_stream",
        "/v2/models/tensorrt_llm/infer", "/v2/models/preprocessing/infer", "/v2/logging",
        "/v2/repository/index", "/v2/repository/models/x/load", "/v2/models/x/infer",
    ))  # fmt: skip
    return _left(rng, f"a long body to {route}", _request("POST", route, headers, body))


def _pipelined(rng: random.Random) -> Case:
    """Several consecutive requests on one connection."""
    requests: list[Piece] = []
    for _ in range(rng.randint(2, 5)):
        requests += _request("GET", _target(rng, rng.choice(_GETS)), [], "")
        if rng.random() < 0.3:
            body = {"json": generate_body(rng, "ensemble", 0.0)}
            requests += _request("POST", "/v2/models/ensemble/generate", [], body)
    if rng.random() < 0.3:
        requests = [{"times": rng.choice((50, 1000)), "of": requests}]
    return Case("requests behind each other", parts=[requests], leaves_after_s=5.0)


def metrics_case(rng: random.Random) -> Case:
    """A request to the metrics port, which also has the status page."""
    target = rng.choice(("/metrics", "/", "/status", "/metrics?name[]=x", "/x" * 900, "/%ff"))
    method = "GET" if rng.random() < 0.8 else rng.choice(_METHODS)
    headers = rng.sample(_HEADERS, rng.choice((0, 0, 1, 2)))
    parts = _request(method, target, headers, "", has_length=rng.random() < 0.2)
    case = _left(rng, f"metrics: {method[:10]} {target[:20]}", parts)
    return Case(**{**case.to_dict(), "port": "metrics"})
