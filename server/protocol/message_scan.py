"""The fields of a protobuf message, counted and split before any object is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.server.inference.cooperative import CHUNK_ITEMS, Cooperative
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.protocol.limits import MAX_NAME_BYTES

View: TypeAlias = memoryview

NUM_FIRST_FIELDS = 1 << 10
"""Fields among which the names of a message are looked for: libraries write them first."""

MAX_FIELDS = 1 << 16
"""Top-level fields of a message: inputs, outputs, parameters, raw tensors and names."""

_NAME, _VERSION, _ID, _INPUTS, _OUTPUTS, _RAW_CONTENTS = 1, 2, 3, 5, 6, 7
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_CONTINUED = 0x80
_CONTINUED_BYTES = bytes(range(_CONTINUED, 256))
"""Those behind which a number goes on."""

_ELEMENT_BYTES = 16
"""Bytes of the limit on messages for each explicit element."""

_STRING_ELEMENTS = 4
"""A string or parameter counts as so many elements: one that takes two bytes on the wire takes
up to 50 in memory."""

_SHAPE, _CONTENTS, _STRINGS = 3, 5, 8
_NUMBER, _NESTED, _VARINTS, _ONE = -4, -3, -2, -1
_OF_INPUT = {_SHAPE: _VARINTS, _CONTENTS: _NESTED}
_OF_CONTENTS = {**dict.fromkeys(range(1, 6), _VARINTS), 6: 4, 7: 8, _STRINGS: _ONE}
"""The elements in a field with a length, by the field's number: packed numbers of any length or
of so many bytes, one string, or the elements in the fields of a message."""


class MalformedError(Exception):
    """The bytes are no protobuf message."""


def _varint(view: View | bytes, start: int) -> tuple[int, int]:
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

    head_parts: list[View]
    """All other fields, still serialized, as parts of the message's buffer."""

    raw_contents: list[View] = field(default_factory=list)
    """The tensors in order, as parts of the message's buffer."""

    @property
    def num_head_bytes(self) -> int:
        """The length of all parts of the head."""
        return sum(map(len, self.head_parts))


@dataclass(slots=True)
class MessageNames:
    """What routes a message before its rest is read."""

    model_name: str = ""
    model_version: str = ""
    id: str = ""


def split_infer(raw: bytes | View) -> Cooperative[SplitMessage]:
    """A message in two parts, without a copy.

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
    return SplitMessage(kept, contents)


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


def check_num_elements(head: bytes, max_message_bytes: int) -> None:
    """Refuse a ``ModelInferRequest`` with too many elements in ``contents``, dimensions in
    ``shape`` and other fields of its inputs, before any object is made of these.

    Raises:
        RequestError: more than a sixteenth of ``max_message_bytes``.
        MalformedError: the bytes are no message.
    """
    limit = max_message_bytes // _ELEMENT_BYTES
    number = 0
    try:
        for field, _, payload, end in _fields(memoryview(head)):
            if field == _INPUTS:
                number += _num_elements(head, payload, end, _OF_INPUT, limit)
                if number > limit:
                    break
    except IndexError:
        raise MalformedError from None
    if number > limit:
        raise RequestError(
            f"the message has more than {limit} explicit elements, dimensions and other fields "
            "of inputs, of which a string or parameter counts as four. Send tensors as "
            "raw_input_contents, or use --grpc-max-message-size to increase the limit."
        )


def _num_elements(
    raw: bytes, position: int, end: int, kinds: Mapping[int, int], limit: int
) -> int:
    """The elements in the fields from ``position`` to ``end``, if there are ``limit`` at most;
    an empty field counts as one. Fields come by the million: each takes a microsecond or two.
    """
    number = 0
    while position < end and number <= limit:
        tag, start = raw[position], position + 1
        if tag >= _CONTINUED:
            tag, start = _varint(raw, position)
        wire, size = tag & 7, 0
        if wire == _LENGTH:
            size, start = raw[start], start + 1
            if size >= _CONTINUED:
                size, start = _varint(raw, start - 1)
        elif wire == _VARINT:
            while raw[start] >= _CONTINUED:
                start += 1
            start += 1
        elif wire in (_FIXED32, _FIXED64):
            start += 4 if wire == _FIXED32 else 8
        else:
            raise MalformedError
        position = start + size
        if position > end:
            raise MalformedError
        kind = kinds.get(tag >> 3, _ONE) if wire == _LENGTH else _NUMBER
        if kind == _NUMBER:
            number += 1
        elif kind == _ONE:
            number += _STRING_ELEMENTS
        else:
            number += _num_in_field(raw, start, position, kind, limit)
    return number


def _num_in_field(raw: bytes, start: int, end: int, kind: int, limit: int) -> int:
    """The elements in a field with this payload, at least one."""
    if kind == _NESTED:
        number = _num_elements(raw, start, end, _OF_CONTENTS, limit)
    elif kind != _VARINTS:
        number = (end - start) // kind
    elif end - start < _CONTINUED:
        number = len(raw[start:end].translate(None, _CONTINUED_BYTES))
    else:
        payload = np.frombuffer(raw, np.uint8, end - start, start)
        number = int(np.count_nonzero(payload < _CONTINUED))
    return max(number, 1)


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
