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
"""Requests that were given up get this long to tell their clients."""


class Admission:
    """Counts running requests; once draining it admits none and tells when all are done."""

    def __init__(self) -> None:
        self._num_running = 0
        self._tasks: set[asyncio.Task[object] | None] = set()
        self._is_draining = False
        self._given_up = ""
        """Why all that runs has been ended; empty before."""
        self._uncut: dict[asyncio.Task[object] | None, bool] = {}
        """Tasks within `uncut`, and whether `give_up` has come upon them there."""
        self._changed = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the server is on its way out."""
        return self._is_draining

    @property
    def num_running(self) -> int:
        """Requests admitted and not over."""
        return self._num_running

    def check(self, refusal: str = STOPPING) -> None:
        """Refuse a request that would not be admitted, before its body is read.

        Raises:
            RequestError: the server is draining; its text is ``refusal``.
        """
        if self._is_draining:
            raise RequestError(refusal, ErrorKind.UNAVAILABLE)

    @contextmanager
    def admit(self, refusal: str = STOPPING) -> Iterator[None]:
        """Hold one running request, complete with its body.

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
        """Hold a request that is over but for what its client has yet to take, until the
        result is called: `give_up` leaves that to the end of the connection."""

        def sent() -> None:
            self._num_running -= 1
            self._changed.set()

        self._num_running += 1
        return sent

    def start_draining(self) -> None:
        """Admit nothing from now on."""
        self._is_draining = True

    @contextmanager
    def unless_given_up(self) -> Iterator[None]:
        """Around what is waited for while a request runs.

        Raises:
            RequestError: the request was ended by `give_up`.
        """
        try:
            yield
        except asyncio.CancelledError:
            if not self._given_up:
                raise
            raise RequestError(self._given_up, ErrorKind.UNAVAILABLE) from None

    @contextmanager
    def uncut(self) -> Iterator[None]:
        """Around what must not be left half done: `give_up` ends the request behind it."""
        task = asyncio.current_task()
        self._uncut[task] = False
        try:
            yield
        finally:
            is_over = self._uncut.pop(task)
            if is_over and task is not None:
                task.cancel()

    async def give_up(self, waited_s: float) -> None:
        """End what still runs after a drain of ``waited_s``: its clients are told why."""
        self._given_up = (
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
