"""The answers of a stream as bytes: what the messages of one request repeat is encoded once."""

from __future__ import annotations

from collections.abc import Mapping

from tritonclient.grpc import service_pb2 as pb

from trimaran.server.grpc.messages import FINAL, fill_head
from trimaran.server.inference.request import InferResponse, ParameterValue, Tensor
from trimaran.server.inference.tensor_bytes import LENGTH_PREFIX_BYTES, to_bytes

_MAX_ITEMS = 64
"""Values of an output of a short answer."""

_MAX_BYTES = 16 << 10
"""Bytes of the output of a short answer that holds one string."""

# The tags of `infer_response` in ModelStreamInferResponse, and of `raw_output_contents` in
# ModelInferResponse: field number and the wire type of bytes.
_INFER_RESPONSE = bytes((2 << 3 | 2,))
_RAW_OUTPUT = bytes((6 << 3 | 2,))


class StreamEncoder:
    """Encodes the short answers to one request as ``ModelStreamInferResponse``.

    A stream's answers differ in the raw contents of their outputs alone: the bytes in front of
    these are kept until a name, a shape or the parameters change.
    """

    def __init__(self) -> None:
        self._layout: list[object] = []
        """What the head was made of, but for the parameters."""

        self._parameters: Mapping[str, ParameterValue] = {}
        self._head = b""

    def encode_short(self, response: InferResponse, *, is_final: bool) -> bytes | None:
        """The message of a response; None if an output is long."""
        raws: list[bytes] = []
        layout: list[object] = [
            response.model_name, response.model_version, response.id, is_final,
        ]  # fmt: skip
        for output in response.outputs:
            raw = _short_raw(output)
            if raw is None:
                return None
            raws += (_RAW_OUTPUT, _varint(len(raw)), raw)
            layout += (output.name, output.datatype, output.data.shape)
        parameters = response.parameters
        # Not by value, in which 1 and True are the same. Parameters never change.
        is_known = parameters is self._parameters or not (parameters or self._parameters)
        if layout != self._layout or not is_known:
            message = pb.ModelInferResponse()
            fill_head(message, response)
            message.parameters[FINAL].bool_param = is_final
            self._head = message.SerializeToString()
            self._layout, self._parameters = layout, parameters
        num_bytes = len(self._head) + sum(map(len, raws))
        return b"".join((_INFER_RESPONSE, _varint(num_bytes), self._head, *raws))


def _short_raw(output: Tensor) -> bytes | None:
    """The raw contents of an output; None if it is long."""
    data = output.data
    if output.datatype != "BYTES":
        return to_bytes(data, output.datatype) if data.size <= _MAX_ITEMS else None
    if data.size != 1:
        return None
    text = data.item()
    if not isinstance(text, bytes) or len(text) > _MAX_BYTES:
        return None
    return len(text).to_bytes(LENGTH_PREFIX_BYTES, "little") + text


_ONE_BYTE = [bytes((value,)) for value in range(1 << 7)]


def _varint(value: int) -> bytes:
    """A length as protobuf writes it: seven bits a byte, the lowest first."""
    if value < 1 << 7:
        return _ONE_BYTE[value]
    parts = bytearray()
    while value >= 1 << 7:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def to_wire(message: pb.ModelStreamInferResponse | bytes) -> bytes:
    """What the call sends for a message."""
    return message if isinstance(message, bytes) else message.SerializeToString()
