"""Tensors as JSON values: strict types in, flat lists out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.cooperative import CHUNK_BYTES, CHUNK_ITEMS, Cooperative
from trimaran.server.inference.tensor_bytes import (
    NUMPY_TYPES,
    ONLY_BINARY,
    Array,
    cut_strings,
    object_array,
)
from trimaran.server.protocol.json_access import MAX_NESTING, dump, too_big, wrong_type

_DATA = "'data'"


def flatten(data: list[Any]) -> list[Any]:
    """The innermost values of nested lists, row-major.

    Raises:
        RequestError: the nesting is too deep.
    """
    for _ in range(MAX_NESTING):
        if not any(type(value) is list for value in data):
            return data
        data = list(chain.from_iterable(v if type(v) is list else (v,) for v in data))
    raise RequestError(f"'data' is nested deeper than {MAX_NESTING} levels")


def _are(values: list[Any], *types: type) -> bool:
    """Whether all values have one of these types: of subclasses, JSON has ``bool`` for
    ``int``."""
    return set(map(type, values)).issubset(types)


def _strings(values: list[Any]) -> Array:
    if not _are(values, str):
        raise RequestError(
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
            ErrorKind.INTERNAL,
        )
    # In place of their texts: a million short strings take 64 MB as either.
    for index, value in enumerate(values):
        values[index] = value.encode("utf-8", "surrogateescape")
    return object_array(values)


def _integers(values: list[Any], datatype: str) -> Array:
    word = "unsigned-integer" if datatype[0] == "U" else "signed-integer"
    wide = np.dtype(np.uint64 if datatype[0] == "U" else np.int64)
    if not _are(values, int):
        raise wrong_type(_DATA, f"non-{word}", word)
    try:
        # Converted through 64 bits: a narrower type keeps the low bits, as in Triton.
        return np.array(values, wide).astype(NUMPY_TYPES[datatype])
    except OverflowError:
        raise wrong_type(_DATA, f"non-{word}", word) from None


def array_from_json(values: list[Any], datatype: str, input_name: str) -> Array:
    """A flat array of JSON values that must all have the JSON type of ``datatype``; the list of
    ``values`` is used up.

    Raises:
        RequestError: a value of another JSON type, or a datatype without a JSON form.
    """
    if datatype in ONLY_BINARY:
        raise RequestError(
            f"receiving {datatype} data via JSON is not supported. Please use the binary "
            f"data format for input {input_name}"
        )
    if datatype == "BYTES":
        return _strings(values)
    if datatype == "BOOL":
        if not _are(values, bool):
            raise wrong_type(_DATA, "non-boolean", "boolean")
        return np.array(values, np.bool_)
    if datatype not in ("FP32", "FP64"):
        return _integers(values, datatype)
    if not _are(values, int, float):
        raise wrong_type(_DATA, "non-number", "double")
    try:
        with np.errstate(over="ignore"):
            return np.array(values, np.float64).astype(NUMPY_TYPES[datatype])
    except OverflowError:
        raise too_big() from None


def few_values(data: Array, datatype: str, output_name: str) -> list[Any] | None:
    """The elements of an output, flat, if the conversion is short.

    Raises:
        RequestError: as for `to_json`.
    """
    values = next(_cut(data, datatype, output_name), [])
    return values if len(values) == data.size else None


_STREAMED_BYTES = 1 << 20
"""Bytes of a tensor from which its JSON text, which is longer, is made while it is sent."""


@dataclass(frozen=True, slots=True)
class LongValues:
    """The elements of a long output, whose JSON text is never in memory as a whole."""

    data: Array
    datatype: str
    output_name: str

    def texts(self) -> Iterator[bytes]:
        """The elements, flat, as the parts of a text of JSON values and commas; each part takes
        less than a millisecond."""
        comma = b""
        for values in _cut(self.data, self.datatype, self.output_name):
            yield comma + dump(values)[1:-1]
            comma = b","


BodyPart: TypeAlias = bytes | LongValues
"""A part of an answer's body."""


def to_json(data: Array, datatype: str, output_name: str) -> Cooperative[list[bytes]]:
    """The elements of an output, flat, as the parts of a text of JSON values and commas. Floats
    are the exact doubles of the elements.

    Raises:
        RequestError: the datatype has no JSON form.
    """
    parts: list[bytes] = []
    recent: list[bytes] = []
    num_recent = 0
    for values in _cut(data, datatype, output_name):
        text = dump(values)[1:-1]
        recent += (text, b",")
        num_recent += len(text) + 1
        if num_recent > CHUNK_BYTES:
            # Blocks of this size go back to the system when they are written and freed.
            parts.append(b"".join(recent))
            recent, num_recent = [], 0
        yield
    if recent:
        parts.append(b"".join(recent))
    if parts:
        parts[-1] = parts[-1][:-1]
    return parts


def to_body(
    data: Array, datatype: str, output_name: str, *, is_whole: bool = False
) -> Cooperative[list[BodyPart]]:
    """`to_json`; unless ``is_whole``, a long output of numbers stays as it is, to become a text
    while it is sent.

    Raises:
        RequestError: as for `to_json`.
    """
    if is_whole or datatype == "BYTES" or data.nbytes < _STREAMED_BYTES:
        return [*(yield from to_json(data, datatype, output_name))]
    values = LongValues(data, datatype, output_name)
    # The first elements tell whether the datatype has a JSON form.
    next(values.texts())
    return [values]


def _cut(data: Array, datatype: str, output_name: str) -> Iterator[list[Any]]:
    """The elements in order, in lists that take less than a millisecond each."""
    if datatype in ONLY_BINARY:
        raise RequestError(
            f"sending {datatype} data via JSON is not supported. Please use the binary data "
            f"format for output {output_name}"
        )
    if datatype == "BYTES":
        for strings in cut_strings(data):
            yield list(map(text_of, strings))
        return
    flat = data.reshape(-1)
    for start in range(0, len(flat), CHUNK_ITEMS):
        yield flat[start : start + CHUNK_ITEMS].tolist()


def text_of(element: bytes | str) -> str:
    """An element of a BYTES tensor as JSON text; bytes that are not UTF-8 survive."""
    if isinstance(element, str):
        return element
    return bytes(element).decode("utf-8", "surrogateescape")
