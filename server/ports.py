"""The ports of one front end: HTTP, gRPC, metrics and the administration's own."""

from __future__ import annotations

from trimaran.server.access.control import AccessControl
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.grpc.server import GrpcServer
from trimaran.server.http.port import HttpPort
from trimaran.server.http.server import HttpServer, MetricsServer
from trimaran.server.openai.server import OpenAiServer
from trimaran.server.service import Service

_GRPC_GRACE_S = 0.5


class Ports:
    """Every port that the configuration asks for, opened and closed together.

    The metrics and the administration have one port for all front ends: the first's.
    """

    def __init__(self, service: Service) -> None:
        """Raises:
        ConfigError: a certificate or the file of keys cannot be used.
        """
        config, asked = service.config, service.config.access
        self._access = access = AccessControl(asked)
        self._decoder = Decoder(config.http_max_input_bytes, config.grpc_max_message_bytes)
        self._grpc: list[GrpcServer] = []
        self._http: list[HttpPort] = []
        self._metrics: MetricsServer | None = None
        parts = service, self._decoder
        if config.allow_grpc:
            self._grpc.append(
                GrpcServer(*parts, config.grpc_address, config.grpc_port, access.grpc())
            )
        if config.allow_http:
            self._http.append(
                HttpServer(*parts, config.http_address, config.http_port, access.http())
            )
        if config.openai.port is not None:
            self._http.append(OpenAiServer(*parts, access.openai()))
        if not config.is_first:
            return
        if config.allow_metrics:
            self._metrics = MetricsServer(service, config.metrics_address, config.metrics_port)
        admin = asked.admin_address
        if asked.admin_grpc_port is not None:
            guard = access.grpc(is_admin=True)
            self._grpc.append(GrpcServer(*parts, admin, asked.admin_grpc_port, guard))
        if asked.admin_port is not None:
            guard = access.http(is_admin=True)
            self._http.append(HttpServer(*parts, admin, asked.admin_port, guard))

    async def start(self) -> None:
        """Listen on all of them.

        Raises:
            ConfigError: a port is in use.
        """
        for grpc in self._grpc:
            await grpc.start()
        for http in self._http:
            await http.start()
        if self._metrics is not None:
            await self._metrics.start()
        self._access.start()

    def close_idle_connections(self) -> None:
        """Close every HTTP connection that is not in the middle of a request."""
        for server in self._http:
            server.close_idle_connections()

    async def stop(self) -> None:
        """Close everything, running requests too; the metrics last."""
        await self._access.stop()
        for grpc in self._grpc:
            await grpc.stop(_GRPC_GRACE_S)
        for http in self._http:
            await http.stop()
        self._decoder.close()
        if self._metrics is not None:
            await self._metrics.stop()
