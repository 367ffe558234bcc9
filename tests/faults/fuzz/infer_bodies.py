"""Random bodies of inference: JSON of generate and infer, and binary tensors behind JSON."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from model_fields import Input, choose_inputs, value_of
from pieces import Piece, hexed

_OUTPUTS = (
    "text_output", "output_ids", "sequence_length", "cum_log_probs", "context_logits", "x", "",
    "finish_reason", "batch_index", "OUTPUT", "INPUT_ID",
)  # fmt: skip
_SHAPES: tuple[Any, ...] = (
    [], [0], [1], [1, 0], [-1], [1, -1], [2**31, 2**31, 4], [2**63 - 1], [1, 2**40], [1] * 40,
    [1.5], ["1"], "x", None, [1, None], [2**64], [[1]], [65536, 65536], [1] * 70_000,
)  # fmt: skip
_DATATYPES = (
    "BOOL",
    "INT8",
    "INT64",
    "UINT64",
    "FP16",
    "BF16",
    "FP64",
    "BYTES",
    "x",
    "",
    None,
    3,
)
_FORMATS = {
    "BOOL": "?", "UINT8": "B", "INT32": "i", "INT64": "q", "UINT64": "Q", "FP16": "e",
    "FP32": "f",
}  # fmt: skip
_PARAMETERS: tuple[dict[str, Any], ...] = (
    {}, {"sequence_id": 1, "sequence_start": True}, {"sequence_id": "x" * 300},
    {"priority": 2**64},
    {"sequence_id": -1, "sequence_end": "no"}, {"timeout": 1}, {"timeout": 2**63},
    {"timeout": -1},
    {"priority": "x"}, {"binary_data_output": True}, {"binary_data_output": 7}, {"a": [1]},
    {"triton_enable_empty_final_response": True}, {"request_id": None}, {"": ""},
    {f"p{number}": number for number in range(2000)},
)  # fmt: skip


_OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_draft_tokens": 0}, {"max_draft_tokens": 3}, {"max_draft_tokens": -1},
    {"max_draft_tokens": "x"}, {"max_draft_tokens": 2**63}, {"cache_salt": "s"},
    {"cache_salt": "s" * 70_000}, {"cache_salt": 7}, {"request_type": "context_only"},
    {"request_type": "context_and_generation"}, {"len_penalty": 1.5}, {"len_penalty": "x"},
)  # fmt: skip
"""Parameters that a model reads."""


def generate_body(rng: random.Random, model: str, malice: float) -> dict[str, Any]:
    """A request of the generate extension."""
    body = {one.name: value_of(rng, one, malice) for one in choose_inputs(rng, model)}
    for name in ("stream", "streaming"):
        if rng.random() < 0.4:
            body[name] = rng.random() < 0.7
    if rng.random() < 0.15:
        body |= rng.choice(_OPTIONS)
    if rng.random() < 0.2:
        body["id"] = rng.choice(("r", "", "r" * 5000, 7, -1, None, [], 2**70))
    if rng.random() < malice:
        body["parameters"] = rng.choice(_PARAMETERS)
        body[rng.choice(("x", "", "text_input ", "\x00", "a" * 3000))] = rng.choice(
            (1, [[[[]]]], {"a": {"b": {}}}, [1, "a"], None)
        )
    return body


def infer_body(rng: random.Random, model: str, malice: float) -> dict[str, Any]:
    """A request of infer in JSON alone."""
    tensors = [_tensor(rng, one, malice) for one in choose_inputs(rng, model)]
    body: dict[str, Any] = {"inputs": tensors}
    if rng.random() < 0.3:
        body["outputs"] = [_output(rng, malice) for _ in range(rng.choice((0, 1, 2, 40)))]
    if rng.random() < 0.3:
        body["parameters"] = rng.choice((*_PARAMETERS, *_OPTIONS))
    if rng.random() < 0.2:
        body["id"] = rng.choice(("r", "", "r" * 5000, 7, None))
    if rng.random() < malice:
        body["inputs"] = rng.choice((
            tensors * 50, [], None, {}, [None], [{}], [tensors], [{"name": "x"}] * 3000,
        ))  # fmt: skip
    return body


def binary_body(rng: random.Random, model: str, malice: float) -> tuple[Piece, int | str]:
    """A request of infer with tensors behind the JSON, and the length of that."""
    tensors, blobs = [], []
    for one in choose_inputs(rng, model):
        tensor = _tensor(rng, one, malice)
        raw = packed(one.datatype, tensor.pop("data", 0))
        size: Any = len(raw)
        if rng.random() < malice:
            size = rng.choice((0, 1, -1, size + 1, 2**31, 2**63, 2**64, "4", None, 1.5, 10**30))
        tensor["parameters"] = {"binary_data_size": size}
        tensors.append(tensor)
        blobs.append(raw)
    body = {"inputs": tensors, "parameters": rng.choice(({}, {"binary_data_output": True}))}
    text = json.dumps(body)
    length: int | str = len(text)
    if rng.random() < malice:
        length = rng.choice(
            (0, 1, length - 1, length + 1, 10**6, -1, "1e2", 10**25, "0x10", " 5")
        )
    return [text, hexed(b"".join(blobs))], length


def packed(datatype: str, values: Any) -> bytes:
    """The elements of a tensor as binary data; what does not fit is something else."""
    if datatype == "BYTES":
        raws = [str(each).encode(errors="replace") for each in _flat(values)]
        return b"".join(struct.pack("<I", len(raw)) + raw for raw in raws)
    code = _FORMATS.get(datatype, "i")
    parts = []
    for each in _flat(values):
        try:
            parts.append(struct.pack("<" + code, each))
        except (struct.error, OverflowError):
            parts.append(b"\xff" * struct.calcsize(code))
    return b"".join(parts)


def _flat(values: Any) -> list[Any]:
    if not isinstance(values, list):
        return [values]
    return [each for value in values for each in _flat(value)]


def shape_of(one: Input, value: Any) -> list[int]:
    """The shape of a request of one, for an honest value."""
    count = len(_flat(value))
    return [1, *(1 for _ in one.dims[:-1]), count]


def _tensor(rng: random.Random, one: Input, malice: float) -> dict[str, Any]:
    value = value_of(rng, one, malice)
    tensor: dict[str, Any] = {
        "name": one.name,
        "datatype": one.datatype,
        "shape": shape_of(one, value),
        "data": _flat(value) if rng.random() < 0.9 else value,
    }
    if rng.random() < malice:
        key, lies = rng.choice((
            ("shape", _SHAPES), ("datatype", _DATATYPES), ("name", (None, "", "x" * 9000, 1)),
            ("data", (None, {}, "x", [[[]]], [1] * 9000)), ("parameters", _PARAMETERS),
        ))  # fmt: skip
        tensor[key] = rng.choice(lies)
    if rng.random() < malice / 3:
        tensor.pop(rng.choice(list(tensor)))
    if rng.random() < malice / 3:
        tensor["parameters"] = {
            "shared_memory_region": rng.choice(("r", "", 7)),
            "shared_memory_byte_size": rng.choice((1, -1, 2**64)),
            "shared_memory_offset": rng.choice((0, -1, 2**63)),
        }
    return tensor


def _output(rng: random.Random, malice: float) -> dict[str, Any]:
    output: dict[str, Any] = {"name": rng.choice(_OUTPUTS)}
    if rng.random() < 0.5:
        output["parameters"] = rng.choice((
            {"classification": 3}, {"classification": -1}, {"classification": 2**40},
            {"binary_data": True}, {"binary_data": "x"}, {"shared_memory_region": "r"},
        ))  # fmt: skip
    if rng.random() < malice:
        output.update(rng.choice(_PARAMETERS))
    return output
