"""Responses as messages of the gRPC protocol."""

from __future__ import annotations

from collections.abc import Collection

from tritonclient.grpc import service_pb2 as pb

from trimaran.server.inference.cooperative import CHUNK_ITEMS, Cooperative
from trimaran.server.inference.request import InferResponse, ParameterValue
from trimaran.server.inference.tensor_bytes import to_bytes, to_parts

FINAL = "triton_final_response"


def fill_response(
    message: pb.ModelInferResponse, response: InferResponse, stored: Collection[str] = ()
) -> Cooperative[None]:
    """Write a response into a message; tensors always go as raw contents, which are empty for
    the ``stored`` outputs.
    """
    message.model_name = response.model_name
    message.model_version = response.model_version
    message.id = response.id
    for name, value in response.parameters.items():
        set_parameter(message.parameters[name], value)
    raw = message.raw_output_contents
    for output in response.outputs:
        message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        if output.name in stored:
            raw.append(b"")
            continue
        if output.data.size <= CHUNK_ITEMS:
            raw.append(to_bytes(output.data, output.datatype))
            continue
        parts = yield from to_parts(output.data, output.datatype)
        data = b"".join(parts)
        yield
        raw.append(data)
        yield


def utf8(text: str) -> str:
    """A text that is valid in protobuf: bytes that are not UTF-8 are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def set_parameter(parameter: pb.InferParameter, value: ParameterValue) -> None:
    """Store a value under its type."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    else:
        parameter.double_param = value
