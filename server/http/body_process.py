"""The process that reads long JSON bodies: parses, converts and checks them, one at a time."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.http.body_pieces import send_parsed
from trimaran.server.inference.validation import Validator
from trimaran.server.protocol.generate import GenerateMapper
from trimaran.server.protocol.infer_json import ParsedInfer, parse_document

_PR_SET_PDEATHSIG = 1
_NICENESS = 5
"""Whoever sends a long body waits, rather than everybody else."""

MAX_ERROR_CHARACTERS = 1 << 16
"""Errors that list what a body holds are cut there."""


@dataclass(frozen=True, slots=True)
class BodyTask:
    """What the front end says of the JSON that follows."""

    config: bytes
    """The model's, serialized."""
    max_input_bytes: int
    is_generate: bool
    num_blob_bytes: int = 0
    """Bytes after the JSON, which stay with the front end."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The body is the client's mistake, or reading it showed a bug of ours."""

    text: str
    kind: ErrorKind | None
    """None for a bug: the text is its traceback."""


def main() -> None:
    """Serve the front end at the other end of the socket whose descriptor is argument 1."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    # Values of JSON form no cycles.
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
    """The request of a body, which the model takes as far as can be told without the blobs.

    Raises:
        RequestError: with the kind and text that clients know.
    """
    config = ModelConfig.FromString(task.config)
    if task.is_generate:
        parsed = ParsedInfer(*GenerateMapper(config, task.max_input_bytes).parse(json))
    else:
        # As long as the blobs, but one byte of memory.
        blobs = np.broadcast_to(np.zeros(1, np.uint8), task.num_blob_bytes).data
        parsed = parse_document(json, blobs, config, task.max_input_bytes)
    names = [output.name for output in parsed.outputs]
    validator = Validator(config)
    check = validator.check_shapes if task.num_blob_bytes else validator.check
    check(parsed.inputs, names, parsed.request.id)
    return parsed
