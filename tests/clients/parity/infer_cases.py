"""Generated requests to ``infer``, and values of each type."""

from __future__ import annotations

import copy
import gzip
import json
import random
import zlib
from collections.abc import Iterator

import numpy as np
from http_case import (
    CHAIN,
    DATATYPES,
    NUMBERS,
    ODD_VALUES,
    TOLD,
    VECTOR,
    VERSIONS,
    WHOLE,
    A,
    B,
    HttpCase,
    Json,
    int32,
    mutate,
    post,
    strings,
    tensor,
    with_blobs,
)

# fmt: off


def infer_documents() -> Iterator[HttpCase]:
    """Bodies of ``infer`` that each have one peculiarity."""
    for model, document in WHOLE.items():
        yield post("infer/valid", f"/v2/models/{model}/infer", document)
        yield post("infer/valid", f"/v2/models/{model}/infer", {**document, "outputs": []})
        yield post("infer/valid", f"/v2/models/{model}/versions/1/infer", document)
        yield post("infer/valid", f"/v2/models/{model}/infer", {**document, "extra": {"a": 1}})
    yield from _inputs()
    yield from _members()
    yield from _models()


def _numbers(*inputs: Json, **members: Json) -> HttpCase:
    """A request to the model `numbers`."""
    body = {"inputs": list(inputs), **members}
    return post("infer/inputs", "/v2/models/numbers/infer", body)


def _inputs() -> Iterator[HttpCase]:
    """Missing, doubled and wrong inputs."""
    numbers = _numbers
    yield numbers()
    yield numbers(A)
    yield numbers(A, B, int32("C", [1, 2, 3, 4]))
    yield numbers(A, int32("C", [1, 2, 3, 4]))
    yield numbers(A, A)
    yield numbers(A, A, B)
    yield numbers(A, B, B)
    yield numbers(B, A)
    yield numbers(int32("A", *[[1, 2, 3, 4]] * 8), int32("B", *[[1, 2, 3, 4]] * 8))
    yield numbers(int32("A", *[[1, 2, 3, 4]] * 9), int32("B", *[[1, 2, 3, 4]] * 9))
    yield numbers(int32("A", [1, 2, 3, 4], [1, 2, 3, 4]), B)
    yield numbers(A, tensor("B", "INT64", [1, 4], [1, 2, 3, 4]))
    yield numbers(A, tensor("B", "BYTES", [1, 4], ["a", "b", "c", "d"]))
    for shape in ([4], [], [1, 1, 4], [0, 4], [1, 0], [4, 1], [2, 2], [1, 3], [1, 5], [1, -4],
                  [1, 4.0], [1, "4"], [1 << 62, 8], [1 << 33, 1 << 33], [1 << 64, 1]):
        yield numbers(A, tensor("B", "INT32", shape, [1, 2, 3, 4]))
    for data in ([], [1], [1, 2, 3], [1, 2, 3, 4, 5], [[1, 2], [3, 4]], [[1, [2]], [3, 4]], 7,
        "x",
                 None, {}, [1.0, 2, 3, 4], ["1", 2, 3, 4], [None, 2, 3, 4], [True, 2, 3, 4],
                 [1 << 31, 2, 3, 4], [-(1 << 31) - 1, 2, 3, 4], [1 << 32, 2, 3, 4],
                 [1 << 63, 2, 3, 4], [[], [1, 2, 3, 4]], [{}, 2, 3, 4], [[1, 2, 3, 4]]):
        yield numbers(A, tensor("B", "INT32", [1, 4], data))
    for datatype in ("INT31", "int32", "TYPE_INT32", "", "STRING", "BF16", "FP16", "<invalid>"):
        yield numbers(A, tensor("B", datatype, [1, 4], [1, 2, 3, 4]))


def _members() -> Iterator[HttpCase]:
    """Outputs, ids, and where the data of an input is."""
    numbers = _numbers
    for outputs in ([], [{"name": "SUM"}], [{"name": "DIFFERENCE"}, {"name": "SUM"}],
                    [{"name": "SUM"}, {"name": "SUM"}], [{"name": "Q"}], [{}], ["SUM"], {},
                    None,
                    "SUM", [{"name": 1}], [{"name": "SUM", "parameters": None}],
                    [{"name": "SUM", "parameters": {"binary_data": 1}}],
                    [{"name": "SUM", "parameters": {"binary_data": True}},
                    {"name": "DIFFERENCE"}],
                    [{"name": "SUM", "parameters": {"x": 1}}]):
        yield numbers(A, B, outputs=outputs)
    for request_id in ("", "x", "é", "a" * 300, 7, None, [], {}):
        yield numbers(A, B, id=request_id)
        yield numbers(A, id=request_id)
    for source in ({}, {"binary_data_size": 0}, {"binary_data_size": 16},
        {"binary_data_size": -1},
                   {"binary_data_size": "16"}, {"binary_data_size": 16.0}, None, [], 3,
                   {"shared_memory_region": "r"}, {"shared_memory_region": 1},
                   {"shared_memory_region": "r", "shared_memory_byte_size": 16},
                   {"shared_memory_region": "r", "shared_memory_byte_size": 16,
                       "shared_memory_offset": 4},
                   {"x": 1}, {"x": None}, {"classification": 1}):
        bare = {"name": "B", "datatype": "INT32", "shape": [1, 4]}
        yield numbers(A, {**bare, "parameters": source})
        yield numbers(A, {**bare, "parameters": source, "data": [1, 2, 3, 4]})
    yield numbers(A, {"name": "B", "datatype": "INT32", "shape": [1, 4]})


def _models() -> Iterator[HttpCase]:
    """Texts, models that fail, and steps of an ensemble."""
    for text in ("plain", "", "\0a", "\x1f\x7f", "😀", "\ud800", "a\\\"b/", "line\nfeed"):
        body = {"inputs": [tensor("TEXT", "BYTES", [1, 1], [text])]}
        yield post("infer/text", "/v2/models/text/infer", body)
    yield post("infer/text", "/v2/models/text/infer",
               {"inputs": [tensor("TEXT", "BYTES", [5, 1], list("abcde"))]})
    for codes in ("raise", "model_exception", "other_output", "other_type", "no_output",
                  "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE",
                  "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"):
        body = {"id": "f", "inputs": [tensor("CODE", "BYTES", [1], [codes])]}
        for action in ("infer", "generate", "generate_stream"):
            document = body if action == "infer" else {"id": "f", "CODE": codes}
            yield post("failing/" + action, f"/v2/models/failing/{action}", document)
    for names in ("Z", "D", "ZD", "DZ"):
        outputs = [{"name": name} for name in names]
        yield post("infer/valid", "/v2/models/chain/infer", {**CHAIN, "outputs": outputs})
    for version in (1, 3):
        yield post("infer/valid", f"/v2/models/versions/versions/{version}/infer", VERSIONS)


def mutated(rng: random.Random, count: int) -> Iterator[HttpCase]:
    """Valid bodies with one or two members exchanged, removed, doubled or renamed."""
    for _ in range(count):
        model = rng.choice(list(WHOLE))
        document = copy.deepcopy(WHOLE[model])
        if rng.random() < 0.3:
            document["parameters"] = {"priority": 1, "timeout": 1000, "custom": "c"}
        for _ in range(rng.choice((1, 1, 2))):
            mutate(rng, document)
        yield post("infer/mutated", f"/v2/models/{model}/infer", document)


def parameters() -> Iterator[HttpCase]:
    """Parameters of infer and generate, of each type."""
    names = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "custom",
             "binary_data_output", "triton_x", "triton_enable_empty_final_response",
                 "headers", "")
    values = (*ODD_VALUES, "seven", 7, False, 2.0, 1 << 32)
    for name in names:
        for value in values:
            for model in ("told", "numbers"):
                document = {**WHOLE[model], "parameters": {name: value}}
                yield post("infer/parameters", f"/v2/models/{model}/infer", document)
            yield post("generate/parameters", "/v2/models/told/generate",
                       {"TEXT": "x", "parameters": {name: value}})
            yield post("generate/parameters", "/v2/models/told/generate",
                       {"TEXT": "x", name: value})
    for value in ODD_VALUES:
        document = {**TOLD, "parameters": value}
        yield post("infer/parameters", "/v2/models/told/infer", document)
    sequence = {"sequence_id": 5, "sequence_start": True, "sequence_end": True}
    for model in ("told", "numbers", "chain"):
        document = {**WHOLE[model], "parameters": sequence}
        yield post("infer/parameters", f"/v2/models/{model}/infer", document)
        named = {**WHOLE[model], "parameters": {**sequence, "sequence_id": "s"}}
        yield post("infer/parameters", f"/v2/models/{model}/infer", named)


def types(rng: random.Random) -> Iterator[HttpCase]:
    """Each datatype in JSON and in binary, at and beyond the limits of the type."""
    values = (0, 1, -1, 127, 128, 255, 256, -129, 65535, 65536, 1 << 31, 1 << 32,
        -(1 << 31) - 1,
              1 << 63, 1 << 64, 0.5, 1e39, 1e-46, -0.0, True, "a", None, [1], 1e400)
    path = "/v2/models/types/infer"
    for datatype in (*DATATYPES, "BYTES", "BF16"):
        name = f"IN_{'STRING' if datatype == 'BYTES' else datatype}"
        for value in values:
            text = json.dumps({"inputs": [tensor(name, datatype, [1], [value])]})
            yield post("types/json", path, text)
            plain = [tensor(name, datatype, [2], [value, value])]
            yield post("types/json", path, {"inputs": plain})
            yield post("types/generate", "/v2/models/types/generate", {name: value})
        yield post("types/generate", "/v2/models/types/generate", {name: [1, 0, 1]})
        for shape in ([0], [3], []):
            yield post("types/json", path, {"inputs": [tensor(name, datatype, shape, [])]})
    for datatype, dtype in DATATYPES.items():
        array = np.array([rng.randrange(0, 2) for _ in range(5)]).astype(dtype)
        for extra in (0, -1, 1):
            blob = (array.tobytes() + b"\0")[: array.nbytes + extra]
            entry = {"name": f"IN_{datatype}", "datatype": datatype, "shape": [5],
                     "parameters": {"binary_data_size": len(blob)}}
            for wants in ({}, {"parameters": {"binary_data_output": True}}):
                yield with_blobs("types/binary", path, {"inputs": [entry], **wants}, blob)


def binary(rng: random.Random) -> Iterator[HttpCase]:
    """Blobs and the header of their place."""
    path, row = "/v2/models/numbers/infer", np.arange(4, dtype=np.int32).tobytes()

    def entry(name: str, size: int) -> Json:
        return {"name": name, "datatype": "INT32", "shape": [1, 4],
                "parameters": {"binary_data_size": size}}

    both = {"inputs": [entry("A", 16), entry("B", 16)]}
    yield with_blobs("binary", path, both, row + row)
    for length in ("0", "1", "10", "-1", "99999", "abc", "1e3", "0x10", " 12", "+5", "",
                   "99999999999", str(len(json.dumps(both)) + 1),
                       str(len(json.dumps(both)) - 1),
                   str(len(json.dumps(both))) + "abc"):
        yield with_blobs("binary", path, both, row + row, length)
    for size in (0, 4, 15, 17, 20):
        yield with_blobs("binary", path, {"inputs": [entry("A", 16), entry("B", size)]},
            row + row)
        yield with_blobs("binary", path, {"inputs": [entry("A", 16), entry("B", size)]},
                         row + row[:size])
    yield with_blobs("binary", path, {"inputs": [entry("A", 16), B]}, row)
    yield with_blobs("binary", path, {"inputs": [A, B]}, b"")
    yield with_blobs("binary", path, {"inputs": [A, B]}, b"more")
    for flags in ((True, False), (False, True), (True, True)):
        outputs = [{"name": name, "parameters": {"binary_data": flag}}
                   for name, flag in zip(("SUM", "DIFFERENCE"), flags, strict=True)]
        yield post("binary", path, {**NUMBERS, "outputs": outputs})
        yield post("binary", path, {**NUMBERS, "outputs": outputs,
                                    "parameters": {"binary_data_output": True}})
    whole = strings(b"a\0\xff", "é".encode())
    text_path = "/v2/models/text/infer"
    for blob in (whole, whole[:-1], whole + b"\0", strings(b"one"), strings(b"a", b"b", b"c"),
                 b"\x09\0\0\0ab", b"\x09\0", b"", b"\xff\xff\xff\xff", strings(b"", b"")):
        text = {"name": "TEXT", "datatype": "BYTES", "shape": [2, 1],
                "parameters": {"binary_data_size": len(blob)}}
        yield with_blobs("binary/text", text_path, {"inputs": [text]}, blob)
        yield with_blobs("binary/text", text_path,
                         {"inputs": [text], "parameters": {"binary_data_output": True}}, blob)
    for model, sizes in (("text", (0, 1, 50)), ("vector", (0, 4, 8, 16, 20, 24)),
                         ("versions", (0, 7, 8, 16)), ("reshaped", (0, 4, 8)),
                         ("numbers", (16,)), ("failing", (5,)), ("told", (3,))):
        for size in sizes:
            raw = {"Inference-Header-Content-Length": "0"}
            body = rng.randbytes(size) if model != "failing" else b"raise"
            yield HttpCase("binary/raw", "POST", f"/v2/models/{model}/infer", body, raw)


def compressed() -> Iterator[HttpCase]:
    """Encodings of requests and of responses."""
    path, plain = "/v2/models/numbers/infer", json.dumps(NUMBERS).encode()
    bodies = {"gzip": gzip.compress(plain, mtime=0), "deflate": zlib.compress(plain),
              "identity": plain, "": plain, "br": plain, "GZIP": gzip.compress(plain, mtime=0),
              "gzip, deflate": plain}
    for coding, body in bodies.items():
        yield HttpCase("coding", "POST", path, body, {"Content-Encoding": coding})
        yield HttpCase("coding", "POST", "/v2/models/text/generate",
            json.dumps({"TEXT": "a"}).encode(),
                       {"Content-Encoding": coding})
    for coding in ("gzip", "deflate"):
        yield HttpCase("coding", "POST", path, plain, {"Content-Encoding": coding})
        yield HttpCase("coding", "POST", path, bodies[coding][:-9],
            {"Content-Encoding": coding})
        yield HttpCase("coding", "POST", path, bodies["deflate"], {"Content-Encoding": coding})
    for accepted in ("gzip", "deflate", "gzip, deflate", "deflate, gzip", "identity", "*", "br",
                     "gzip;q=0.5, deflate;q=0.9", "gzip;q=0", "identity;q=1, gzip;q=0.5", "",
                     "gzip;q=x", "GZIP", "gzip;q=0.5, identity"):
        yield HttpCase("coding", "POST", path, plain, {"Accept-Encoding": accepted})
        yield HttpCase("coding", "POST", "/v2/models/text/generate",
            json.dumps({"TEXT": "a"}).encode(),
                       {"Accept-Encoding": accepted})


def classification() -> Iterator[HttpCase]:
    """The best classes of an output."""
    for name in ("SUM", "DIFFERENCE"):
        for classes in (0, 1, 2, 4, 5, 100, -1, "2", 1.5, True, None, [], 1 << 40):
            outputs = [{"name": name, "parameters": {"classification": classes}}]
            yield post("classification", "/v2/models/numbers/infer", {**NUMBERS,
                "outputs": outputs})
            outputs = [{"name": name, "parameters": {"classification": classes,
                "binary_data": True}}]
            yield post("classification", "/v2/models/numbers/infer", {**NUMBERS,
                "outputs": outputs})
    two = [int32("A", [4, 3, 2, 1], [1, 1, 1, 1]), int32("B", [0, 0, 0, 0], [3, 2, 1, 9])]
    for classes in (1, 3):
        outputs = [{"name": "SUM", "parameters": {"classification": classes}}]
        yield post("classification", "/v2/models/numbers/infer", {"inputs": two,
            "outputs": outputs})
    outputs = [{"name": "W", "parameters": {"classification": 3}}]
    yield post("classification", "/v2/models/vector/infer", {**VECTOR, "outputs": outputs})
    both = {"classification": 1, "shared_memory_region": "r"}
    yield post("classification", "/v2/models/numbers/infer",
               {**NUMBERS, "outputs": [{"name": "SUM", "parameters": both}]})
