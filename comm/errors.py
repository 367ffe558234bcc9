"""The error tree by the role that must act (operator, client or developer), and each kind's
code on the wire."""

from __future__ import annotations

from enum import Enum


class ErrorKind(Enum):
    """An error's kind with its HTTP status and its gRPC status name."""

    UNKNOWN = (400, "UNKNOWN")
    INTERNAL = (500, "INTERNAL")
    NOT_FOUND = (404, "NOT_FOUND")
    INVALID_ARG = (400, "INVALID_ARGUMENT")
    UNAVAILABLE = (503, "UNAVAILABLE")
    UNSUPPORTED = (501, "UNIMPLEMENTED")
    ALREADY_EXISTS = (400, "ALREADY_EXISTS")
    CANCELLED = (400, "CANCELLED")

    @property
    def http_status(self) -> int:
        """The HTTP status code that clients see."""
        return self.value[0]

    @property
    def grpc_name(self) -> str:
        """The name of the ``grpc.StatusCode`` that clients see."""
        return self.value[1]


class TrimaranError(Exception):
    """Base class. Any other exception that escapes is a bug."""


class ConfigError(TrimaranError, ValueError):
    """The operator must change the configuration. Raised before any rank starts."""


class RequestError(TrimaranError):
    """The client must change or repeat this request. Other requests go on."""

    def __init__(self, message: str, kind: ErrorKind = ErrorKind.INVALID_ARG) -> None:
        super().__init__(message)
        self.kind = kind


class RefusedError(RequestError):
    """The request was refused for lack of room before its start; the client may repeat the
    request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorKind.UNAVAILABLE)


class EngineDeadError(RequestError):
    """The worker group of this request is gone, and the request could not be replayed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorKind.UNAVAILABLE)


class ProtocolError(TrimaranError):
    """A peer process sent a message that this protocol version does not allow."""


class PeerLostError(TrimaranError):
    """Another rank of the group did not answer in time: the group cannot go on."""


def with_request_id(request_id: str, text: str) -> str:
    """A text that clients see after the request id."""
    return f"[request id: {request_id or '<id_unknown>'}] {text}"
