"""One HTTP port: its address, its guard, and what every request on it meets."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.access.control import PortGuard
from trimaran.server.access.policy import Refusal
from trimaran.server.http.connections import (
    BodyTimeoutError,
    HttpConnections,
    fault_logger,
    refusal,
)
from trimaran.server.http.messages import error_response, plain_error
from trimaran.server.http.routes import path_of
from trimaran.server.service import INTERNAL, Service

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
"""Seconds that running requests get when the server stops."""

_BACKLOG = 1024


class PortRoute(Protocol):
    """The members of a matched path on every port."""

    @property
    def methods(self) -> frozenset[str]:
        """The methods that the path takes."""
        ...

    @property
    def category(self) -> str:
        """The category of access control that the path belongs to."""
        ...


@dataclass(frozen=True, slots=True)
class PortPlace:
    """Where a port listens, and its name in the log."""

    title: str
    host: str
    port: int
    is_shared: bool = False
    """Whether all front ends share the port."""


class HttpPort(ABC):
    """Serves one address. A request ends at once when its connection does.

    A subclass matches paths, answers requests, and gives errors the form of its protocol.
    """

    def __init__(self, service: Service, place: PortPlace, guard: PortGuard) -> None:
        """``guard`` holds the port's permissions and TLS context."""
        self._service = service
        self._place = place
        self._guard = guard
        self._policy = guard.policy
        self._busy: set[Any] = set()
        limits = service.config.http_limits
        self._server = HttpConnections(self._handle, limits, has_reserve=not place.is_shared)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=STOP_GRACE_S)

    @abstractmethod
    def _match(self, path: str) -> PortRoute | None:
        """The route of a path; None if there is none."""

    @abstractmethod
    async def _dispatch(self, request: web.BaseRequest, route: Any) -> web.StreamResponse:
        """The answer to a request that may be made.

        Raises:
            RequestError: the answer is an error.
        """

    def _error(self, error: RequestError) -> web.Response:
        """The answer to a request that failed before anything was sent."""
        return error_response(error)

    def _plain_error(self, status: int, text: str) -> web.Response:
        """The answer of an error that is no `RequestError`."""
        return plain_error(status, text)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port is in use.
        """
        config, guard, place = self._service.config, self._guard, self._place
        await listen(
            self._runner,
            place.host,
            place.port,
            guard.flag,
            is_shared=config.num_frontends > 1 and place.is_shared,
            tls=guard.tls.context if guard.tls is not None else None,
            handshake_timeout_s=config.http_limits.header_timeout_s,
        )
        logger.info("Started %s at %s:%d", place.title, place.host, self.port)

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
            response = self._error(error)
        except ConnectionError:
            # The client is gone. A returned response is not sent; a raised error would be
            # logged.
            response = self._plain_error(400, "")
            response.force_close()
        except HttpProcessingError as error:
            # The body began well and then stalled or broke HTTP.
            if not isinstance(error, BodyTimeoutError):
                fault_logger.error("%s", request.remote, exc_info=error)
            response = refusal(error.code or 400, error.message)
        except Exception:
            logger.exception("%s %s failed", request.method, request.raw_path)
            response = self._plain_error(500, INTERNAL)
        finally:
            self._busy.discard(request.protocol)
        if self._service.admission.is_draining and not response.prepared:
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        route = self._match(path_of(request.raw_path))
        if route is None:
            return self._plain_error(404, "Not Found")
        if not self._policy.is_open:
            refused = self._policy.refusal(route.category, request.headers.get)
            if refused is not None:
                return self._refused(refused)
        if request.method not in route.methods:
            return self._plain_error(405, "Method Not Allowed")
        return await self._dispatch(request, route)

    def _refused(self, refused: Refusal) -> web.Response:
        response = self._plain_error(refused.http_status, refused.text)
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


async def listen(
    runner: web.ServerRunner, host: str, port: int, flag: str, **options: Any
) -> None:
    """Open a `_Site` with ``options``.

    Raises:
        ConfigError: the address is in use or not allowed; names ``flag`` as the remedy.
    """
    await runner.setup()
    try:
        await _Site(runner, host, port, **options).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another {flag}."
        ) from None
