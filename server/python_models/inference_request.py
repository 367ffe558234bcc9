"""The requests of ``triton_python_backend_utils``: received, or made to call other models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.server.python_models.link import PendingCall, the_link
from trimaran.server.python_models.responses import (
    InferenceResponse,
    InferenceResponseSender,
    Ticket,
    TritonError,
    checked_parameters,
)
from trimaran.server.python_models.tensors import Tensor, TritonModelException
from trimaran.server.python_models.wire import RequestFields, Result

MEMORY_CPU, MEMORY_GPU = 0, 2
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2

_OPTIONS = ("timeout", "priority", "parameters", "preferred_memory", "trace")


@dataclass(frozen=True)
class PreferredMemory:
    """The memory for tensors of a called model: only the host's is supported."""

    preferred_memory_type: int
    preferred_device_id: int = 0


class InferenceRequest:
    """A request to another model of the server."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int | str = -1,
        flags: int = 0,
        **options: Any,
    ) -> None:
        """``options`` are ``timeout`` in microseconds, ``priority``, ``parameters``,
        ``preferred_memory`` and ``trace``, which is ignored.

        Raises:
            TritonModelException: an invalid value, or another option.
        """
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise TritonModelException(
                f"InferenceRequest has no argument '{unknown[0]}': it has {', '.join(_OPTIONS)}"
                " and those that name the model and its tensors"
            )
        memory = options.get("preferred_memory") or PreferredMemory(MEMORY_CPU)
        if memory.preferred_memory_type != MEMORY_CPU:
            raise TritonModelException(
                "preferred_memory asks for the GPU's memory, but tensors come and go through "
                "the host's. Leave it out and move the tensor."
            )
        self._inputs = list(inputs)
        self._fields = RequestFields(
            model=model_name,
            version="" if str(model_version) == "-1" else str(model_version),
            id=str(request_id),
            outputs=list(requested_output_names),
            parameters=checked_parameters(options.get("parameters") or {}),
            priority=options.get("priority", 0),
            timeout_us=options.get("timeout", 0),
            correlation_id=correlation_id,
            flags=flags,
        )

    # ---- fields -------------------------------------------------------------------------

    def inputs(self) -> list[Tensor]:
        """All inputs."""
        return self._inputs

    def request_id(self) -> str:
        """The id, or an empty text."""
        return self._fields.id

    def correlation_id(self) -> int | str:
        """The correlation id of the sequence; 0 for none."""
        return self._fields.correlation_id

    def requested_output_names(self) -> list[str]:
        """The requested outputs."""
        return self._fields.outputs

    def model_name(self) -> str:
        """The name of the called model."""
        return self._fields.model

    def model_version(self) -> int:
        """The version of the called model; -1 for the latest."""
        return int(self._fields.version or -1)

    def parameters(self) -> str:
        """The parameters as a JSON object."""
        return json.dumps(self._fields.parameters)

    def priority(self) -> int:
        """The priority; 0 for none."""
        return self._fields.priority

    def timeout(self) -> int:
        """The time limit in microseconds; 0 for none."""
        return self._fields.timeout_us

    def flags(self) -> int:
        """Bits that mark the start and the end of a sequence."""
        return self._fields.flags

    def set_flags(self, flags: int) -> None:
        """Set the sequence flags."""
        self._fields.flags = flags

    def trace(self) -> None:
        """Traces are not supported."""

    # ---- running it ---------------------------------------------------------------------

    def exec(self, decoupled: bool = False) -> Any:
        """Run the request and wait: a response, or with ``decoupled`` an iterator of responses.

        A failure is returned as a response with an error. The call is made on behalf of the
        requests of ``execute``: once all of them are cancelled, the call is cancelled.

        Raises:
            TritonModelException: the tensors are too large for one message.
        """
        pending = self._call(decoupled)
        if decoupled:
            return ResponseIterator(pending)
        return _response(pending.get().result())

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """As `exec`, for coroutines. The call begins at once; cancelling the awaitable cancels
        it.
        """
        return asyncio.ensure_future(_awaited(self._call(decoupled), decoupled))

    def _call(self, is_decoupled: bool) -> PendingCall:
        self._fields.inputs = [tensor.to_packed() for tensor in self._inputs]
        try:
            return the_link().call(self._fields, is_decoupled=is_decoupled)
        except ValueError as error:
            raise TritonModelException(str(error)) from error


class ReceivedRequest(InferenceRequest):
    """A request that ``execute`` receives."""

    def __init__(
        self,
        fields: RequestFields,
        outputs: Sequence[str],
        ticket: Ticket,
        *,
        is_iterative: bool = False,
    ) -> None:
        """``outputs`` are all outputs of the model, for a request without a list."""
        self._is_iterative = is_iterative
        self.is_rescheduled = False
        """Whether the request is to be executed again."""
        self._inputs = [Tensor.from_packed(packed) for packed in fields.inputs]
        self._fields = fields
        fields.inputs = []
        fields.outputs = list(fields.outputs or outputs)
        self.ticket = ticket

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self.ticket.is_cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of its responses, valid after ``execute`` has returned too."""
        return InferenceResponseSender(self.ticket)

    def set_release_flags(self, flags: int) -> None:
        """ALL ends the request with its response, as without a call. RESCHEDULE executes the
        request again once ``execute`` has returned, with None as its response.

        Raises:
            TritonModelException: another flag, or the model's sequences are not iterative.
        """
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"Unsupported release flag {flags}; use TRITONSERVER_REQUEST_RELEASE_ALL or "
                "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE."
            )
        if flags == RELEASE_RESCHEDULE and not self._is_iterative:
            raise TritonModelException(
                "Unable to reschedule the request: its model has no sequence_batching with "
                "iterative_sequence. Set it to true, or loop inside execute."
            )
        self.is_rescheduled = flags == RELEASE_RESCHEDULE


class ResponseIterator:
    """The responses of a decoupled model as they come, for ``for`` and for ``async for``.

    A reader that drops the iterator before its end cancels the call.
    """

    def __init__(self, pending: PendingCall) -> None:
        self._pending = pending
        self._is_over = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        response = None if self._is_over else self._taken(self._pending.get().result())
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        response = None
        if not self._is_over:
            response = self._taken(await asyncio.wrap_future(self._pending.get()))
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """End the call; the iterator ends with an error of the kind CANCELLED."""
        if not self._is_over:
            the_link().cancel_call(self._pending)

    def _taken(self, result: Result) -> InferenceResponse | None:
        self._is_over = result.is_final
        if result.tensors is None and not result.error:
            return None
        return _response(result)

    def __del__(self) -> None:
        self.cancel()


def ask(verb: str, **arguments: object) -> dict[str, Any]:
    """The front end's answer to a question; blocks.

    Raises:
        TritonModelException: the front end refuses.
    """
    result = the_link().ask(verb, **arguments)
    if result.error:
        raise TritonModelException(result.error)
    return result.values


async def _awaited(pending: PendingCall, is_decoupled: bool) -> Any:
    if is_decoupled:
        return ResponseIterator(pending)
    try:
        return _response(await asyncio.wrap_future(pending.get()))
    except asyncio.CancelledError:
        the_link().cancel_call(pending)
        raise


def _response(result: Result) -> InferenceResponse:
    if result.error:
        return InferenceResponse(error=TritonError.of_kind(result.error, result.kind))
    tensors = [Tensor.from_packed(packed) for packed in result.tensors or ()]
    return InferenceResponse(tensors, parameters=result.parameters)
