"""The process that parses and checks long JSON bodies, and returns them in pieces."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.tensor_bytes import Array
from trimaran.server.inference.validation import Validator
from trimaran.server.protocol.generate import GenerateMapper
from trimaran.server.protocol.infer_json import ParsedInfer, parse_document

_PIECE_BYTES = 1 << 20
_PIECE_ITEMS = 1 << 12


def send_parsed(connection: Connection, parsed: ParsedInfer) -> None:
    """Send a request: long values follow the head; blobs are sent as sizes only."""
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


_PR_SET_PDEATHSIG = 1
_NICENESS = 5
"""The front end's thread that sends a long body blocks; its event loop does not."""

MAX_ERROR_CHARACTERS = 1 << 16
"""Limit on the length of errors that quote a body."""


@dataclass(frozen=True, slots=True)
class BodyTask:
    """The front end's message before a JSON body."""

    config: bytes
    """The model's configuration, serialized."""
    max_input_bytes: int
    is_generate: bool
    num_blob_bytes: int = 0
    """Bytes after the JSON, which stay in the front end."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The body is invalid, or a bug was hit while reading it."""

    text: str
    kind: ErrorKind | None
    """None for a bug: the text is the traceback."""


def main() -> None:
    """Serve the front end at the other end of the socket whose descriptor is argument 1."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    # JSON values form no cycles.
    gc.disable()
    connection = Connection(int(sys.argv[1]))
    try:
        while True:
            _serve(connection)
    except (EOFError, ConnectionError):
        return


def _serve(connection: Connection) -> None:
    task: BodyTask = connection.recv()
    json = connection.recv_bytes()
    try:
        parsed = read(task, json)
    except RequestError as error:
        connection.send(Refusal(str(error)[:MAX_ERROR_CHARACTERS], error.kind))
    except Exception:
        connection.send(Refusal(traceback.format_exc(), None))
    else:
        send_parsed(connection, parsed)


def read(task: BodyTask, json: bytes) -> ParsedInfer:
    """The request of a body, checked against the model except for its blobs.

    Raises:
        RequestError: with the kind and text that clients know.
    """
    config = ModelConfig.FromString(task.config)
    if task.is_generate:
        parsed = ParsedInfer(*GenerateMapper(config, task.max_input_bytes).parse(json))
    else:
        # A view as long as the blobs, in one byte of memory.
        blobs = np.broadcast_to(np.zeros(1, np.uint8), task.num_blob_bytes).data
        parsed = parse_document(json, blobs, config, task.max_input_bytes)
    names = [output.name for output in parsed.outputs]
    validator = Validator(config)
    check = validator.check_shapes if task.num_blob_bytes else validator.check
    check(parsed.inputs, names, parsed.request.id)
    return parsed
