"""One front end from configuration to its end: models, ports, drain."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from trimaran.comm.messages import Command
from trimaran.comm.supervisor_link import SupervisorLink
from trimaran.server.config import FrontendConfig
from trimaran.server.engine_client import EngineClient
from trimaran.server.group_board import GroupBoard
from trimaran.server.grpc_server import GrpcServer
from trimaran.server.http_server import HttpServer, MetricsServer
from trimaran.server.inference import Model
from trimaran.server.log_settings import LogSettings
from trimaran.server.metrics import Metrics
from trimaran.server.model_repository import ModelRepository
from trimaran.server.pipeline import build_models
from trimaran.server.registry import ModelRegistry
from trimaran.server.service import Service

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.02
_GRPC_GRACE_S = 0.5


class Frontend:
    """Serves from the first time that all models are ready until told to shut down.

    Until then the ports are closed, so that "connection refused" means "still loading".
    Afterwards they stay open, whatever becomes of the engines.
    """

    def __init__(self, config: FrontendConfig, link: SupervisorLink) -> None:
        self._config = config
        self._link = link
        self._metrics = Metrics(config.metrics_config)
        self._engines = EngineClient(config, self._metrics)
        self._board = GroupBoard()
        self._shutdown = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None
        self._service: Service | None = None
        self._http: HttpServer | None = None

    async def run(self) -> None:
        """Serve; returns after the shutdown command.

        Raises:
            ConfigError: the repository cannot be served, or a port is in use.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), self._take_commands)
        self._link.state("loading", f"reading models of {self._config.model_repository}")
        started = time.monotonic()
        models = await self._build_models()
        await self._engines.start()
        if not await self._all_ready(models):
            return
        for model in models:
            elapsed_s = time.monotonic() - started
            self._metrics.set_load_duration(model.name, model.version, elapsed_s)
        await self._serve(models)
        await self._engines.close()

    async def _build_models(self) -> list[Model]:
        repository = ModelRepository.load(self._config.model_repository)
        for name in self._config.groups:
            for version in repository.models[name].versions:
                self._metrics.add_engine(name, str(version))
        models = await build_models(
            repository, self._engines, self._metrics, self._config.tokenizer_threads
        )
        return [self._metrics.measure(model) for model in models]

    async def _all_ready(self, models: list[Model]) -> bool:
        """Wait until all models could run; False if the shutdown comes first."""
        self._link.state("loading", "waiting for the engines")
        while not all(model.is_ready for model in models):
            try:
                await asyncio.wait_for(self._shutdown.wait(), _READY_POLL_S)
            except asyncio.TimeoutError:
                continue
            return False
        return True

    async def _serve(self, models: list[Model]) -> None:
        config = self._config
        registry = ModelRegistry(
            models,
            strict_readiness=config.strict_readiness,
            repository=Path(config.model_repository),
        )
        log_settings = LogSettings(config.log_verbose_level)
        self._service = service = Service(
            config, registry, self._metrics, log_settings, board=self._board
        )
        grpc = GrpcServer(service, config.grpc_address, config.grpc_port)
        http = HttpServer(service, config.http_address, config.http_port)
        metrics = MetricsServer(service, config.metrics_address, config.metrics_port)
        if config.allow_grpc:
            await grpc.start()
        if config.allow_http:
            await http.start()
            self._http = http
        if config.allow_metrics:
            await metrics.start()
        names = ", ".join(f"{m.name}:{m.version}" for m in registry.models())
        logger.info("Serving models %s", names)
        self._link.state("ready", facts={"models": [model.name for model in models]})
        await self._shutdown.wait()
        await grpc.stop(_GRPC_GRACE_S)
        await http.stop()
        await metrics.stop()

    # ---- the supervisor's commands ------------------------------------------------------

    def _take_commands(self) -> None:
        for command in self._link.commands():
            self._obey(command)

    def _obey(self, command: Command) -> None:
        if command.verb == "shutdown":
            self._shutdown.set()
        elif command.verb == "drain" and self._drain is None:
            timeout_s = float(command.arguments.get("timeout_s", self._config.exit_timeout_s))
            self._drain = asyncio.ensure_future(self._drain_within(timeout_s))
        elif command.verb == "group_state":
            self._board.update(str(command.arguments["group"]), command.arguments)
            self._engines.on_group_state(**command.arguments)

    async def _drain_within(self, timeout_s: float) -> None:
        """Admit nothing, close idle connections, and report when the rest is done."""
        num_unfinished = 0
        if self._service is not None:
            admission = self._service.admission
            admission.start_draining()
            if self._http is not None:
                self._http.close_idle_connections()
            logger.info("Draining: %d requests are running", admission.num_running)
            try:
                await asyncio.wait_for(admission.wait_idle(), timeout_s)
            except asyncio.TimeoutError:
                num_unfinished = admission.num_running
        self._engines.expect_the_end()
        facts: dict[str, Any] = {"num_unfinished": num_unfinished}
        self._link.state("drained", facts=facts)
