"""One front end from configuration to its end: models, ports, drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from trimaran.comm.messages.messages import Command
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.server.config import FrontendConfig
from trimaran.server.engines.client import EngineClient
from trimaran.server.inference.registry import ModelRegistry
from trimaran.server.metrics.group_board import GroupBoard
from trimaran.server.metrics.host_metrics import HostOptions
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.ports import Ports
from trimaran.server.served_models import FollowedModels, OwnModels, ServedModels
from trimaran.server.service import Service
from trimaran.server.settings import LogSettings
from trimaran.server.stall_watch import StallWatch

logger = logging.getLogger(__name__)


class Frontend:
    """Serves from the time that all models are ready until the shutdown command.

    Until then the ports are closed, so that "connection refused" means "still loading".
    Afterwards they stay open, even when engines die.
    """

    def __init__(self, config: FrontendConfig, link: SupervisorLink) -> None:
        self._config = config
        self._link = link
        self._metrics = Metrics(
            config.metrics_config,
            HostOptions(
                interval_s=config.metrics_interval_s,
                has_cpu=config.allow_cpu_metrics,
                has_gpu=config.allow_gpu_metrics,
            ),
        )
        self._engines = EngineClient(config, self._metrics)
        self._board = GroupBoard()
        self._metrics.show_board(self._board)
        self._registry = ModelRegistry(strict_readiness=config.strict_readiness)
        self._log_settings = LogSettings(config.log_verbose_level, config.log_kinds)
        parts = config, link, self._engines, self._board, self._metrics, self._registry
        self._models: ServedModels
        if config.is_first:
            self._models = OwnModels(*parts)
        else:
            self._models = FollowedModels(*parts, self._log_settings)
        self._shutdown = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None
        self._service: Service | None = None
        self._ports: Ports | None = None
        self._stalls = StallWatch()

    async def run(self) -> None:
        """Serve; returns after the shutdown command.

        Raises:
            ConfigError: the repository cannot be served, or a port is in use.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), self._take_commands)
        self._link.state("loading", f"reading models of {self._config.model_repository}")
        await self._models.begin()
        await self._engines.start()
        self._link.state("loading", "waiting for the engines")
        if await self._unless_shut_down(self._models.finish()):
            await self._serve()
        await self._models.close()
        await self._engines.close()

    async def _unless_shut_down(self, work: Coroutine[Any, Any, None]) -> bool:
        """Await some work; False if the shutdown comes first."""
        task = asyncio.ensure_future(work)
        shutdown = asyncio.ensure_future(self._shutdown.wait())
        await asyncio.wait({task, shutdown}, return_when=asyncio.FIRST_COMPLETED)
        shutdown.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def _serve(self) -> None:
        config, registry = self._config, self._registry
        self._service = service = Service(
            config, registry, self._metrics, self._log_settings, board=self._board
        )
        await self._models.attach(service)
        self._ports = ports = Ports(service)
        await ports.start()
        names = ", ".join(f"{m.name}:{m.version}" for m in registry.models())
        logger.info("Serving models %s", names or "(none)")
        facts = {"models": [model.name for model in registry.models()]}
        self._link.state("ready", facts=facts)
        self._stalls.start()
        self._link.answer_while(self._stalls.is_turning)
        await self._unless_shut_down(self._models.follow())
        self._stalls.stop()
        await ports.stop()

    # ---- the supervisor's commands ------------------------------------------------------

    def _take_commands(self) -> None:
        for command in self._link.commands():
            self._execute(command)

    def _execute(self, command: Command) -> None:
        if command.verb == "shutdown":
            self._shutdown.set()
        elif command.verb == "drain" and self._drain is None:
            timeout_s = float(command.arguments.get("timeout_s", self._config.exit_timeout_s))
            drain = self._drain_within(timeout_s, self._engines.num_lost)
            self._drain = asyncio.ensure_future(drain)
        elif command.verb == "group_state":
            self._board.update(str(command.arguments["group"]), command.arguments)
            self._engines.on_group_state(**command.arguments)
        elif command.verb == "reply":
            self._models.on_reply(command.arguments)

    async def _drain_within(self, timeout_s: float, num_lost_before: int) -> None:
        """Admit no requests, close idle connections, and report when running requests have
        ended.
        """
        num_unfinished = 0
        if self._service is not None:
            admission = self._service.admission
            admission.start_draining()
            if self._ports is not None:
                self._ports.close_idle_connections()
            logger.info("Draining: %d requests are running", admission.num_running)
            await self._models.give_up()
            try:
                await asyncio.wait_for(admission.wait_idle(), timeout_s)
            except asyncio.TimeoutError:
                num_unfinished = admission.num_running
                await admission.abort_running(timeout_s)
        self._engines.expect_the_end()
        facts: dict[str, Any] = {
            "num_unfinished": num_unfinished,
            "num_lost": self._engines.num_lost - num_lost_before,
        }
        self._link.state("drained", facts=facts)
