"""The resources of a running server: signals, folders, log pump, children, sockets.

Everything is opened in order before the supervisor is constructed, and closed in the reverse
order after its event loop has ended.
"""

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
from collections.abc import Callable, Coroutine
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.transport.sockets import Address
from trimaran.launcher.config import ServeConfig
from trimaran.launcher.placement.hosts import advertised_ip
from trimaran.launcher.starters.children import Children, describe_signal
from trimaran.launcher.starters.process_tree import adopt_orphans, kill_and_reap_all
from trimaran.launcher.starters.run_dir import MpiSessionDirs, RunDir
from trimaran.launcher.supervisor.group_specs import Addresses
from trimaran.launcher.supervisor.log_pump import LogPump

logger = logging.getLogger(__name__)

_MAX_OPEN_FILES = 65536
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Shutdown:
    """Whether the server shall end: the first signal begins a drain, the second forces."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Catches the signals from now on."""
        self.begun = asyncio.Event()
        self.forced = asyncio.Event()
        self.last_signal = 0
        for number in _SIGNALS:
            # `nohup` sets SIGHUP to be ignored.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    def begin(self) -> None:
        """End the server in order."""
        self.begun.set()

    def _on_signal(self, number: int) -> None:
        if not self.last_signal:
            logger.info("received %s: draining", describe_signal(number))
            self.begin()
        else:
            logger.warning("received %s again: ending at once", describe_signal(number))
            self.forced.set()
        self.last_signal = number


@dataclasses.dataclass(frozen=True, slots=True)
class Runtime:
    """The open resources of one server."""

    shutdown: Shutdown
    run_dir: RunDir
    session_dirs: MpiSessionDirs
    log: LogPump
    children: Children


def run(config: ServeConfig, serve: Callable[[Runtime], Coroutine[Any, Any, int]]) -> int:
    """Open a runtime, ``serve`` in its event loop, close it; the exit code of ``serve``.

    Every process below this one is ended before this returns.

    Raises:
        ConfigError: a folder or the log file cannot be created.
    """
    adopt_orphans()
    _allow_many_connections()
    with contextlib.ExitStack() as cleanup:
        return asyncio.run(_run(config, serve, cleanup))


async def _run(
    config: ServeConfig,
    serve: Callable[[Runtime], Coroutine[Any, Any, int]],
    cleanup: contextlib.ExitStack,
) -> int:
    """``cleanup`` runs once the loop has ended."""
    loop = asyncio.get_running_loop()
    shutdown = Shutdown(loop)
    # After the signals are caught: an uncaught signal would leave the folders behind.
    run_dir = RunDir()
    cleanup.callback(run_dir.remove)
    session_dirs = MpiSessionDirs(run_dir)
    cleanup.callback(session_dirs.remove)
    cleanup.callback(_end_all)
    pump = LogPump(loop, _log_sinks(config.log.file), sys.stdout.fileno())
    _log_through(pump)
    children = Children(loop, pump.write_fd)
    try:
        return await serve(Runtime(shutdown, run_dir, session_dirs, pump, children))
    finally:
        _hold_signals()
        children.close()
        pump.close()
        _log_through(sys.stderr)


class ChildSockets:
    """The sockets on which children are expected, and their addresses."""

    def __init__(self, config: ServeConfig, run_dir: RunDir) -> None:
        """TCP sockets in addition to Unix ones if ranks of other hosts are expected.

        Raises:
            ConfigError: the advertised address is not this host's.
        """
        near = run_dir.socket("supervisor")
        self.listeners = [Address.parse(near).listen()]
        indices = range(config.frontend.num_frontends)
        self.addresses = Addresses(
            secrets.token_hex(16),
            near,
            tuple(run_dir.socket(f"frontend-{index}") for index in indices),
            between_frontends=run_dir.socket("frontends"),
        )
        self._held: list[socket.socket] = []
        if not config.advertise_address:
            return
        host = advertised_ip(config.advertise_address)
        self.listeners.append(Address(host=host).listen())
        port = self.listeners[-1].getsockname()[1]
        # Bound without a listener: every incarnation of a front end opens the port.
        self._held = [_held_socket(host) for _ in indices]
        self.addresses = dataclasses.replace(
            self.addresses,
            far_supervisor=f"tcp:{host}:{port}",
            far_frontends=tuple(f"tcp:{host}:{held.getsockname()[1]}" for held in self._held),
        )


def _log_sinks(path: str) -> dict[str, int]:
    sinks = {"stderr": sys.stderr.fileno()}
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
    """Raise the limit on open files for the front end, which inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _end_all() -> None:
    """End every process below this one."""
    left = kill_and_reap_all()
    if left:
        logger.error("processes that would not end: %s", left)


def _hold_signals() -> None:
    """Block signals, so that no signal interrupts the clean-up or changes the exit code.

    Handlers that ignore signals do not suffice: the closing loop has moments without a complete
    handler.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _log_through(stream: Any) -> None:
    """Send this process's log lines to another stream."""
    # The first handler alone: a log file of this process stays unchanged.
    for handler in logging.getLogger().handlers[:1]:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


def _held_socket(host: str) -> socket.socket:
    """A TCP port on which only processes of this user may listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, 0))
    return held
