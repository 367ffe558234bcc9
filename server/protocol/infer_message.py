"""The messages of ``ModelInfer`` and ``ModelStreamInfer``, parsed to requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from trimaran.comm.errors import RequestError, with_request_id
from trimaran.server.inference.cooperative import CHUNK_ITEMS, Cooperative
from trimaran.server.inference.request import InferRequest
from trimaran.server.inference.tensor_bytes import NUMPY_TYPES, Array, Buffer
from trimaran.server.inference.validation import INVALID_DATATYPE, WireInput
from trimaran.server.protocol.infer_json import (
    RESERVED_PREFIX,
    ParsedInfer,
    RequestedOutput,
)
from trimaran.server.protocol.limits import check_dimensions, check_id, check_number
from trimaran.server.shared_memory.region_specs import RegionSlice

EMPTY_FINAL = "triton_enable_empty_final_response"

# Field of the explicit contents: its element type and the datatypes that use it.
_CONTENTS = {
    "bool_contents": ("BOOL", ("BOOL",)),
    "int_contents": ("INT32", ("INT8", "INT16", "INT32")),
    "int64_contents": ("INT64", ("INT64",)),
    "uint_contents": ("UINT32", ("UINT8", "UINT16", "UINT32")),
    "uint64_contents": ("UINT64", ("UINT64",)),
    "fp32_contents": ("FP32", ("FP32",)),
    "fp64_contents": ("FP64", ("FP64",)),
    "bytes_contents": ("BYTES", ("BYTES",)),
}

_TYPES_OF: dict[str, tuple[str, ...]] = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    EMPTY_FINAL: ("bool_param",),
}
_CUSTOM_TYPES = ("string_param", "int64_param", "bool_param", "double_param")
_REGION, _SIZE, _OFFSET = (
    "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset",
)  # fmt: skip
_UINT64_MAX = (1 << 64) - 1


def parse_message(
    message: pb.ModelInferRequest, raw_contents: Sequence[Buffer]
) -> Cooperative[ParsedInfer]:
    """The request of a message, whose raw tensors are apart (see `split_infer`).

    The inputs are not yet checked against the model.

    Raises:
        RequestError: with the text that clients know.
    """
    check_id("the request's id", message.id)
    request = InferRequest(model_name=message.model_name, id=message.id)
    check_number("inputs", len(message.inputs))
    check_number("outputs", len(message.outputs))
    check_number("parameters", len(message.parameters))
    _apply_parameters(request, message.parameters)
    parsed = ParsedInfer(request, wants_empty_final=_wants_empty_final(message))
    _check_repeated(message)
    # Tensors in regions have no raw contents.
    contents = iter(raw_contents) if raw_contents else None
    for entry in message.inputs:
        parsed.inputs.append((yield from _input(message, contents, entry)))
        yield
    for output in message.outputs:
        parsed.outputs.append(_output(output))
        yield
    return parsed


def _wants_empty_final(message: pb.ModelInferRequest) -> bool:
    return (
        message.parameters[EMPTY_FINAL].bool_param
        if EMPTY_FINAL in message.parameters
        else False
    )


def _parameter(name: str, parameter: pb.InferParameter, allowed: tuple[str, ...]) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in allowed:
        words = " or ".join(allowed) + "."
        if allowed is _CUSTOM_TYPES:
            words = "int64_param, bool_param, or string_param."
        raise RequestError(f"invalid value type for '{name}' parameter, expected {words}")
    return getattr(parameter, kind)


def _apply_parameters(request: InferRequest, members: Mapping[str, pb.InferParameter]) -> None:
    for name, parameter in members.items():
        if name not in _TYPES_OF:
            _check_name(name)
            request.parameters[name] = _parameter(name, parameter, _CUSTOM_TYPES)
            continue
        value = _parameter(name, parameter, _TYPES_OF[name])
        if name in ("priority", "timeout") and value < 0:
            raise RequestError(f"invalid value for '{name}', expected value >= 0.")
        if name == "sequence_id" and isinstance(value, str):
            check_id("the request's sequence id", value)
        if name == "timeout":
            request.timeout_us = value
        elif name != EMPTY_FINAL:
            setattr(request, name, value)


def _check_repeated(message: pb.ModelInferRequest) -> None:
    names = set[str]()
    for entry in message.inputs:
        if entry.name in names:
            text = f"input '{entry.name}' already exists in request"
            raise RequestError(with_request_id(message.id, text))
        names.add(entry.name)


def _check_name(name: str) -> None:
    if name.startswith(RESERVED_PREFIX):
        raise RequestError(
            f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage. "
            f"Only the following keys starting with '{RESERVED_PREFIX}' are allowed: "
            f"{EMPTY_FINAL}"
        )


def _input(
    message: pb.ModelInferRequest,
    contents: Iterator[Buffer] | None,
    entry: pb.ModelInferRequest.InferInputTensor,
) -> Cooperative[WireInput]:
    name, model = entry.name, message.model_name
    region_slice = _slice(name, entry.parameters)
    check_dimensions(name, len(entry.shape))
    shape = tuple(entry.shape)
    datatype = entry.datatype if entry.datatype in NUMPY_TYPES else INVALID_DATATYPE
    if region_slice is not None:
        return WireInput(name, datatype, shape, b"", region_slice)
    if contents is not None:
        if entry.HasField("contents"):
            raise RequestError(
                "contents field must not be specified when using raw_input_contents for "
                f"'{name}' for model '{model}'"
            )
        raw = next(contents, None)
        if raw is not None:
            return WireInput(name, datatype, shape, raw)
    elif entry.HasField("contents"):
        data = yield from _contents(entry, datatype, model)
        return WireInput(name, datatype, shape, data)
    raise RequestError(
        f"unable to find data for input tensor '{name}' for model '{model}' in request."
    )


def _contents(
    entry: pb.ModelInferRequest.InferInputTensor, datatype: str, model: str
) -> Cooperative[Array]:
    found: Array = np.empty(0, NUMPY_TYPES.get(datatype, np.dtype(np.uint8)))
    for field, (element, datatypes) in _CONTENTS.items():
        values = getattr(entry.contents, field)
        if not values:
            continue
        if datatype not in datatypes:
            raise RequestError(
                f"unexpected explicit tensor data for input tensor '{entry.name}' for model "
                f"'{model}' of type '{element}', expected datatype '{datatype}'"
            )
        found = np.empty(len(values), NUMPY_TYPES[datatype])
        for start in range(0, len(values), CHUNK_ITEMS):
            piece = values[start : start + CHUNK_ITEMS]
            # Through the field's type: a narrower one takes the low bits.
            found[start : start + CHUNK_ITEMS] = np.array(piece, NUMPY_TYPES[element])
            yield
    return found


def _output(output: pb.ModelInferRequest.InferRequestedOutputTensor) -> RequestedOutput:
    has_region = _REGION in output.parameters
    num_classes = 0
    if "classification" in output.parameters:
        if has_region:
            raise RequestError(
                "Output can't set both 'shared_memory_region' and 'classification'"
            )
        name = "classification"
        parameter = output.parameters[name]
        if parameter.WhichOneof("parameter_choice") != "int64_param":
            raise RequestError(
                "invalid value type for 'classification' parameter, expected int64_param"
            )
        num_classes = parameter.int64_param
        if num_classes <= 0:
            raise RequestError("invalid value for 'classification' parameter, expected >= 0")
    region_slice = _slice(output.name, output.parameters)
    return RequestedOutput(
        output.name, is_binary=True, num_classes=num_classes, region_slice=region_slice
    )


def _slice(tensor: str, parameters: Mapping[str, pb.InferParameter]) -> RegionSlice | None:
    """The slice of a region that holds a tensor; None for a tensor in the message."""
    if _REGION not in parameters:
        for name in (_SIZE, _OFFSET):
            if name in parameters:
                raise RequestError(
                    f"'{name}' can not be specified without '{_REGION}' parameter for tensor "
                    f"'{tensor}'"
                )
        return None
    parameter = parameters[_REGION]
    if parameter.WhichOneof("parameter_choice") != "string_param":
        raise RequestError(
            f"invalid value type for '{_REGION}' parameter for tensor '{tensor}', "
            "expected string_param."
        )
    if _SIZE not in parameters:
        raise RequestError(
            f"'{_SIZE}' must be specified along with '{_REGION}' parameter for tensor "
            f"'{tensor}'"
        )
    return RegionSlice(
        parameter.string_param,
        offset=_size(tensor, parameters, _OFFSET) if _OFFSET in parameters else 0,
        num_bytes=_size(tensor, parameters, _SIZE),
    )


def _size(tensor: str, parameters: Mapping[str, pb.InferParameter], name: str) -> int:
    parameter = parameters[name]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise RequestError(
            f"invalid value type for '{name}' parameter for tensor '{tensor}', expected "
            "int64_param."
        )
    # As in Triton, a negative number becomes a huge one, which no region has room for.
    size: int = parameter.int64_param & _UINT64_MAX
    return size
