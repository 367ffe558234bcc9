"""Generated requests to generate, settings, shared memory and the repository."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from http_case import (
    CHAIN,
    NUMBERS,
    REGION,
    REGION_BYTES,
    REGION_TEXT,
    TEXT,
    HttpCase,
    Json,
    mutate,
    post,
)

# fmt: off


def malformed(rng: random.Random) -> Iterator[HttpCase]:
    """Bodies that are not the JSON that a route expects."""
    texts = ["", "{", "}", "[]", "null", "7", '"x"', "{}", "{} {}", "{}x", "\0",
        '{"inputs": [}',
             '{"inputs" [1]}', '{inputs: []}', "{'inputs': []}", '{"inputs": [], }', "\xff",
                 "nul",
             '{"inputs": [1,,2]}', '{"a": 01}', '{"a": .5}', '{"a": 1.}', '{"a": +1}',
                 '{"a": NaN}',
             '{"a": Infinity}', '{"a": "\\x"}', '{"a": "\\ud800"}', '{"a": "\n"}', '{"a": "b',
             "[" * 50, "// c\n{}", "\ufeff{}", '{"a": 1e999}', '{"a": 1, "a": 2}', "  {}  "]
    paths = ["/v2/models/text/infer", "/v2/models/numbers/infer", "/v2/models/text/generate",
             "/v2/models/text/generate_stream", "/v2/logging", "/v2/trace/setting",
             "/v2/models/text/trace/setting", "/v2/repository/index",
             "/v2/repository/models/text/load", "/v2/repository/models/nothing/unload"]
    for path in paths:
        for text in texts:
            yield post("malformed" + path.removeprefix("/v2"), path, text)
    whole = json.dumps(NUMBERS)
    for _ in range(150):
        at = rng.randrange(len(whole))
        cut = rng.choice((whole[:at], whole[:at] + rng.choice('{}[]",:x0 ') + whole[at:],
                          whole[:at] + whole[at + 1 :]))
        yield post("malformed/cut", "/v2/models/numbers/infer", cut)


def generate(rng: random.Random) -> Iterator[HttpCase]:
    """Bodies of generate and generate_stream."""
    bodies: list[tuple[str, Json]] = [
        ("text", {"TEXT": "a"}), ("text", {"TEXT": ["a"]}), ("text", {"TEXT": ["a", "b"]}),
        ("text", {"TEXT": []}), ("text", {"TEXT": [["a"], ["b"]]}), ("text", {"TEXT": ""}),
        ("text", {"TEXT": list("abcde")}), ("text", {}), ("text", {"TEXT": "a", "id": "i"}),
        ("text", {"TEXT": "a", "id": 7}), ("text", {"TEXT": "a", "id": ""}),
        ("text", {"TEXT": "a", "foo": "bar"}), ("text", {"TEXT": "a", "foo": [1]}),
        ("text", {"TEXT": "a", "foo": None}), ("text", {"TEXT": "a", "foo": {}}),
        ("text", {"TEXT": "a", "parameters": {}}), ("text", {"parameters": {"TEXT": "a"}}),
        ("text", {"TEXT": "a", "parameters": {"TEXT": "b"}}), ("text", {"TEXT": "a",
            "parameters": []}),
        ("text", {"TEXT": "a", "parameters": {"parameters": {}}}), ("text", {"TEXT": "a",
            "outputs": []}),
        ("text", {"TEXT": "a", "parameters": {"x": [1]}}), ("text", {"TEXT": "a",
            "parameters": 7}),
        ("numbers", {"A": [1, 2, 3, 4], "B": [1, 2, 3, 4]}), ("numbers", {"A": 1, "B": 1}),
        ("numbers", {"A": [1, 2, 3, 4] * 2, "B": [1, 2, 3, 4] * 2}), ("numbers", {"A": [1, 2,
            3]}),
        ("numbers", {"A": [[1, 2, 3, 4]], "B": [[1, 2, 3, 4]]}), ("numbers", {"A": "x"}),
        ("numbers", {"A": [1.5, 2, 3, 4], "B": [1, 2, 3, 4]}), ("numbers", {"A": [1, 2, 3, 4]}),
        ("numbers", {"A": [1, 2, 3, 4] * 9, "B": [1, 2, 3, 4] * 9}),
        ("vector", {"V": [1, 2, 3, 4]}), ("vector", {"V": [1, 2, 3]}), ("vector", {"V": 1}),
        ("told", {}), ("told", {"TEXT": []}), ("told", {"TEXT": "x", "id": "i", "priority": 3}),
        ("chain", {"X": [1, 2, 3, 4], "Y": [1, 2, 3, 4]}), ("reshaped", {"IN": 3}),
        ("chain", {"X": [1, 2, 3, 4], "Y": [1, 2, 3, 4], "sequence_id": 3, "id": "c"}),
        ("reshaped", {"IN": [3, 4]}), ("versions", {"IN": [3, 4]}), ("versions", {"IN": []}),
        ("failing", {"CODE": "x"}), ("repeater", {"COUNT": "x"}), ("repeater", {}),
    ]
    bodies += [("repeater", {"COUNT": n, "FAIL_AT": at, "FINAL_WITH_LAST": last, "id": "r"})
               for n in (0, 1, 2, 4) for at in (-1, 0, 1) for last in (False, True)]
    bodies += [("streaming_chain", {"N": n, "F": at}) for n in (0, 1, 2, 3) for at in (-1, 0,
        1)]
    bodies += [("streaming_chain", {"N": 2})]
    for model, body in bodies:
        for action in ("generate", "generate_stream"):
            yield post(f"generate/{action}", f"/v2/models/{model}/{action}", body)
        yield post("generate/infer", f"/v2/models/{model}/infer", body)
    for text in ('{"TEXT": "a", "TEXT": "b"}', '{"TEXT": "a", "foo": 1, "foo": 2}'):
        yield post("generate/generate", "/v2/models/text/generate", text)
    for _ in range(150):
        document = {"TEXT": "a", "id": "m", "parameters": {"x": 1}, "y": 2.5, "z": True}
        mutate(rng, document)
        yield post("generate/mutated", "/v2/models/told/generate", document)


_TRACE = ("trace_level", "trace_rate", "trace_count", "log_frequency")


def settings() -> Iterator[HttpCase]:
    """Log and trace settings, each value followed by a look at all."""
    for name in ("log_info", "log_warning", "log_error", "log_verbose_level", "log_format",
                 "log_file", "unknown"):
        for value in (None, True, False, 0, 1, -1, 1.5, "x", "default", "ISO8601", [], {},
            1 << 32):
            yield post("logging", "/v2/logging", {name: value})
    yield post("logging", "/v2/logging", {"log_info": True, "log_warning": True,
        "log_error": True,
                                          "log_verbose_level": 0, "log_format": "default"})
    yield HttpCase("logging", "GET", "/v2/logging")
    for path in ("/v2/trace/setting", "/v2/models/text/trace/setting",
        "/v2/models/no/trace/setting"):
        for name in ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file",
                     "trace_mode", "unknown"):
            for value in (None, True, 1, -1, "", "x", "5", "-1", "-2", "5x", "99999999999",
                "OFF",
                          ["OFF"], ["TIMESTAMPS"], ["TENSORS"], ["x"], [], ["OFF", "OFF"],
                          [1], {}):
                yield post("trace", path, {name: value})
                yield HttpCase("trace", "GET", path)
                yield post("trace", path, dict.fromkeys(_TRACE))
        yield post("trace", path, {"trace_rate": "7", "trace_count": "9"})
        yield post("trace", path, dict.fromkeys(_TRACE))


def shared_memory() -> Iterator[HttpCase]:
    """Regions that can and cannot be registered, their status, and tensors in them."""
    for kind in ("system", "cuda"):
        path = f"/v2/{kind}sharedmemory"
        bodies = ("", {}, {"key": "/proto_absent", "offset": 0, "byte_size": 64}, {"key": 1,
            "byte_size": 1},
                  {"key": "/x"}, {"byte_size": 4}, {"key": "/x", "byte_size": "4"},
                  {"key": "/x", "byte_size": -4}, {"key": "/x", "offset": -1, "byte_size": 4},
                  {"key": "/x/y", "byte_size": 4}, {"key": "/..", "byte_size": 4},
                  {"key": "", "byte_size": 4}, {"key": "/" + "x" * 300, "byte_size": 4},
                  {"key": REGION, "byte_size": REGION_BYTES + 1},
                  {"key": REGION, "offset": 8, "byte_size": REGION_BYTES},
                  {"key": REGION, "offset": "0", "byte_size": 8},
                  {"key": REGION, "byte_size": 0},
                  {"key": "triton_python_backend_shm_region_x", "byte_size": 4},
                  {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 4},
                  {"raw_handle": {"b64": "AA*A"}, "device_id": 0, "byte_size": 4},
                  {"raw_handle": {"b64": 3}, "device_id": 0, "byte_size": 4},
                  {"raw_handle": {}, "device_id": 0, "byte_size": 4},
                  {"raw_handle": "AAAA", "device_id": 0, "byte_size": 4}, "{", "[]",
                  {"raw_handle": {"b64": "A" * 86 + "=="}, "device_id": 0, "byte_size": 4},
                  {"raw_handle": {"b64": "A" * 86 + "=="}, "device_id": 0},
                  {"raw_handle": {"b64": "A" * 86 + "=="}, "byte_size": 4})
        for body in bodies:
            yield post("shm/register", path + "/region/r/register", body)
            yield HttpCase("shm/status", "GET", path + "/status")
        for name in ("r", "", "%20"):
            yield HttpCase("shm/status", "GET", f"{path}/region/{name}/status")
            yield HttpCase("shm/unregister", "POST", f"{path}/region/{name}/unregister")
        yield HttpCase("shm/status", "GET", path + "/status")
        yield HttpCase("shm/unregister", "POST", path + "/unregister")
    yield from _in_regions()


def _in_regions() -> Iterator[HttpCase]:
    """Inputs and outputs in a region that holds two strings' bytes."""
    path = "/v2/systemsharedmemory"
    # The reference opens a key only once.
    for name, size in (("r", REGION_BYTES), ("r", 8)):
        yield post("shm/register", f"{path}/region/{name}/register",
                   {"key": REGION, "byte_size": size})
        yield HttpCase("shm/status", "GET", f"{path}/region/{name}/status")
    yield HttpCase("shm/status", "GET", path + "/status")
    yield HttpCase("shm/status", "GET", "/v2/cudasharedmemory/region/r/status")
    yield HttpCase("shm/unregister", "POST", "/v2/cudasharedmemory/region/r/unregister")
    yield HttpCase("shm/unregister", "POST", "/v2/cudasharedmemory/unregister")
    yield HttpCase("shm/status", "GET", path + "/region/r/status")
    size, offset = "shared_memory_byte_size", "shared_memory_offset"
    text = len(REGION_TEXT)
    for place in ({size: text}, {size: text, offset: 0}, {}, {size: 0}, {size: text - 1},
                  {size: text + 1}, {size: text, offset: 1}, {size: text, offset: REGION_BYTES},
                  {size: text, offset: REGION_BYTES - 2}, {size: REGION_BYTES},
                  {size: 1 << 63, offset: 1}, {size: -1}, {size: "4"}, {size: text, offset: -1},
                  {size: text, offset: "0"}, {size: text, "binary_data_size": 4}):
        for region in ("r", "absent", 1):
            parameters = {"shared_memory_region": region, **place}
            yield post("shm/input", "/v2/models/text/infer", {"inputs": [
                {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1],
                 "parameters": parameters}]})
            # Behind the text, which stays as it is.
            start = place.get(offset, 0)
            start = start + 512 if isinstance(start, int) and start >= 0 else start
            yield post("shm/output", "/v2/models/text/infer", {**TEXT, "outputs": [
                {"name": "ECHO", "parameters": {**parameters, offset: start}}]})
    for classes in (0, 1):
        yield post("shm/output", "/v2/models/text/infer", {**TEXT, "outputs": [
            {"name": "ECHO", "parameters": {"shared_memory_region": "r", size: 64,
                                            "classification": classes}}]})
    yield HttpCase("shm/unregister", "POST", path + "/region/r/unregister")
    yield HttpCase("shm/status", "GET", path + "/status")
    yield HttpCase("shm/unregister", "POST", path + "/unregister")
    yield HttpCase("shm/status", "GET", path + "/status")


def repository() -> Iterator[HttpCase]:
    """Index, load and unload, with parameters of each kind."""
    index = "/v2/repository/index"
    for body in ("", "{}", {"ready": True}, {"ready": False}, {"ready": "x"}, {"ready": 1},
                 {"ready": None}, {"x": 1}, []):
        yield post("repository/index", index, body)
    yield HttpCase("repository/index", "POST", "/v2/repository/r/index")
    config = {"backend": "python", "max_batch_size": 2,
              "input": [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]}],
              "output": [{"name": "ECHO", "data_type": "TYPE_STRING", "dims": [1]}]}
    loads: tuple[Json, ...] = (
        "", "{}", {"parameters": {}}, {"parameters": None}, {"parameters": []},
            {"parameters": 1},
        {"parameters": {"config": json.dumps(config)}}, {"parameters": {"config": config}},
        {"parameters": {"config": "{"}}, {"parameters": {"config": ""}},
            {"parameters": {"config": "{}"}},
        {"parameters": {"foo": 1}}, {"parameters": {"foo": "x"}},
            {"parameters": {"file:1/model.py": "eA=="}},
        {"parameters": {"file:1/model.py": 3}},
            {"parameters": {"config": json.dumps({"name": "other"})}},
        {"parameters": {"config": json.dumps({**config, "backend": "absent"})}},
        {"parameters": {"config": json.dumps({**config, "max_batch_size": "x"})}},
        {"parameters": {"config": json.dumps({**config, "unknown": 1})}},
    )
    for name in ("text", "absent"):
        for body in loads:
            yield post("repository/load", f"/v2/repository/models/{name}/load", body)
            yield HttpCase("repository/after", "GET", f"/v2/models/{name}/config")
    for body in ({"parameters": {"unload_dependents": True}},
        {"parameters": {"unload_dependents": 1}},
                 {"parameters": {"foo": 1}}, {"parameters": {}}, {"parameters": []}, "{", "",
                     "[]"):
        yield post("repository/unload", "/v2/repository/models/absent/unload", body)
    for step in ("unload", "load", "unload", "unload"):
        yield post("repository/unload", f"/v2/repository/models/text/{step}", "")
        yield post("repository/index", index, "")
        yield post("repository/index", index, {"ready": True})
        for path in ("/v2/models/text", "/v2/models/text/ready", "/v2/models/text/config",
                     "/v2/models/text/versions/1", "/v2/models/text/stats", "/v2/health/ready"):
            yield HttpCase("repository/after", "GET", path)
        yield post("repository/after", "/v2/models/text/infer", TEXT)
        yield post("repository/after", "/v2/models/text/generate", {"TEXT": "x"})
    yield post("repository/load", "/v2/repository/models/text/load", "")
    yield post("repository/unload", "/v2/repository/models/numbers/unload", "")
    for path in ("/v2/models/chain/ready", "/v2/models/numbers/ready"):
        yield HttpCase("repository/after", "GET", path)
    yield post("repository/load", "/v2/repository/models/chain/load", "")
    yield post("repository/after", "/v2/models/chain/infer", CHAIN)
    yield post("repository/unload", "/v2/repository/models/chain/unload",
               {"parameters": {"unload_dependents": True}})
    for path in ("/v2/models/chain/ready", "/v2/models/numbers/ready"):
        yield HttpCase("repository/after", "GET", path)
    yield post("repository/load", "/v2/repository/models/chain/load", "")
    yield post("repository/index", index, "")
