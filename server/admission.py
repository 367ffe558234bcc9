"""Whether new requests are admitted, and how many are running."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from trimaran.comm.errors import ErrorKind, RequestError

STOPPING = (
    "Server is stopping, scheduler for model has stopped accepting new inference requests"
)


class Admission:
    """Counts running requests; once draining it admits none and tells when all are done."""

    def __init__(self) -> None:
        self._num_running = 0
        self._is_draining = False
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
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._changed.set()

    def start_draining(self) -> None:
        """Admit nothing from now on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Return when no request is running."""
        while self._num_running:
            self._changed.clear()
            await self._changed.wait()
