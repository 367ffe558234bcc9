"""The supervisor: starts the front end and the worker groups, watches them, ends them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.messages.messages import ChildRequest, ChildState, Command
from trimaran.comm.transport.sockets import Address
from trimaran.launcher.config import ServeConfig
from trimaran.launcher.starters.children import Children, describe_signal
from trimaran.launcher.starters.mpi_launch import Mpi
from trimaran.launcher.starters.process_tree import adopt_orphans, kill_and_reap_all
from trimaran.launcher.starters.run_dir import MpiScratch, RunDir
from trimaran.launcher.supervisor.child_connections import Link, LinkEvents, listen
from trimaran.launcher.supervisor.group import Failure, Group, GroupEvents, GroupState
from trimaran.launcher.supervisor.group_control import GroupControl, GroupResolver
from trimaran.launcher.supervisor.group_specs import Addresses, Programs, SpecMaker
from trimaran.launcher.supervisor.group_table import Roster
from trimaran.launcher.supervisor.log_pump import LogPump
from trimaran.launcher.supervisor.readiness import announce, withdraw

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_CONFIG = 2
_DRAIN_MARGIN_S = 2.0
"""The front end ends its own drain in time; this is for one that hangs."""

_LAST_WORDS_S = 2.0
"""Drain after a failure: nothing can finish, but clients should get an answer."""

_SHUTDOWN_GRACE_S = 3.0
_FORCED_POLL_S = 0.05
_ANNOUNCE_S = 0.1
_MAX_OPEN_FILES = 65536
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """Runs one server from start to end. One thread; knows nothing of MPI or tensors.

    Every process of the server is below this one, and none outlives it: each holds a
    connection to it and exits when that closes, and direct children are killed with it.
    """

    def __init__(
        self,
        config: ServeConfig,
        mpi: Mpi | None,
        programs: Programs | None = None,
        resolver: GroupResolver | None = None,
    ) -> None:
        """``resolver`` makes groups of the models that are loaded while serving."""
        self._config = config
        self._mpi = mpi
        self._programs = programs or Programs.installed()
        self._resolver = resolver
        self._signals: list[int] = []
        self._failure: Failure | None = None
        self._is_announced = False
        self._is_ending = False
        self._was_cut_short = False
        self._draining: set[Group] = set()

    def run(self) -> int:
        """Serve until a signal or a failure; the exit code."""
        withdraw(self._config)  # that of a server which was killed
        adopt_orphans()
        _allow_many_connections()
        with contextlib.ExitStack() as cleanup:
            return asyncio.run(self._run(cleanup))

    async def _run(self, cleanup: contextlib.ExitStack) -> int:
        """``cleanup`` is done once the loop has ended."""
        loop = asyncio.get_running_loop()
        self._catch_signals(loop)
        # Not before: a signal that nobody catches would leave the folders behind.
        run_dir = RunDir()
        cleanup.callback(run_dir.remove)
        self._scratch = MpiScratch(run_dir)
        cleanup.callback(self._scratch.remove)
        cleanup.callback(_end_all)
        pump = LogPump(loop, self._log_sinks(), sys.stdout.fileno())
        self._show = pump.show
        _log_through(pump)
        children = Children(loop, pump.write_fd)
        try:
            return await self._serve(run_dir, children)
        finally:
            _hold_signals()
            children.close()
            pump.close()
            _log_through(sys.stderr)

    async def _serve(self, run_dir: RunDir, children: Children) -> int:
        self._drained = asyncio.Event()
        self._stopped = asyncio.Event()
        self._make_groups(run_dir, children)
        events = LinkEvents(self._on_hello, self._on_state, self._on_request, self._on_lost)
        servers = [await listen(sock, self._token, events) for sock in self._listeners]
        for group in list(self._roster):
            group.start()
        await self._wake.wait()
        self._is_ending = True
        withdraw(self._config)
        await self._end()
        for server in servers:
            server.close()
        code = self._exit_code()
        logger.info("ended with exit code %d", code)
        return code

    def _catch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        self._wake = asyncio.Event()
        self._forced = asyncio.Event()
        for number in _SIGNALS:
            # `nohup` asks for SIGHUP to be ignored.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    def _make_groups(self, run_dir: RunDir, children: Children) -> None:
        self._token = secrets.token_hex(16)
        addresses = self._open_addresses(run_dir)
        events = GroupEvents(
            on_connected=self._on_connected,
            on_ready=self._on_ready,
            on_drained=self._on_drained,
            on_failure=self._on_failure,
            on_stopped=self._on_stopped,
            on_down=self._on_down,
        )
        maker = SpecMaker(self._config, self._mpi, self._programs, addresses, self._scratch)
        self._roster = Roster(maker, children, self._scratch, events, self._config.restart)
        self._roster.add(self._config.groups)
        self._control = GroupControl(self._roster, self._resolver)

    def _open_addresses(self, run_dir: RunDir) -> Addresses:
        """The sockets on which children are expected, by their addresses."""
        near = run_dir.socket("supervisor")
        self._listeners = [Address.parse(near).listen()]
        indices = range(self._config.frontend.num_frontends)
        addresses = Addresses(
            self._token,
            near,
            tuple(run_dir.socket(f"frontend-{index}") for index in indices),
            between_frontends=run_dir.socket("frontends"),
        )
        host = self._config.advertise_address
        if not host:
            return addresses
        self._listeners.append(Address(host="0.0.0.0").listen())
        port = self._listeners[-1].getsockname()[1]
        # Held, but not listened on: every incarnation of a front end opens its port.
        self._held = [_held_socket() for _ in indices]
        return dataclasses.replace(
            addresses,
            far_supervisor=f"tcp:{host}:{port}",
            far_frontends=tuple(f"tcp:{host}:{held.getsockname()[1]}" for held in self._held),
        )

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
        group = self._roster.group_of(link)
        if group is None:
            link.close()
        else:
            group.on_hello(link)

    def _on_state(self, link: Link, state: ChildState) -> None:
        group = self._roster.group_of(link)
        if group is not None and group is self._roster.orchestrator and state.state == "group":
            self._roster.spawn_link.on_event(state.facts)
        elif group is not None:
            group.on_state(link, state)

    def _on_request(self, link: Link, request: ChildRequest) -> None:
        if self._roster.group_of(link) is self._roster.first_frontend and not self._is_ending:
            self._control.handle(link, request)

    def _on_lost(self, link: Link) -> None:
        group = self._roster.group_of(link)
        if group is not None:
            group.on_lost(link)

    def _on_connected(self, group: Group) -> None:
        if group in self._roster.frontends:
            if group is self._roster.first_frontend and group.incarnation > 0:
                self._control.on_new_frontend(group.link)
            self._roster.tell_all()

    def _on_ready(self, group: Group) -> None:
        logger.info("%s: ready", group.spec.title)
        if group is self._roster.orchestrator:
            self._roster.spawn_link.on_up()
        self._control.on_ready(group)
        self._roster.tell(group)
        if self._roster.is_serving and not self._is_announced and not self._is_ending:
            self._is_announced = True
            # The last lines of a start: what children have just logged goes before them.
            loop = asyncio.get_running_loop()
            loop.call_later(_ANNOUNCE_S, self._announce)

    def _announce(self) -> None:
        if not self._is_ending:
            announce(self._config, self._show)

    def _on_down(self, group: Group) -> None:
        if group is self._roster.orchestrator:
            self._roster.spawn_link.on_down()
        self._roster.tell(group)

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
                # Nobody knows what it had not finished.
                self._was_cut_short = True
            self._roster.mark_failed(group)
            self._roster.tell(group)
            self._on_stopped(group)
            return
        if self._control.is_stopping(group):
            self._control.on_stopped(group)
            return
        what = failure.text.removesuffix(".")  # the line goes on
        if self._control.forgive(group):
            logger.error("%s: %s; the load has failed", group.spec.title, what)
            return
        loop = asyncio.get_running_loop()
        delay = None if failure.is_final else self._roster.budget(group).take(loop.time())
        if delay is None:
            why = self._why_final(group, failure)
            logger.error("%s: %s; %s", group.spec.title, what, why)
            self._roster.mark_failed(group)
            self._roster.tell(group)
            self._failure = failure
            self._wake.set()
            return
        logger.error("%s: %s; restart in %.1f s", group.spec.title, what, delay)
        self._roster.note_restart(group, delay)
        self._roster.tell(group)
        loop.call_later(delay, self._restart, group)

    def _why_final(self, group: Group, failure: Failure) -> str:
        if failure.is_final:
            return "not started again"
        if self._config.restart.max_restarts == 0:
            return "not started again: restarts are off (--restart, --max-restarts)"
        budget = self._roster.budget(group)
        return (
            f"not started again: {budget} are used up. Mend what the log says of each, or "
            "raise --max-restarts"
        )

    def _restart(self, group: Group) -> None:
        is_known = group in list(self._roster)  # else it was stopped meanwhile
        if is_known and not self._is_ending and not self._control.is_stopping(group):
            self._roster.note_restart(group, 0.0)
            group.start()
            self._roster.tell(group)

    def _on_stopped(self, group: Group) -> None:
        self._control.on_stopped(group)
        self._stopped.set()
        self._note_drained(group)

    # ---- the end ------------------------------------------------------------------------

    async def _end(self) -> None:
        """Drain, then end every process in order, then by force; a second signal skips on."""
        await self._drain()
        # Whoever outlives a process that it serves, or takes leave of, reports it lost: ranks
        # that are slower to hear of the end than a front end, spawned ranks without the
        # orchestrator. Drained front ends expect that the ranks leave.
        roster = self._roster
        await self._end_groups(list(roster.workers.values()))
        await self._end_groups(roster.frontends)
        if roster.orchestrator is not None:
            await self._end_groups([roster.orchestrator])

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
        while not self._roster.are_down(groups):
            self._stopped.clear()
            left_s = deadline - loop.time()
            if left_s <= 0 or (may_force and self._forced.is_set()):
                return False
            await self._first_of(self._stopped, self._forced, left_s)
            if not may_force and self._forced.is_set():
                await asyncio.sleep(min(left_s, _FORCED_POLL_S))
        return True

    async def _drain(self) -> None:
        timeout_s = self._config.exit_timeout_s
        workers = self._roster.workers.values()
        if self._failure is not None and not any(group.is_serving for group in workers):
            timeout_s = min(timeout_s, _LAST_WORDS_S)
        self._drained.clear()
        # One that is still loading has nothing to finish, but is to expect the end as well.
        # First of all, so that what fails from now on is known to be cut short.
        for frontend in self._roster.frontends:
            frontend.send(Command(verb="drain", arguments={"timeout_s": timeout_s}))
        for worker in workers:
            if worker.state is GroupState.DOWN and not self._roster.has_failed(worker):
                # Its requests would wait out the drain for a restart that will not come.
                self._roster.mark_failed(worker)
                self._roster.tell(worker)
        self._draining = {g for g in self._roster.frontends if g.state is GroupState.READY}
        if not self._draining:
            return
        await self._first_of(self._drained, self._forced, timeout_s + _DRAIN_MARGIN_S)
        if not self._drained.is_set():
            self._was_cut_short = True
            if not self._forced.is_set():
                late = ", ".join(sorted(group.spec.title for group in self._draining))
                logger.error("%s: not drained after %g s", late, timeout_s + _DRAIN_MARGIN_S)

    def _note_drained(self, group: Group) -> None:
        """A front end has nothing to finish any more."""
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
        if self._forced.is_set():
            return 128 + self._signals[-1]
        return EXIT_FAILURE if self._was_cut_short else 0

    def _log_sinks(self) -> dict[str, int]:
        sinks = {"stderr": sys.stderr.fileno()}
        path = self._config.log.file
        if path:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                sinks[f"--log-file {path}"] = os.open(path, flags, 0o644)
            except OSError as error:
                raise ConfigError(
                    f"--log-file {path}: {error.strerror}. Name a file that can be written."
                ) from None
        return sinks


def _allow_many_connections() -> None:
    """Let the front end, which inherits this limit, hold as many sockets as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _end_all() -> None:
    """End what is left of all processes."""
    left = kill_and_reap_all()
    if left:
        logger.error("processes that would not end: %s", left)


def _hold_signals() -> None:
    """Let nothing cut short what is left to clean up, nor change the exit code. Not by other
    handlers: the loop, as it closes, has moments without any, and some with half of one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _log_through(stream: Any) -> None:
    """Send this process's log lines to another stream."""
    # The first one: a file of this process's own stays what it is.
    for handler in logging.getLogger().handlers[:1]:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


def _held_socket() -> socket.socket:
    """A TCP port that others of this user may listen on and nobody else gets."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("0.0.0.0", 0))
    return held
