"""Bytes as data: small descriptions in JSON of messages that may be large.

A piece is a list of consecutive pieces, or one of these:

- a string: its UTF-8;
- ``{"hex": "00ff"}``: any bytes;
- ``{"json": VALUE}``: a JSON text, with NaN and Infinity as Python writes them;
- ``{"times": N, "of": PIECE}``: the same again and again;
- ``{"first": N, "of": PIECE}``: cut off behind N bytes;
- ``{"gzip": PIECE}``, ``{"zlib": PIECE}``, ``{"deflate": PIECE}``: compressed;
- ``{"chunks": N, "of": PIECE}``: chunked transfer coding, N bytes a chunk;
- ``{"field": NUMBER, "wire": TYPE, "value": INTEGER or PIECE}``: a field of a protobuf message,
  of which ``"length"`` may lie about a delimited value's length;
- ``{"frame": TYPE, "flags": F, "stream": S, "of": PIECE}``: a frame of HTTP/2, of which
  ``"length"`` may lie.
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any, TypeAlias

Piece: TypeAlias = "str | list[Any] | dict[str, Any]"

VARINT, FIXED64, DELIMITED, GROUP, END_GROUP, FIXED32 = range(6)
_KEY_BYTES = 2
"""A delimited field without its value has so many, for the number and the length, or more."""


def build(piece: Piece) -> bytes:
    """The bytes of a piece."""
    if isinstance(piece, str):
        return piece.encode(errors="surrogatepass")
    if isinstance(piece, list):
        return b"".join(map(build, piece))
    if "hex" in piece:
        return bytes.fromhex(piece["hex"])
    if "json" in piece:
        return json.dumps(piece["json"]).encode()
    if "field" in piece:
        return _field(piece)
    for kind, compress in _COMPRESSIONS.items():
        if kind in piece:
            return compress(build(piece[kind]))
    return _of(piece, build(piece["of"]))


def weight(piece: Piece) -> int:
    """The approximate number of bytes of a piece; compressed data counts decompressed."""
    if isinstance(piece, str):
        return len(piece)
    if isinstance(piece, list):
        return sum(map(weight, piece))
    if "times" in piece:
        return int(piece["times"]) * weight(piece["of"])
    inner = [piece[key] for key in ("of", *_COMPRESSIONS) if key in piece]
    own = 0
    if "field" in piece and not isinstance(piece.get("value", 0), int):
        inner.append(piece["value"])
        own = _KEY_BYTES
    return own + sum(map(weight, inner)) if inner else len(str(piece))


def hexed(raw: bytes) -> Piece:
    """A piece of these bytes, as text where they are one."""
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        return {"hex": raw.hex()}


def _deflated(raw: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return packer.compress(raw) + packer.flush()


_COMPRESSIONS = {
    "gzip": lambda raw: gzip.compress(raw, 6, mtime=0),
    "zlib": zlib.compress,
    "deflate": _deflated,
}


def _of(piece: dict[str, Any], raw: bytes) -> bytes:
    if "times" in piece:
        return raw * int(piece["times"])
    if "first" in piece:
        return raw[: piece["first"]]
    if "chunks" in piece:
        size = piece["chunks"]
        parts = [raw[start : start + size] for start in range(0, len(raw), size)]
        return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    length = piece.get("length", len(raw))
    head = length.to_bytes(4, "big")[1:] + bytes([piece["frame"], piece.get("flags", 0)])
    return head + int(piece.get("stream", 0)).to_bytes(4, "big") + raw


def _field(piece: dict[str, Any]) -> bytes:
    wire, value = piece["wire"], piece.get("value", 0)
    key = _varint(piece["field"] << 3 | wire)
    if wire == VARINT:
        return key + _varint(value)
    if wire == FIXED64:
        return key + (value % (1 << 64)).to_bytes(8, "little")
    if wire == FIXED32:
        return key + (value % (1 << 32)).to_bytes(4, "little")
    if wire == DELIMITED:
        raw = build(value)
        return key + _varint(piece.get("length", len(raw))) + raw
    # A group, its end, or a type that there is not.
    return key


def _varint(value: int) -> bytes:
    value %= 1 << 64
    raw = bytearray()
    while value > 0x7F:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    return bytes(raw)
