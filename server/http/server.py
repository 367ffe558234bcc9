"""The HTTP server of Triton's protocol, and the metrics port."""

from __future__ import annotations

import logging

from aiohttp import web

from trimaran.server.access.control import PortGuard
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.pending import PendingBodies
from trimaran.server.http import queries as http_queries
from trimaran.server.http.connections import HttpConnections
from trimaran.server.http.generate import GenerateEndpoint
from trimaran.server.http.infer import InferEndpoint
from trimaran.server.http.messages import json_response, plain_error
from trimaran.server.http.port import STOP_GRACE_S, HttpPort, PortPlace, listen
from trimaran.server.http.routes import Route, match
from trimaran.server.http.status_page import StatusReport, render_page
from trimaran.server.metrics.openmetrics import negotiated
from trimaran.server.service import Service

logger = logging.getLogger(__name__)


class HttpServer(HttpPort):
    """Serves Triton's HTTP protocol on one address."""

    def __init__(
        self,
        service: Service,
        decoder: Decoder,
        host: str,
        port: int,
        guard: PortGuard | None = None,
    ) -> None:
        """``guard`` holds the permissions and the TLS context; None: all requests, no TLS."""
        guard = guard or PortGuard(flag="--http-port")
        is_admin = guard.flag == "--admin-port"
        title = "administration" if is_admin else "HTTPService"
        super().__init__(service, PortPlace(title, host, port, not is_admin), guard)
        self._decoder = decoder
        self._pending = PendingBodies(
            service.config.http_max_pending_bytes, "--http-max-pending-size"
        )
        self._infer = InferEndpoint(service, decoder, self._pending)
        self._generate = GenerateEndpoint(service, decoder, self._pending)

    def _match(self, path: str) -> Route | None:
        return match(path)

    async def _dispatch(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        if route.action == "infer":
            return await self._infer.infer(request, route)
        if route.action == "generate":
            return await self._generate.generate(request, route)
        if route.action == "generate_stream":
            return await self._generate.generate_stream(request, route)
        if route.action == "load":
            return await http_queries.load(
                self._service, self._decoder, self._pending, request, route
            )
        return await http_queries.answer(self._service, request, route)


class MetricsServer:
    """Serves the metrics and the operator's page on a separate port.

    Other paths answer 200 with an empty body.
    """

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._service = service
        self._host = host
        self._port = port
        self._status = StatusReport(service)
        limits = service.config.http_limits
        server = HttpConnections(self._handle, limits, has_reserve=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=STOP_GRACE_S)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port is in use.
        """
        await listen(self._runner, self._host, self._port, "--metrics-port")
        self._status.start()
        logger.info("Started Metrics Service at %s:%d", self._host, self.port)

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close everything."""
        await self._status.stop()
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "GET":
            return plain_error(405, "Method Not Allowed")
        path = request.raw_path.partition("?")[0]
        await self._service.refresh()
        if path == "/":
            page = render_page(self._status.document())
            return web.Response(text=page, content_type="text/html", charset="utf-8")
        if path == "/status.json":
            return json_response(self._status.document())
        body = self._service.metrics.render() if path in ("/metrics", "/metrics/") else b""
        # As in Triton, another path has an empty body.
        accept = request.headers.get("Accept", "") if body else ""
        body, content_type = negotiated(body, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})
