"""The fields of a protobuf message, counted and split before any object is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from trimaran.comm.errors import RequestError
from trimaran.server.inference.cooperative import CHUNK_ITEMS, Cooperative
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.protocol.limits import MAX_NAME_BYTES

View: TypeAlias = memoryview

NUM_FIRST_FIELDS = 1 << 10
"""Fields among which the names of a message are looked for: libraries write them first."""

MAX_FIELDS = 1 << 16
"""Of a message at the top level: inputs, outputs, parameters, raw tensors and names."""

_NAME, _VERSION, _ID, _INPUTS, _OUTPUTS, _RAW_CONTENTS = 1, 2, 3, 5, 6, 7
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class MalformedError(Exception):
    """The bytes are no protobuf message."""


def _varint(view: View, start: int) -> tuple[int, int]:
    """The number at ``start`` and where the bytes after it begin."""
    value, shift = 0, 0
    try:
        for position in range(start, start + _MAX_VARINT_BYTES):
            byte = view[position]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position + 1
            shift += 7
    except IndexError:
        pass
    raise MalformedError


def _fields(view: View) -> Iterator[tuple[int, int, int, int]]:
    """Number, beginning, beginning of the payload, and end of each field.

    Payloads of numbers are empty: the beginning is the end.
    """
    position, end = 0, len(view)
    while position < end:
        begin = position
        tag, position = _varint(view, position)
        kind, size = tag & 7, 0
        if kind == _VARINT:
            _, position = _varint(view, position)
        elif kind == _LENGTH:
            size, position = _varint(view, position)
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            # Groups, which no field of the protocol uses.
            raise MalformedError
        if position + size > end:
            raise MalformedError
        yield tag >> 3, begin, position, position + size
        position += size


@dataclass(slots=True)
class SplitMessage:
    """A ``ModelInferRequest`` without its raw tensors, and those tensors apart."""

    head: bytes
    """All other fields, still serialized."""

    raw_contents: list[View] = field(default_factory=list)
    """The tensors in order, as parts of the message's buffer."""


@dataclass(slots=True)
class MessageNames:
    """What routes a message before its rest is read."""

    model_name: str = ""
    model_version: str = ""
    id: str = ""


def split_infer(raw: bytes | View) -> Cooperative[SplitMessage]:
    """A message in two parts, without a copy of the tensors.

    Raises:
        MalformedError: the bytes are no message.
        RequestError: the message has more fields than any request.
    """
    view = memoryview(raw)
    kept: list[View] = []
    contents: list[View] = []
    kept_from = 0
    for index, (number, begin, payload, end) in enumerate(_fields(view)):
        if index >= MAX_FIELDS:
            raise _too_many_fields()
        if number == _RAW_CONTENTS:
            kept.append(view[kept_from:begin])
            contents.append(view[payload:end])
            kept_from = end
        if index % CHUNK_ITEMS == 0:
            yield
    kept.append(view[kept_from:])
    return SplitMessage(b"".join(kept), contents)


def names_of(raw: bytes | View) -> MessageNames:
    """The names among the first `NUM_FIRST_FIELDS` fields of a ``ModelInferRequest``.

    Longer names than `MAX_NAME_BYTES`, and later ones, are left out.

    Raises:
        MalformedError: the bytes are no message.
    """
    view, names = memoryview(raw), MessageNames()
    attributes = {_NAME: "model_name", _VERSION: "model_version", _ID: "id"}
    for number, _, payload, end in islice(_fields(view), NUM_FIRST_FIELDS):
        if number in attributes and end - payload <= MAX_NAME_BYTES:
            text = bytes(view[payload:end]).decode(errors="replace")
            setattr(names, attributes[number], text)
    return names


def check_num_files(message: Buffer) -> None:
    """Refuse a ``RepositoryModelLoadRequest`` of more fields than any request has.

    Raises:
        RequestError: more than `MAX_FIELDS`.
        MalformedError: the bytes are no message.
    """
    for index, _ in enumerate(_fields(memoryview(message))):
        if index >= MAX_FIELDS:
            raise _too_many_fields()


def check_head(num_bytes: int, max_message_bytes: int) -> None:
    """Refuse a message with too much beside its raw tensors.

    Objects made of those bytes take up to twelve times their memory.

    Raises:
        RequestError: more than a quarter of ``max_message_bytes``.
    """
    limit = max_message_bytes // 4
    if num_bytes > limit:
        raise RequestError(
            f"the message has {num_bytes} bytes beside its raw tensors, and at most {limit} "
            "are allowed. Send tensors as raw_input_contents, or use --grpc-max-message-size "
            "to increase the limit."
        )


def _too_many_fields() -> RequestError:
    return RequestError(
        f"a message has at most {MAX_FIELDS} inputs, outputs, parameters and raw tensors"
    )
