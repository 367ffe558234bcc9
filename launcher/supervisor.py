"""The supervisor: starts the front end and the worker groups, watches them, ends them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import resource
import secrets
import signal
import sys
from typing import Any

from trimaran.comm.address import Address
from trimaran.comm.errors import ConfigError
from trimaran.comm.messages import ChildState, Command
from trimaran.launcher.banner import print_endpoints
from trimaran.launcher.children import Children, describe_signal
from trimaran.launcher.config import ServeConfig
from trimaran.launcher.group import Failure, Group, GroupEvents, GroupState
from trimaran.launcher.group_specs import Programs, frontend_spec, worker_spec
from trimaran.launcher.links import Link, LinkEvents, listen
from trimaran.launcher.log_pump import LogPump
from trimaran.launcher.mpi_launch import Mpi
from trimaran.launcher.process_tree import adopt_orphans, kill_and_reap_all
from trimaran.launcher.restart import RestartBudget
from trimaran.launcher.run_dir import RunDir

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_CONFIG = 2
_DRAIN_MARGIN_S = 2.0
"""The front end ends its own drain in time; this is for one that hangs."""

_LAST_WORDS_S = 2.0
"""Drain after a failure: nothing can finish, but clients should get an answer."""

_SHUTDOWN_GRACE_S = 3.0
_ANNOUNCE_S = 0.1
_MAX_OPEN_FILES = 65536


class Supervisor:
    """Runs one server from start to end. One thread; knows nothing of MPI or tensors.

    Every process of the server is below this one, and none outlives it: each holds a
    connection to it and exits when that closes, and direct children are killed with it.
    """

    def __init__(
        self, config: ServeConfig, mpi: Mpi | None, programs: Programs | None = None
    ) -> None:
        self._config = config
        self._mpi = mpi
        self._programs = programs or Programs.installed()
        self._budget = RestartBudget(config.restart)
        self._signals: list[int] = []
        self._failure: Failure | None = None
        self._is_announced = False
        self._is_ending = False
        self._was_cut_short = False

    def run(self) -> int:
        """Serve until a signal or a failure; the exit code."""
        adopt_orphans()
        _allow_many_connections()
        run_dir = RunDir()
        try:
            return asyncio.run(self._run(run_dir))
        finally:
            left = kill_and_reap_all()
            if left:
                logger.error("processes that would not end: %s", left)
            run_dir.remove()

    async def _run(self, run_dir: RunDir) -> int:
        loop = asyncio.get_running_loop()
        pump = LogPump(loop, self._log_sinks())
        _log_through(pump)
        try:
            return await self._serve(run_dir, Children(loop, pump.write_fd))
        finally:
            pump.close()
            _log_through(sys.stderr)

    async def _serve(self, run_dir: RunDir, children: Children) -> int:
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._stopped = asyncio.Event()
        self._forced = asyncio.Event()
        self._make_groups(run_dir, children)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # `nohup` asks for SIGHUP to be ignored.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        events = LinkEvents(self._on_hello, self._on_state, self._on_lost)
        servers = [await listen(sock, self._token, events) for sock in self._listeners]
        for group in self._groups:
            group.start()
        await self._wake.wait()
        self._is_ending = True
        await self._end()
        for server in servers:
            server.close()
        code = self._exit_code()
        logger.info("ended with exit code %d", code)
        return code

    def _make_groups(self, run_dir: RunDir, children: Children) -> None:
        self._token = secrets.token_hex(16)
        address = run_dir.socket("supervisor")
        self._listeners = [Address.parse(address).listen()]
        rank_address = address
        if self._config.advertise_address:
            self._listeners.append(Address(host="0.0.0.0").listen())
            port = self._listeners[-1].getsockname()[1]
            rank_address = f"tcp:{self._config.advertise_address}:{port}"
        engine_address = run_dir.socket("frontend-0")
        config = dataclasses.replace(
            self._config,
            frontend=dataclasses.replace(
                self._config.frontend, engine_listen=(engine_address,), token=self._token
            ),
        )
        events = GroupEvents(
            on_connected=self._on_connected,
            on_ready=self._on_ready,
            on_drained=self._on_drained,
            on_failure=self._on_failure,
            on_stopped=self._on_stopped,
        )
        self._frontend = Group(
            frontend_spec(config, self._programs, (address, self._token)), children, events
        )
        self._workers = [
            Group(
                worker_spec(
                    config, group, self._mpi, self._programs, (rank_address, self._token)
                ),
                children,
                events,
            )
            for group in config.groups
        ]
        self._groups = [self._frontend, *self._workers]

    # ---- events -------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            logger.info("received %s: draining", describe_signal(number))
            self._wake.set()
        else:
            logger.warning("received %s again: ending at once", describe_signal(number))
            self._forced.set()

    def _on_hello(self, link: Link) -> None:
        group = self._group_of(link)
        if group is None:
            link.close()
        else:
            group.on_hello(link)

    def _on_state(self, link: Link, state: ChildState) -> None:
        group = self._group_of(link)
        if group is not None:
            group.on_state(link, state)

    def _on_lost(self, link: Link) -> None:
        group = self._group_of(link)
        if group is not None:
            group.on_lost(link)

    def _group_of(self, link: Link) -> Group | None:
        assert link.hello is not None
        if link.hello.role == "frontend":
            return self._frontend
        return next((g for g in self._workers if g.spec.name == link.hello.group), None)

    def _on_connected(self, group: Group) -> None:
        if group is self._frontend and group.incarnation > 0:
            for worker in self._workers:
                self._tell_state(worker, _STATE_WORDS[worker.state])

    def _on_ready(self, group: Group) -> None:
        logger.info("%s: ready", group.spec.title)
        if group is not self._frontend:
            self._tell_state(group, "up")
        is_serving = all(each.state is GroupState.READY for each in self._groups)
        if is_serving and not self._is_announced and not self._is_ending:
            self._is_announced = True
            # The last lines of a start: what children have just logged goes before them.
            loop = asyncio.get_running_loop()
            loop.call_later(_ANNOUNCE_S, print_endpoints, self._config)

    def _on_drained(self, group: Group, facts: dict[str, Any]) -> None:
        if facts.get("num_unfinished"):
            self._was_cut_short = True
            logger.warning("drain ended with %s requests unfinished", facts["num_unfinished"])
        self._drained.set()

    def _on_failure(self, group: Group, failure: Failure) -> None:
        if group is not self._frontend:
            state = "failed" if self._is_ending else "down"
            self._tell_state(group, state, failure.text)
        if self._is_ending:
            logger.error("%s: %s", group.spec.title, failure.text)
            self._on_stopped(group)
            return
        loop = asyncio.get_running_loop()
        delay = None if failure.is_final else self._budget.take(loop.time())
        if delay is None:
            why = self._why_final(failure)
            logger.error("%s: %s; %s", group.spec.title, failure.text, why)
            self._failure = failure
            self._wake.set()
            return
        logger.error("%s: %s; restart in %.1f s", group.spec.title, failure.text, delay)
        loop.call_later(delay, self._restart, group)

    def _why_final(self, failure: Failure) -> str:
        if failure.is_final:
            return "not started again"
        if self._config.restart.max_restarts == 0:
            return "not started again: restarts are off"
        return f"not started again: {self._budget} are used up"

    def _restart(self, group: Group) -> None:
        if not self._is_ending:
            group.start()

    def _on_stopped(self, group: Group) -> None:
        if self._is_ending and all(each.state is GroupState.DOWN for each in self._groups):
            self._stopped.set()
        if group is self._frontend:
            self._drained.set()

    def _tell_state(self, group: Group, state: str, text: str = "") -> None:
        arguments = {
            "group": group.spec.name,
            "state": state,
            "text": text,
            "num_restarts": max(0, group.incarnation),
        }
        self._frontend.send(Command(verb="group_state", arguments=arguments))

    # ---- the end ------------------------------------------------------------------------

    async def _end(self) -> None:
        """Drain, then end every process in order, then by force; a second signal skips on."""
        if self._frontend.state is GroupState.READY:
            await self._drain()
        for group in self._groups:
            group.stop()
        if all(group.state is GroupState.DOWN for group in self._groups):
            return
        if not await self._unless_forced(self._stopped, _SHUTDOWN_GRACE_S):
            slow = [g.spec.title for g in self._groups if g.state is not GroupState.DOWN]
            logger.warning("killing what has not ended: %s", ", ".join(slow))
            for group in self._groups:
                group.kill()
            await self._within(self._stopped, _SHUTDOWN_GRACE_S)

    async def _drain(self) -> None:
        timeout_s = self._config.exit_timeout_s
        if self._failure is not None:
            timeout_s = min(timeout_s, _LAST_WORDS_S)
        for worker in self._workers:
            if worker.state is GroupState.DOWN:
                # Its requests would wait out the drain for a restart that will not come.
                self._tell_state(worker, "failed")
        self._drained.clear()
        self._frontend.send(Command(verb="drain", arguments={"timeout_s": timeout_s}))
        if not await self._unless_forced(self._drained, timeout_s + _DRAIN_MARGIN_S):
            self._was_cut_short = True
            if not self._forced.is_set():
                logger.error("front end: not drained after %g s", timeout_s + _DRAIN_MARGIN_S)

    async def _unless_forced(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Wait for ``event``; False after ``timeout_s`` or as soon as a signal forces."""
        waits = [asyncio.create_task(e.wait()) for e in (event, self._forced)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return event.is_set()

    async def _within(self, event: asyncio.Event, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except asyncio.TimeoutError:
            pass

    def _exit_code(self) -> int:
        if self._failure is not None:
            return EXIT_CONFIG if self._failure.is_config_error else EXIT_FAILURE
        if self._forced.is_set():
            return 128 + self._signals[-1]
        return EXIT_FAILURE if self._was_cut_short else 0

    def _log_sinks(self) -> list[int]:
        sinks = [sys.stderr.fileno()]
        path = self._config.log.file
        if path:
            try:
                sinks.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
            except OSError as error:
                raise ConfigError(
                    f"--log-file {path}: {error.strerror}. Name a file that can be written."
                ) from None
        return sinks


_STATE_WORDS = {
    GroupState.DOWN: "down",
    GroupState.STARTING: "down",
    GroupState.READY: "up",
    GroupState.DYING: "down",
    GroupState.STOPPING: "down",
}


def _allow_many_connections() -> None:
    """Let the front end, which inherits this limit, hold as many sockets as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _log_through(stream: Any) -> None:
    """Send this process's log lines to another stream."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)
