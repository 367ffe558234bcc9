"""A front end's connection to one process of a Python model, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import cast

from trimaran.comm.errors import ConfigError, ProtocolError
from trimaran.comm.messages.bulk import BulkSender
from trimaran.server.python_models.wire import (
    BULK_PEER,
    Failed,
    FrameBuffer,
    Message,
    Ready,
    Release,
    Start,
    encode,
    open_tensors,
    released,
)

logger = logging.getLogger(__name__)

# The current folder must not shadow modules that the model imports.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from trimaran.server.python_models.process import main; main()"
)
_FINISH_S = 10.0


class ProcessLink(asyncio.Protocol):
    """One process: its messages go to ``on_message``, its end to ``on_end``."""

    def __init__(
        self, on_message: Callable[[ProcessLink, Message], None], on_end: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._frames = FrameBuffer()
        self._bulk = BulkSender()
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[Ready] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the process runs."""
        return self._transport is not None

    async def open(self, start: Start) -> Ready:
        """Start the process; returns once the model is initialized.

        Raises:
            ConfigError: the model cannot be initialized; the message has the traceback.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        try:
            ours, self._process = await _started()
        except OSError as error:
            raise ConfigError(f"its process cannot be started: {error}") from error
        try:
            ours.setblocking(False)
            await loop.create_connection(lambda: self, sock=ours)
            self.send(start)
            return await self._ready
        except BaseException:
            self.kill()
            await self._process.wait()
            raise

    def send(self, message: Message) -> None:
        """Send a message; dropped if the process has ended.

        Raises:
            MessageTooLongError: its tensors are too large.
        """
        if self._transport is not None:
            self._transport.write(encode(message, self._bulk))

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def finished(self) -> None:
        """Return once the process has ended by itself, or kill it after a while."""
        assert self._process is not None
        try:
            await asyncio.wait_for(self._process.wait(), _FINISH_S)
        except asyncio.TimeoutError:
            logger.warning(
                "a Python model took longer than %g s to finalize: killed", _FINISH_S
            )
            self.kill()
            await self._process.wait()
        if self._transport is not None:
            self._transport.close()

    async def ended(self) -> str:
        """Wait for the end of the process; returns how it ended, in words."""
        assert self._process is not None
        code = await self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Dispatch complete messages; a process that breaks the protocol is killed."""
        try:
            for message in self._frames.feed(data):
                release = open_tensors(message)
                if release is not None:
                    self.send(release)
                self._take(message)
        except ProtocolError as error:
            logger.error("killing a process of a Python model: %s", error)
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended, or is about to."""
        self._transport = None
        self._bulk.drop(BULK_PEER)
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(
                ConfigError("its process ended before the model was initialized")
            )
        self._on_end()

    def _take(self, message: Message) -> None:
        assert self._ready is not None
        if isinstance(message, Release):
            released(message, self._bulk)
        elif self._ready.done():
            self._on_message(self, message)
        elif isinstance(message, Ready):
            self._ready.set_result(message)
        elif isinstance(message, Failed):
            self._ready.set_exception(ConfigError(message.text))
        else:
            # Messages of user code during ``initialize``.
            self._on_message(self, message)


async def _started() -> tuple[socket.socket, asyncio.subprocess.Process]:
    """A new process, and this end of the socket pair that ties the process to it."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _PROGRAM, str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    return ours, process
