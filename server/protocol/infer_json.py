"""The body and the parameters of ``POST .../infer``, parsed to a request."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput

from trimaran.comm.errors import ErrorKind, RequestError, with_request_id
from trimaran.server.inference.request import InferRequest, ParameterValue
from trimaran.server.inference.tensor_bytes import (
    LENGTH_PREFIX_BYTES,
    NUMPY_TYPES,
    Buffer,
    element_bytes,
    from_config,
)
from trimaran.server.inference.text_limits import PromptBound
from trimaran.server.inference.validation import MAX_ELEMENTS, WireInput, too_many_elements
from trimaran.server.protocol import json_access
from trimaran.server.protocol.json_access import (
    JsonObject,
    as_bool,
    as_list,
    as_string,
    as_unsigned,
    too_big,
)
from trimaran.server.protocol.limits import check_dimensions, check_id, check_number
from trimaran.server.protocol.tensor_json import array_from_json, flatten
from trimaran.server.shared_memory.region_specs import RegionSlice
from trimaran.server.shared_memory.regions import OpenSlice

RESERVED_PREFIX = "triton_"


def check_custom_name(name: str) -> None:
    """Refuse names that are reserved for the protocol."""
    if name.startswith(RESERVED_PREFIX):
        raise RequestError(
            f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage "
            "and should not be specified."
        )


def custom_value(name: str, value: object) -> ParameterValue:
    """The value of a custom parameter, if parameters can have its type. An integer of more than
    64 bits becomes a double, as in Triton.
    """
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return _double(value)
    if isinstance(value, (str, bool, int, float)):
        return value
    raise RequestError(
        f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
    )


def _double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise too_big() from None


def apply_json_parameters(request: InferRequest, members: Mapping[str, object]) -> bool:
    """Move the ``parameters`` of a JSON request into the request. Returns
    ``binary_data_output``.
    """
    check_number("parameters", len(members))
    wants_binary = False
    for name, value in members.items():
        if name == "sequence_id":
            request.sequence_id = _sequence_id(value)
        elif name == "sequence_start":
            request.sequence_start = as_bool(value, "'sequence_start'")
        elif name == "sequence_end":
            request.sequence_end = as_bool(value, "'sequence_end'")
        elif name == "priority":
            request.priority = as_unsigned(value, "'priority'")
        elif name == "timeout":
            request.timeout_us = as_unsigned(value, "'timeout'")
        elif name == "binary_data_output":
            wants_binary = as_bool(value, "'binary_data_output'")
        else:
            check_custom_name(name)
            request.parameters[name] = custom_value(name, value)
    return wants_binary


def _sequence_id(value: object) -> int | str:
    if type(value) is int and 0 <= value < 1 << 64:
        return value
    return check_id("the request's sequence id", as_string(value, "'sequence_id'"))


_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output as the client requested it."""

    name: str
    is_binary: bool = False
    num_classes: int = 0
    """The number of best classes to return instead of the values; 0 means the values."""

    region_slice: RegionSlice | None = None
    """Memory of the client in place of the response."""


@dataclass(slots=True)
class ParsedInfer:
    """A parsed body. The inputs are not yet checked against the model."""

    request: InferRequest
    inputs: list[WireInput] = field(default_factory=list)
    outputs: list[RequestedOutput] = field(default_factory=list)
    is_binary_by_default: bool = False
    """HTTP: if no output is named, all of them go as binary data."""

    wants_empty_final: bool = False
    """gRPC streams: a flag-only response ends the answers."""

    targets: dict[str, OpenSlice] = field(default_factory=dict)
    """Outputs that are written to memory of the client, once it is found."""

    @property
    def has_slices(self) -> bool:
        """Whether tensors are in memory of the client."""
        return any(wire.region_slice for wire in self.inputs) or any(
            output.region_slice for output in self.outputs
        )


def header_length(text: str | None, num_bytes: int) -> int:
    """Bytes of the JSON part of a body of ``num_bytes``, from its header.

    Raises:
        RequestError: not a number, or outside the body.
    """
    if text is None:
        return num_bytes
    # As C's strtol: characters after the digits are ignored.
    digits = re.match(r"\s*[+-]?\d+", text)
    if digits is None or abs(int(digits[0])) > _INT32_MAX:
        raise RequestError(f"Unable to parse Inference-Header-Content-Length, got: {text}")
    length = int(digits[0])
    if not 0 <= length <= num_bytes:
        raise RequestError(
            f"inference header size should be in range (0, {num_bytes}), got: {length}"
        )
    return length


def parse_infer(
    body: Buffer, json_bytes: int, config: ModelConfig, max_input_bytes: int
) -> ParsedInfer:
    """Parse a decompressed body whose first ``json_bytes`` are JSON. With 0 of them the whole
    body is the model's only input.

    Raises:
        RequestError: with the kind and text that clients know.
    """
    if json_bytes == 0:
        check_size("Raw input", len(body), max_input_bytes)
        wire = _raw_input(memoryview(body), config)
        request = InferRequest(model_name=config.name)
        return ParsedInfer(request, [wire], is_binary_by_default=True)
    if json_bytes > max_input_bytes:
        raise json_too_large(json_bytes, max_input_bytes)
    view = memoryview(body)
    return parse_document(view[:json_bytes], view[json_bytes:], config, max_input_bytes)


def parse_document(
    json: Buffer,
    blobs: memoryview,
    config: ModelConfig,
    max_input_bytes: int,
    prompts: PromptBound | None = None,
) -> ParsedInfer:
    """Parse a JSON body, and locate the blobs of its inputs. ``prompts`` refuses prompts that
    are too long for the model.

    Raises:
        RequestError: with the kind and text that clients know.
    """
    return parse_members(json_access.parse(json), blobs, config, max_input_bytes, prompts)


def parse_members(
    document: object,
    blobs: memoryview,
    config: ModelConfig,
    max_input_bytes: int,
    prompts: PromptBound | None = None,
) -> ParsedInfer:
    """`parse_document`, of the JSON's value.

    Raises:
        RequestError: with the kind and text that clients know.
    """
    request = InferRequest(model_name=config.name)
    parsed = ParsedInfer(request)
    if not isinstance(document, dict):
        # As in Triton, a body of another type has no members.
        document = {}
    if "id" in document:
        request.id = check_id("the request's id", as_string(document["id"], "'id'"))
    if "parameters" in document:
        members = document["parameters"]
        if not isinstance(members, dict):
            raise RequestError(
                "failed to get request params.: attempt to get members for non-object",
                ErrorKind.INTERNAL,
            )
        parsed.is_binary_by_default = apply_json_parameters(request, members)
    limits = _InputLimits(max_input_bytes, prompts)
    parsed.inputs = _inputs(_member(document, "inputs"), blobs, config.name, limits)
    outputs = as_list(document.get("outputs", []), "'outputs'")
    check_number("outputs", len(outputs))
    for entry in outputs:
        parsed.outputs.append(_output(_members(entry)))
    return parsed


class BodyTooLargeError(RequestError):
    """A body's JSON part is over the limit. Triton answers with the status 400, and its OpenAI
    front end with 413."""


def json_too_large(num_bytes: int, limit: int) -> BodyTooLargeError:
    """The error of a body whose JSON part is over the limit."""
    return BodyTooLargeError(
        f"request JSON size of {num_bytes} bytes exceeds the maximum allowed input size of "
        f"{limit} bytes. Use --http-max-input-size to increase the limit."
    )


def check_size(what: str, num_bytes: int, limit: int) -> None:
    """Refuse input data over the limit of one tensor."""
    if num_bytes > limit:
        raise RequestError(
            f"{what} has a byte_size ({num_bytes}) that exceeds the maximum allowed value of "
            f"{limit} bytes. Use --http-max-input-size to increase the limit."
        )


def _members(entry: object) -> JsonObject:
    """The members of an entry; an entry that is no object has none."""
    return entry if isinstance(entry, dict) else {}


def _member(entry: JsonObject, name: str) -> Any:
    if name not in entry:
        raise RequestError(
            f"Unable to parse '{name}': attempt to access non-existing object member '{name}'",
            ErrorKind.INTERNAL,
        )
    return entry[name]


@dataclass(frozen=True, slots=True)
class _InputLimits:
    """What is refused before it is converted."""

    max_bytes: int
    prompts: PromptBound | None


def _inputs(
    entries: object, blobs: memoryview, model: str, limits: _InputLimits
) -> list[WireInput]:
    inputs: list[WireInput] = []
    start = 0
    items = as_list(entries, "'inputs'")
    check_number("inputs", len(items))
    for item in items:
        entry = _members(item)
        source = _data_source(entry)
        name = as_string(_member(entry, "name"), "'name'")
        datatype = as_string(_member(entry, "datatype"), "'datatype'")
        if datatype not in NUMPY_TYPES:
            raise RequestError(f"invalid datatype for input {name}")
        dims = as_list(_member(entry, "shape"), "'shape'")
        check_dimensions(name, len(dims))
        shape = tuple(as_unsigned(dim, "'shape'") for dim in dims)
        if isinstance(source, RegionSlice):
            inputs.append(WireInput(name, datatype, shape, b"", source))
            continue
        if source is None:
            data = _json_data(entry, WireInput(name, datatype, shape, b""), limits)
            inputs.append(WireInput(name, datatype, shape, data))
            continue
        end = start + source
        if end > len(blobs):
            raise RequestError(
                f"unexpected size for input '{name}', expecting {end - len(blobs)} additional "
                f"bytes for model '{model}'"
            )
        inputs.append(WireInput(name, datatype, shape, blobs[start:end]))
        start = end
    if start != len(blobs):
        raise RequestError(f"unexpected additional input data for model '{model}'")
    return inputs


def _data_source(entry: JsonObject) -> int | RegionSlice | None:
    """Size of the input's blob, its slice of a region, or None if the data is in the JSON."""
    parameters = _members(entry.get("parameters"))
    sources = [f"'{name}'" for name in ("data",) if name in entry] + [
        f"'{name}'"
        for name in ("binary_data_size", "shared_memory_region")
        if name in parameters
    ]
    if len(sources) != 1:
        found = "no field is set" if not sources else "set " + " ".join(sources)
        raise RequestError(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in "
            f"'parameters', 'shared_memory_region' in 'parameters'. But {found}"
        )
    if "shared_memory_region" in parameters:
        return _slice(parameters)
    if "data" in entry:
        return None
    return as_unsigned(parameters["binary_data_size"], "'binary_data_size'")


def _slice(parameters: JsonObject) -> RegionSlice:
    """The slice that the parameters of a tensor name."""
    region = as_string(parameters["shared_memory_region"], "'shared_memory_region'")
    extent = (
        as_unsigned(parameters.get(name, 0), f"'{name}'")
        for name in ("shared_memory_offset", "shared_memory_byte_size")
    )
    return RegionSlice(region, *extent)


def _json_data(entry: JsonObject, wire: WireInput, limits: _InputLimits) -> Any:
    count = math.prod(wire.shape) if wire.shape else 0
    if count > MAX_ELEMENTS:
        raise RequestError(too_many_elements(wire))
    num_bytes = count * element_bytes(wire.datatype)
    check_size(f"JSON input '{wire.name}'", num_bytes, limits.max_bytes)
    if count == 0:
        # As in Triton, the data of no elements is not read.
        return np.empty(0, NUMPY_TYPES[wire.datatype])
    values = flatten(as_list(entry["data"], "'data'"))
    if limits.prompts is not None:
        limits.prompts.check(wire.name, values)
    data = array_from_json(values, wire.datatype, wire.name)
    # Strings are counted with the request's other checks.
    if len(data) != count and wire.datatype != "BYTES":
        raise RequestError(
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
            ErrorKind.INTERNAL,
        )
    return data


def _output(entry: JsonObject) -> RequestedOutput:
    name = as_string(_member(entry, "name"), "'name'")
    parameters = _members(entry.get("parameters"))
    if "shared_memory_region" in parameters:
        if "classification" in parameters:
            raise RequestError(
                "Output can't set both 'shared_memory_region' and 'classification'"
            )
        return RequestedOutput(name, region_slice=_slice(parameters))
    is_binary = False
    if "binary_data" in parameters:
        is_binary = json_access.as_bool(parameters["binary_data"], "'binary_data'")
    classes = as_unsigned(parameters.get("classification", 0), "'classification'", "set")
    return RequestedOutput(name, is_binary, classes)


def _raw_input(body: memoryview, config: ModelConfig) -> WireInput:
    if len(config.input) != 1:
        text = (
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(config.input)} inputs in '{config.name}' model configuration"
        )
        raise RequestError(with_request_id("", text))
    entry = config.input[0]
    datatype = from_config(entry.data_type)
    batch = (1,) if config.max_batch_size > 0 else ()
    if datatype == "BYTES":
        if any(dim not in (1, -1) for dim in entry.dims):
            raise RequestError(
                f"For BYTES datatype raw input '{entry.name}', the model must have input shape "
                "[1]"
            )
        prefix = len(body).to_bytes(LENGTH_PREFIX_BYTES, "little")
        return WireInput(entry.name, datatype, batch + (1,) * len(entry.dims), prefix + body)
    return WireInput(entry.name, datatype, batch + _deduced(entry, len(body)), body)


def _deduced(entry: ModelInput, num_bytes: int) -> tuple[int, ...]:
    """The shape of a raw input, from its size."""
    fixed = [dim for dim in entry.dims if dim != -1]
    if len(entry.dims) - len(fixed) > 1:
        text = (
            f"The shape of the raw input '{entry.name}' can not be deduced because there are "
            "more than one variable-sized dimension"
        )
        raise RequestError(with_request_id("", text))
    row_bytes = math.prod(fixed) * element_bytes(from_config(entry.data_type))
    variable = num_bytes // row_bytes if row_bytes else 0
    return tuple(variable if dim == -1 else dim for dim in entry.dims)
