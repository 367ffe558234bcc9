"""Spawns groups of ranks through MPI, one after the other, and minds MPI's own daemon."""

from __future__ import annotations

import logging
import os
import select
import shutil
import threading
import time
from collections import deque

from trimaran.comm.errors import PeerLostError
from trimaran.comm.messages import Command
from trimaran.comm.mpi import MPI
from trimaran.comm.supervisor_link import SupervisorLink
from trimaran.comm.watchdog import Watchdog
from trimaran.orchestrator.daemon import SpawnDaemon

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""A group's name and its incarnation."""

_ENV = "/usr/bin/env"
_LONGEST_PERIOD_S = 3.0


class Spawner:
    """The loop of the orchestrator; it sleeps in the kernel until the supervisor speaks.

    Spawn is called in a side thread: it never returns when a rank dies before MPI_Init, and
    that must not keep other groups from being spawned. One runs at a time, since concurrent
    ones hang; one whose group was given up is left behind, which each having a communicator
    of its own allows. What was spawned is never waited for through MPI: Revoke, Disconnect
    and Free may hang once a rank is gone, and a probe does not tell of a death. The
    supervisor, to which every rank is connected, sees it at once.
    """

    def __init__(self, link: SupervisorLink, watchdog: Watchdog) -> None:
        """``watchdog`` ends the process when MPI's daemon does not answer in time."""
        self._link = link
        self._watchdog = watchdog
        self._period_s = min(watchdog.hang_timeout_s / 3, _LONGEST_PERIOD_S)
        self._daemon = SpawnDaemon()
        self._poll = select.poll()
        self._comms: dict[Key, MPI.Intercomm] = {}
        # Kept for ever: freeing the communicator of a group that died may hang.
        self._dropped: list[MPI.Intercomm] = []
        self._forgotten: set[Key] = set()
        self._waiting: deque[Command] = deque()
        self._running: Key | None = None
        self._finished: deque[tuple[Key, MPI.Intercomm | None, str]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def run(self) -> None:
        """Obey the supervisor until it says shutdown.

        Raises:
            PeerLostError: MPI's daemon died, and so did all ranks.
        """
        self._poll.register(self._link.fileno(), select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._link.state("ready")
        next_look = time.monotonic() + self._period_s
        while True:
            readable = self._poll.poll(1000 * max(0.0, next_look - time.monotonic()))
            if self._daemon.fileno() in (fd for fd, _ in readable):
                pid = self._daemon.pid
                raise PeerLostError(f"MPI's daemon (pid {pid}) died, and all ranks with it")
            for command in self._link.commands():
                if command.verb == "shutdown":
                    return
                self._obey(command)
            self._take_finished()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + self._period_s
                self._look_after_daemon()

    def _look_after_daemon(self) -> None:
        daemon = self._daemon
        if daemon.find():
            self._poll.register(daemon.fileno(), select.POLLIN)
        if daemon.pid:
            title = f"waiting for an answer of MPI's daemon (pid {daemon.pid})"
            self._watchdog.watch(lambda: title)
            daemon.ask()
            self._watchdog.pause()

    def _obey(self, command: Command) -> None:
        if command.verb == "spawn":
            self._waiting.append(command)
        elif command.verb == "forget":
            self._forget(_key(command))
        self._spawn_next()

    def _spawn_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        command = self._waiting.popleft()
        self._running = _key(command)
        threading.Thread(
            target=self._spawn, args=(MPI.COMM_SELF.Dup(), command), name="spawn", daemon=True
        ).start()

    def _spawn(self, parent: MPI.Intracomm, command: Command) -> None:
        """Spawn one group; runs in a thread of its own."""
        arguments = command.arguments
        program, world_size = arguments["command"], int(arguments["world_size"])
        comm, text = None, ""
        # MPI would wait for ever for what `env` cannot start.
        if shutil.which(program[0]) is None:
            text = f"{program[0]}: no such program"
        else:
            words = [f"{name}={value}" for name, value in arguments["env"].items()]
            try:
                comm = parent.Spawn(_ENV, [*words, *program], maxprocs=world_size)
            except MPI.Exception as error:
                text = f"{error.Get_error_string()} ({world_size} ranks)"
        self._finished.append((_key(command), comm, text))
        os.eventfd_write(self._wake_fd, 1)

    def _take_finished(self) -> None:
        """Take what the spawning threads have done."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
        while self._finished:
            key, comm, text = self._finished.popleft()
            if comm is None:
                self._tell(key, "spawn_failed", text)
            else:
                comm.Set_errhandler(MPI.ERRORS_RETURN)
                self._comms[key] = comm
                self._tell(key, "spawned")
            if key in self._forgotten:
                self._forget(key)
            if key == self._running:
                self._running = None
        self._spawn_next()

    def _forget(self, key: Key) -> None:
        self._waiting = deque(each for each in self._waiting if _key(each) != key)
        comm = self._comms.pop(key, None)
        if comm is None:
            # Still being spawned; by now its ranks may be dead, and Spawn hang.
            self._forgotten.add(key)
            if key == self._running:
                self._running = None
        else:
            self._forgotten.discard(key)
            self._dropped.append(comm)

    def _tell(self, key: Key, event: str, text: str = "") -> None:
        group, incarnation = key
        logger.debug("group %s: %s %s", group, event, text)
        facts = {"group": group, "incarnation": incarnation, "event": event, "text": text}
        self._link.state("group", facts=facts)


def _key(command: Command) -> Key:
    return str(command.arguments["group"]), int(command.arguments["incarnation"])
