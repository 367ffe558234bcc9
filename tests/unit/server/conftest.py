"""Servers on real sockets with small models, for tests that speak to them as clients do."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.unit.server.small_models import (
    DOUBLE,
    ECHO,
    FAIL,
    RAW,
    REPEAT,
    SQUEEZE,
    DoubleModel,
    EchoModel,
    FailModel,
    RepeatModel,
    SqueezeModel,
)
from trimaran.server.access.control import AccessControl
from trimaran.server.config import FrontendConfig
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.grpc.server import GrpcServer
from trimaran.server.http.server import HttpServer, MetricsServer
from trimaran.server.inference.registry import ModelRegistry
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.service import Service

# Helper modules lie beside the tests, which are imported by path.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The text of an error body, which holds nothing else."""
        document = self.json
        assert list(document) == ["error"]
        return document["error"]

    @property
    def events(self) -> list[Any]:
        """The values of a server-sent event stream."""
        *events, rest = self.body.split(b"\n\n")
        assert rest == b""
        assert all(event.startswith(b"data: ") for event in events)
        return [json.loads(event[6:]) for event in events]


class RunningServer:
    """All servers of a front end in a thread with an event loop of its own."""

    def __init__(self, **config: Any) -> None:
        self.repeat = RepeatModel(REPEAT)
        self.asleep = EchoModel(ECHO.replace('"echo"', '"asleep"'))

        models = [
            EchoModel(ECHO),
            EchoModel(RAW),
            DoubleModel(DOUBLE),
            SqueezeModel(SQUEEZE),
            FailModel(FAIL),
            self.repeat,
            self.asleep,
        ]
        self.metrics = Metrics(config.pop("metrics_config", {}))
        self._config = FrontendConfig(model_repository="", **config)
        self._models = [self.metrics.measure(model) for model in models]
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One HTTP request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def post(self, path: str, value: Any, headers: dict[str, str] | None = None) -> Answer:
        """Post a JSON value, or bytes as they are."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return self.request("POST", path, body, headers)

    def get(self, path: str) -> Answer:
        """Get a path."""
        return self.request("GET", path)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds, however long that takes."""
        while not condition():
            time.sleep(0.005)

    async def _start(self) -> None:
        self.service = Service(self._config, ModelRegistry(self._models), self.metrics)
        config = self._config
        self.decoder = Decoder(config.http_max_input_bytes, config.grpc_max_message_bytes)
        self.access = access = AccessControl(config.access)
        self.http = HttpServer(self.service, self.decoder, "127.0.0.1", 0, access.http())
        self.grpc = GrpcServer(self.service, self.decoder, "127.0.0.1", 0, access.grpc())
        self._metrics_server = MetricsServer(self.service, "127.0.0.1", 0)
        await self.http.start()
        await self.grpc.start()
        await self._metrics_server.start()
        access.start()
        self.http_port = self.http.port
        self.http_url = f"127.0.0.1:{self.http.port}"
        self.grpc_url = f"127.0.0.1:{self.grpc.port}"
        self.metrics_url = f"http://127.0.0.1:{self._metrics_server.port}"

    def close(self) -> None:
        """End the servers and their thread."""
        self.run(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _stop(self) -> None:
        await self.access.stop()
        await self.grpc.stop(0)
        await self.http.stop()
        self.decoder.close()
        await self._metrics_server.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A shared server; every test leaves the server ready."""
    running = RunningServer()
    yield running
    running.close()


@pytest.fixture
def fresh_server() -> Iterator[RunningServer]:
    """A server for one test."""
    running = RunningServer()
    yield running
    running.close()
