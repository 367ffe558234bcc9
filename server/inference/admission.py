"""Whether new requests are admitted, and how many are running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from trimaran.comm.errors import ErrorKind, RequestError

STOPPING = (
    "Server is stopping, scheduler for model has stopped accepting new inference requests"
)

_GIVE_UP_S = 0.5
"""Clients of requests that were ended by `abort_running` are answered within this time."""


class Admission:
    """Counts running requests. While draining, admits no requests and signals when none
    runs.
    """

    def __init__(self) -> None:
        self._num_running = 0
        self._tasks: set[asyncio.Task[object] | None] = set()
        self._is_draining = False
        self._abort_reason = ""
        """Why the running requests were ended; empty before."""
        self._uncut: dict[asyncio.Task[object] | None, bool] = {}
        """Tasks within `uncut`, and whether `abort_running` ended them meanwhile."""
        self._changed = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._is_draining

    @property
    def num_running(self) -> int:
        """Requests that were admitted and have not ended."""
        return self._num_running

    def check(self, refusal: str = STOPPING) -> None:
        """Refuse a request that would not be admitted, before its body is read.

        Raises:
            RequestError: the server is draining; the text is ``refusal``.
        """
        if self._is_draining:
            raise RequestError(refusal, ErrorKind.UNAVAILABLE)

    @contextmanager
    def admit(self, refusal: str = STOPPING) -> Iterator[None]:
        """Count one running request, whose body is complete, within the context.

        Raises:
            RequestError: as for `check`.
        """
        self.check(refusal)
        task = asyncio.current_task()
        self._num_running += 1
        self._tasks.add(task)
        try:
            yield
        finally:
            self._num_running -= 1
            self._tasks.discard(task)
            self._changed.set()

    def sending(self) -> Callable[[], None]:
        """Count a request whose response is still being sent, until the result is called.
        `abort_running` does not end the request: the end of the connection does.
        """

        def sent() -> None:
            self._num_running -= 1
            self._changed.set()

        self._num_running += 1
        return sent

    def start_draining(self) -> None:
        """Admit no further requests."""
        self._is_draining = True

    @contextmanager
    def unless_aborted(self) -> Iterator[None]:
        """The context of waits that `abort_running` may end.

        Raises:
            RequestError: the request was ended by `abort_running`.
        """
        try:
            yield
        except asyncio.CancelledError:
            if not self._abort_reason:
                raise
            raise RequestError(self._abort_reason, ErrorKind.UNAVAILABLE) from None

    @contextmanager
    def uncut(self) -> Iterator[None]:
        """The context of work that `abort_running` lets end: the request ends afterwards."""
        task = asyncio.current_task()
        self._uncut[task] = False
        try:
            yield
        finally:
            is_over = self._uncut.pop(task)
            if is_over and task is not None:
                task.cancel()

    async def abort_running(self, waited_s: float) -> None:
        """End the requests that still run after a drain of ``waited_s``; clients get the
        reason.
        """
        self._abort_reason = (
            f"Server is stopping: the request had not ended within the {waited_s:g} s that "
            "--exit-timeout leaves. Send it again, or raise --exit-timeout."
        )
        for task in self._tasks:
            if task in self._uncut:
                self._uncut[task] = True
            elif task is not None:
                task.cancel()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.wait_idle(), _GIVE_UP_S)

    async def wait_idle(self) -> None:
        """Return when no request is running."""
        while self._num_running:
            self._changed.clear()
            await self._changed.wait()
