"""The gRPC server: its port, its limits, its health service and undecodable messages."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2_grpc

from trimaran.comm.errors import ConfigError
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.grpc.messages import InferMessage
from trimaran.server.grpc.service import InferenceServicer
from trimaran.server.grpc.stream import Context
from trimaran.server.service import Service

SMALL_MESSAGE_BYTES = 64 << 10
"""Limit on messages that hold a few names and settings: all but those of `_LONG_METHODS`."""

_LONG_METHODS: dict[str, Callable[[bytes], Any]] = {
    "ModelInfer": InferMessage.receive,
    "ModelStreamInfer": InferMessage.receive,
    "RepositoryModelLoad": bytes,
}
"""Methods whose messages a client sizes, with the part of decoding that takes a moment."""


class _Refused:
    """Stands for a message that could not be decoded or is too long."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        self.code = code
        self.text = text


class _RefusedError(Exception):
    """A stream cannot go on behind a refused message."""

    def __init__(self, refused: _Refused) -> None:
        super().__init__(refused.text)
        self.refused = refused


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Decodes on the event loop only what takes a moment.

    Messages of most methods are refused over `SMALL_MESSAGE_BYTES`. Calls with undecodable
    messages end as INTERNAL, as in Triton: by itself gRPC ends them as UNKNOWN, and logs each
    with a traceback.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: Any,
    ) -> grpc.RpcMethodHandler:
        """The method's handler, with a decoder that does not raise."""
        known = self._handlers.get(handler_call_details.method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        decode = _decoder_of(handler_call_details.method, handler)
        make = _stream if handler.request_streaming else _unary
        self._handlers[handler_call_details.method] = careful = make(handler, decode)
        return careful


def _unary(handler: Any, decode: Callable[[bytes], Any]) -> grpc.RpcMethodHandler:
    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, _Refused):
            await context.abort(request.code, request.text)
        return await handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(call, decode, handler.response_serializer)


def _stream(handler: Any, decode: Callable[[bytes], Any]) -> grpc.RpcMethodHandler:
    async def decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, _Refused):
                raise _RefusedError(request)
            yield request

    async def call(requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            return await handler.stream_stream(decoded(requests), context)
        except _RefusedError as error:
            await context.abort(error.refused.code, error.refused.text)

    return grpc.stream_stream_rpc_method_handler(call, decode, handler.response_serializer)


def _decoder_of(method: str, handler: Any) -> Callable[[bytes], Any]:
    """What turns the messages of a method into objects, or into `_Refused`."""
    long = _LONG_METHODS.get(method.rpartition("/")[2])
    parse = long or handler.request_deserializer or bytes

    def decode(raw: bytes) -> Any:
        if long is None and len(raw) > SMALL_MESSAGE_BYTES:
            return _Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the message has {len(raw)} bytes, and this method takes at most "
                f"{SMALL_MESSAGE_BYTES}. Send only the names and settings that it knows.",
            )
        try:
            return parse(raw)
        except DecodeError as error:
            text = f"the message cannot be decoded: {error}"
            return _Refused(grpc.StatusCode.INTERNAL, text)

    return decode


logger = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = (1 << 31) - 1
_OPTIONS = {
    "grpc.max_send_message_length": _MAX_ANSWER_BYTES,
    "grpc.keepalive_time_ms": 7_200_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.http2.max_pings_without_data": 2,
    "grpc.http2.min_recv_ping_interval_without_data_ms": 300_000,
    "grpc.http2.max_ping_strikes": 2,
}
# Messages of grpc.health.v1, field 1: SERVING and NOT_SERVING.
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"


class GrpcServer:
    """Serves one address. A call's requests end when the call does."""

    def __init__(self, service: Service, decoder: Decoder, host: str, port: int) -> None:
        self._service = service
        self._host = host
        self._asked_port = port
        self.port = 0
        """The port in use, also when 0 was asked for."""
        # With so_reuseport, a second server on an unshared port would bind silently.
        is_shared = int(service.config.num_frontends > 1)
        config = service.config
        own = {"grpc.max_receive_message_length": config.grpc_max_message_bytes}
        own |= config.grpc_options
        self._server = grpc.aio.server(
            interceptors=(DecodingInterceptor(),),
            options=tuple({**_OPTIONS, **own, "grpc.so_reuseport": is_shared}.items()),
        )
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            InferenceServicer(service, decoder), self._server
        )
        self._server.add_generic_rpc_handlers((self._health_handler(),))

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port is in use.
        """
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{self._asked_port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen for gRPC on {address}: {error}. Choose another --grpc-port."
            ) from None
        await self._server.start()
        logger.info("Started GRPCInferenceService at %s:%d", self._host, self.port)

    async def stop(self, grace_s: float) -> None:
        """Accept no further calls, and end the open ones after ``grace_s``."""
        await self._server.stop(grace_s)

    def _health_handler(self) -> grpc.GenericRpcHandler:
        async def check(request: bytes, context: Context) -> bytes:
            return _SERVING if self._service.is_ready else _NOT_SERVING

        handler = grpc.unary_unary_rpc_method_handler(check)
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})
