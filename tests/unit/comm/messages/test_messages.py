"""Every message survives its encoding, and a byte stream is cut into messages."""

from __future__ import annotations

import random
import struct
from dataclasses import MISSING, fields

import msgpack
import numpy as np
import pytest

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages import messages
from trimaran.comm.messages.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    FrameBuffer,
    KeepAdapter,
    Message,
    Ping,
    RequestFailed,
    Stop,
    Submit,
    decode,
    encode,
    encode_parts,
)
from trimaran.comm.messages.token_ids import pack_ids, unpack_ids

TYPES = [
    value
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
]
SAMPLES = {
    "int": 7,
    "str": "naïve",
    "bytes": b"\x00\xff",
    "bool": True,
    "list[int]": [1, 2, 1 << 63],
    "dict[str, Any]": {"a": [1, {"b": b"c"}], "d": None, "e": 1.5},
    "dict[str, Any] | None": {"shape": [2, 3]},
    "dict[str, float]": {"active_requests": 3.0},
    "dict[int, dict[str, Any]]": {4: {"log_probs": b"\x01"}},
    "tuple[str, ...]": ["output_ids", "logits"],
    "tuple[int, ...]": [3, 1],
    "float": 0.5,
    "int | None": 4,
}


def body(frame: bytes) -> bytes:
    """A frame without its length."""
    assert struct.unpack("<I", frame[:4])[0] == len(frame) - 4
    return frame[4:]


def sample(message_type: type[Message]) -> Message:
    """A message of that type with no field at its default."""
    return message_type(**{f.name: SAMPLES[str(f.type)] for f in fields(message_type)})


@pytest.mark.parametrize("message_type", TYPES, ids=lambda t: t.__name__)
def test_every_field_survives_the_wire(message_type):
    message = sample(message_type)

    assert decode(body(encode(message))) == message


def test_texts_of_clients_need_not_be_valid_utf8():
    message = Stop(client_request_id=b"gr\xfcn".decode("utf-8", "surrogateescape"))

    assert decode(body(encode(message))) == message


def test_every_type_has_a_number_of_its_own():
    assert len({message_type.number for message_type in TYPES}) == len(TYPES)
    assert len(TYPES) >= 13


@pytest.mark.parametrize("message_type", TYPES, ids=lambda t: t.__name__)
def test_fields_that_an_older_sender_leaves_out_get_their_defaults(message_type):
    required = [
        f for f in fields(message_type)
        if f.default is MISSING and f.default_factory is MISSING
    ]  # fmt: skip
    last_required = max((fields(message_type).index(f) for f in required), default=-1)
    sent = [SAMPLES[str(f.type)] for f in fields(message_type)[: last_required + 1]]

    received = decode(msgpack.packb([message_type.number, *sent]))

    for f in fields(message_type)[last_required + 1 :]:
        default = f.default_factory() if f.default is MISSING else f.default
        assert getattr(received, f.name) == default


def test_fields_that_a_newer_sender_adds_are_ignored():
    assert decode(msgpack.packb([Ping.number, 5, "new"])) == Ping(payload=5)


def test_token_ids_travel_as_little_endian_int32():
    raw = pack_ids([1, 258, 128_255])

    assert raw == b"\x01\x00\x00\x00\x02\x01\x00\x00\xff\xf4\x01\x00"
    assert np.array_equal(unpack_ids(raw), [1, 258, 128_255])


@pytest.mark.parametrize("step", [1, 2, 3, 5, 64, 10_000])
def test_messages_come_out_whole_however_the_stream_is_cut(step):
    rng = random.Random(step)
    sent = [
        RequestFailed(request_id=i, kind="INTERNAL", text="x" * rng.randrange(400))
        for i in range(20)
    ]
    stream = b"".join(encode(message) for message in sent)
    buffer = FrameBuffer()

    received = []
    for start in range(0, len(stream), step):
        received += buffer.feed(stream[start : start + step])

    assert received == sent


def test_a_frame_over_the_limit_is_refused_from_its_length_alone():
    with pytest.raises(ProtocolError, match=str(MAX_FRAME_BYTES)):
        FrameBuffer().feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_a_large_frame_passes():
    message = RequestFailed(request_id=1, kind="INTERNAL", text="x" * (30 << 20))
    buffer = FrameBuffer()
    stream = encode(message)

    received = []
    for start in range(0, len(stream), 1 << 20):
        received += buffer.feed(stream[start : start + (1 << 20)])

    assert received == [message]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([]),
        msgpack.packb([999, 1]),
        msgpack.packb([[1], 2]),
        msgpack.packb({"a": 1}),
        msgpack.packb([RequestFailed.number, 1]),
        msgpack.packb([Cancel.number]),
        msgpack.packb([Ping.number, 1]) + b"\x00",
        b"\xd9\x05ab",
        b"\x91" * 5000,
    ],
)
def test_garbage_is_a_protocol_error(garbage):
    with pytest.raises(ProtocolError):
        FrameBuffer().feed(struct.pack("<I", len(garbage)) + garbage)


def test_a_damaged_message_is_read_or_a_protocol_error():
    rng = random.Random(0)
    frames = [encode(sample(message_type)) for message_type in TYPES]
    num_refused = 0
    for _ in range(2000):
        frame = bytearray(rng.choice(frames))
        # The length field stays unchanged.
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(4, len(frame))] = rng.randrange(256)
        try:
            FrameBuffer().feed(bytes(frame))
        except ProtocolError:
            num_refused += 1
    assert 0 < num_refused < 2000


@pytest.mark.parametrize("message_type", TYPES)
def test_the_parts_of_a_message_are_its_encoding(message_type):
    message = sample(message_type)
    whole = b"".join(encode_parts(message))
    assert decode(body(whole)) == decode(body(encode(message)))


def test_long_binary_values_are_not_copied():
    weights = np.arange(1 << 20, dtype="<u2").view(np.uint8).data
    adapter = {
        "weights": {"datatype": "FP16", "shape": [1, 1 << 20], "data": weights},
        "config": {"datatype": "INT32", "shape": [1, 3], "data": b"\0" * 12},
        "digest": b"d" * 16,
    }
    for message in (
        Submit(
            request_id=1, model="m", prompt_ids=b"\1\0\0\0", sampling={"stop_words": ((1,),)},
            adapter_id=1 << 63, adapter=adapter,
        ),
        KeepAdapter(adapter_id=7, adapter=adapter),
    ):  # fmt: skip
        parts = encode_parts(message)
        assert any(part is weights for part in parts)
        whole = b"".join(parts)
        assert decode(body(whole)) == decode(body(encode(message)))
        assert decode(body(whole)).adapter["weights"]["data"] == bytes(weights)
