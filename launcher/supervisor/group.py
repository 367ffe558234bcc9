"""A process group: the ranks of an engine, or a front end, which live and die together."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trimaran.comm.messages.messages import ChildConfig, ChildState, Command
from trimaran.launcher.starters.children import describe_signal, describe_status
from trimaran.launcher.starters.mpi_launch import exit_signal
from trimaran.launcher.starters.process_tree import descendants
from trimaran.launcher.starters.process_watch import ProcessWatch
from trimaran.launcher.starters.starter import (
    FRONTEND,
    ORCHESTRATOR,
    GroupSpec,
    Starter,
    StarterEvents,
)
from trimaran.launcher.supervisor.child_connections import ChildConnection
from trimaran.launcher.supervisor.signs_of_life import SignsOfLife

logger = logging.getLogger(__name__)

_NOTICE_S = 0.3
"""Within this time the starter has noticed a death and found the process that died first."""

_STARTER_END_S = 2.0
"""Time for the starter to end after its last process."""

_READ_S = 0.05
_STACKS_S = 0.3
"""Time for a silent front end to write its stacks before it is killed."""

_KILL_PERIOD_S = 0.05


class GroupState(Enum):
    """The state of a group."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    DYING = "dying"
    """A process ended; the rest is being ended."""

    STOPPING = "stopping"
    """The group was commanded to end."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause of a group's death."""

    text: str
    is_config_error: bool = False
    is_final: bool = False
    """A restart cannot help."""


@dataclass(frozen=True, slots=True)
class GroupEvents:
    """The callbacks of a group."""

    on_connected: Callable[[Group], None]
    """Every process has its configuration."""

    on_ready: Callable[[Group], None]
    on_drained: Callable[[Group, dict[str, Any]], None]
    on_failure: Callable[[Group, Failure], None]
    """All its processes have ended."""

    on_stopped: Callable[[Group], None]
    """All its processes have ended, as commanded."""

    on_down: Callable[[Group], None]
    """The group no longer serves: a process is gone, and the rest is being ended."""


class Group:
    """Starts its processes, follows their states, determines the cause of a death, ends the
    rest.
    """

    def __init__(self, spec: GroupSpec, starter: Starter, events: GroupEvents) -> None:
        self.spec = spec
        self.state = GroupState.DOWN
        self.incarnation = -1
        self.was_ready = False
        self.has_served = False
        """Whether the last incarnation was ready."""

        self.fault = ""
        """The cause of the last death."""

        self.fault_time = 0.0
        self._starter = starter
        self._events = events
        self._connections: dict[int, ChildConnection] = {}
        self._states: dict[int, ChildState] = {}
        self._left: set[int] = set()
        self._lost: ChildConnection | None = None
        self._failure: Failure | None = None
        self._signs = SignsOfLife(spec.hang_timeout_s, spec.stall_timeout_s)
        self._helpers = ProcessWatch(self._on_helper_end)
        self._timers: list[asyncio.TimerHandle] = []

    def start(self) -> None:
        """Start the next incarnation."""
        self.incarnation += 1
        self._connections, self._states, self._left = {}, {}, set()
        self._lost = self._failure = None
        self.state, self.has_served = GroupState.STARTING, False
        spec = self.spec
        events = StarterEvents(self._on_exit, self._on_start_failure, self._on_starter_lost)
        try:
            self._starter.start(self.incarnation, events)
        except OSError as error:
            # A restart may help: memory, disk space or a program may be available again.
            what = error.filename or spec.command[0]
            self._die(Failure(f"{what}: {error.strerror}", is_final=not self.was_ready))
            return
        pid = self._starter.pid
        what = f"pid {pid}" if pid else self._starter.title
        logger.info("%s: started %s", spec.title, what)
        self._after(spec.connect_timeout_s, self._on_connect_timeout)

    def send(self, command: Command) -> None:
        """Send to every process that is connected."""
        for connection in self._connections.values():
            connection.send(command)

    def stop(self) -> None:
        """Command every process to end; `kill` ends the remaining processes. Idempotent."""
        if self.state in (GroupState.DOWN, GroupState.DYING, GroupState.STOPPING):
            return
        is_loading = self.state is GroupState.STARTING and bool(self.spec.engines)
        self.state = GroupState.STOPPING
        self._cancel_timers()
        if is_loading or len(self._connections) < self.spec.world_size:
            # Loading ranks do not listen and have no requests to finish; a process that has not
            # connected cannot be reached.
            self.kill()
        else:
            self.send(Command(verb="shutdown"))

    def kill(self) -> None:
        """Kill every process of the group now; `on_stopped` or `on_failure` follows."""
        connections = list(self._connections.values())
        self._finish_when_gone()
        # Processes of other hosts cannot be killed from here: they end when the connection
        # closes. Processes of this host are dead by now, so no process logs a lost supervisor.
        for connection in connections:
            connection.close()

    @property
    def connection(self) -> ChildConnection:
        """The connection of its first process, which has connected."""
        return self._connections[0]

    @property
    def is_serving(self) -> bool:
        """Whether all its processes are ready and no process is known to be dying."""
        return self.state is GroupState.READY and self._lost is None

    def describe_ranks(self) -> list[dict[str, Any]]:
        """Every connected process: ``rank``, ``pid``, ``host`` and ``device``."""
        return [
            {
                "rank": rank,
                "pid": connection.pid,
                "host": connection.hello.host,
                "device": str(self._states[rank].facts.get("device", ""))
                if rank in self._states
                else "",
            }
            for rank, connection in sorted(self._connections.items())
        ]

    # ---- events of the connections -------------------------------------------------------

    def on_hello(self, connection: ChildConnection) -> None:
        """A process of this group has connected: send its configuration."""
        hello, world_size = connection.hello, self.spec.world_size
        is_of_this_start = hello.incarnation in (-1, self.incarnation)
        if self.state is not GroupState.STARTING or not is_of_this_start:
            connection.close()
            return
        if hello.world_size != world_size or not 0 <= hello.rank < world_size:
            self._die(self._wrong_world(hello.rank, hello.world_size))
        elif hello.rank in self._connections:
            self._die(self._wrong_world(hello.rank, 1))
        else:
            self._connections[hello.rank] = connection
            config = self.spec.make_config(self.incarnation, hello.rank)
            connection.send(ChildConfig(config=config))
            if len(self._connections) == world_size:
                self._cancel_timers()
                self._after(self.spec.startup_timeout_s, self._on_startup_timeout)
                self._watch_helpers()
                # Not at once: a process that dies with an unread ping loses its last message.
                self._after(self._signs.period_s, self._check_alive)
                self._events.on_connected(self)

    def on_state(self, connection: ChildConnection, state: ChildState) -> None:
        """A process of this group has a new state."""
        if self._connections.get(connection.rank) is not connection:
            return
        self._states[connection.rank] = state
        if state.state == "failed":
            self._on_failed(connection, state)
        elif state.state == "drained":
            self._events.on_drained(self, state.facts)
        elif state.state == "ready" and self.state is GroupState.STARTING:
            ready = [each for each in self._states.values() if each.state == "ready"]
            if len(ready) == self.spec.world_size:
                self.state = GroupState.READY
                self.was_ready = self.has_served = True
                self._cancel_timers()
                self._check_alive()
                self._events.on_ready(self)
        elif state.text:
            logger.debug("%s: %s: %s", self.spec.title, self._process(connection), state.text)

    def on_lost(self, connection: ChildConnection) -> None:
        """The connection of a process of this group closed: the process is dying or dead."""
        if self._connections.get(connection.rank) is not connection:
            return
        if self.state is GroupState.STOPPING:
            self._left.add(connection.rank)
            if len(self._left) == self.spec.world_size and self._starter.is_over:
                # The starter will not report an exit of the last process.
                self._after(_NOTICE_S, self.kill)
            return
        if self._lost is None and self._failure is None:
            self._lost = connection
            self._events.on_down(self)
            # The exit code of an ended starter shows how the process died.
            self._after(_NOTICE_S, self._end_the_others)

    # ---- endings ------------------------------------------------------------------------

    def _on_start_failure(self, text: str) -> None:
        if self.state in (GroupState.STARTING, GroupState.READY) and self._lost is None:
            is_final = not self.was_ready and not self._connections
            self._die(Failure(text, is_final=is_final))

    def _on_starter_lost(self, text: str) -> None:
        if self.state in (GroupState.STARTING, GroupState.READY) and self._lost is None:
            self._die(Failure(text))

    def _on_exit(self) -> None:
        if self.state is GroupState.STOPPING:
            self.kill()
        else:
            # Connections that closed before the starter ended may not have been read yet.
            self._after(_READ_S, self._conclude)

    def _watch_helpers(self) -> None:
        """Watch the helpers of the starter: without them the death of a rank goes unnoticed."""
        if self.spec.mpi is not None:
            ranks = {connection.pid for connection in self._connections.values()}
            below_ranks = {pid for rank in ranks for pid in descendants(rank)}
            found = set(descendants(self._starter.pid))
            self._helpers.watch(found - ranks - below_ranks)

    def _on_helper_end(self, process: str) -> None:
        self._after(_READ_S, self._blame_helper, process)

    def _blame_helper(self, process: str) -> None:
        # The death of a rank or of the starter ends the helpers too and is reported elsewhere.
        is_up = self.state in (GroupState.STARTING, GroupState.READY)
        if is_up and self._lost is None and not self._starter.is_over:
            self._die(Failure(f"{process}, a helper of mpirun, died"))

    def _end_the_others(self) -> None:
        """Kill the rest of the group: ranks ignore the signal that mpirun sends."""
        if self._starter.status is None:
            # The starter ends a moment later: its exit code shows how a rank died.
            self._starter.kill(spare_own=True)
            self._after(_STARTER_END_S if self._starter.pid else _READ_S, self._conclude)

    def _on_failed(self, connection: ChildConnection, state: ChildState) -> None:
        # A failure that is reported after the loss of another process follows from that loss.
        if self._lost is None and self.state in (GroupState.STARTING, GroupState.READY):
            text = f"{self._process(connection)} failed: {state.text}"
            is_final = state.is_config_error or not self.was_ready
            self._die(Failure(text, state.is_config_error, is_final))

    def _check_alive(self) -> None:
        """Ping every process periodically; end the group if one stays silent."""
        is_up = self.state in (GroupState.STARTING, GroupState.READY)
        if not self._signs.period_s or not is_up:
            return
        is_loading = self.state is GroupState.STARTING
        silence = self._signs.look(self._connections.values(), is_loading=is_loading)
        if silence is not None and self._lost is None:
            failure = Failure(f"{self._process(silence.connection)} {silence.text}")
            if self.spec.role == FRONTEND and not is_loading:
                silence.connection.ask_for_stacks()
                self._after(_STACKS_S, self._die, failure)
            else:
                self._die(failure)
            return
        self._after(self._signs.period_s, self._check_alive)

    def _on_connect_timeout(self) -> None:
        missing = [r for r in range(self.spec.world_size) if r not in self._connections]
        self._die(
            Failure(
                f"{self._names(missing)} did not connect within "
                f"{self.spec.connect_timeout_s:g} s of the start (--connect-timeout)",
                is_final=not self.was_ready,
            )
        )

    def _on_startup_timeout(self) -> None:
        slow = [r for r in range(self.spec.world_size) if self._last_state(r) != "ready"]
        state = self._states.get(slow[0])
        last = f"; last heard: {state.state} {state.text}".rstrip() if state else ""
        self._die(
            Failure(
                f"{self._names(slow)} not ready within {self.spec.startup_timeout_s:g} s "
                f"(--startup-timeout){last}",
                is_final=not self.was_ready,
            )
        )

    def _conclude(self) -> None:
        """Determine which process died first, and how."""
        if self.state not in (GroupState.STARTING, GroupState.READY):
            return
        status, lost = self._starter.status, self._lost
        has_connected = len(self._connections) == self.spec.world_size
        is_final = not self.was_ready and not self._connections
        how = "closed its connection" if status is None else describe_status(status)
        starter = self._starter.title
        if self.spec.mpi is None and lost is not None and lost.pid != self._starter.pid:
            text = f"{self._process(lost)} died"
        elif self.spec.mpi is None and not self.spec.is_step:
            text = f"{self._names([0])} (pid {self._starter.pid}) {how}"
        elif lost is not None and not (status is not None and os.WIFSIGNALED(status)):
            text = f"{self._process(lost)} {self._end_of(status)}"
        elif has_connected:
            text = f"{starter} {how}"
        else:
            text = f"{starter} {how} before all ranks had connected: see the server's log"
        self._die(Failure(text, is_final=is_final))

    def _end_of(self, status: int | None) -> str:
        """The cause of the first death, from mpirun's exit code."""
        if status is None:
            return "died"
        code = os.WEXITSTATUS(status)
        number = exit_signal(self.spec.mpi, code)
        return (
            f"was killed by {describe_signal(number)}"
            if number
            else f"ended with exit code {code}"
        )

    def _wrong_world(self, rank: int, world_size: int) -> Failure:
        return Failure(
            f"MPI started a process as rank {rank} of {world_size}, but the group has "
            f"{self.spec.world_size} ranks: mpirun and mpi4py's MPI library do not fit "
            "together. Name the library's own mpirun with --mpirun PATH.",
            is_config_error=True,
            is_final=True,
        )

    def _die(self, failure: Failure) -> None:
        if self.state is GroupState.DYING:
            return
        self._failure = failure
        self.fault, self.fault_time = failure.text, time.time()
        self.state = GroupState.DYING
        self._cancel_timers()
        if self._lost is None:
            self._events.on_down(self)
        self.kill()

    def _finish_when_gone(self) -> None:
        """Report the end once no process of the group is left."""
        if self.state is GroupState.DOWN:
            return
        if self._starter.kill() or not self._starter.is_over:
            self._cancel_timers()
            self._after(_KILL_PERIOD_S, self._finish_when_gone)
            return
        self._cancel_timers()
        self._helpers.close()
        self._starter.release()
        was_told, self.state = self.state is GroupState.STOPPING, GroupState.DOWN
        if was_told or self._failure is None:
            self._events.on_stopped(self)
        else:
            self._events.on_failure(self, self._failure)

    # ---- texts --------------------------------------------------------------------------

    def _process(self, connection: ChildConnection) -> str:
        host = connection.hello.host
        where = f" on {host}" if host and self.spec.world_size > 1 else ""
        return f"{self._names([connection.rank])} (pid {connection.pid}{where})"

    def _names(self, ranks: list[int]) -> str:
        if self.spec.role in (FRONTEND, ORCHESTRATOR):
            return self.spec.title
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

    def _last_state(self, rank: int) -> str:
        state = self._states.get(rank)
        return state.state if state else ""

    def _after(self, delay_s: float, action: Callable[..., None], *values: object) -> None:
        def act() -> None:
            # Pings go on for as long as the group serves: timers that have fired are dropped.
            self._timers.remove(timer)
            action(*values)

        timer = asyncio.get_running_loop().call_later(delay_s, act)
        self._timers.append(timer)

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
