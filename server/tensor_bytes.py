"""Tensors as bytes on the wire: little-endian elements, length-prefixed strings."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.server.datatypes import LENGTH_PREFIX_BYTES, NUMPY_TYPES

_LENGTH = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview
Array = np.ndarray[Any, Any]


def to_bytes(data: Array, datatype: str) -> bytes:
    """The elements of an array in row-major order."""
    if datatype != "BYTES":
        return np.ascontiguousarray(data, NUMPY_TYPES[datatype]).tobytes()
    parts: list[bytes] = []
    for element in data.ravel():
        raw = element.encode() if isinstance(element, str) else bytes(element)
        parts += (_LENGTH.pack(len(raw)), raw)
    return b"".join(parts)


def object_array(elements: list[bytes], shape: tuple[int, ...] | None = None) -> Array:
    """An array of byte strings; numpy would otherwise cut trailing zero bytes."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array if shape is None else array.reshape(shape)


def split_strings(raw: Buffer, input_name: str) -> list[bytes]:
    """The elements of a BYTES tensor.

    Raises:
        RequestError: a length or a string is cut.
    """
    view = memoryview(raw)
    elements: list[bytes] = []
    start, end = 0, len(view)
    while start < end:
        if end - start < LENGTH_PREFIX_BYTES:
            raise RequestError(
                f"incomplete string length indicator for inference input '{input_name}', "
                f"expecting {LENGTH_PREFIX_BYTES} bytes but only {end - start} bytes available"
            )
        (length,) = _LENGTH.unpack_from(view, start)
        start += LENGTH_PREFIX_BYTES
        if end - start < length:
            raise RequestError(
                f"incomplete string data for inference input '{input_name}', expecting string "
                f"of length {length} but only {end - start} bytes available"
            )
        elements.append(bytes(view[start : start + length]))
        start += length
    return elements


def from_bytes(raw: Buffer, datatype: str, shape: tuple[int, ...]) -> Array:
    """A read-only view of fixed-size elements. The size must already fit the shape."""
    return np.frombuffer(raw, NUMPY_TYPES[datatype]).reshape(shape)
