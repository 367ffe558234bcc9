"""What generated HTTP requests consist of: valid bodies, odd values,
and a way to change one."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# fmt: off

Json = Any

DATATYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32,
    "UINT64": np.uint64, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32,
    "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}


@dataclass(frozen=True)
class HttpCase:
    """One request as bytes."""

    group: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def post(group: str, path: str, document: Json, **headers: str) -> HttpCase:
    """A request with a JSON body; a text is the body itself."""
    text = document if isinstance(document, str) else json.dumps(document)
    return HttpCase(group, "POST", path, text.encode(), dict(headers))


def tensor(name: str, datatype: str, shape: list[int], data: Json) -> Json:
    """An input of a JSON body."""
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def int32(name: str, *rows: list[int]) -> Json:
    return tensor(name, "INT32", [len(rows), 4], [value for row in rows for value in row])


A, B = int32("A", [1, 2, 3, 4]), int32("B", [10, 20, 30, 40])
NUMBERS = {"id": "n1", "inputs": [A, B], "outputs": [{"name": "SUM"}, {"name": "DIFFERENCE"}]}
TEXT = {"inputs": [tensor("TEXT", "BYTES", [1, 1], ["héllo"])]}
CODE = {"inputs": [tensor("CODE", "BYTES", [1], ["refused"])]}
CHAIN = {"inputs": [int32("X", [1, 2, 3, 4]), int32("Y", [5, 6, 7, 8])]}
VECTOR = {"inputs": [tensor("V", "FP32", [2, 2], [0.1, -2.5, 3e10, 4])]}
REGION, REGION_BYTES = "/parity_of_clients", 1024
REGION_TEXT = len(b"shared").to_bytes(4, "little") + b"shared"
"""Shared memory of a client, and the BYTES tensor at its start."""

TOLD = {"id": "t", "inputs": [tensor("TEXT", "BYTES", [1], ["x"])]}
VERSIONS = {"inputs": [tensor("IN", "INT64", [2], [-5, 1 << 40])]}
RESHAPED = {"inputs": [tensor("IN", "INT32", [2, 1], [7, 8])]}
WHOLE = {
    "numbers": NUMBERS, "text": TEXT, "failing": CODE, "chain": CHAIN, "vector": VECTOR,
    "told": TOLD, "versions": VERSIONS, "reshaped": RESHAPED,
}
MODELS = (*WHOLE, "types", "repeater", "streaming_chain")
ODD_VALUES: tuple[Json, ...] = (
    None, True, "", "x", 0, 1, -1, 1.5, 1 << 31, 1 << 63, -(1 << 63) - 1, 1 << 64, 1e300,
    [], [1], [[]], {}, {"a": 1}, ["x"], [None],
)
LARGE = (1 << 31, 1 << 63, 1e300)


def _places(value: Json, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, member in items:
        yield (*at, key)
        yield from _places(member, (*at, key))


def mutate(rng: random.Random, document: Json) -> None:
    """Change one place of a document."""
    places = list(_places(document))
    if not places:
        return
    *path, last = rng.choice(places)
    parent = document
    for key in path:
        parent = parent[key]
    action = rng.choice(("exchange", "exchange", "remove", "double", "rename"))
    if action == "exchange":
        # The reference takes the memory that a shape in range asks for, and dies of it.
        values = [v for v in ODD_VALUES if "shape" not in path or v not in LARGE]
        parent[last] = copy.deepcopy(rng.choice(values))
    elif action == "remove":
        del parent[last]
    elif isinstance(parent, list):
        parent.insert(last, copy.deepcopy(parent[last]))
    else:
        parent[f"{last}_2" if action == "rename" else str(last).upper()] = parent.pop(last)


def with_blobs(
    group: str, path: str, document: Json, blobs: bytes, length: str = "", **headers: str
) -> HttpCase:
    """A body of JSON and blobs."""
    head = json.dumps(document).encode()
    named = {"Inference-Header-Content-Length": length or str(len(head)), **headers}
    return HttpCase(group, "POST", path, head + blobs, named)


def strings(*texts: bytes) -> bytes:
    """Elements of BYTES as binary data."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
