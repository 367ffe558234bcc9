"""The work of a helper process: one long body or message each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.cooperative import run_at_once
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.inference.text_limits import PromptBound
from trimaran.server.inference.validation import Validator
from trimaran.server.protocol import json_access
from trimaran.server.protocol.generate import GenerateMapper
from trimaran.server.protocol.infer_json import ParsedInfer, parse_document
from trimaran.server.protocol.infer_message import parse_message
from trimaran.server.protocol.load_request import (
    LoadRequest,
    load_request_of_grpc,
    load_request_of_json,
)
from trimaran.server.protocol.message_scan import (
    MalformedError,
    check_num_elements,
    check_num_files,
)


@dataclass(frozen=True, slots=True)
class InferTask:
    """The JSON of an ``infer`` body, for a model."""

    subject: ClassVar[str] = "the request's JSON"

    config: bytes
    """The model's, serialized."""
    max_input_bytes: int
    num_blob_bytes: int
    """Bytes after the JSON, which stay with the front end."""
    prompts: PromptBound | None = None

    def read(self, data: Buffer) -> ParsedInfer:
        """The request, which the model takes as far as can be told without the blobs.

        Raises:
            RequestError: with the kind and text that clients know.
        """
        json_access.check_json(data, self.max_input_bytes)
        config = ModelConfig.FromString(self.config)
        blobs = _stand_in(self.num_blob_bytes)
        parsed = parse_document(data, blobs, config, self.max_input_bytes, self.prompts)
        _check(config, parsed, has_blobs=self.num_blob_bytes > 0 or parsed.has_slices)
        return parsed


@dataclass(frozen=True, slots=True)
class GenerateTask:
    """A ``generate`` body, for a model."""

    subject: ClassVar[str] = "the request's JSON"

    config: bytes
    """The model's, serialized."""
    max_input_bytes: int
    prompts: PromptBound | None = None

    def read(self, data: Buffer) -> ParsedInfer:
        """The request, which the model takes.

        Raises:
            RequestError: with the kind and text that clients know.
        """
        json_access.check_json(data, self.max_input_bytes)
        config = ModelConfig.FromString(self.config)
        mapper = GenerateMapper(config, self.max_input_bytes, self.prompts)
        parsed = ParsedInfer(*mapper.parse(data))
        _check(config, parsed, has_blobs=False)
        return parsed


@dataclass(frozen=True, slots=True)
class MessageTask:
    """A ``ModelInferRequest`` without its raw tensors (see `split_infer`)."""

    subject: ClassVar[str] = "the request's message"

    max_message_bytes: int
    raw_sizes: Sequence[int]
    """Bytes of each raw tensor, which stay with the front end."""

    def read(self, data: Buffer) -> ParsedInfer:
        """The request, not yet checked against its model.

        Raises:
            RequestError: with the kind and text that clients know.
        """
        raw = bytes(data)
        try:
            check_num_elements(raw, self.max_message_bytes)
            message = pb.ModelInferRequest.FromString(raw)
        except (DecodeError, MalformedError) as error:
            raise undecodable(error) from None
        return run_at_once(parse_message(message, [_stand_in(size) for size in self.raw_sizes]))


@dataclass(frozen=True, slots=True)
class LoadJsonTask:
    """The body of a request to load a model."""

    subject: ClassVar[str] = "the request's JSON"

    name: str
    max_input_bytes: int

    def read(self, data: Buffer) -> LoadRequest:
        """The request.

        Raises:
            RequestError: a parameter is unknown or of another type.
        """
        json_access.check_json(data, self.max_input_bytes)
        return load_request_of_json(self.name, data)


@dataclass(frozen=True, slots=True)
class LoadMessageTask:
    """A ``RepositoryModelLoadRequest``."""

    subject: ClassVar[str] = "the request's message"

    def read(self, data: Buffer) -> LoadRequest:
        """The request.

        Raises:
            RequestError: a parameter is unknown or of another type.
        """
        try:
            check_num_files(data)
            message = pb.RepositoryModelLoadRequest.FromString(bytes(data))
        except (DecodeError, MalformedError) as error:
            raise undecodable(error) from None
        return load_request_of_grpc(message)


class OtherTask(Protocol):
    """The work of another room: pickled, and read in the process."""

    @property
    def subject(self) -> str:
        """What the task reads, for errors."""
        ...

    def read(self, data: Buffer) -> Any:
        """What the body asks for, which is pickled.

        Raises:
            RequestError: with the kind and text that clients know.
        """
        ...


Task = InferTask | GenerateTask | MessageTask | LoadJsonTask | LoadMessageTask


def undecodable(error: Exception) -> RequestError:
    """The error of bytes that are no protobuf message."""
    text = str(error) or "malformed protobuf"
    return RequestError(f"the message cannot be decoded: {text}", ErrorKind.INTERNAL)


def _stand_in(num_bytes: int) -> memoryview:
    """A buffer of so many bytes that takes the memory of a single one."""
    return np.broadcast_to(np.zeros(1, np.uint8), num_bytes).data


def _check(config: ModelConfig, parsed: ParsedInfer, *, has_blobs: bool) -> None:
    names = [output.name for output in parsed.outputs]
    validator = Validator(config)
    check = validator.check_shapes if has_blobs else validator.check
    check(parsed.inputs, names, parsed.request.id)
