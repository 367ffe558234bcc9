"""Random gRPC calls: every method, messages as trees of fields, honest, mutated or cut off."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import mutations
from cases import Case
from infer_bodies import packed, shape_of
from model_fields import MODELS, choose_inputs, choose_model, value_of
from pieces import DELIMITED, FIXED64, VARINT, Piece, build, weight

INFERENCE = "/inference.GRPCInferenceService/"
_Fields = list[Any]
_NAMES = ("", "none", "x" * 5000, "é", "../..", "\x00")
_METADATA = (
    ["triton_grpc_error", "true"], ["authorization", "Bearer x"], ["x", "y" * 4000],
    ["grpc-timeout", "1n"], ["triton-grpc-protocol-x", "y"], ["x-bin", "\x01"],
    ["grpc-accept-encoding", "gzip"], ["grpc-encoding", "gzip"],
)  # fmt: skip
_DATATYPES = ("", "x", "INT8", "BF16")
_CONTENTS = {"BOOL": 1, "INT32": 2, "INT64": 3, "UINT8": 4, "UINT64": 5, "FP32": 6, "BYTES": 8}


def text(number: int, value: Piece) -> dict[str, Any]:
    """A string, bytes or message as a field."""
    return {"field": number, "wire": DELIMITED, "value": value}


def integer(number: int, value: int) -> dict[str, Any]:
    """A varint as a field."""
    return {"field": number, "wire": VARINT, "value": value}


def grpc_case(rng: random.Random) -> Case:
    """A random call."""
    make = rng.choices((_small, _inference, _stream, _unknown), (5, 6, 5, 1))[0]
    return make(rng)


def _name(rng: random.Random) -> str:
    return rng.choice(MODELS) if rng.random() < 0.8 else rng.choice(_NAMES)


def _parameter(rng: random.Random, key: int = 4) -> dict[str, Any]:
    """An entry of a map of InferParameter or ModelRepositoryParameter."""
    name = rng.choice((
        "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "config", "x",
        "triton_enable_empty_final_response", "file:1/model.py", "unload_dependents", "",
        "binary_data_size", "classification", "shared_memory_region", "max_tokens",
        "max_draft_tokens", "cache_salt", "request_type",
    ))  # fmt: skip
    value = rng.choice((
        integer(1, 1), integer(2, rng.choice((0, 1, 2**63, 2**64 - 1))), text(3, "x"),
        {"field": 4, "wire": FIXED64, "value": 0x7FF8000000000000}, integer(5, 2**64 - 1),
        text(3, "{" * 2000), text(3, {"hex": "c328ff"}),
    ))  # fmt: skip
    return text(key, [text(1, name), text(2, [value])])


def _settings(rng: random.Random) -> _Fields:
    name = rng.choice((
        "log_verbose_level", "log_info", "log_format", "trace_level", "trace_rate", "x", "",
    ))  # fmt: skip
    value = rng.choice((
        [integer(1, 1)], [integer(2, 2**32 - 1)], [text(3, "x")], [text(1, "OFF")], [],
        [text(1, "TIMESTAMPS"), text(1, "-1")], [text(3, "default")], [integer(2, 0)],
    ))  # fmt: skip
    return [text(1, [text(1, name), text(2, value)])]


_SMALL: dict[str, Callable[[random.Random], _Fields]] = {
    "ServerLive": lambda rng: [],
    "ServerReady": lambda rng: [],
    "ServerMetadata": lambda rng: [],
    "ModelReady": lambda rng: [text(1, _name(rng)), text(2, rng.choice(("", "1", "x")))],
    "ModelMetadata": lambda rng: [text(1, _name(rng)), text(2, rng.choice(("", "1", "-1")))],
    "ModelConfig": lambda rng: [text(1, _name(rng))],
    "ModelStatistics": lambda rng: [text(1, rng.choice(("", _name(rng))))],
    "RepositoryIndex": lambda rng: [integer(2, rng.choice((0, 1, 2)))],
    "RepositoryModelLoad": lambda rng: [text(2, _name(rng)), _parameter(rng, 3)],
    "RepositoryModelUnload": lambda rng: [text(2, _name(rng)), _parameter(rng, 3)],
    "SystemSharedMemoryStatus": lambda rng: [text(1, _name(rng))],
    "SystemSharedMemoryRegister": lambda rng: [
        text(1, "r"), text(2, "/k"), integer(3, 2**63), integer(4, 1),
    ],
    "SystemSharedMemoryUnregister": lambda rng: [text(1, _name(rng))],
    "CudaSharedMemoryStatus": lambda rng: [text(1, "")],
    "CudaSharedMemoryRegister": lambda rng: [text(1, "r"), text(2, "h"), integer(3, 2**64 - 1)],
    "CudaSharedMemoryUnregister": lambda rng: [text(1, "")],
    "TraceSetting": lambda rng: [*_settings(rng), text(2, rng.choice(("", _name(rng))))],
    "LogSettings": _settings,
    "/grpc.health.v1.Health/Check": lambda rng: [text(1, _name(rng))],
}  # fmt: skip


def _small(rng: random.Random) -> Case:
    method = rng.choice(list(_SMALL))
    fields = _SMALL[method](rng)
    name = method
    if rng.random() < 0.5:
        fields, name = mutations.of_fields(rng, fields), f"{method}, mutated"
    path = method if method.startswith("/") else INFERENCE + method
    return _with_manners(rng, Case(name, "grpc", path, [fields]))


def _unknown(rng: random.Random) -> Case:
    method = rng.choice((
        "/", "/x", INFERENCE + "x", "/inference.GRPCInferenceService", "/x/" + "y" * 3000,
        "/grpc.health.v1.Health/Watch", "/grpc.reflection.v1.ServerReflection/x",
        "/inference.Health/Check", "x", INFERENCE.upper() + "MODELINFER",
    ))  # fmt: skip
    raw = mutations.of_bytes(rng, bytes(rng.choices(range(256), k=rng.choice((0, 10, 3000)))))
    stays = rng.choice((None, 0.5))
    return Case("another method", "grpc", method, [raw], leaves_after_s=stays, is_stream=True)


def infer_message(
    rng: random.Random, malice: float, *, is_unary: bool = False
) -> tuple[str, _Fields]:
    """The model and the fields of a ModelInferRequest."""
    model = choose_model(rng, is_unary=is_unary)
    fields: _Fields = [text(1, model)]
    raws = []
    is_raw = rng.random() < 0.6
    for one in choose_inputs(rng, model):
        value = value_of(rng, one, malice)
        shape = shape_of(one, value)
        if rng.random() < malice:
            shape = rng.choice(([], [0], [-1], [2**62, 2**62], [1] * 3000, [1, 2**31], [2]))
        content: Piece = {"hex": packed(one.datatype, value).hex()}
        tensor = [
            text(1, one.name),
            text(2, one.datatype if rng.random() > malice / 2 else rng.choice(_DATATYPES)),
            text(3, [{"hex": build(integer(1, size))[1:].hex()} for size in shape]),
        ]
        if rng.random() < malice / 2:
            tensor.append(_parameter(rng))
        if is_raw:
            raws.append(text(7, content))
        else:
            tensor.append(text(5, _contents(one.datatype, value)))
        fields.append(text(5, tensor))
    if rng.random() < 0.3:
        fields.append(text(3, rng.choice(("r", "r" * 5000, {"hex": "ff"}))))
    if rng.random() < 0.2:
        fields.append(text(2, rng.choice(("1", "", "2", "x", "99999999999999999999"))))
    fields += [_parameter(rng) for _ in range(rng.choice((0, 0, 0, 1, 3)))]
    fields += [
        text(6, [text(1, rng.choice(("text_output", "x", "")))])
        for _ in range(rng.choice((0, 0, 1, 3)))
    ]
    return model, fields + raws


def _contents(datatype: str, value: Any) -> _Fields:
    number = _CONTENTS.get(datatype, 6)
    values = value if isinstance(value, list) else [value]
    if datatype == "BYTES":
        return [text(number, str(each)) for each in values]
    if datatype.startswith("FP"):
        raw = b"".join(struct.pack("<f", _float(each)) for each in values)
        return [text(number, {"hex": raw.hex()})]
    return [integer(number, each if isinstance(each, int) else 0) for each in values]


def _float(value: Any) -> float:
    is_fit = isinstance(value, float) and (value != value or abs(value) < 3e38)
    return value if is_fit else 0.0


def _inference(rng: random.Random) -> Case:
    model, fields = infer_message(rng, rng.choice((0.0, 0.1, 0.4)), is_unary=True)
    name = f"ModelInfer of {model}"
    if rng.random() < 0.3:
        fields, name = mutations.of_fields(rng, fields), f"{name}, mutated"
    return _with_manners(rng, Case(name, "grpc", INFERENCE + "ModelInfer", [fields]))


def _stream(rng: random.Random) -> Case:
    messages: list[Piece] = []
    name = "a stream"
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
        _, fields = infer_message(rng, rng.choice((0.0, 0.0, 0.2)))
        if rng.random() < 0.15:
            fields, name = mutations.of_fields(rng, fields), "a stream of mutated messages"
        messages.append(fields)
    if rng.random() < 0.1 and messages:
        messages = messages * rng.choice((20, 100))
        name += ", many times"
    pause_s = rng.choice((0.0, 0.0, 0.05, 0.3))
    case = Case(name, "grpc", INFERENCE + "ModelStreamInfer", messages, pause_s, is_stream=True)
    return _with_manners(rng, case)


def _with_manners(rng: random.Random, case: Case) -> Case:
    changes: dict[str, Any] = {}
    roll = rng.random()
    if roll < 0.15:
        changes["leaves_after_s"] = rng.choice((0.0, 0.01, 0.1, 0.5, 2.0))
        changes["name"] = f"{case.name}, left early"
    elif roll < 0.2:
        changes.update(leaves_after_s=3.0, reads=False, name=f"{case.name}, never read")
    if rng.random() < 0.1:
        changes["metadata"] = rng.sample(_METADATA, rng.randint(1, 2))
    is_small = bool(case.parts) and weight(case.parts[0]) < 100_000
    if is_small and rng.random() < 0.05:
        parts = [mutations.of_bytes(rng, mutations.built(case.parts[0])), *case.parts[1:]]
        changes.update(parts=parts, name=f"{case.name}, of other bytes")
    return Case(**{**case.to_dict(), **changes})
