"""The gRPC server: its port, its limits, its health service and undecodable messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2_grpc

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.access.control import PortGuard
from trimaran.server.access.tls import ServerTls
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.pending import PendingBodies
from trimaran.server.grpc.access import AccessInterceptor
from trimaran.server.grpc.messages import InferMessage, LoadMessage
from trimaran.server.grpc.service import InferenceServicer
from trimaran.server.grpc.status import CallStatus, Context
from trimaran.server.grpc.stream_answers import to_wire
from trimaran.server.memory import return_freed
from trimaran.server.service import Service

SMALL_MESSAGE_BYTES = 64 << 10
"""Limit on messages that hold a few names and settings: all but those of `_LONG_METHODS`."""

_LONG_METHODS: dict[str, Callable[[bytes, PendingBodies], Any]] = {
    "ModelInfer": InferMessage.receive,
    "ModelStreamInfer": InferMessage.receive,
    "RepositoryModelLoad": LoadMessage.receive,
}
"""Methods whose messages a client sizes, with the part of decoding that takes a moment."""

_LARGE_BYTES = 4 << 20
"""From this size of a message on, the buffers in which the message came go back to the system
before its request runs: these take the message's size again. A millisecond for 16 MB."""


class _RefusedError(Exception):
    """A stream cannot go on behind a refused message."""

    def __init__(self, status: CallStatus) -> None:
        super().__init__(status.text)
        self.status = status


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Decodes on the event loop only what takes a moment.

    Messages of most methods are refused over `SMALL_MESSAGE_BYTES`. Calls with undecodable
    messages end as INTERNAL, as in Triton: by itself gRPC ends them as UNKNOWN, and logs each
    with a traceback.
    """

    def __init__(self, message_timeout_s: float, pending: PendingBodies) -> None:
        """``message_timeout_s`` is how long a unary call's message may take; 0: no limit.
        ``pending`` limits the messages that wait to be decoded."""
        self._message_timeout_s = message_timeout_s
        self._pending = pending
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
        decode = _decoder_of(handler_call_details.method, handler, self._pending)
        if handler.request_streaming:
            careful = _stream(handler, decode)
        else:
            careful = _unary(handler, decode, self._message_timeout_s)
        self._handlers[handler_call_details.method] = careful
        return careful


def _unary(
    handler: Any, decode: Callable[[bytes], Any], timeout_s: float
) -> grpc.RpcMethodHandler:
    """A handler that reads its only message itself, so that the reading can have a deadline."""

    async def call(requests: AsyncIterator[Any], context: Context) -> Any:
        request = await _read(context, timeout_s)
        if isinstance(request, CallStatus):
            return request.set(context)
        return await handler.unary_unary(request, context)

    return grpc.stream_unary_rpc_method_handler(call, decode, handler.response_serializer)


async def _read(context: Context, timeout_s: float) -> Any:
    """The message of a call, or the `CallStatus` of a call whose message does not come in time
    or is refused."""
    task = asyncio.current_task()
    assert task is not None
    has_expired = False

    def expire() -> None:
        nonlocal has_expired
        has_expired = True
        task.cancel()

    loop = asyncio.get_running_loop()
    timer = loop.call_later(timeout_s, expire) if timeout_s else None
    try:
        request = await context.read()
    except asyncio.CancelledError:
        if not has_expired:
            raise
        return CallStatus(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the message did not arrive within {timeout_s:g} s (--grpc-message-timeout)",
        )
    finally:
        if timer is not None:
            timer.cancel()
    if request is grpc.aio.EOF:
        return CallStatus(grpc.StatusCode.INTERNAL, "the call has no message")
    return request


def _stream(handler: Any, decode: Callable[[bytes], Any]) -> grpc.RpcMethodHandler:
    async def decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, CallStatus):
                raise _RefusedError(request)
            yield request

    async def call(requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            return await handler.stream_stream(decoded(requests), context)
        except _RefusedError as error:
            error.status.set(context)
            return None

    return grpc.stream_stream_rpc_method_handler(call, decode, to_wire)


def _decoder_of(method: str, handler: Any, pending: PendingBodies) -> Callable[[bytes], Any]:
    """What turns messages of a method into objects, or into the status of a refusal."""
    long = _LONG_METHODS.get(method.rpartition("/")[2])
    parse = handler.request_deserializer or bytes

    def decode(raw: bytes) -> Any:
        if len(raw) >= _LARGE_BYTES:
            return_freed()
        if long is None and len(raw) > SMALL_MESSAGE_BYTES:
            return CallStatus(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the message has {len(raw)} bytes, and this method takes at most "
                f"{SMALL_MESSAGE_BYTES}. Send only the names and settings that it knows.",
            )
        try:
            return parse(raw) if long is None else long(raw, pending)
        except RequestError as error:
            return CallStatus.of_error(error)
        except DecodeError as error:
            text = f"the message cannot be decoded: {error}"
            return CallStatus(grpc.StatusCode.INTERNAL, text)

    return decode


logger = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = (1 << 31) - 1
_OPTIONS = {
    "grpc.max_send_message_length": _MAX_ANSWER_BYTES,
    # A client whose host is lost, or that reads nothing, is found while it has calls.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.http2.max_pings_without_data": 2,
    "grpc.http2.min_recv_ping_interval_without_data_ms": 300_000,
    "grpc.http2.max_ping_strikes": 2,
    # From the connection to its first frame of settings, a handshake of TLS between.
    "grpc.server_handshake_timeout_ms": 20_000,
    "grpc.max_connection_idle_ms": 600_000,
    "grpc.max_allowed_incoming_connections": 16_384,
    "grpc.max_concurrent_streams": 4_096,
}
# Messages of grpc.health.v1, field 1: SERVING and NOT_SERVING.
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"


class GrpcServer:
    """Serves one address. A call's requests end when the call does."""

    def __init__(
        self,
        service: Service,
        decoder: Decoder,
        host: str,
        port: int,
        guard: PortGuard | None = None,
    ) -> None:
        """``guard`` holds the permissions and the TLS context; None: all requests, no TLS."""
        self._service = service
        self._host = host
        self._asked_port = port
        self._guard = guard or PortGuard(flag="--grpc-port")
        self.port = 0
        """The port in use, also when 0 was asked for."""
        # With so_reuseport, a second server on an unshared port would bind silently.
        config, policy = service.config, self._guard.policy
        is_shared = int(config.num_frontends > 1 and not self._is_admin)
        own = {"grpc.max_receive_message_length": config.grpc_max_message_bytes}
        own |= config.grpc_options
        checks = () if policy.is_open else (AccessInterceptor(policy),)
        self._pending = PendingBodies(config.grpc_max_pending_bytes, "--grpc-max-pending-size")
        decoding = DecodingInterceptor(config.grpc_message_timeout_s, self._pending)
        self._server = grpc.aio.server(
            interceptors=(*checks, decoding),
            options=tuple({**_OPTIONS, **own, "grpc.so_reuseport": is_shared}.items()),
            maximum_concurrent_rpcs=config.grpc_max_calls,
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
            self.port = self._open(address)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen for gRPC on {address}: {error}. Choose another "
                f"{self._guard.flag}."
            ) from None
        await self._server.start()
        name = "gRPC administration" if self._is_admin else "GRPCInferenceService"
        logger.info("Started %s at %s:%d", name, self._host, self.port)

    async def stop(self, grace_s: float) -> None:
        """Accept no further calls, and end the open ones after ``grace_s``."""
        await self._server.stop(grace_s)

    @property
    def _is_admin(self) -> bool:
        return self._guard.flag == "--admin-grpc-port"

    def _open(self, address: str) -> int:
        if self._guard.tls is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, _credentials(self._guard.tls)))

    def _health_handler(self) -> grpc.GenericRpcHandler:
        async def check(request: bytes, context: Context) -> bytes:
            return _SERVING if self._service.is_ready else _NOT_SERVING

        handler = grpc.unary_unary_rpc_method_handler(check)
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})


def _credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that follow the files: each handshake asks for the current ones."""
    known = tls.content

    def configuration() -> grpc.ServerCertificateConfiguration:
        content = tls.content
        return grpc.ssl_server_certificate_configuration(
            [(content.key, content.cert)], root_certificates=content.root_cert
        )

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        if tls.content is known:
            return None
        known = tls.content
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(), changed, require_client_authentication=tls.files.is_mutual
    )
