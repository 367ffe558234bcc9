"""Messages that are not what a gRPC method takes: the caller's fault, and told as such."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from trimaran.server.grpc.stream import Context


class _Undecodable:
    """Stands for a message that could not be decoded."""

    def __init__(self, error: DecodeError) -> None:
        self.text = f"the message cannot be decoded: {error}"


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Ends calls with such messages as INTERNAL, as Triton does.

    By itself gRPC ends them as UNKNOWN, and logs each with a traceback.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: Any,
    ) -> grpc.RpcMethodHandler:
        """The method's handler, which then decodes with care."""
        known = self._handlers.get(handler_call_details.method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        careful = _stream(handler) if handler.request_streaming else _unary(handler)
        self._handlers[handler_call_details.method] = careful
        return careful


def _unary(handler: Any) -> grpc.RpcMethodHandler:
    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, _Undecodable):
            await context.abort(grpc.StatusCode.INTERNAL, request.text)
        return await handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(
        call, _decode(handler), handler.response_serializer
    )


def _stream(handler: Any) -> grpc.RpcMethodHandler:
    async def decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, _Undecodable):
                raise DecodeError(request.text)
            yield request

    async def call(requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            return await handler.stream_stream(decoded(requests), context)
        except DecodeError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))

    return grpc.stream_stream_rpc_method_handler(
        call, _decode(handler), handler.response_serializer
    )


def _decode(handler: Any) -> Callable[[bytes], Any]:
    def decode(raw: bytes) -> Any:
        try:
            return handler.request_deserializer(raw)
        except DecodeError as error:
            return _Undecodable(error)

    return decode
