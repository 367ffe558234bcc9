"""The HTTP server: connections, routing, and what errors look like."""

from __future__ import annotations

import logging
import socket
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.http import queries as http_queries
from trimaran.server.http.connections import HttpConnections, fault_logger, refusal
from trimaran.server.http.generate import GenerateEndpoint
from trimaran.server.http.infer import InferEndpoint
from trimaran.server.http.messages import error_response, json_response, plain_error
from trimaran.server.http.pending_bodies import PendingBodies
from trimaran.server.http.routes import match, path_of
from trimaran.server.http.status_page import StatusReport, render_page
from trimaran.server.service import INTERNAL, Service

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 0.5
"""Seconds that running requests get when the server stops."""

_BACKLOG = 1024


class HttpServer:
    """Serves one address. A request ends at once when its connection does."""

    def __init__(self, service: Service, decoder: Decoder, host: str, port: int) -> None:
        self._service = service
        self._host = host
        self._port = port
        self._decoder = decoder
        self._pending = PendingBodies(service.config.http_max_pending_bytes)
        self._infer = InferEndpoint(service, decoder, self._pending)
        self._generate = GenerateEndpoint(service, decoder, self._pending)
        self._busy: set[Any] = set()
        self._server = HttpConnections(self._handle)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=_STOP_GRACE_S)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port is in use.
        """
        is_shared = self._service.config.num_frontends > 1
        await _listen(self._runner, self._host, self._port, "--http-port", is_shared)
        logger.info("Started HTTPService at %s:%d", self._host, self.port)

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        return int(self._runner.addresses[0][1])

    def close_idle_connections(self) -> None:
        """Close every connection without a running request."""
        for connection in self._server.connections:
            if connection not in self._busy:
                connection.force_close()

    async def stop(self) -> None:
        """Close everything, including running requests."""
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            response = await self._answer(request)
        except RequestError as error:
            response = error_response(error)
        except ConnectionError:
            # The client is gone. A returned response is not sent; a raised error would be
            # logged.
            response = plain_error(400, "")
            response.force_close()
        except HttpProcessingError as error:
            # The body began well and then broke HTTP.
            fault_logger.error("%s", request.remote, exc_info=error)
            response = refusal(400, error.message)
        except Exception:
            logger.exception("%s %s failed", request.method, request.raw_path)
            response = plain_error(500, INTERNAL)
        finally:
            self._busy.discard(request.protocol)
        if self._service.admission.is_draining and not response.prepared:
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        route = match(path_of(request.raw_path))
        if route is None:
            return plain_error(404, "Not Found")
        if request.method not in route.methods:
            return plain_error(405, "Method Not Allowed")
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
        server = web.Server(self._handle, access_log=None, logger=fault_logger)
        self._runner = web.ServerRunner(server, shutdown_timeout=_STOP_GRACE_S)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port is in use.
        """
        await _listen(self._runner, self._host, self._port, "--metrics-port")
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
        return web.Response(body=body, content_type="text/plain", charset="utf-8")


async def _listen(
    runner: web.ServerRunner, host: str, port: int, flag: str, is_shared: bool = False
) -> None:
    await runner.setup()
    try:
        await _site(runner, host, port, is_shared).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another {flag}."
        ) from None


def _site(runner: web.ServerRunner, host: str, port: int, is_shared: bool) -> web.BaseSite:
    if host != "::":
        return web.TCPSite(runner, host, port, backlog=_BACKLOG, reuse_port=is_shared or None)
    # All addresses, like gRPC: asyncio's default excludes IPv4.
    everywhere = socket.create_server(
        (host, port), family=socket.AF_INET6, backlog=_BACKLOG, reuse_port=is_shared,
        dualstack_ipv6=socket.has_dualstack_ipv6(),
    )  # fmt: skip
    return web.SockSite(runner, everywhere, backlog=_BACKLOG)
