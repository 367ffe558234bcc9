"""Compressed bodies of ``infer``: which codings, and decoding within a size limit."""

from __future__ import annotations

import gzip
import zlib

from trimaran.comm.errors import ErrorKind, RequestError

_AUTODETECT_BITS = zlib.MAX_WBITS | 32
_GZIP_MAGIC = b"\x1f\x8b"
_KNOWN = ("identity", "deflate", "gzip")


class UnsupportedCodingError(RequestError):
    """A request's Content-Encoding is not one of ours."""

    def __init__(self) -> None:
        super().__init__("Unsupported compression type", ErrorKind.UNSUPPORTED)


def decompress(body: bytes, coding: str, max_bytes: int) -> bytes:
    """The decoded body of a request.

    Raises:
        UnsupportedCodingError: neither gzip, deflate nor identity.
        RequestError: undecodable, cut, in several parts, or decoded over ``max_bytes``.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "deflate"):
        raise UnsupportedCodingError
    decoder = zlib.decompressobj(_AUTODETECT_BITS)
    try:
        decoded = decoder.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise RequestError(f"failed to decompress the request: {error}") from None
    if len(decoded) > max_bytes:
        raise RequestError(
            f"Decompressed data size exceeds the maximum allowed value of {max_bytes} bytes. "
            "Use --http-max-input-size to increase the limit."
        )
    if not decoder.eof:
        raise RequestError("failed to decompress the request: the data ends too early")
    if decoder.unused_data.startswith(_GZIP_MAGIC):
        raise RequestError(
            "failed to decompress the request: it is several gzip streams one after the other. "
            "Compress it as one."
        )
    return decoded


def best_coding(accept_encoding: str) -> str:
    """The coding of a response to a request that accepts these; identity if none is known."""
    best, best_weight = "identity", 0.0
    for item in accept_encoding.split(","):
        name, _, weight_text = item.partition(";")
        name = name.strip().lower()
        if name not in _KNOWN:
            continue
        weight = _weight(weight_text)
        if weight > best_weight:
            best, best_weight = name, weight
    return best


def _weight(text: str) -> float:
    key, _, value = text.partition("=")
    if key.strip().lower() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def compress(body: bytes, coding: str) -> bytes:
    """Encode a response's body by a coding that `best_coding` chose."""
    if coding == "gzip":
        return gzip.compress(body, compresslevel=6, mtime=0)
    return zlib.compress(body) if coding == "deflate" else body
