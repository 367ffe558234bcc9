"""Parsed requests between a helper process and the front end, sent in parts.

A front end that unpickled a whole request at once would hold its event loop meanwhile.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection

import numpy as np

from trimaran.server.inference.tensor_bytes import Array, Buffer, cut_strings
from trimaran.server.protocol.infer_json import ParsedInfer

_PART_BYTES = 1 << 20
_PART_ITEMS = 1 << 12


@dataclass(frozen=True, slots=True)
class ParsedHead:
    """The first message of a request."""

    parsed: ParsedInfer
    """Without parameters, and without the elements of its inputs."""

    num_parameters: int
    sizes: list[int]
    """Elements of each array, bytes of each blob."""


def send_parsed(connection: Connection, parsed: ParsedInfer) -> None:
    """Send a request: first its short members and the sizes of its blobs, then its parameters
    and its arrays in parts. Blobs stay with the front end."""
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
    connection.send(ParsedHead(parsed, len(parameters), sizes))
    items = iter(parameters.items())
    while part := list(islice(items, _PART_ITEMS)):
        connection.send(part)
    for array in arrays:
        if array.dtype.hasobject:
            _send_strings(connection, array)
        else:
            _send_bytes(connection, array)


def receive_parsed(
    connection: Connection, head: ParsedHead, take_blob: Callable[[int], Buffer]
) -> ParsedInfer:
    """The request whose first message is ``head``.

    ``take_blob`` gives the next blob of the body, by its size in bytes.
    """
    parsed, num_parameters = head.parsed, head.num_parameters
    parameters = parsed.request.parameters
    while num_parameters > 0:
        part = connection.recv()
        parameters.update(part)
        num_parameters -= len(part)
    for wire, size in zip(parsed.inputs, head.sizes, strict=True):
        if isinstance(wire.data, np.ndarray):
            wire.data = np.empty(size, wire.data.dtype)
            _fill(connection, wire.data)
        elif wire.region_slice is None:
            wire.data = take_blob(size)
    return parsed


def _send_bytes(connection: Connection, array: Array) -> None:
    raw = array.view(np.uint8).data
    for start in range(0, len(raw), _PART_BYTES):
        connection.send_bytes(raw[start : start + _PART_BYTES])


def _send_strings(connection: Connection, array: Array) -> None:
    for part in cut_strings(array):
        connection.send_bytes(pickle.dumps(part, pickle.HIGHEST_PROTOCOL))


def _fill(connection: Connection, array: Array) -> None:
    start = 0
    while start < len(array):
        if array.dtype.hasobject:
            part = connection.recv()
        else:
            part = np.frombuffer(connection.recv_bytes(), array.dtype)
        array[start : start + len(part)] = part
        start += len(part)
