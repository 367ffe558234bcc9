"""The responses of ``triton_python_backend_utils``, and their senders."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimaran.comm.errors import ErrorKind
from trimaran.server.python_models.tensors import Tensor, TritonModelException
from trimaran.server.python_models.wire import Respond

RESPONSE_COMPLETE_FINAL = 1


class TritonError:
    """The error of one request, with the error kind that clients see."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED = range(6)
    ALREADY_EXISTS, CANCELLED = 6, 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = str(message)
        self._code = int(code)
        if not 0 <= self._code < len(_KINDS):
            raise TritonModelException(
                f"error code {code} is none of 0 to {len(_KINDS) - 1}, the constants of "
                "TritonError"
            )

    def __str__(self) -> str:
        return self._message

    def message(self) -> str:
        """The text."""
        return self._message

    def code(self) -> int:
        """One of the constants of this class."""
        return self._code

    @property
    def kind(self) -> str:
        """The `ErrorKind`'s name."""
        return _KINDS[self._code].name

    @classmethod
    def of_kind(cls, message: str, kind: str) -> TritonError:
        """The error of an `ErrorKind`'s name."""
        return cls(message, _KINDS.index(ErrorKind[kind]))


_KINDS = (
    ErrorKind.UNKNOWN, ErrorKind.INTERNAL, ErrorKind.NOT_FOUND, ErrorKind.INVALID_ARG,
    ErrorKind.UNAVAILABLE, ErrorKind.UNSUPPORTED, ErrorKind.ALREADY_EXISTS,
    ErrorKind.CANCELLED,
)  # fmt: skip


def checked_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request or a response, if clients can receive them."""
    for name, value in parameters.items():
        if not isinstance(name, str) or not _is_value(value):
            raise TritonModelException(
                f"parameter {name!r} is {value!r}, but parameters have texts as names and "
                "bool, int (of 64 bits), float or str values"
            )
    return dict(parameters)


def _is_value(value: object) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return isinstance(value, str | float)


class InferenceResponse:
    """Tensors, or an error."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors = list(output_tensors)
        self._error = TritonError(error) if isinstance(error, str) else error
        self._parameters = dict(parameters or {})
        for tensor in self._tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(
                    f"a response is given a {type(tensor).__name__} as an output, not a Tensor"
                )

    def output_tensors(self) -> list[Tensor]:
        """The outputs; none beside an error."""
        return self._tensors

    def has_error(self) -> bool:
        """Whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, or None."""
        return self._error

    def parameters(self) -> str:
        """The response's parameters as a JSON object."""
        return json.dumps(self._parameters)

    def message(self, key: int, outputs: Mapping[str, str], *, is_final: bool) -> Respond:
        """For the wire; ``outputs`` are the wanted outputs with their datatypes."""
        if self._error is not None:
            error, kind = self._error.message(), self._error.kind
            return Respond(key=key, error=error or "no text", kind=kind, is_final=is_final)
        tensors = [
            tensor.to_packed(outputs[tensor.name()])
            for tensor in self._tensors
            if tensor.name() in outputs
        ]
        parameters = checked_parameters(self._parameters)
        return Respond(key=key, tensors=tensors, parameters=parameters, is_final=is_final)


class Ticket:
    """The right to answer one request. Thread safe.

    It lives as long as the request, its sender or the call of ``execute``. If all of them are
    gone without a final response, the client gets an error.
    """

    def __init__(
        self,
        key: int,
        outputs: Mapping[str, str],
        send: Callable[[Respond], None],
        *,
        is_decoupled: bool,
    ) -> None:
        """``outputs`` are the wanted outputs with their datatypes."""
        self.key = key
        self.is_cancelled = False
        self._outputs = outputs
        self._send = send
        self._is_decoupled = is_decoupled
        self._lock = threading.Lock()
        self._has_response = False
        self.is_closed = False

    def send(self, response: InferenceResponse | None, *, is_final: bool) -> None:
        """Send a response, the final flag, or both.

        Raises:
            TritonModelException: after the final flag, or a second response of a model that is
                not decoupled.
        """
        with self._lock:
            if self.is_closed:
                raise TritonModelException(
                    "Unable to send response. Response sender has been closed."
                )
            if response is None:
                message = Respond(key=self.key, is_final=True)
            else:
                self._check_count()
                message = response.message(self.key, self._outputs, is_final=is_final)
            self._send(message)
            self._has_response |= response is not None
            self.is_closed = is_final

    def fail(self, text: str, kind: ErrorKind = ErrorKind.INTERNAL) -> None:
        """End the request with an error, unless it has ended."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._send(Respond(key=self.key, error=text, kind=kind.name))

    def _check_count(self) -> None:
        if self._has_response and not self._is_decoupled:
            raise TritonModelException(
                "a request of a model that is not decoupled has one response; set "
                "model_transaction_policy { decoupled: true } to send more"
            )

    def __del__(self) -> None:
        self.fail("the model's code let go of the request without a final response")


class InferenceResponseSender:
    """Sends the responses of one request, from any thread."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; the flag ``TRITONSERVER_RESPONSE_COMPLETE_FINAL`` ends them.

        Raises:
            TritonModelException: another flag, neither response nor flag, or a response after
                the final flag.
        """
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response. Unsupported flag {flags}; use 0 or "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL."
            )
        if response is None and flags != RESPONSE_COMPLETE_FINAL:
            raise TritonModelException(
                "Inference Response object must be provided when the response flag is not "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(
                f"a response must be an InferenceResponse, not a {type(response).__name__}"
            )
        self._ticket.send(response, is_final=flags == RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self._ticket.is_cancelled
