"""The status with which a call ends that has no answer."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias
from urllib.parse import quote

import grpc
import grpc.aio

from trimaran.comm.errors import RequestError
from trimaran.server.grpc.messages import utf8

Context: TypeAlias = grpc.aio.ServicerContext

_MAX_STATUS_BYTES = 6 << 10
"""Clients may refuse headers from 8 KiB on, and then report the refusal instead of the status.
"""

_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class CallStatus(NamedTuple):
    """A code and a text, which a method sets before it returns None.

    `grpc.aio.ServicerContext.abort` raises instead, and the call keeps what it raised: the
    frames of that exception would hold messages and tensors of the call until the garbage
    collector runs.
    """

    code: grpc.StatusCode
    text: str

    @classmethod
    def of_error(cls, error: RequestError) -> CallStatus:
        """The status of an error, its text cut to what clients take."""
        return cls(getattr(grpc.StatusCode, error.kind.grpc_name), _status_text(str(error)))

    def set(self, context: Context) -> None:
        """End the call with this status as soon as its method returns."""
        context.set_code(self.code)
        context.set_details(self.text)


def _status_text(text: str) -> str:
    """A text of at most a status's length: a longer one is cut in the middle."""
    raw = utf8(text).encode()
    # A status is sent as a header, in which a non-printable byte takes three bytes.
    limit = _MAX_STATUS_BYTES
    if len(raw) <= limit and len(quote(raw, safe=_PRINTABLE)) <= limit:
        return raw.decode()
    kept = limit // 6
    parts = raw[:kept], raw[-kept:]
    return " [...] ".join(part.decode(errors="ignore") for part in parts)
