"""Datatypes of the protocol, and tensors as bytes: little-endian, length-prefixed strings."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType

from trimaran.comm.errors import RequestError
from trimaran.server.inference.cooperative import (
    CHUNK_BYTES,
    CHUNK_ITEMS,
    Cooperative,
    run_at_once,
)

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
    # Bit patterns: numpy has no bfloat16.
    "BF16": np.dtype("<u2"),
}

ONLY_BINARY = frozenset(("FP16", "BF16"))
"""Datatypes that have no JSON form."""

LENGTH_PREFIX_BYTES = 4
"""Each element of a BYTES tensor is preceded by its length."""


def element_bytes(datatype: str) -> int:
    """Bytes of one element; 0 for BYTES, whose elements vary."""
    return 0 if datatype == "BYTES" else NUMPY_TYPES[datatype].itemsize


def from_config(data_type: int) -> str:
    """The protocol's name of a data type of a model configuration (TYPE_STRING is BYTES)."""
    name: str = DataType.Name(data_type)
    return "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")


_LENGTH = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview
Array = np.ndarray[Any, Any]


def to_bytes(data: Array, datatype: str) -> bytes:
    """The elements of an array in row-major order."""
    if datatype == "BYTES":
        return _prefixed(map(_raw, data.reshape(-1).tolist()))
    return np.ascontiguousarray(data, NUMPY_TYPES[datatype]).tobytes()


def to_parts(data: Array, datatype: str) -> Cooperative[list[bytes]]:
    """`to_bytes` in parts, cooperatively."""
    parts: list[bytes] = []
    if datatype == "BYTES":
        for strings in cut_strings(data):
            parts.append(_prefixed(strings))
            yield
        return parts
    flat = np.ascontiguousarray(data, NUMPY_TYPES[datatype]).reshape(-1)
    num_items = CHUNK_BYTES // flat.itemsize
    for start in range(0, len(flat), num_items):
        parts.append(flat[start : start + num_items].tobytes())
        yield
    return parts


def cut_strings(data: Array) -> Iterator[list[bytes]]:
    """The elements of a BYTES tensor in order, in lists that take less than a millisecond
    each.
    """
    flat = data.reshape(-1)
    for start in range(0, len(flat), CHUNK_ITEMS):
        strings = list(map(_raw, flat[start : start + CHUNK_ITEMS].tolist()))
        if sum(map(len, strings)) <= CHUNK_BYTES:
            yield strings
        else:
            yield from ([string] for string in strings)


def _prefixed(strings: Iterable[bytes]) -> bytes:
    return b"".join([part for raw in strings for part in (_LENGTH.pack(len(raw)), raw)])


def _raw(element: Any) -> bytes:
    if isinstance(element, bytes):
        return element
    if isinstance(element, (bytearray, memoryview)):
        return bytes(element)
    return str(element).encode()


def object_array(elements: list[bytes], shape: tuple[int, ...] | None = None) -> Array:
    """An array of byte strings; numpy would otherwise cut trailing zero bytes."""
    array = np.empty(len(elements), dtype=object)
    if len(elements) == 1:
        # The text of a streamed token: a slice takes three times as long.
        array[0] = elements[0]
    else:
        array[:] = elements
    return array if shape is None else array.reshape(shape)


class CutLengthError(RequestError):
    """The length of a string is cut."""

    def __init__(self, input_name: str, num_bytes: int) -> None:
        self._input_name, self._num_bytes = input_name, num_bytes
        super().__init__(self._text(""))

    def text_for(self, model: str) -> str:
        """The text with the model's name."""
        return self._text(f" for model '{model}'")

    def _text(self, model: str) -> str:
        return (
            f"incomplete string length indicator for inference input '{self._input_name}'"
            f"{model}, expecting {LENGTH_PREFIX_BYTES} bytes but only {self._num_bytes} bytes "
            "available. Please make sure the string length indicator is in one buffer."
        )


def split_strings(raw: Buffer, input_name: str) -> Array:
    """The elements of a BYTES tensor, flat.

    Raises:
        RequestError: a length or a string is cut.
    """
    return run_at_once(split_in_chunks(raw, input_name))


def count_in_chunks(raw: Buffer, input_name: str, limit: int) -> Cooperative[int]:
    """The number of elements of a BYTES tensor, cooperatively, without memory for them. A
    tensor of more than ``limit`` is counted only until that is known.

    Raises:
        RequestError: as for `split_strings`.
    """
    view = memoryview(raw)
    count = start = 0
    while start < len(view) and count <= limit:
        for _ in range(CHUNK_ITEMS):
            if start >= len(view):
                break
            start = _end_of_string(view, start, input_name)
            count += 1
        yield
    return count


def split_in_chunks(raw: Buffer, input_name: str) -> Cooperative[Array]:
    """`split_strings`, cooperatively."""
    view = memoryview(raw)
    pieces: deque[list[bytes]] = deque()
    start = 0
    while start < len(view):
        strings, start = _some_strings(view, start, input_name)
        pieces.append(strings)
        yield
    array = np.empty(sum(map(len, pieces)), dtype=object)
    filled = 0
    while pieces:
        strings = pieces.popleft()
        array[filled : filled + len(strings)] = strings
        filled += len(strings)
        yield
    return array


def _some_strings(view: memoryview, start: int, input_name: str) -> tuple[list[bytes], int]:
    """The next strings from ``start`` on, and the position after them."""
    elements: list[bytes] = []
    while start < len(view) and len(elements) < CHUNK_ITEMS:
        end = _end_of_string(view, start, input_name)
        elements.append(bytes(view[start + LENGTH_PREFIX_BYTES : end]))
        start = end
    return elements, start


def _end_of_string(view: memoryview, start: int, input_name: str) -> int:
    """The position behind the string whose length stands at ``start``."""
    end = len(view)
    if end - start < LENGTH_PREFIX_BYTES:
        raise CutLengthError(input_name, end - start)
    length: int = _LENGTH.unpack_from(view, start)[0]
    start += LENGTH_PREFIX_BYTES
    if end - start < length:
        raise RequestError(
            f"incomplete string data for inference input '{input_name}', expecting string "
            f"of length {length} but only {end - start} bytes available"
        )
    return start + length


def from_bytes(raw: Buffer, datatype: str, shape: tuple[int, ...]) -> Array:
    """A read-only view of fixed-size elements. The size must already fit the shape."""
    return np.frombuffer(raw, NUMPY_TYPES[datatype]).reshape(shape)
