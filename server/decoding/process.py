"""The helper process that decodes long bodies and messages for one front end."""

from __future__ import annotations

import gc
import os
import traceback
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.decoding.body import LONG_BYTES, mapped
from trimaran.server.decoding.exchange import send_parsed
from trimaran.server.decoding.tasks import OtherTask, Task
from trimaran.server.inference.helper_process import serve_front_end
from trimaran.server.memory import resident_bytes, return_freed
from trimaran.server.protocol.infer_json import ParsedInfer

MAX_ERROR_CHARACTERS = 1 << 16
"""Errors that list what a body holds are cut there."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The body is the client's mistake, or reading it showed a bug of ours."""

    text: str
    kind: ErrorKind | None
    """None for a bug: the text is its traceback."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The message behind the answer for a body of more than `LONG_BYTES`, once what the process
    made is freed."""

    num_bytes: int
    """Memory that the process has beyond that of its start."""


def main() -> None:
    """Decode one body or message after the other."""
    # Values of JSON form no cycles.
    gc.disable()
    at_start = resident_bytes()

    def serve(connection: Connection) -> None:
        num_bytes = _serve(connection)
        return_freed()
        if num_bytes > LONG_BYTES:
            connection.send(Kept(resident_bytes() - at_start))

    serve_front_end(serve)


def _serve(connection: Connection) -> int:
    """Answer one task; the bytes of its body."""
    task: Task | OtherTask
    num_bytes: int
    task, num_bytes = connection.recv()
    fd = reduction.recv_handle(connection)
    data = mapped(fd, num_bytes)
    os.close(fd)
    try:
        found = task.read(data)
    except RequestError as error:
        connection.send(Refusal(str(error)[:MAX_ERROR_CHARACTERS], error.kind))
    except Exception:
        connection.send(Refusal(traceback.format_exc(), None))
    else:
        if isinstance(found, ParsedInfer):
            send_parsed(connection, found)
        else:
            connection.send(found)
    return num_bytes
