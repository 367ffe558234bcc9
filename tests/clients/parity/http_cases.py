"""Generated HTTP requests, valid and invalid, for models of the folder ``models``."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import infer_cases
import other_cases
from http_case import MODELS, TOLD, HttpCase, post

# fmt: off

def all_cases(seed: int) -> Iterator[HttpCase]:
    """Every generated case, in an order that the servers' states depend on."""
    rng = random.Random(seed)
    yield from routes()
    yield from queries()
    yield from infer_cases.infer_documents()
    yield from infer_cases.mutated(rng, 1200)
    yield from infer_cases.parameters()
    yield from forwarded()
    yield from infer_cases.types(rng)
    yield from infer_cases.binary(rng)
    yield from infer_cases.compressed()
    yield from infer_cases.classification()
    yield from other_cases.malformed(rng)
    yield from other_cases.generate(rng)
    yield from other_cases.settings()
    yield from other_cases.shared_memory()
    yield from other_cases.repository()


def routes() -> Iterator[HttpCase]:
    """Every path with every method, and paths beside them."""
    known = [
        "/v2/health/live", "/v2/health/ready", "/v2", "/v2/models/text", "/v2/models/stats",
        "/v2/models/text/ready", "/v2/models/text/config", "/v2/models/text/stats",
        "/v2/models/versions/versions/3", "/v2/models/versions/versions/3/ready",
        "/v2/models/versions/versions/3/config", "/v2/models/versions/versions/3/stats",
        "/v2/models/text/infer", "/v2/models/text/generate", "/v2/models/text/generate_stream",
        "/v2/models/text/trace/setting", "/v2/trace/setting", "/v2/logging",
        "/v2/repository/index", "/v2/repository/r/index",
        "/v2/repository/r/models/text/load", "/v2/repository/r/models/text/unload",
        "/v2/systemsharedmemory/status", "/v2/cudasharedmemory/status",
        "/v2/systemsharedmemory/region/r/status", "/v2/cudasharedmemory/region/r/status",
        "/v2/systemsharedmemory/region/r/register", "/v2/cudasharedmemory/region/r/register",
        "/v2/systemsharedmemory/unregister", "/v2/cudasharedmemory/unregister",
        "/v2/systemsharedmemory/region/r/unregister",
        "/v2/cudasharedmemory/region/r/unregister",
    ]
    for path in known:
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
            yield HttpCase("routes", method, path)
        yield HttpCase("routes", "GET", path + "/")
        yield HttpCase("routes", "GET", path + "?a=b&c")
        yield HttpCase("routes", "GET", path.replace("/v2", "/v1"))
        yield HttpCase("routes", "GET", path.replace("/v2", "//v2"))
        yield HttpCase("routes", "GET", path.upper())
    beside = [
        "/", "/v2/", "/v2/models", "/v2/models/", "/v2/health", "/v2/health/x", "/metrics",
        "/v2/models/text/versions", "/v2/models/text/versions/", "/v2/models/text/x",
        "/v2/models/text/versions/abc", "/v2/models/text/versions/-1/ready",
        "/v2/models/text/versions/1.0/ready", "/v2/models/text/versions/01/ready",
        "/v2/models/text/versions/1/trace/setting", "/v2/models/a/b/ready", "/v2/models//ready",
        "/v2/models/te%78t/ready", "/v2/models/te%78t/config", "/v2/models/a%2Fb/ready",
        "/v2/repository", "/v2/repository/models", "/v2/logging/x", "/v2/trace",
            "/v2/models/text/trace",
        "/v2/repository/models/text", "/v2/systemsharedmemory", "/v2/systemsharedmemory/region",
        "/v2/systemsharedmemory/region/r", "/v2/xsharedmemory/status", "/v2/models/stats/stats",
        "/v2/models/stats/ready", "/v2/models/text/infer/x", "/v2/cudasharedmemory/x",
    ]
    for path in beside:
        for method in ("GET", "POST"):
            yield HttpCase("routes", method, path)


def forwarded() -> Iterator[HttpCase]:
    """Headers that match the servers' pattern, and others."""
    for headers in ({"X-Told-A": "1"}, {"x-told": "b", "y-told": "c"}, {"z-TELL-z": "d"},
                    {"timeout-tell": "5"}, {"X-Told-A": "1", "X-TOLD-a": "2"}):
        for parameters in ({}, {"X-Told-A": "own"}, {"k": 1}):
            document = {**TOLD, "parameters": parameters}
            yield HttpCase("forwarded", "POST", "/v2/models/told/infer",
                           json.dumps(document).encode(), headers)
        yield HttpCase("forwarded", "POST", "/v2/models/told/generate", b'{"TEXT": "x"}',
                       headers)


def queries() -> Iterator[HttpCase]:
    """Metadata, configuration, readiness and statistics of all kinds of models."""
    for model in (*MODELS, "absent", "TEXT", "text.", "a b"):
        path = f"/v2/models/{model.replace(' ', '%20')}"
        for rest in ("", "/config", "/ready", "/stats"):
            for version in ("", "/versions/1", "/versions/2", "/versions/3", "/versions/0",
                            "/versions/99999999999999999999"):
                yield HttpCase(f"query{rest or '/metadata'}", "GET", path + version + rest)
        yield HttpCase("query/trace", "GET", path + "/trace/setting")
        for action in ("infer", "generate", "generate_stream"):
            yield post("query/" + action, f"{path}/versions/2/{action}", {})
            yield post("query/" + action, f"{path}/versions/1/{action}", {})
            yield post("query/" + action, f"{path}/{action}", {"inputs": []})
