"""Messages of inference calls: from the wire to a request, and responses as messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from trimaran.comm.errors import RequestError
from trimaran.server.decoding.body import SHORT_BYTES
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.pending import BodyMemory, PendingBodies
from trimaran.server.decoding.tasks import LoadMessageTask, undecodable
from trimaran.server.inference.cooperative import CHUNK_ITEMS, Cooperative, run_cooperatively
from trimaran.server.inference.request import InferResponse, ParameterValue
from trimaran.server.inference.tensor_bytes import to_bytes, to_parts
from trimaran.server.protocol.infer_json import ParsedInfer
from trimaran.server.protocol.infer_message import parse_message
from trimaran.server.protocol.load_request import LoadRequest
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

    memory: BodyMemory | None = None
    """What a long message takes until its request is decoded."""

    refusal: RequestError | None = None
    """Why a long message was not kept: in a stream, other requests go on."""

    @classmethod
    def receive(cls, raw: bytes, pending: PendingBodies) -> InferMessage:
        """A message as it came, with as much read as takes a moment.

        Raises:
            DecodeError: the bytes are no message.
        """
        if len(raw) <= SHORT_BYTES:
            message = pb.ModelInferRequest.FromString(raw)
            names = MessageNames(message.model_name, message.model_version, message.id)
            return cls(b"", names, message)
        try:
            names = names_of(raw)
        except MalformedError:
            raise DecodeError("malformed protobuf") from None
        memory = pending.body()
        try:
            memory.add(len(raw))
        except RequestError as error:
            # The frames of the traceback have the message.
            return cls(b"", names, None, refusal=error.with_traceback(None))
        return cls(raw, names, None, memory)

    async def parse(self, decoder: Decoder) -> ParsedInfer:
        """The request; what takes long to decode is decoded by ``decoder``.

        Raises:
            RequestError: with the text that clients know.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.decoded is not None:
            contents = self.decoded.raw_input_contents
            return await run_cooperatively(parse_message(self.decoded, contents))
        assert self.memory is not None
        with self.memory:
            return await self._parse_long(decoder)

    async def _parse_long(self, decoder: Decoder) -> ParsedInfer:
        try:
            split = await run_cooperatively(split_infer(self.raw))
            if split.num_head_bytes > SHORT_BYTES:
                return await decoder.read_message(split.head_parts, split.raw_contents)
            message = pb.ModelInferRequest.FromString(b"".join(split.head_parts))
        except (DecodeError, MalformedError) as error:
            raise undecodable(error) from None
        return await run_cooperatively(parse_message(message, split.raw_contents))


@dataclass(frozen=True, slots=True)
class LoadMessage:
    """A ``RepositoryModelLoadRequest``, still bytes."""

    raw: bytes
    memory: BodyMemory

    @classmethod
    def receive(cls, raw: bytes, pending: PendingBodies) -> LoadMessage:
        """A message as it came.

        Raises:
            RequestError: too many long messages wait to be decoded.
        """
        memory = pending.body()
        memory.add(len(raw))
        return cls(raw, memory)

    @property
    def is_long(self) -> bool:
        """Whether decoding takes more than a moment."""
        return len(self.raw) > SHORT_BYTES

    async def parse(self, decoder: Decoder) -> LoadRequest:
        """The request.

        Raises:
            RequestError: with the text that clients know.
        """
        with self.memory:
            if self.is_long:
                return await decoder.read_load_message(self.raw)
            return LoadMessageTask().read(self.raw)


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
