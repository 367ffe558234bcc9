"""The messages between our processes and their encoding.

A frame is a 4-byte little-endian length and a msgpack list: the message's number, then its
fields in order. Token ids travel as raw little-endian int32 bytes. A sender may add fields at
the end within one ``PROTOCOL_VERSION``; a receiver fills missing fields with their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any, ClassVar

import msgpack

from trimaran.comm.errors import ProtocolError
from trimaran.comm.transport.sockets import FrameCutter, frame, frame_head

PROTOCOL_VERSION = 4
MAX_FRAME_BYTES = (1 << 31) - 1
"""The largest request that a client can send: an adapter's weights may need all of it."""


class FinishReason(IntEnum):
    """Why a sequence ended; the numbers are those of TensorRT-LLM's executor.

    Number 4 is a limit on running time, which no client of Triton's TensorRT-LLM backend can
    set.
    """

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    CANCELLED = 5


@dataclass(slots=True, kw_only=True)
class Message:
    """Base of all messages."""

    number: ClassVar[int] = 0


# ---- engine <-> front end ---------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class EngineHello(Message):
    """Engine to front end, first: rank 0 of a warm group dials in."""

    number: ClassVar[int] = 1
    protocol_version: int = PROTOCOL_VERSION
    token: str = ""
    """Empty over TCP, where the challenge of `comm.transport.greeting` comes first."""
    model: str = ""
    group: str = ""
    incarnation: int = 0
    """Counts the starts of this group; a later one replaces an earlier one."""
    facts: dict[str, Any] = field(default_factory=dict)
    """See `EngineFacts`."""


@dataclass(slots=True, kw_only=True)
class FrontendHello(Message):
    """Front end to engine, the answer to `EngineHello`."""

    number: ClassVar[int] = 2
    protocol_version: int = PROTOCOL_VERSION
    accepted: bool = True
    reason: str = ""
    frontend: int = 0


@dataclass(slots=True, kw_only=True)
class Submit(Message):
    """Front end to engine: start, or after a replay continue, one request."""

    number: ClassVar[int] = 3
    request_id: int
    """Unique on its connection; never reused."""
    model: str
    group: str = ""
    prompt_ids: bytes
    output_ids: bytes = b""
    """Ids that the client already has: a replayed request continues after them."""
    sequence_index: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    """`SamplingParams.to_wire()`."""
    priority: int = 0
    """Higher runs first."""
    adapter_id: int = 0
    """LoRA task id; 0 without an ``adapter`` means no adapter."""
    embeddings: dict[str, Any] | None = None
    """Prompt table: dtype, shape, data (bytes or a shared-memory descriptor)."""
    requested_outputs: tuple[str, ...] = ()
    streaming: bool = False
    cache_salt: bytes = b""
    """Requests share KV blocks only under equal salts."""
    client_request_id: str = ""
    arrival_ns: int = 0
    """Monotonic clock of the front end's host, nanoseconds."""
    retention: dict[str, Any] | None = None
    """Retention of KV blocks: ``ranges`` of prompt tokens, each (start, end, priority,
    milliseconds or -1), and (priority, milliseconds) for the ``output``."""
    adapter: dict[str, Any] | None = None
    """The LoRA adapter of the request: ``weights`` and ``config``, each with ``datatype``,
    ``shape`` and ``data``, and their ``digest``; or the ``name`` of an adapter instead of an
    id."""
    draft_token_ids: tuple[int, ...] = ()
    """Ids that the client expects after the prompt; the engine verifies them."""
    draft_acceptance_threshold: float = 0.0
    """0 accepts the draft ids that the model chooses itself. A higher value also accepts draft
    ids of at least this probability, relative to the draft's if there are logits."""
    draft_logits: bytes = b""
    """float32 [n, V]: the logits from which the last n draft ids were drawn, for rejection
    sampling; empty for none."""
    lookahead: tuple[int, ...] = ()
    """Window, n-gram and verification set of lookahead decoding; empty for the engine's."""
    max_draft_tokens: int | None = None
    """Most draft tokens of a step; None for the engine's limit, 0 for no drafts."""
    ends_after_drafts: bool = False
    """Whether the output ends at the first id that is no draft id, or that follows the last
    draft id, with the reason LENGTH."""


@dataclass(slots=True, kw_only=True)
class Cancel(Message):
    """Front end to engine: end these requests now; unknown ids are ignored."""

    number: ClassVar[int] = 4
    request_ids: list[int]


@dataclass(slots=True, kw_only=True)
class StepOutput(Message):
    """Engine to front end: the output of one step, as parallel arrays.

    Row i belongs to ``request_ids[i]`` and holds the next ``num_tokens[i]`` ids of
    ``token_ids``. All arrays are little-endian bytes.
    """

    number: ClassVar[int] = 5
    step: int
    request_ids: bytes
    """uint64, one a row."""
    sequence_indices: bytes
    """uint16, one a row."""
    num_tokens: bytes
    """uint16, one a row; 0 for a row that only ends."""
    finish_reasons: bytes
    """uint8, one a row, `FinishReason`."""
    token_ids: bytes
    """int32, sum of ``num_tokens``."""
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Row to further outputs: log-probs, logits, performance figures."""
    bulk: list[int] = field(default_factory=list)
    """Handle of large extras in shared memory; see `bulk`. Empty if they are in ``extras``."""


@dataclass(slots=True, kw_only=True)
class RequestFailed(Message):
    """Engine to front end: one request was refused or failed; other requests continue."""

    number: ClassVar[int] = 6
    request_id: int
    kind: str
    """Name of an `ErrorKind`."""
    text: str


@dataclass(slots=True, kw_only=True)
class StatsReport(Message):
    """Engine to front end: gauges of the last iteration and sums since the start, keys of
    `STATS_KEYS`."""

    number: ClassVar[int] = 7
    values: dict[str, float]


@dataclass(slots=True, kw_only=True)
class ExpertReport(Message):
    """Engine to front end: how many tokens chose each expert since the start."""

    number: ClassVar[int] = 15
    layers: list[int]
    """Numbers of the model's layers that have experts."""

    counts: bytes
    """int64, little-endian [layers, experts of a layer]."""


@dataclass(slots=True, kw_only=True)
class Ping(Message):
    """Either way; answered by `Pong` with the same payload."""

    number: ClassVar[int] = 8
    payload: int = 0


@dataclass(slots=True, kw_only=True)
class Pong(Message):
    """The answer to `Ping`."""

    number: ClassVar[int] = 9
    payload: int = 0


@dataclass(slots=True, kw_only=True)
class Stop(Message):
    """Front end to engine: cancel every request with this client-given id, also those of
    other front ends, which receive CANCELLED. Engine to the other front ends: cancel
    matching requests that have not been submitted yet."""

    number: ClassVar[int] = 10
    client_request_id: str


@dataclass(slots=True, kw_only=True)
class Release(Message):
    """Front end to engine: free the memory of these ``bulk`` payloads."""

    number: ClassVar[int] = 13
    numbers: list[int]


@dataclass(slots=True, kw_only=True)
class KeepAdapter(Message):
    """Front end to engine: a request to another instance of the model brought an adapter; a
    later request here may name the adapter by its id alone."""

    number: ClassVar[int] = 14
    adapter_id: int
    adapter: dict[str, Any]
    """As in `Submit`."""
    is_resent: bool = False
    """The adapter is from an earlier incarnation: weights from later requests are newer."""


@dataclass(slots=True, kw_only=True)
class AdapterTaken(Message):
    """Engine to all front ends: this id now means the weights that a request brought. Sent
    before any other message about the request."""

    number: ClassVar[int] = 16
    adapter_id: int
    digest: bytes
    """As in `Submit.adapter`."""


# ---- front end <-> first front end ------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Ask(Message):
    """Either way between two front ends: a question or a command."""

    number: ClassVar[int] = 11
    ask_id: int
    """Unique among the questions of its sender on the connection."""
    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Answer(Message):
    """The answer to the `Ask` with this number; an ``error`` means that nothing was done."""

    number: ClassVar[int] = 12
    ask_id: int
    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    kind: str = ""
    """Name of the error's `ErrorKind`."""


DRAFT_POSITIONS = ("1", "2", "3", "4", "5", "6", "7", "8", "later")
"""Places of draft tokens among a sequence's drafts of one step, as metrics name them."""

DRAFT_POSITION_KEYS = tuple(f"accepted_draft_tokens_{name}" for name in DRAFT_POSITIONS)
"""Accepted draft tokens since the start, by place."""

STATS_KEYS = (
    "active_requests",
    "max_requests",
    "scheduled_requests",
    "context_requests",
    "waiting_requests",
    "generation_requests",
    "paused_requests",
    "paused_sequences",
    "paused_tokens",
    "total_context_tokens",
    "micro_batch_id",
    "kv_max_blocks",
    "kv_free_blocks",
    "kv_used_blocks",
    "kv_tokens_per_block",
    "kv_reused_blocks",
    "lora_host_adapters",
    "lora_device_adapters",
    "lora_used_adapters",
    "lora_loaded_adapters",
    "kv_host_max_blocks",
    "kv_host_used_blocks",
    "kv_host_moved_blocks",
    "kv_host_loaded_blocks",
    "v1_batching",
    "total_generation_tokens",
    "empty_generation_slots",
    "iteration_counter",
    "timestamp_us",
    "cpu_memory_bytes",
    "gpu_memory_bytes",
    "pinned_memory_bytes",
    "receive_seconds",
    "schedule_seconds",
    "launch_seconds",
    "wait_seconds",
    "emit_seconds",
    "device_seconds",
    "sample_seconds",
    "num_drafts",
    "num_draft_tokens",
    *DRAFT_POSITION_KEYS,
    "num_compiled_kernels",
    "num_loaded_kernels",
)


# ---- child <-> supervisor ---------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class ChildHello(Message):
    """Child to supervisor, first."""

    number: ClassVar[int] = 20
    protocol_version: int = PROTOCOL_VERSION
    token: str = ""
    """As in `EngineHello`."""
    role: str = ""
    """``frontend``, ``rank`` or ``orchestrator``."""
    group: str = ""
    rank: int = 0
    world_size: int = 1
    pid: int = 0
    host: str = ""
    incarnation: int = -1
    """Which start of the group the child belongs to; -1 if the child was not told."""


@dataclass(slots=True, kw_only=True)
class ChildConfig(Message):
    """Supervisor to child, the answer to `ChildHello`: the child's configuration."""

    number: ClassVar[int] = 21
    protocol_version: int = PROTOCOL_VERSION
    config: dict[str, Any] = field(default_factory=dict)
    """`FrontendConfig.to_wire()` or `RankConfig.to_wire()`, by role."""


@dataclass(slots=True, kw_only=True)
class ChildState(Message):
    """Child to supervisor: its state changed."""

    number: ClassVar[int] = 22
    state: str
    """``loading``, ``ready``, ``drained`` or ``failed``."""
    text: str = ""
    """Text for operators: progress, or the failure and its remedy."""
    is_config_error: bool = False
    """Whether a restart cannot help."""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Command(Message):
    """Supervisor to child."""

    number: ClassVar[int] = 23
    verb: str
    """``drain`` (front end: admit nothing new, answer ``drained`` when idle),
    ``shutdown`` (end now, in order, exit 0), ``group_state`` (front end: ``group``
    became ``state``), ``reply`` (the answer to the `ChildRequest` of ``request_id``)."""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ChildRequest(Message):
    """Child to supervisor: a request for an action of the supervisor."""

    number: ClassVar[int] = 24
    request_id: int
    """Chosen by the child; the ``reply`` command carries it."""
    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)


_TYPES: dict[int, type[Message]] = {
    cls.number: cls
    for cls in (
        EngineHello, FrontendHello, Submit, Cancel, StepOutput, RequestFailed, StatsReport,
        ExpertReport, Ping, Pong, Stop, Release, KeepAdapter, AdapterTaken, Ask, Answer,
        ChildHello, ChildConfig, ChildState, Command, ChildRequest,
    )
}  # fmt: skip
_FIELDS: dict[type[Message], tuple[str, ...]] = {
    cls: tuple(f.name for f in fields(cls)) for cls in _TYPES.values()
}
_VALUES = {cls: attrgetter("number", *names) for cls, names in _FIELDS.items()}


def encode(message: Message) -> bytes:
    """A whole frame, length included."""
    return frame(_packed(_VALUES[type(message)](message)))


def encode_parts(message: Message) -> list[bytes | memoryview]:
    """`encode`, in parts to be sent one after the other, for a caller that makes no copy of
    long binary values: an adapter may take all the bytes of a request."""
    values = _VALUES[type(message)](message)
    is_long = isinstance(message, KeepAdapter) or (
        isinstance(message, Submit) and bool(message.adapter or message.embeddings)
    )
    if not is_long:
        return [frame(_packed(values))]
    parts: list[bytes | memoryview] = []
    _add_parts(parts, values)
    return [frame_head(sum(map(len, parts))), *parts]


def _packed(values: object) -> bytes:
    # Clients' texts need not be UTF-8: their bytes are passed on unchanged.
    packed: bytes = msgpack.packb(values, use_bin_type=True, unicode_errors="surrogateescape")
    return packed


_LONG_BYTES = 1 << 20
"""Binary values from this size on are parts of their own."""

_BIN_32 = b"\xc6"
"""Stands before the length of a binary value in msgpack's longest form."""


def _add_parts(parts: list[bytes | memoryview], value: object) -> None:
    """Add a value of a message; containers with many members have no long values."""
    packer = msgpack.Packer()
    if isinstance(value, tuple):
        parts.append(packer.pack_array_header(len(value)))
        for item in value:
            _add_parts(parts, item)
    elif isinstance(value, dict):
        parts.append(packer.pack_map_header(len(value)))
        for name, item in value.items():
            parts.append(_packed(name))
            _add_parts(parts, item)
    elif isinstance(value, (bytes, memoryview)) and len(value) >= _LONG_BYTES:
        parts += (_BIN_32 + len(value).to_bytes(4, "big"), value)
    else:
        parts.append(_packed(value))


def decode(body: bytes | memoryview) -> Message:
    """The message of a frame's body, without its length.

    Raises:
        ProtocolError: not msgpack, an unknown number, or fields that do not fit.
    """
    try:
        number, *values = msgpack.unpackb(
            body, raw=False, strict_map_key=False, unicode_errors="surrogateescape"
        )
        cls = _TYPES[number]
        return cls(**dict(zip(_FIELDS[cls], values, strict=False)))
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"cannot decode a message of {len(body)} bytes: {error}") from error


class FrameBuffer(FrameCutter[Message]):
    """Cuts a byte stream into these messages."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(decode, max_bytes)
