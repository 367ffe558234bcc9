"""Spawns groups of ranks through MPI, one after the other, and watches MPI's daemon."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import psutil

from trimaran.comm.deadlines import Watchdog
from trimaran.comm.errors import ConfigError, PeerLostError
from trimaran.comm.messages.messages import Command
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.comm.mpi import MPI, library_version

_UNPUBLISHED_NAME = "trimaran-is-anybody-there"
_NO_PROGRAM = "/proc/self/no-such-program"

Key = tuple[str, int]
"""A group's name and its incarnation."""

_ENV = "/usr/bin/env"
_PATIENCE_S = 15.0
"""A Spawn takes a second or two; after this time the next group no longer waits for it."""

_LONGEST_PERIOD_S = 3.0


class SpawnDaemon:
    """The process below this one from which MPI starts ranks and watches them.

    All spawned ranks are its children and die with it. MPI does not notice when the daemon
    dies or hangs: every later Spawn would wait for ever.
    """

    def __init__(self) -> None:
        """Have MPI start the daemon.

        MPI does so within the first Spawn, which must not overlap with another one. That
        first Spawn is therefore of a program that does not exist and fails at once.

        Raises:
            ConfigError: the daemon did not start.
        """
        with contextlib.suppress(MPI.Exception):
            MPI.COMM_SELF.Spawn(_NO_PROGRAM, maxprocs=1)
        # The orchestrator itself starts no process.
        children = [
            child
            for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE
        ]
        if not children:
            raise ConfigError(
                "MPI cannot spawn ranks here: its daemon (prte, of the same Open MPI as "
                f"{library_version()}) did not start. Choose --worker-launch mpirun."
            )
        self.pid = children[0].pid
        self._pid_fd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        """Readable once the daemon has died."""
        return self._pid_fd

    def ask(self) -> None:
        """Wait until the daemon has answered a look-up.

        Raises:
            MPI.Exception: the daemon cannot be reached.
        """
        try:
            MPI.Lookup_name(_UNPUBLISHED_NAME)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_NAME:
                raise


class Spawner:
    """The loop of the orchestrator, which sleeps in the kernel until a command arrives.

    Spawn is called in a side thread: it never returns when a rank dies before MPI_Init, and
    that must not keep other groups from being spawned. One call runs at a time, since
    concurrent calls fail or hang when a rank of one dies. A call that does not return is left
    behind, as each has a communicator of its own. Spawned ranks are not watched through MPI,
    whose probes do not report a death: the supervisor, to which every rank is connected, sees
    it at once. The communicators are never freed: that may hang once a rank is gone.
    """

    def __init__(self, link: SupervisorLink, watchdog: Watchdog) -> None:
        """``watchdog`` ends the process when MPI's daemon does not answer in time.

        Raises:
            ConfigError: MPI cannot spawn here.
        """
        self._link = link
        self._watchdog = watchdog
        self._period_s = min(watchdog.hang_timeout_s / 3, _LONGEST_PERIOD_S)
        self._daemon = SpawnDaemon()
        self._poll = select.poll()
        self._waiting: deque[Command] = deque()
        self._running: Key | None = None
        self._patient_until = 0.0
        self._finished: deque[Key] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def run(self) -> None:
        """Obey the supervisor until it says shutdown.

        Raises:
            PeerLostError: MPI's daemon died, and so did all ranks.
        """
        self._poll.register(self._link.fileno(), select.POLLIN)
        self._poll.register(self._daemon.fileno(), select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._link.state("ready")
        next_question = time.monotonic() + self._period_s
        while True:
            readable = self._poll.poll(1000 * max(0.0, next_question - time.monotonic()))
            if self._daemon.fileno() in (fd for fd, _ in readable):
                pid = self._daemon.pid
                raise PeerLostError(f"MPI's daemon (pid {pid}) died, and all ranks with it")
            for command in self._link.commands():
                if command.verb == "shutdown":
                    return
                self._execute(command)
            self._take_finished()
            self._spawn_next()
            if time.monotonic() >= next_question:
                next_question = time.monotonic() + self._period_s
                self._ask_daemon()

    def _ask_daemon(self) -> None:
        title = f"waiting for an answer of MPI's daemon (pid {self._daemon.pid})"
        self._watchdog.watch(lambda: title)
        self._daemon.ask()
        self._watchdog.pause()

    def _execute(self, command: Command) -> None:
        key = _key(command.arguments)
        if command.verb == "spawn":
            self._waiting.append(command)
        elif command.verb == "forget":
            self._waiting = deque(w for w in self._waiting if _key(w.arguments) != key)
            if self._running == key:
                self._running = None

    def _take_finished(self) -> None:
        """Take in the Spawn calls that have returned."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._finished:
            if self._finished.popleft() == self._running:
                self._running = None

    def _spawn_next(self) -> None:
        is_busy = self._running is not None and time.monotonic() < self._patient_until
        if is_busy or not self._waiting:
            return
        arguments = self._waiting.popleft().arguments
        self._running = _key(arguments)
        self._patient_until = time.monotonic() + _PATIENCE_S
        work = (MPI.COMM_SELF.Dup(), arguments)
        threading.Thread(target=self._spawn, args=work, name="spawn", daemon=True).start()

    def _spawn(self, parent: MPI.Intracomm, arguments: Mapping[str, Any]) -> None:
        """Spawn one group; runs in a thread of its own."""
        program, world_size = arguments["command"], int(arguments["world_size"])
        event, text = "spawned", ""
        # MPI would wait for ever for what `env` cannot start.
        if shutil.which(program[0]) is None:
            event, text = "spawn_failed", f"{program[0]}: no such program"
        else:
            words = [f"{name}={value}" for name, value in arguments["env"].items()]
            try:
                parent.Spawn(_ENV, [*words, *program], maxprocs=world_size)
            except MPI.Exception as error:
                event = "spawn_failed"
                text = f"{error.Get_error_string()} ({world_size} ranks)"
        group, incarnation = key = _key(arguments)
        facts = {"group": group, "incarnation": incarnation, "event": event, "text": text}
        self._link.state("group", facts=facts)
        self._finished.append(key)
        os.eventfd_write(self._wake_fd, 1)


def _key(arguments: Mapping[str, Any]) -> Key:
    return str(arguments["group"]), int(arguments["incarnation"])
