"""Bodies of infer with one value an input hold what their tensors hold."""

from __future__ import annotations

import json
import random

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.server.inference.tensor_bytes import from_config
from trimaran.server.inference.validation import Validator
from trimaran.server.protocol import json_access
from trimaran.server.protocol.infer_json import parse_infer
from trimaran.server.protocol.plain_infer import PlainInferReader

CONFIG = """
name: "m"
max_batch_size: {batch}
input {{ name: "text" data_type: TYPE_STRING dims: [ 1 ] }}
input {{ name: "count" data_type: TYPE_INT32 dims: [ -1 ] optional: true }}
input {{ name: "seed" data_type: TYPE_UINT64 dims: [ 1 ] optional: true }}
input {{ name: "share" data_type: TYPE_FP32 dims: [ 1 ] optional: true }}
input {{ name: "flag" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
input {{ name: "pair" data_type: TYPE_INT32 dims: [ 2 ] optional: true }}
input {{ name: "half" data_type: TYPE_FP16 dims: [ 1 ] optional: true }}
output {{ name: "out" data_type: TYPE_STRING dims: [ 1 ] }}
"""
VALUES = (
    0, 1, -1, 7, 0.1, 1.0, -0.25, 1e-7, 3e9, 1e39, 1 << 31, 1 << 63, 1 << 64, True, False, "",
    "a", "größer 🙂", None, [], [1], {},
)  # fmt: skip


def _config(batch: int) -> ModelConfig:
    return text_format.Parse(CONFIG.format(batch=batch), ModelConfig())


def _entry(name: str, datatype: str, value: object, batch: int, **other: object) -> dict:
    shape = [1, 1] if batch else [1]
    return {"name": name, "datatype": datatype, "shape": shape, "data": [value], **other}


@pytest.mark.parametrize("batch", [0, 4])
def test_values_of_plain_bodies_are_those_of_their_tensors(batch):
    draw, config = random.Random(11), _config(batch)
    reader, validator, num_plain = PlainInferReader(config), Validator(config), 0
    shapes = ([], [1], [1, 1], [2], [True], [1.0], [1, 1, 1], [-1])
    for _ in range(3000):
        inputs = [_entry("text", "BYTES", "A house", batch)]
        for one in draw.sample(list(config.input), draw.randint(0, 3)):
            entry = _entry(one.name, from_config(one.data_type), draw.choice(VALUES), batch)
            if draw.random() < 0.1:
                entry["shape"] = draw.choice(shapes)
            if draw.random() < 0.05:
                entry["datatype"] = draw.choice(("INT32", "BYTES", "FP32", 1, None))
            if draw.random() < 0.05:
                entry["parameters"] = {}
            inputs.append(entry)
        if draw.random() < 0.1:
            del inputs[0]
        body = {"id": draw.choice(("", "r", "r" * 200, 7)), "inputs": inputs}
        raw = json.dumps(body).encode()
        found = reader.read(json_access.parse(raw))
        if found is None:
            continue
        num_plain += 1
        parsed = parse_infer(raw, len(raw), config, 1 << 20)
        tensors = validator.check(parsed.inputs, found.outputs, found.id)
        held = {}
        for name, tensor in tensors.items():
            assert tensor.data.size == 1
            value = tensor.data.item()
            held[name] = value.decode() if isinstance(value, bytes) else value
        assert (parsed.request.id, held) == (found.id, found.values)
        assert [type(value) for value in held.values()] == [
            type(found.values[name]) for name in held
        ]
    assert num_plain > 300


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": {}},
        {"x": 1},
        {"inputs": []},
        {"inputs": None},
        {"id": 7},
        {"outputs": [{"name": "out", "parameters": {"binary_data": True}}]},
        {"outputs": {}},
        {"outputs": ["out"]},
    ],
)
def test_bodies_of_other_forms_are_not_plain(change):
    plain = {"inputs": [_entry("text", "BYTES", "a", 0)], "outputs": [{"name": "out"}]}
    reader = PlainInferReader(_config(0))
    assert reader.read(plain) is not None
    assert reader.read({**plain, **change}) is None
    assert reader.read(json_access.parse(b'{"inputs": [], "inputs": []}')) is None
