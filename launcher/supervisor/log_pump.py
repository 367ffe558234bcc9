"""Copies every process's log lines to stderr and the log file without ever blocking."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import select
import time

_READ_BYTES = 64 << 10
_PIPE_BYTES = 1 << 20
_MAX_PENDING_BYTES = 4 << 20
_RETRY_S = 0.05

logger = logging.getLogger(__name__)


class LogPump:
    """A pipe that children write to, copied to all sinks.

    A sink that fails (disk full, reader gone) loses lines; a sink that stalls is buffered up to
    a limit and then loses lines. Neither blocks a process that logs. The first failure of each
    sink is logged to the other sinks.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sinks: dict[str, int], stdout: int
    ) -> None:
        """``sinks`` are descriptors by the names that log lines give them; ``stdout`` is the
        descriptor of `show`.
        """
        self._loop = loop
        self._sinks = [_Sink(title, fd) for title, fd in sinks.items()]
        self._stdout = _Sink("stdout", stdout)
        self._every = [*self._sinks, self._stdout]
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        try:
            fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # over the user's limit: the default of 64 KiB suffices
        self._retry: asyncio.TimerHandle | None = None
        loop.add_reader(self._read_fd, self._on_readable)

    def write(self, text: str) -> int:
        """Write lines of this process; with `flush`, the interface of a logging stream."""
        self._copy(text.encode("utf-8", "replace"))
        return len(text)

    def show(self, text: str) -> None:
        """Print to standard output, beside the log."""
        self._stdout.add(text.encode("utf-8", "replace"))
        self._drain()

    def flush(self) -> None:
        """Without effect: `write` has already tried."""

    def close(self, timeout_s: float = 0.5) -> None:
        """Copy the remaining lines, as far as the sinks accept them within ``timeout_s``."""
        self._loop.remove_reader(self._read_fd)
        if self._retry is not None:
            self._retry.cancel()
        os.close(self.write_fd)
        self._on_readable()
        deadline = time.monotonic() + timeout_s
        while any(not sink.drain() for sink in self._every) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.close(self._read_fd)

    def _on_readable(self) -> None:
        # At most one full pipe: a process that logs without end must not keep the loop busy.
        for _ in range(_PIPE_BYTES // _READ_BYTES):
            try:
                data = os.read(self._read_fd, _READ_BYTES)
            except BlockingIOError:
                return
            self._copy(data)
            if len(data) < _READ_BYTES:
                return

    def _copy(self, data: bytes) -> None:
        for sink in self._sinks:
            sink.add(data)
        self._drain()

    def _drain(self) -> None:
        stalled = [sink for sink in self._every if not sink.drain()]
        if stalled and self._retry is None and not self._loop.is_closed():
            self._retry = self._loop.call_later(_RETRY_S, self._try_again)
        for sink in self._every:
            sink.tell()

    def _try_again(self) -> None:
        self._retry = None
        self._drain()


class _Sink:
    """One destination of log lines, by its descriptor."""

    def __init__(self, title: str, fd: int) -> None:
        self._title = title
        self._fd = fd
        self._pending = bytearray()
        self._failure = ""
        self._is_told = False

    def add(self, data: bytes) -> None:
        if len(self._pending) + len(data) <= _MAX_PENDING_BYTES:
            self._pending += data

    def drain(self) -> bool:
        """Write without blocking; whether no bytes are left."""
        try:
            # A pipe or terminal that is ready takes this many bytes at once.
            while self._pending and select.select([], [self._fd], [], 0)[1]:
                del self._pending[: os.write(self._fd, self._pending[: select.PIPE_BUF])]
        except OSError as error:
            self._pending.clear()
            self._failure = error.strerror or str(error)
        return not self._pending

    def tell(self) -> None:
        """Log the first failure."""
        if self._failure and not self._is_told:
            # Set before the log line, because the line arrives here again.
            self._is_told = True
            logger.warning(
                "%s lacks lines from here on, of which some cannot be written: %s",
                self._title, self._failure,
            )  # fmt: skip
