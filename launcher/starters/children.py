"""The direct children of the supervisor, and the starter of groups that are one child."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from trimaran.comm.env import INCARNATION
from trimaran.launcher.starters.process_tree import die_with, kill_tagged
from trimaran.launcher.starters.run_dir import MpiSessionDirs
from trimaran.launcher.starters.starter import GroupSpec, StarterEvents


def describe_status(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        return f"was killed by {describe_signal(os.WTERMSIG(status))}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"


def describe_signal(number: int) -> str:
    """A signal's number and name."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


class Children:
    """The direct children of this process. Reaps them, and every orphan reparented here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log_fd: int) -> None:
        self._loop = loop
        self._log_fd = log_fd
        self._running: dict[int, tuple[subprocess.Popen[bytes], Callable[[int], None]]] = {}
        loop.add_signal_handler(signal.SIGCHLD, self._reap)

    @property
    def pids(self) -> set[int]:
        """Children that were started here and have not ended."""
        return set(self._running)

    @property
    def log_pipe(self) -> str:
        """The log pipe as a path, for processes of this host that are no direct children."""
        return f"/proc/{os.getpid()}/fd/{self._log_fd}"

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        on_exit: Callable[[int], None],
        *,
        inherit_fds: bool = False,
    ) -> int:
        """Start a child in its own session; returns its pid.

        The child is killed when this process dies. Output goes to the log. ``on_exit`` gets the
        wait status. ``inherit_fds`` lets a rank reach the daemon of the outer MPI job.

        Raises:
            OSError: the program cannot be started.
        """
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._log_fd,
            stderr=self._log_fd,
            env=dict(env),
            start_new_session=True,
            close_fds=not inherit_fds,
            # Safe: this process has one thread.
            preexec_fn=die_with(os.getpid()),
        )
        self._running[process.pid] = (process, on_exit)
        return process.pid

    def close(self) -> None:
        """Stop reaping. Called before the loop closes: a child may end while the loop is
        half closed.
        """
        self._loop.remove_signal_handler(signal.SIGCHLD)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                process, on_exit = self._running.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                on_exit(status)


class CommandStarter:
    """One direct child: mpirun, srun, or the only process of the group."""

    def __init__(
        self, spec: GroupSpec, children: Children, session_dirs: MpiSessionDirs
    ) -> None:
        self._spec = spec
        self._session_dirs = session_dirs
        self._children = children
        self._pid = 0
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """See `Starter`."""
        return self._pid

    @property
    def status(self) -> int | None:
        """See `Starter`."""
        return self._status

    @property
    def is_over(self) -> bool:
        """See `Starter`."""
        return self._pid == 0 or self._status is not None

    @property
    def title(self) -> str:
        """See `Starter`."""
        return f"{os.path.basename(self._spec.command[0])} (pid {self._pid})"

    def start(self, incarnation: int, events: StarterEvents) -> None:
        """See `Starter`."""
        self._pid, self._status = 0, None

        def on_exit(status: int) -> None:
            self._status = status
            events.on_exit()

        spec = self._spec
        self._session_dirs.prepare(spec.tag)
        env = {**spec.env, INCARNATION: str(incarnation)}
        self._pid = self._children.start(
            spec.command, env, on_exit, inherit_fds=spec.inherit_fds
        )

    def kill(self, *, spare_own: bool = False) -> bool:
        """See `Starter`."""
        return bool(kill_tagged(os.getpid(), self._spec.tag, self._pid if spare_own else 0))

    def release(self) -> None:
        """See `Starter`: the child was killed with its group."""
        self._session_dirs.clear(self._spec.tag)
