"""Messages of inference calls, from the wire to a request."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from trimaran.server.decoding.body import SHORT_BYTES
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.tasks import undecodable
from trimaran.server.inference.cooperative import run_cooperatively
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
