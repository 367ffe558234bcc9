"""The fields of a protobuf message, counted and split before any object is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.server.inference.cooperative import CHUNK_ITEMS, Cooperative
from trimaran.server.protocol.limits import (
    MAX_NAME_BYTES,
    MAX_NUMBER,
    max_num_values,
    too_many_values,
)

View: TypeAlias = memoryview

NUM_FIRST_FIELDS = 1 << 10
"""Fields among which the names of a message are looked for: libraries write them first."""

MAX_FIELDS = 4 * MAX_NUMBER + 3
"""Of a message at the top level: inputs, outputs, parameters, raw tensors and three names."""

_NAME, _VERSION, _ID, _INPUTS, _OUTPUTS, _RAW_CONTENTS = 1, 2, 3, 5, 6, 7
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10

_Schema: TypeAlias = Mapping[int, "_Schema"]
_LEAF: _Schema = {}
_MAP: _Schema = {2: _LEAF}
_PACKED = -1
"""Stands in a schema for packed numbers, each of which becomes a value."""

_CONTENTS: _Schema = {**{key: {_PACKED: _LEAF} for key in range(1, 6)}, 8: _LEAF}
_INPUT: _Schema = {3: {_PACKED: _LEAF}, 4: _MAP, 5: _CONTENTS}
_OUTPUT: _Schema = {2: _MAP}
_INFER: _Schema = {4: _MAP, _INPUTS: _INPUT, _OUTPUTS: _OUTPUT}
"""Parts of ``ModelInferRequest`` in which a client may repeat fields, by field number."""

_LOAD: _Schema = {3: _MAP}
"""The same of ``RepositoryModelLoadRequest``."""


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
            raise RequestError(
                f"a request has at most {MAX_NUMBER} inputs, outputs and parameters each"
            )
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


def check_num_values(head: bytes, max_input_bytes: int) -> None:
    """Refuse a ``ModelInferRequest`` of more values than a request may have.

    Values are fields at every level and packed numbers.

    Raises:
        RequestError: more than `max_num_values` of ``max_input_bytes``.
        MalformedError: the bytes are no message.
    """
    _check_count(head, _INFER, max_input_bytes)


def check_num_load_values(message: bytes, max_input_bytes: int) -> None:
    """The same as `check_num_values` for a ``RepositoryModelLoadRequest``.

    Raises:
        RequestError, MalformedError: as for `check_num_values`.
    """
    _check_count(message, _LOAD, max_input_bytes)


def _check_count(message: bytes, schema: _Schema, max_input_bytes: int) -> None:
    limit = max_num_values(max_input_bytes)
    if _count(memoryview(message), schema, 0, limit) > limit:
        raise too_many_values(limit, "--grpc-max-message-size")


def _count(view: View, schema: _Schema, count: int, limit: int) -> int:
    """``count`` and the values in ``view``, counted until they pass ``limit``."""
    if _PACKED in schema:
        # Each varint ends with its only byte below 0x80.
        return count + int(np.count_nonzero(np.frombuffer(view, np.uint8) < 0x80))
    for number, _, payload, end in _fields(view):
        count += 1
        inner = schema.get(number, _LEAF)
        if inner and end > payload:
            count = _count(view[payload:end], inner, count, limit)
        if count > limit:
            break
    return count
