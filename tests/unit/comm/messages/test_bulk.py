"""Logits on their way beside a step's message."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.bulk import INLINE_BYTES, BulkSender, open_bulk, pack, unpack
from trimaran.comm.messages.messages import StepOutput, decode, encode


def _message(extras):
    return StepOutput(
        step=1,
        request_ids=b"",
        sequence_indices=b"",
        num_tokens=b"",
        finish_reasons=b"",
        token_ids=b"",
        extras=extras,
    )


def _logits(seed, num_bytes):
    return memoryview(bytes([seed]) * num_bytes)


def _through_the_wire(message):
    return decode(encode(message)[4:])


@pytest.mark.parametrize("num_bytes", [100, INLINE_BYTES, 9 << 20])
def test_extras_of_any_size_arrive_and_their_memory_comes_back(num_bytes):
    sender = BulkSender()
    num_open = len(os.listdir("/proc/self/fd"))
    message = _message(
        {
            0: {"context_logits": [_logits(1, num_bytes), _logits(2, 3)], "log_probs": [0.5]},
            4: {
                "generation_logits": [_logits(3, num_bytes)],
                "context_logits": [_logits(4, 8)],
            },
            5: {"figures": {"a": 1}},
        }
    )
    pack(message, "front end", sender)
    assert sender.num_held == (num_bytes > 100)
    raw = encode(message)
    assert len(raw) < INLINE_BYTES
    opened = unpack(_through_the_wire(message))
    if message.bulk:
        sender.release("another", message.bulk[-1:])
        assert sender.num_held == 1
        sender.release("front end", message.bulk[-1:])
    assert sender.num_held == 0

    assert opened[0]["log_probs"] == [0.5] and opened[5] == {"figures": {"a": 1}}
    for row, name, expected in (
        (0, "context_logits", [_logits(1, num_bytes), _logits(2, 3)]),
        (4, "generation_logits", [_logits(3, num_bytes)]),
        (4, "context_logits", [_logits(4, 8)]),
    ):
        found = opened[row][name]
        assert b"".join(map(bytes, found)) == b"".join(map(bytes, expected))
    del opened, found
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_row_that_is_kept_keeps_no_other_row():
    sender, num_bytes = BulkSender(), 1 << 20
    tracemalloc.start()
    try:
        kept = []
        for _ in range(4):
            message = _message(
                {row: {"generation_logits": [_logits(row, num_bytes)]} for row in range(4)}
            )
            pack(message, "front end", sender)
            opened = unpack(_through_the_wire(message))
            sender.release("front end", message.bulk[-1:])
            kept.append(opened[2]["generation_logits"][0])
            del message, opened
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(bytes(each) == bytes(_logits(2, num_bytes)) for each in kept)
    assert held < 5 * num_bytes


def test_without_shared_memory_large_data_travels_in_the_message():
    message = _message({0: {"context_logits": [_logits(1, 2 * INLINE_BYTES)]}})
    pack(message, "front end", None)
    opened = unpack(_through_the_wire(message))
    assert bytes(opened[0]["context_logits"][0]) == bytes(_logits(1, 2 * INLINE_BYTES))


def test_memory_of_a_receiver_that_is_gone_is_freed():
    sender = BulkSender()
    handle = sender.put("front end", [_logits(1, 5)])
    assert bytes(open_bulk(handle)) == b"\x01" * 5
    sender.drop("front end")
    sender.release("front end", [handle[-1]])
    assert sender.num_held == 0
    with pytest.raises(ProtocolError, match=r"cannot open 5 bytes of process"):
        open_bulk(handle)
