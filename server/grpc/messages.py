"""Messages of inference calls: from the wire to a request, and responses as messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from trimaran.server.decoding.body import SHORT_BYTES
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.tasks import undecodable
from trimaran.server.inference.cooperative import CHUNK_ITEMS, Cooperative, run_cooperatively
from trimaran.server.inference.request import InferResponse, ParameterValue
from trimaran.server.inference.tensor_bytes import to_bytes, to_parts
from trimaran.server.protocol.infer_json import ParsedInfer
from trimaran.server.protocol.infer_message import parse_message
from trimaran.server.protocol.message_scan import (
    MalformedError,
    MessageNames,
    names_of,
    split_infer,
)


@dataclass(frozen=True, slots=True)
class InferMessage:
    """A ``ModelInferRequest`` whose names are known. The rest of a long one is still bytes."""

    raw: bytes
    names: MessageNames
    decoded: pb.ModelInferRequest | None
    """None for a long message."""

    @classmethod
    def receive(cls, raw: bytes) -> InferMessage:
        """A message as it came, with as much read as takes a moment.

        Raises:
            DecodeError: the bytes are no message.
        """
        if len(raw) <= SHORT_BYTES:
            message = pb.ModelInferRequest.FromString(raw)
            names = MessageNames(message.model_name, message.model_version, message.id)
            return cls(b"", names, message)
        try:
            return cls(raw, names_of(raw), None)
        except MalformedError:
            raise DecodeError("malformed protobuf") from None

    async def parse(self, decoder: Decoder) -> ParsedInfer:
        """The request; what takes long to decode is decoded by ``decoder``.

        Raises:
            RequestError: with the text that clients know.
        """
        if self.decoded is not None:
            contents = self.decoded.raw_input_contents
            return await run_cooperatively(parse_message(self.decoded, contents))
        try:
            split = await run_cooperatively(split_infer(self.raw))
            if len(split.head) > SHORT_BYTES:
                return await decoder.read_message(split.head, split.raw_contents)
            message = pb.ModelInferRequest.FromString(split.head)
        except (DecodeError, MalformedError) as error:
            raise undecodable(error) from None
        return await run_cooperatively(parse_message(message, split.raw_contents))


FINAL = "triton_final_response"


def fill_response(
    message: pb.ModelInferResponse, response: InferResponse, stored: Collection[str] = ()
) -> Cooperative[None]:
    """Write a response into a message; tensors always go as raw contents, which are empty for
    the ``stored`` outputs.
    """
    fill_head(message, response)
    raw = message.raw_output_contents
    for output in response.outputs:
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


def fill_head(message: pb.ModelInferResponse, response: InferResponse) -> None:
    """Write all of a response but its tensors' contents."""
    message.model_name = response.model_name
    message.model_version = response.model_version
    message.id = response.id
    for name, value in response.parameters.items():
        set_parameter(message.parameters[name], value)
    for output in response.outputs:
        message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)


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
