"""Logits in the extras of a step's message: packed by the engine, opened by the front end."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from trimaran.comm.messages.bulk import INLINE_BYTES, BulkSender, open_bulk
from trimaran.comm.messages.messages import StepOutput

BULKY = ("context_logits", "generation_logits")
"""Extras that are lists of bytes."""

MAX_REMOTE_BYTES = 32 << 20
"""Most logits of one message to another host, where no memory can be shared."""


def bulky_bytes(output: StepOutput) -> int:
    """Bytes of the extras that `pack` may move."""
    return sum(
        memoryview(item).nbytes
        for extras in output.extras.values()
        for name in BULKY
        for item in extras.get(name, ())
    )


def pack(output: StepOutput, receiver: Hashable, sender: BulkSender | None) -> None:
    """Move large extras out of the message, into memory; without ``sender`` they stay."""
    lists = [
        (extras, name) for extras in output.extras.values() for name in BULKY if name in extras
    ]
    parts = [memoryview(item).cast("B") for extras, name in lists for item in extras[name]]
    if sender is None or sum(map(len, parts)) <= INLINE_BYTES:
        return
    output.bulk = sender.put(receiver, parts)
    start = 0
    for extras, name in lists:
        lengths = [memoryview(item).nbytes for item in extras[name]]
        extras[name] = [[start, *lengths]]
        start += sum(lengths)


def unpack(output: StepOutput) -> dict[int, dict[str, Any]]:
    """The extras by row, with the payloads of `pack` in place.

    Raises:
        ProtocolError: the memory cannot be opened.
    """
    if not output.bulk:
        return output.extras
    payload = open_bulk(output.bulk)
    for extras in output.extras.values():
        for name in BULKY:
            if name in extras:
                ((start, *lengths),) = extras[name]
                if name == "context_logits":
                    # The pieces of a prompt lie side by side: no need to join them later.
                    lengths = [sum(lengths)]
                extras[name] = items = []
                for length in lengths:
                    items.append(payload[start : start + length])
                    start += length
    return output.extras
