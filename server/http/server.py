"""The HTTP server: connections, routing, and what errors look like."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.access.control import PortGuard
from trimaran.server.access.policy import Refusal
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.http import queries as http_queries
from trimaran.server.http.connections import (
    BodyTimeoutError,
    HttpConnections,
    fault_logger,
    refusal,
)
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

    def __init__(
        self,
        service: Service,
        decoder: Decoder,
        host: str,
        port: int,
        guard: PortGuard | None = None,
    ) -> None:
        """``guard`` says who may do what and how the port is encrypted; None: all, not."""
        self._service = service
        self._host = host
        self._port = port
        self._guard = guard or PortGuard(flag="--http-port")
        self._policy = self._guard.policy
        self._decoder = decoder
        self._pending = PendingBodies(service.config.http_max_pending_bytes)
        self._infer = InferEndpoint(service, decoder, self._pending)
        self._generate = GenerateEndpoint(service, decoder, self._pending)
        self._busy: set[Any] = set()
        self._is_admin = self._guard.flag == "--admin-port"
        limits = service.config.http_limits
        self._server = HttpConnections(self._handle, limits, has_reserve=self._is_admin)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=_STOP_GRACE_S)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port is in use.
        """
        config, guard = self._service.config, self._guard
        await _listen(
            self._runner,
            self._host,
            self._port,
            guard.flag,
            is_shared=config.num_frontends > 1 and not self._is_admin,
            tls=guard.tls.context if guard.tls is not None else None,
            handshake_timeout_s=config.http_limits.header_timeout_s,
        )
        name = "administration" if self._is_admin else "HTTPService"
        logger.info("Started %s at %s:%d", name, self._host, self.port)

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
            # The body began well and then stalled or broke HTTP.
            if not isinstance(error, BodyTimeoutError):
                fault_logger.error("%s", request.remote, exc_info=error)
            response = refusal(error.code or 400, error.message)
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
        if not self._policy.is_open:
            refused = self._policy.refusal(route.category, request.headers.get)
            if refused is not None:
                return _refused(refused)
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
        limits = service.config.http_limits
        server = HttpConnections(self._handle, limits, has_reserve=True)
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


def _refused(refused: Refusal) -> web.Response:
    response = plain_error(refused.http_status, refused.text)
    if refused.needs_key:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


class _Site(web.BaseSite):
    """The addresses of a host; a handshake of TLS has a deadline there."""

    def __init__(
        self,
        runner: web.ServerRunner,
        host: str,
        port: int,
        *,
        is_shared: bool = False,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = 0.0,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=_BACKLOG)
        self.host = host
        self.port = port
        self._is_shared = is_shared
        self._handshake_timeout_s = handshake_timeout_s

    @property
    def name(self) -> str:
        """The address as a URL."""
        return f"http{'s' if self._ssl_context else ''}://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen; raises OSError if that cannot be."""
        await super().start()
        assert self._runner.server is not None
        options: dict[str, Any] = {"ssl": self._ssl_context, "backlog": self._backlog}
        if self._ssl_context is not None and self._handshake_timeout_s:
            options["ssl_handshake_timeout"] = self._handshake_timeout_s
        if self.host == "::":
            # All addresses, like gRPC: asyncio's default excludes IPv4.
            options["sock"] = socket.create_server(
                (self.host, self.port), family=socket.AF_INET6, backlog=_BACKLOG,
                reuse_port=self._is_shared, dualstack_ipv6=socket.has_dualstack_ipv6(),
            )  # fmt: skip
        else:
            options |= {"host": self.host, "port": self.port}
            options["reuse_port"] = self._is_shared or None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._runner.server, **options)


async def _listen(
    runner: web.ServerRunner, host: str, port: int, flag: str, **options: Any
) -> None:
    """Open a `_Site`, whose ``options`` these are."""
    await runner.setup()
    try:
        await _Site(runner, host, port, **options).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another {flag}."
        ) from None
