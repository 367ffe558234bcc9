"""A parsed request between two processes, in pieces that take the receiver moments each."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from trimaran.server.inference.tensor_bytes import Array
from trimaran.server.protocol.infer_json import ParsedInfer

_PIECE_BYTES = 1 << 20
_PIECE_ITEMS = 1 << 12


def send_parsed(connection: Connection, parsed: ParsedInfer) -> None:
    """Send a request: what is of any length follows the rest, and of blobs only the sizes."""
    parameters, parsed.request.parameters = parsed.request.parameters, {}
    arrays: list[Array] = []
    sizes: list[int] = []
    for wire in parsed.inputs:
        sizes.append(len(wire.data))
        if isinstance(wire.data, np.ndarray):
            arrays.append(wire.data)
            wire.data = np.empty(0, wire.data.dtype)
        else:
            wire.data = b""
    connection.send((parsed, len(parameters), sizes))
    items = iter(parameters.items())
    while piece := list(islice(items, _PIECE_ITEMS)):
        connection.send(piece)
    for array in arrays:
        if array.dtype.hasobject:
            _send_strings(connection, array)
        else:
            _send_bytes(connection, array)


def receive_parsed(connection: Connection, head: Any, blobs: memoryview) -> ParsedInfer:
    """The request whose first message is ``head``, with the blobs of its body."""
    parsed: ParsedInfer
    parsed, num_parameters, sizes = head
    parameters = parsed.request.parameters
    while num_parameters > 0:
        piece = connection.recv()
        parameters.update(piece)
        num_parameters -= len(piece)
    start = 0
    for wire, size in zip(parsed.inputs, sizes, strict=True):
        if isinstance(wire.data, np.ndarray):
            wire.data = np.empty(size, wire.data.dtype)
            _fill(connection, wire.data)
        else:
            wire.data = blobs[start : start + size]
            start += size
    return parsed


def _send_bytes(connection: Connection, array: Array) -> None:
    raw = array.view(np.uint8).data
    for start in range(0, len(raw), _PIECE_BYTES):
        connection.send_bytes(raw[start : start + _PIECE_BYTES])


def _send_strings(connection: Connection, array: Array) -> None:
    for start in range(0, len(array), _PIECE_ITEMS):
        piece = array[start : start + _PIECE_ITEMS].tolist()
        connection.send_bytes(pickle.dumps(piece, pickle.HIGHEST_PROTOCOL))


def _fill(connection: Connection, array: Array) -> None:
    for start, stop in _spans(len(array), array.dtype):
        if array.dtype.hasobject:
            array[start:stop] = connection.recv()
        else:
            array[start:stop] = np.frombuffer(connection.recv_bytes(), array.dtype)


def _spans(length: int, dtype: np.dtype[Any]) -> Iterator[tuple[int, int]]:
    """Where the pieces of an array begin and end."""
    items = _PIECE_ITEMS if dtype.hasobject else _PIECE_BYTES // dtype.itemsize
    for start in range(0, length, items):
        yield start, min(start + items, length)
