"""The supervisor: starts the front end and the worker groups, watches them, ends them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from trimaran.comm.messages.messages import ChildRequest, ChildState, Command
from trimaran.launcher.config import ServeConfig
from trimaran.launcher.starters.mpi_launch import Mpi
from trimaran.launcher.supervisor.child_connections import (
    ChildConnection,
    ConnectionEvents,
    listen,
)
from trimaran.launcher.supervisor.group import Failure, Group, GroupEvents, GroupState
from trimaran.launcher.supervisor.group_control import GroupControl, GroupResolver
from trimaran.launcher.supervisor.group_specs import Programs, SpecMaker
from trimaran.launcher.supervisor.group_table import GroupTable
from trimaran.launcher.supervisor.readiness import announce, withdraw
from trimaran.launcher.supervisor.runtime import ChildSockets, Runtime, run

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_CONFIG = 2
_DRAIN_MARGIN_S = 2.0
"""Added to the drain for a front end that hangs; others end their drain in time."""

_LAST_WORDS_S = 2.0
"""Longest drain after a failure: no request can finish, but clients should get an answer."""

_SHUTDOWN_GRACE_S = 3.0
_FORCED_POLL_S = 0.05
_ANNOUNCE_S = 0.1


def supervise(
    config: ServeConfig,
    mpi: Mpi | None,
    programs: Programs,
    resolver: GroupResolver | None = None,
) -> int:
    """Run one server until a signal or a failure ends it; the exit code.

    ``mpi`` starts the groups that need an mpirun. ``resolver`` makes groups of models that are
    loaded while serving.

    Raises:
        ConfigError: a folder or the log file cannot be created.
    """

    async def serve(runtime: Runtime) -> int:
        sockets = ChildSockets(config, runtime.run_dir)
        maker = SpecMaker(config, mpi, programs, sockets.addresses, runtime.session_dirs)
        return await Supervisor(config, maker, runtime, resolver).run(sockets)

    withdraw(config)  # left by a server that was killed
    return run(config, serve)


class Supervisor:
    """Runs one server from start to end. One thread; free of MPI and tensors.

    Every process of the server is a descendant of this process, and no descendant outlives this
    process. Each descendant holds a connection to this process and exits when the connection
    closes; the kernel kills direct children.
    """

    def __init__(
        self,
        config: ServeConfig,
        maker: SpecMaker,
        runtime: Runtime,
        resolver: GroupResolver | None,
    ) -> None:
        """``resolver`` makes groups of models that are loaded while serving."""
        self._config = config
        self._shutdown = runtime.shutdown
        self._show = runtime.log.show
        events = GroupEvents(
            on_connected=self._on_connected,
            on_ready=self._on_ready,
            on_drained=self._on_drained,
            on_failure=self._on_failure,
            on_stopped=self._on_stopped,
            on_down=self._on_down,
        )
        self._table = GroupTable(
            maker, runtime.children, runtime.session_dirs, events, config.restart
        )
        self._table.add(config.groups)
        self._control = GroupControl(self._table, resolver)
        self._failure: Failure | None = None
        self._is_announced = False
        self._is_ending = False
        self._was_cut_short = False
        self._draining: set[Group] = set()
        self._drained = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self, sockets: ChildSockets) -> int:
        """Serve until a signal or a failure; the exit code."""
        events = ConnectionEvents(
            self._on_hello, self._on_state, self._on_request, self._on_lost
        )
        token = sockets.addresses.token
        servers = [await listen(sock, token, events) for sock in sockets.listeners]
        for group in list(self._table):
            group.start()
        await self._shutdown.begun.wait()
        self._is_ending = True
        withdraw(self._config)
        await self._end()
        for server in servers:
            server.close()
        code = self._exit_code()
        logger.info("ended with exit code %d", code)
        return code

    # ---- events -------------------------------------------------------------------------

    def _on_hello(self, connection: ChildConnection) -> None:
        group = self._table.group_of(connection)
        if group is None:
            connection.close()
        else:
            group.on_hello(connection)

    def _on_state(self, connection: ChildConnection, state: ChildState) -> None:
        group = self._table.group_of(connection)
        if group is not None and group is self._table.orchestrator and state.state == "group":
            self._table.spawn_client.on_event(state.facts)
        elif group is not None:
            group.on_state(connection, state)

    def _on_request(self, connection: ChildConnection, request: ChildRequest) -> None:
        if (
            self._table.group_of(connection) is self._table.first_frontend
            and not self._is_ending
        ):
            self._control.handle(connection, request)

    def _on_lost(self, connection: ChildConnection) -> None:
        group = self._table.group_of(connection)
        if group is not None:
            group.on_lost(connection)

    def _on_connected(self, group: Group) -> None:
        if group in self._table.frontends:
            if group is self._table.first_frontend and group.incarnation > 0:
                self._control.on_new_frontend(group.connection)
            self._table.tell_all()

    def _on_ready(self, group: Group) -> None:
        logger.info("%s: ready", group.spec.title)
        if group is self._table.orchestrator:
            self._table.spawn_client.on_up()
        self._control.on_ready(group)
        self._table.tell(group)
        if self._table.is_serving and not self._is_announced and not self._is_ending:
            self._is_announced = True
            # The last lines of a start: lines that children have just logged come first.
            loop = asyncio.get_running_loop()
            loop.call_later(_ANNOUNCE_S, self._announce)

    def _announce(self) -> None:
        if not self._is_ending:
            announce(self._config, self._show)

    def _on_down(self, group: Group) -> None:
        if group is self._table.orchestrator:
            self._table.spawn_client.on_down()
        self._table.tell(group)

    def _on_drained(self, group: Group, facts: dict[str, Any]) -> None:
        if facts.get("num_unfinished"):
            self._was_cut_short = True
            logger.warning(
                "drain ended with %s requests unfinished after %g s; raise --exit-timeout if "
                "they need longer", facts["num_unfinished"], self._config.exit_timeout_s,
            )  # fmt: skip
        if facts.get("num_lost"):
            self._was_cut_short = True
            logger.warning(
                "%s requests failed during the drain: their group had died", facts["num_lost"]
            )
        self._note_drained(group)

    def _on_failure(self, group: Group, failure: Failure) -> None:
        if self._is_ending:
            logger.error("%s: %s", group.spec.title, failure.text)
            if group in self._draining:
                # The number of its unfinished requests is unknown.
                self._was_cut_short = True
            self._table.mark_failed(group)
            self._table.tell(group)
            self._on_stopped(group)
            return
        if self._control.is_stopping(group):
            self._control.on_stopped(group)
            return
        what = failure.text.removesuffix(".")  # the log line continues
        if self._control.fail_load(group):
            logger.error("%s: %s; the load has failed", group.spec.title, what)
            return
        loop = asyncio.get_running_loop()
        # Clients may have caused the death of a front end that served, and must not end all.
        is_free = group in self._table.frontends and group.has_served
        budget = self._table.budget(group)
        delay = None if failure.is_final else budget.take(loop.time(), is_free=is_free)
        if delay is None:
            why = self._why_final(group, failure)
            logger.error("%s: %s; %s", group.spec.title, what, why)
            self._table.mark_failed(group)
            self._table.tell(group)
            self._failure = failure
            self._shutdown.begin()
            return
        logger.error("%s: %s; restart in %.1f s", group.spec.title, what, delay)
        self._table.note_restart(group, delay)
        self._table.tell(group)
        loop.call_later(delay, self._restart, group)

    def _why_final(self, group: Group, failure: Failure) -> str:
        if failure.is_final:
            return "not started again"
        if self._config.restart.max_restarts == 0:
            return "not started again: restarts are off (--restart, --max-restarts)"
        budget = self._table.budget(group)
        return (
            f"not started again: {budget} are used up. Mend what the log says of each, or "
            "raise --max-restarts"
        )

    def _restart(self, group: Group) -> None:
        is_known = group in list(self._table)  # otherwise the group was stopped meanwhile
        if is_known and not self._is_ending and not self._control.is_stopping(group):
            self._table.note_restart(group, 0.0)
            group.start()
            self._table.tell(group)

    def _on_stopped(self, group: Group) -> None:
        self._control.on_stopped(group)
        self._stopped.set()
        self._note_drained(group)

    # ---- the end ------------------------------------------------------------------------

    async def _end(self) -> None:
        """Drain, then end every process in order, then by force; a second signal forces."""
        await self._drain()
        # Ranks first: a rank that outlives its front end or its orchestrator logs a lost
        # connection. Drained front ends expect the end of the ranks.
        table = self._table
        await self._end_groups(list(table.workers.values()))
        await self._end_groups(table.frontends)
        if table.orchestrator is not None:
            await self._end_groups([table.orchestrator])

    async def _end_groups(self, groups: list[Group]) -> None:
        for group in groups:
            group.stop()
        if not await self._until_down(groups, may_force=True):
            slow = [g.spec.title for g in groups if g.state is not GroupState.DOWN]
            logger.warning("killing what has not ended: %s", ", ".join(slow))
            for group in groups:
                group.kill()
            await self._until_down(groups, may_force=False)

    async def _until_down(self, groups: list[Group], *, may_force: bool) -> bool:
        """Wait for the end of groups; False after the grace or when a signal forces."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SHUTDOWN_GRACE_S
        while not self._table.are_down(groups):
            self._stopped.clear()
            left_s = deadline - loop.time()
            if left_s <= 0 or (may_force and self._shutdown.forced.is_set()):
                return False
            await self._first_of(self._stopped, self._shutdown.forced, left_s)
            if not may_force and self._shutdown.forced.is_set():
                await asyncio.sleep(min(left_s, _FORCED_POLL_S))
        return True

    async def _drain(self) -> None:
        timeout_s = self._config.exit_timeout_s
        workers = self._table.workers.values()
        if self._failure is not None and not any(group.is_serving for group in workers):
            timeout_s = min(timeout_s, _LAST_WORDS_S)
        self._drained.clear()
        # A loading front end, which has no requests to finish, gets the message too. The
        # message is sent first, so that later failures of requests count as cut short.
        for frontend in self._table.frontends:
            frontend.send(Command(verb="drain", arguments={"timeout_s": timeout_s}))
        for worker in workers:
            if worker.state is GroupState.DOWN and not self._table.has_failed(worker):
                # Its requests would wait for a restart until the drain ends.
                self._table.mark_failed(worker)
                self._table.tell(worker)
        self._draining = {g for g in self._table.frontends if g.state is GroupState.READY}
        if not self._draining:
            return
        await self._first_of(self._drained, self._shutdown.forced, timeout_s + _DRAIN_MARGIN_S)
        if not self._drained.is_set():
            self._was_cut_short = True
            if not self._shutdown.forced.is_set():
                late = ", ".join(sorted(group.spec.title for group in self._draining))
                logger.error("%s: not drained after %g s", late, timeout_s + _DRAIN_MARGIN_S)

    def _note_drained(self, group: Group) -> None:
        """A front end has no running requests left."""
        self._draining.discard(group)
        if not self._draining:
            self._drained.set()

    async def _first_of(
        self, one: asyncio.Event, other: asyncio.Event, timeout_s: float
    ) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (one, other)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _exit_code(self) -> int:
        if self._failure is not None:
            return EXIT_CONFIG if self._failure.is_config_error else EXIT_FAILURE
        if self._shutdown.forced.is_set():
            return 128 + self._shutdown.last_signal
        return EXIT_FAILURE if self._was_cut_short else 0
