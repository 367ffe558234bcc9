"""What becomes of adapters, on its way from rank 0 to all ranks ahead of a step's decision."""

from __future__ import annotations

from typing import Any

import msgpack

from trimaran.comm.errors import ProtocolError

_FIRST_BYTE = 0x81
"""Of an encoded map of one key; those of decisions are others."""


def encode_ops(ops: list[Any]) -> bytes:
    """A msgpack map of the operations of `take_ops`, of one dp rank or of all."""
    packed: bytes = msgpack.packb({"adapters": ops})
    return packed


def holds_ops(payload: bytes) -> bool:
    """Whether this is of adapters, and not a decision."""
    return payload[:1] == bytes([_FIRST_BYTE])


def decode_ops(payload: bytes) -> list[Any]:
    """The inverse of `encode_ops`.

    Raises:
        ProtocolError: ``payload`` holds nothing of adapters.
    """
    try:
        ops: list[Any] = msgpack.unpackb(payload)["adapters"]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"cannot decode what becomes of adapters in {len(payload)} bytes: {error}"
        ) from error
    return ops
