"""The gRPC server: its port, limits and health service."""

from __future__ import annotations

import logging

import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from trimaran.comm.errors import ConfigError
from trimaran.server.grpc.decoding import DecodingInterceptor
from trimaran.server.grpc.service import InferenceServicer
from trimaran.server.grpc.stream import Context
from trimaran.server.service import Service

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = (1 << 31) - 1
_OPTIONS = {
    "grpc.max_send_message_length": _MAX_MESSAGE_BYTES,
    "grpc.max_receive_message_length": _MAX_MESSAGE_BYTES,
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

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._service = service
        self._host = host
        self._asked_port = port
        self.port = 0
        """The port in use, also when 0 was asked for."""
        # Where it need not be shared, a second server on the port would bind silently.
        is_shared = int(service.config.num_frontends > 1)
        own = service.config.grpc_options
        self._server = grpc.aio.server(
            interceptors=(DecodingInterceptor(),),
            options=tuple({**_OPTIONS, **own, "grpc.so_reuseport": is_shared}.items()),
        )
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            InferenceServicer(service), self._server
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
        """Take no more calls, and end those still open after ``grace_s``."""
        await self._server.stop(grace_s)

    def _health_handler(self) -> grpc.GenericRpcHandler:
        async def check(request: bytes, context: Context) -> bytes:
            return _SERVING if self._service.is_ready else _NOT_SERVING

        handler = grpc.unary_unary_rpc_method_handler(check)
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})
