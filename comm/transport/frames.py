"""Frames on a byte stream: a 4-byte little-endian length, then a body."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Generic, TypeVar

from trimaran.comm.errors import ProtocolError

_LENGTH = struct.Struct("<I")
MessageT = TypeVar("MessageT")


def frame(body: bytes) -> bytes:
    """A whole frame, length included."""
    return _LENGTH.pack(len(body)) + body


class FrameCutter(Generic[MessageT]):
    """Cuts a byte stream into messages. One a connection; not thread safe."""

    def __init__(self, decode: Callable[[bytes], MessageT], max_bytes: int) -> None:
        """``decode`` reads a body of at most ``max_bytes``."""
        self._decode = decode
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """Add received bytes; return the messages that are now complete.

        Raises:
            ProtocolError: a frame is too long or undecodable.
        """
        self._buffer += data
        messages: list[MessageT] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._max_bytes:
                raise ProtocolError(
                    f"a frame of {length} bytes is over the limit of {self._max_bytes}"
                )
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            with memoryview(self._buffer) as view:
                body = bytes(view[start + _LENGTH.size : end])
            messages.append(self._decode(body))
            start = end
        del self._buffer[:start]
        return messages
