"""The messages between a front end and the process of a Python model, and their encoding.

A frame is a 4-byte little-endian length and a msgpack list: the message's place in
``_TYPES``, then its fields in order. Both ends are of one installation. Large tensors lie in
memory beside their message (`comm.bulk`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import msgpack
import numpy as np

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.bulk import INLINE_BYTES, BulkSender, open_bulk
from trimaran.comm.transport.sockets import FrameCutter, frame
from trimaran.server.inference.cooperative import Cooperative, run_at_once
from trimaran.server.inference.request import Tensor
from trimaran.server.inference.tensor_bytes import NUMPY_TYPES, split_in_chunks, to_parts

MAX_FRAME_BYTES = 1 << 30
"""Longest message either way."""

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
"""Kinds of metrics."""

BULK_PEER = 0
"""The only receiver of this process's shared memory."""

SEQUENCE_START, SEQUENCE_END = 1, 2
"""Bits of a request's sequence flags."""

NULL_KEY = 0
"""The key of a null request. No client waits for its responses."""

Packed = list[Any]
"""A tensor as name, datatype, shape and data: a buffer, or its location in shared memory. BYTES
data has the clients' wire format.
"""


@dataclass(slots=True, kw_only=True)
class Start:
    """To the process, first: which model to load."""

    name: str
    version: str
    file: str
    """The model's ``model.py``."""
    args: dict[str, str]
    """The arguments of the model's ``initialize``."""
    is_decoupled: bool
    num_threads: int
    """Threads that call ``execute``, unless it is a coroutine."""
    outputs: dict[str, str]
    """The model's outputs with their datatypes."""
    states: dict[str, str] = field(default_factory=dict)
    """Outputs that hold a sequence's next state, with their datatypes."""
    is_iterative: bool = False
    """Whether requests may be executed again."""


@dataclass(slots=True, kw_only=True)
class Execute:
    """To the process: run these requests in one call; each is a `RequestFields`."""

    batch: int
    requests: list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class CancelRequests:
    """To the process: these requests are cancelled."""

    keys: list[int]


@dataclass(slots=True, kw_only=True)
class Result:
    """To the process: the result of a call or a question of user code."""

    call: int
    tensors: list[Packed] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    kind: str = ""
    """An `ErrorKind`'s name; empty without an error."""
    is_final: bool = True
    values: dict[str, Any] = field(default_factory=dict)
    """The answer to a `Question`."""


@dataclass(slots=True, kw_only=True)
class Finish:
    """To the process: finalize the model and end."""


@dataclass(slots=True, kw_only=True)
class Ready:
    """From the process: the model is initialized."""

    capacity: int = 1
    """Batches that the process executes at the same time; 0 for any number."""


@dataclass(slots=True, kw_only=True)
class Failed:
    """From the process, which then ends: the model cannot be loaded."""

    text: str


@dataclass(slots=True, kw_only=True)
class Respond:
    """From the process: a response of a request, or the end without a response."""

    key: int
    tensors: list[Packed] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    kind: str = ""
    is_final: bool = True


@dataclass(slots=True, kw_only=True)
class Executed:
    """From the process: ``execute`` has returned, the next batch may come."""

    batch: int
    rescheduled: list[int] = field(default_factory=list)
    """The keys of requests that are to be executed again."""


@dataclass(slots=True, kw_only=True)
class Call:
    """From the process: the model's code runs another model."""

    call: int
    request: dict[str, Any]
    """A `RequestFields`."""
    is_decoupled: bool = False


@dataclass(slots=True, kw_only=True)
class CancelCall:
    """From the process: this call is cancelled."""

    call: int


@dataclass(slots=True, kw_only=True)
class Question:
    """From the process: user code asks about a model, or requests a load."""

    call: int
    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class MetricChange:
    """From the process: a metric of user code changed or was removed."""

    metric: int
    verb: str
    """``add``, ``set``, ``observe`` or ``drop``."""
    amount: float = 0.0


@dataclass(slots=True, kw_only=True)
class Release:
    """Either way: shared memory beside messages that was read."""

    numbers: list[int]


@dataclass(slots=True, kw_only=True)
class Log:
    """From the process: a log line of user code; ``level`` as in `logging`."""

    level: int
    text: str


Message = (
    Start | Execute | CancelRequests | Result | Finish | Ready | Failed | Respond | Executed
    | Call | CancelCall | Question | MetricChange | Release | Log
)  # fmt: skip
_TYPES: tuple[type[Any], ...] = (
    Start, Execute, CancelRequests, Result, Finish, Ready, Failed, Respond, Executed, Call,
    CancelCall, Question, MetricChange, Release, Log,
)  # fmt: skip
_FIELDS = [tuple(f.name for f in fields(cls)) for cls in _TYPES]
_NUMBERS = {cls: number for number, cls in enumerate(_TYPES)}


@dataclass(slots=True, kw_only=True)
class RequestFields:
    """One request, to a Python model or from user code, in plain types."""

    key: int = 0
    model: str = ""
    version: str = ""
    id: str = ""
    inputs: list[Packed] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    correlation_id: int | str = 0
    flags: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Plain values, for msgpack."""
        return {name: getattr(self, name) for name in _REQUEST_FIELDS}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> RequestFields:
        """The inverse of `to_wire`."""
        return cls(**wire)


_REQUEST_FIELDS = tuple(f.name for f in fields(RequestFields))


class MessageTooLongError(ValueError):
    """A message is over ``MAX_FRAME_BYTES``; nothing was sent."""


def encode(message: Message, bulk: BulkSender) -> bytes:
    """A whole frame, length included. Large tensors go into memory of ``bulk``.

    Raises:
        MessageTooLongError: texts too large for one message.
    """
    moved = _move_to_bulk(message, bulk)
    number = _NUMBERS[type(message)]
    values = (getattr(message, name) for name in _FIELDS[number])
    # Clients' texts need not be UTF-8: their bytes are kept.
    body: bytes = msgpack.packb(
        [number, *values], use_bin_type=True, unicode_errors="surrogateescape"
    )
    if len(body) > MAX_FRAME_BYTES:
        bulk.release(BULK_PEER, moved)
        raise MessageTooLongError(
            f"the tensors make a message of {len(body)} bytes, over the limit of "
            f"{MAX_FRAME_BYTES} between a front end and a Python model. Send them in parts."
        )
    return frame(body)


def open_tensors(message: Message) -> Release | None:
    """Read the tensors that lie beside a message; returns the message to its sender.

    Raises:
        ProtocolError: the shared memory cannot be opened.
    """
    numbers = []
    for tensors in _tensor_lists(message):
        for packed in tensors:
            if isinstance(packed[3], list):
                numbers.append(packed[3][-1])
                packed[3] = open_bulk(packed[3])
    return Release(numbers=numbers) if numbers else None


def released(message: Release, bulk: BulkSender) -> None:
    """The other end has read this shared memory."""
    bulk.release(BULK_PEER, message.numbers)


def _move_to_bulk(message: Message, bulk: BulkSender) -> list[int]:
    numbers = []
    for tensors in _tensor_lists(message):
        for packed in tensors:
            data = packed[3]
            if isinstance(data, memoryview) and data.nbytes > INLINE_BYTES:
                packed[3] = bulk.put(BULK_PEER, [data])
                numbers.append(packed[3][-1])
    return numbers


def _tensor_lists(message: Message) -> list[list[Packed]]:
    if isinstance(message, Execute):
        return [request["inputs"] for request in message.requests]
    if isinstance(message, Call):
        return [message.request["inputs"]]
    if isinstance(message, (Result, Respond)) and message.tensors:
        return [message.tensors]
    return []


class FrameBuffer(FrameCutter[Message]):
    """Cuts a byte stream into these messages."""

    def __init__(self) -> None:
        super().__init__(_decode, MAX_FRAME_BYTES)


def _decode(body: bytes) -> Message:
    try:
        number, *values = msgpack.unpackb(
            body,
            strict_map_key=False,
            max_bin_len=MAX_FRAME_BYTES,
            unicode_errors="surrogateescape",
        )
        message: Message = _TYPES[number](**dict(zip(_FIELDS[number], values, strict=True)))
    except (ValueError, IndexError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"cannot decode a message of {len(body)} bytes: {error}") from error
    return message


def pack(tensor: Tensor) -> Packed:
    """A tensor for the wire."""
    return run_at_once(pack_in_chunks(tensor))


def pack_in_chunks(tensor: Tensor) -> Cooperative[Packed]:
    """`pack`, cooperatively."""
    shape = list(tensor.data.shape)
    if tensor.datatype == "BYTES":
        raw = b"".join((yield from to_parts(tensor.data, tensor.datatype)))
        return [tensor.name, tensor.datatype, shape, memoryview(raw)]
    array = np.ascontiguousarray(tensor.data, NUMPY_TYPES[tensor.datatype])
    flat = array.reshape(-1).view(np.uint8)
    return [tensor.name, tensor.datatype, shape, flat.data if flat.size else b""]


def unpack(packed: Packed, *, is_writable: bool = False) -> Tensor:
    """The inverse of `pack`, after `open_tensors`; a view of the message unless the result has
    to be writable.
    """
    return run_at_once(unpack_in_chunks(packed, is_writable=is_writable))


def unpack_in_chunks(packed: Packed, *, is_writable: bool = False) -> Cooperative[Tensor]:
    """`unpack`, cooperatively."""
    name, datatype, shape, data = packed
    if datatype == "BYTES":
        strings = yield from split_in_chunks(data, name)
        return Tensor(name, datatype, strings.reshape(shape))
    if is_writable and isinstance(data, bytes):
        data = bytearray(data)
    array = np.frombuffer(data, NUMPY_TYPES[datatype])
    return Tensor(name, datatype, array.reshape(shape))
