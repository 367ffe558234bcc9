"""Generated gRPC requests, valid and invalid, for models of the folder ``models``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict
from http_case import REGION, REGION_BYTES, REGION_TEXT
from tritonclient.grpc import service_pb2 as pb

# fmt: off

Json = Any


@dataclass(frozen=True)
class GrpcCase:
    """One call; the requests of a stream are ``messages``."""

    group: str
    method: str
    messages: tuple[Any, ...]
    metadata: tuple[tuple[str, str], ...] = field(default=())


def _int32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def _string(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def numbers() -> Any:
    """A valid request to the model of that name."""
    request = pb.ModelInferRequest(model_name="numbers", id="n")
    for name in ("A", "B"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 4])
        request.raw_input_contents.append(_int32(1, 2, 3, 4))
    return request


def _one(
    model: str, name: str, datatype: str, shape: list[int], raw: bytes, **more: Any
) -> Any:
    request = pb.ModelInferRequest(model_name=model, **more)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw)
    return request


def _told(**parameters: Any) -> Any:
    request = _one("told", "TEXT", "BYTES", [1], _string(b"x"), id="t")
    for name, value in parameters.items():
        ParseDict(value, request.parameters[name])
    return request


def _repeater(count: int, fail_at: int, ends: bool, number: str) -> Any:
    request = _one("repeater", "COUNT", "INT32", [1], _int32(count), id=number)
    request.inputs.add(name="FAIL_AT", datatype="INT32", shape=[1])
    request.raw_input_contents.append(_int32(fail_at))
    request.inputs.add(name="FINAL_WITH_LAST", datatype="BOOL", shape=[1])
    request.raw_input_contents.append(bytes([ends]))
    return request


def all_cases(seed: int) -> Iterator[GrpcCase]:
    """Every generated call."""
    rng = random.Random(seed)
    yield from queries()
    yield from contents()
    yield from parameters()
    yield from mutated(rng, 600)
    yield from settings()
    yield from forwarded()
    yield from shared_memory()
    yield from repository()
    yield from streams()


def queries() -> Iterator[GrpcCase]:
    """Health, metadata, configuration and readiness."""
    for method in ("ServerLive", "ServerReady", "ServerMetadata"):
        yield GrpcCase("query", method, (getattr(pb, f"{method}Request")(),))
    for method in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"):
        for name in ("numbers", "text", "versions", "chain", "repeater", "absent", "", "a b"):
            for version in ("", "1", "3", "7", "0", "-1", "-2", "x", "1.0", " 1", "9" * 20):
                message = getattr(pb, f"{method}Request")(name=name, version=version)
                yield GrpcCase("query", method, (message,))


def contents() -> Iterator[GrpcCase]:
    """Tensors as raw bytes and as typed values."""
    yield from _raw_contents()
    yield from _typed_contents()
    yield from _contents_of_models()


def _infer(request: Any, group: str = "contents") -> GrpcCase:
    return GrpcCase(group, "ModelInfer", (request,))


def _raw_contents() -> Iterator[GrpcCase]:
    """Raw bytes that are missing, too many or of a wrong size."""
    infer = _infer
    yield infer(numbers())
    for size in (0, 4, 15, 17, 32):
        request = numbers()
        request.raw_input_contents[1] = bytes(size)
        yield infer(request)
    request = numbers()
    request.raw_input_contents.append(b"more")
    yield infer(request)
    request = numbers()
    del request.raw_input_contents[1]
    yield infer(request)
    request = numbers()
    request.inputs[0].contents.int_contents.extend([1, 2, 3, 4])
    yield infer(request)


def _typed_contents() -> Iterator[GrpcCase]:
    """Values of each type in the field of each type."""
    infer = _infer
    fields = {
        "bool_contents": [True] * 4, "int_contents": [1, -2, 3, 70000],
            "int64_contents": [1] * 4,
        "uint_contents": [1, 300, 3, 4], "uint64_contents": [1] * 4, "fp32_contents": [0.5] * 4,
        "fp64_contents": [0.5] * 4, "bytes_contents": [b"a", b"", b"\xff", b"d"],
    }
    datatypes = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32",
        "INT64",
                 "FP16", "FP32", "FP64", "BYTES", "BF16", "x", "")
    for datatype in datatypes:
        name = f"IN_{'STRING' if datatype == 'BYTES' else datatype}"
        for kind, values in fields.items():
            for shape in ([4], [3], [-1], []):
                request = pb.ModelInferRequest(model_name="types")
                entry = request.inputs.add(name=name, datatype=datatype, shape=shape)
                getattr(entry.contents, kind).extend(values)
                yield infer(request, "contents/typed")
        request = pb.ModelInferRequest(model_name="types")
        request.inputs.add(name=name, datatype=datatype, shape=[4])
        yield infer(request, "contents/typed")
        request.raw_input_contents.append(bytes(16))
        yield infer(request, "contents/typed")


def _contents_of_models() -> Iterator[GrpcCase]:
    """Texts, outputs, models that fail, and versions."""
    infer = _infer
    for raw in (
        _string(b"a"),
        _string(b"a", b"b"),
        b"",
        b"\x05\0\0\0ab",
        b"\x01\0",
        _string(b""),
    ):
        yield infer(_one("text", "TEXT", "BYTES", [1, 1], raw))
    for shape in ([1], [], [0, 1], [5, 1], [1, -1], [2, 1], [1, 1, 1]):
        yield infer(_one("text", "TEXT", "BYTES", shape, _string(b"a")))
    for outputs in (["SUM"], ["DIFFERENCE", "SUM"], ["SUM", "SUM"], ["Q"], [""]):
        request = numbers()
        for name in outputs:
            request.outputs.add(name=name)
        yield infer(request)
    for code in ("raise", "other_output", "no_output", "UNKNOWN", "INTERNAL", "NOT_FOUND",
                 "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"):
        yield infer(
            _one("failing", "CODE", "BYTES", [1], _string(code.encode()), id="f"), "failing"
        )
    for model in ("repeater", "absent", "", "streaming_chain"):
        yield infer(_one(model, "COUNT", "INT32", [1], _int32(1)))
    for version in ("1", "3", "7", "x", "-1", "0"):
        values = np.array([1, 2], np.int64).tobytes()
        yield infer(_one("versions", "IN", "INT64", [2], values, model_version=version))
    chain = _one("chain", "X", "INT32", [1, 4], _int32(1, 2, 3, 4))
    chain.inputs.add(name="Y", datatype="INT32", shape=[1, 4])
    chain.raw_input_contents.append(_int32(1, 1, 1, 1))
    yield infer(chain)


_VALUES: tuple[Json, ...] = (
    {}, {"boolParam": True}, {"boolParam": False}, {"int64Param": 0}, {"int64Param": 5},
    {"int64Param": -5}, {"stringParam": ""}, {"stringParam": "s"}, {"doubleParam": 1.5},
    {"uint64Param": 7},
)


def parameters() -> Iterator[GrpcCase]:
    """Parameters of each name and type, of requests, inputs and outputs."""
    for name in ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout",
        "custom",
                 "triton_x", "triton_enable_empty_final_response", "binary_data_output",
                 "headers"):
        for value in _VALUES:
            yield GrpcCase("parameters", "ModelInfer", (_told(**{name: value}),))
    names = ("classification", "shared_memory_region", "shared_memory_byte_size",
             "shared_memory_offset", "binary_data", "x")
    for name in names:
        for value in _VALUES:
            request = numbers()
            output = request.outputs.add(name="SUM")
            ParseDict(value, output.parameters[name])
            yield GrpcCase("parameters/output", "ModelInfer", (request,))
            request = numbers()
            ParseDict(value, request.inputs[1].parameters[name])
            yield GrpcCase("parameters/input", "ModelInfer", (request,))


def mutated(rng: random.Random, count: int) -> Iterator[GrpcCase]:
    """Valid requests with one or two fields changed."""
    for _ in range(count):
        request = numbers()
        for _ in range(rng.choice((1, 1, 2))):
            entry = rng.choice(list(request.inputs) or [request.inputs.add()])
            change = rng.randrange(9)
            if change == 0:
                entry.name = rng.choice(("", "A", "B", "C", "é"))
            elif change == 1:
                entry.datatype = rng.choice(("", "INT64", "BYTES", "FP32", "x", "int32"))
            elif change == 2:
                del entry.shape[:]
                entry.shape.extend(
                    rng.choice(([], [4], [1, 4, 1], [1, -1], [2, 2], [0, 4], [9, 4]))
                )
            elif change == 3:
                request.raw_input_contents.append(rng.randbytes(rng.choice((0, 16))))
            elif change == 4 and request.raw_input_contents:
                del request.raw_input_contents[rng.randrange(len(request.raw_input_contents))]
            elif change == 5:
                entry.contents.int_contents.append(1)
            elif change == 6:
                request.model_version = rng.choice(("1", "2", "x", "-3"))
            elif change == 7:
                request.id = rng.choice(("", "é", "a" * 300))
            else:
                request.inputs.add(name=entry.name, datatype="INT32", shape=[1, 4])
        yield GrpcCase("mutated", "ModelInfer", (request,))


def streams() -> Iterator[GrpcCase]:
    """Streams with one request each, and with several for models that keep the order."""
    for metadata in ((), (("triton_grpc_error", "true"),)):
        for count in (0, 1, 3):
            for fail_at in (-1, 0, 1):
                for ends in (False, True):
                    for wants in (False, True):
                        request = _repeater(count, fail_at, ends, "r")
                        if wants:
                            name = "triton_enable_empty_final_response"
                            request.parameters[name].bool_param = True
                        yield GrpcCase("stream", "ModelStreamInfer", (request,), metadata)
        bad = numbers()
        bad.inputs[0].name = "Q"
        absent = pb.ModelInferRequest(model_name="absent", id="a")
        code = _one("failing", "CODE", "BYTES", [1], _string(b"refused"), id="f")
        yield GrpcCase("stream", "ModelStreamInfer", (), metadata)
        yield GrpcCase("stream", "ModelStreamInfer", (numbers(), numbers()), metadata)
        for request in (bad, absent, code):
            yield GrpcCase("stream", "ModelStreamInfer", (request,), metadata)
            if not metadata:
                # An error behind other requests ends the reference with a fault of memory.
                yield GrpcCase("stream", "ModelStreamInfer", (numbers(), request))
        chained = _one("streaming_chain", "N", "INT32", [1], _int32(2), id="c")
        yield GrpcCase("stream", "ModelStreamInfer", (chained,), metadata)


def settings() -> Iterator[GrpcCase]:
    """Log and trace settings."""
    for name in ("log_info", "log_verbose_level", "log_format", "log_file", "unknown"):
        for value in ({}, {"boolParam": True}, {"uint32Param": 1}, {"stringParam": "x"},
                      {"stringParam": "default"}, {"uint32Param": 0}):
            request = pb.LogSettingsRequest()
            ParseDict(value, request.settings[name])
            yield GrpcCase("logging", "LogSettings", (request,))
    for model in ("", "text", "absent"):
        for name in ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file",
                     "trace_mode", "unknown"):
            for values in ([], ["OFF"], ["TIMESTAMPS"], ["x"], ["5"], ["-2"], ["1", "2"], [""]):
                request = pb.TraceSettingRequest(model_name=model)
                request.settings[name].value.extend(values)
                yield GrpcCase("trace", "TraceSetting", (request,))
                clear = pb.TraceSettingRequest(model_name=model)
                for each in ("trace_level", "trace_rate", "trace_count", "log_frequency"):
                    clear.settings[each].SetInParent()
                yield GrpcCase("trace", "TraceSetting", (clear,))


def forwarded() -> Iterator[GrpcCase]:
    """Metadata that matches the servers' pattern, and other."""
    for metadata in ((("x-told-a", "1"),), (("x-told", "b"), ("y-told", "c")),
                     (("x-told-a", "1"), ("x-told-a", "2"))):
        for own in ({}, {"x-told-a": "own"}, {"k": "1"}):
            message = pb.ModelInferRequest(model_name="told", id="t")
            message.inputs.add(name="TEXT", datatype="BYTES", shape=[1])
            message.raw_input_contents.append(_string(b"x"))
            for name, value in own.items():
                message.parameters[name].string_param = value
            for method in ("ModelInfer", "ModelStreamInfer"):
                yield GrpcCase("forwarded", method, (message,), metadata)


def shared_memory() -> Iterator[GrpcCase]:
    """Status and changes of regions, and tensors in them."""
    for kind in ("System", "Cuda"):
        for name in ("", "r"):
            for action in ("Status", "Unregister", "Register"):
                method = f"{kind}SharedMemory{action}"
                message = getattr(pb, f"{method}Request")(name=name)
                yield GrpcCase("shared memory", method, (message,))
    for handle in (b"", b"x" * 63, b"x" * 64, b"x" * 65):
        cuda = pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=handle, byte_size=8)
        yield GrpcCase("shared memory", "CudaSharedMemoryRegister", (cuda,))
    # The reference opens a key only once.
    for name, key, offset, size in (("s", REGION, 0, 1 << 40), ("u", REGION, 1 << 63, 8),
                                    ("t", "/absent", 0, 8), ("r", REGION, 0, REGION_BYTES),
                                    ("r", "/absent", 0, 8)):
        register = pb.SystemSharedMemoryRegisterRequest(
            name=name, key=key, offset=offset, byte_size=size)
        yield GrpcCase("shared memory", "SystemSharedMemoryRegister", (register,))
        for each in ("", name):
            status = pb.SystemSharedMemoryStatusRequest(name=each)
            yield GrpcCase("shared memory", "SystemSharedMemoryStatus", (status,))
    status = pb.CudaSharedMemoryStatusRequest(name="r")
    yield GrpcCase("shared memory", "CudaSharedMemoryStatus", (status,))
    yield from _in_regions()
    everything = pb.SystemSharedMemoryUnregisterRequest()
    yield GrpcCase("shared memory", "SystemSharedMemoryUnregister", (everything,))
    yield GrpcCase("shared memory", "SystemSharedMemoryStatus",
                   (pb.SystemSharedMemoryStatusRequest(),))


def _in_regions() -> Iterator[GrpcCase]:
    text = len(REGION_TEXT)
    for region in ("r", "absent"):
        for size, offset in ((text, None), (text, 0), (0, 0), (text - 1, 0), (text + 1, 0),
                             (text, 1), (text, REGION_BYTES), (text, REGION_BYTES - 2), (-1, 0),
                             (text, -1)):
            for is_output in (False, True):
                message = pb.ModelInferRequest(model_name="text", id="i")
                entry = message.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
                if is_output:
                    message.raw_input_contents.append(REGION_TEXT)
                    entry = message.outputs.add(name="ECHO")
                    if offset is not None and offset >= 0:
                        offset += 512
                entry.parameters["shared_memory_region"].string_param = region
                entry.parameters["shared_memory_byte_size"].int64_param = size
                if offset is not None:
                    entry.parameters["shared_memory_offset"].int64_param = offset
                for method in ("ModelInfer", "ModelStreamInfer"):
                    yield GrpcCase("shared memory", method, (message,))


def repository() -> Iterator[GrpcCase]:
    """Index, load and unload."""
    for ready in (False, True):
        for name in ("", "r"):
            message = pb.RepositoryIndexRequest(repository_name=name, ready=ready)
            yield GrpcCase("repository", "RepositoryIndex", (message,))
    for name, model in (("", "absent"), ("r", "text"), ("", "")):
        for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
            request = getattr(pb, f"{method}Request")(repository_name=name, model_name=model)
            yield GrpcCase("repository", method, (request,))
            for key in ("config", "file:1/model.py", "foo", "unload_dependents"):
                for value in (
                    {"boolParam": True},
                    {"stringParam": "x"},
                    {"bytesParam": "eA=="},
                ):
                    request = getattr(pb, f"{method}Request")(model_name="absent")
                    ParseDict(value, request.parameters[key])
                    yield GrpcCase("repository", method, (request,))
