"""Whether new requests are admitted, and how many are running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

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
        self._uninterrupted: dict[asyncio.Task[object] | None, bool] = {}
        """Tasks within `uninterrupted`, and whether `abort_running` ended them meanwhile."""
        self._changed = asyncio.Event()
        self._unless_aborted = UnlessAborted(self)

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

    def admit(self, refusal: str = STOPPING) -> Admitted:
        """The context in which one running request counts, whose body is complete.

        Raises:
            RequestError: as for `check`.
        """
        self.check(refusal)
        return Admitted(self, asyncio.current_task())

    def begin(self, task: asyncio.Task[object] | None) -> None:
        """A request of this task runs."""
        self._num_running += 1
        self._tasks.add(task)

    def end(self, task: asyncio.Task[object] | None) -> None:
        """The request of this task has ended."""
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

    def unless_aborted(self) -> UnlessAborted:
        """The context of waits that `abort_running` may end.

        Raises:
            RequestError: the request was ended by `abort_running`.
        """
        return self._unless_aborted

    @property
    def abort_reason(self) -> str:
        """Why the running requests were ended; empty before."""
        return self._abort_reason

    def uninterrupted(self) -> Uninterrupted:
        """The context of work that `abort_running` lets end: the request ends afterwards."""
        return Uninterrupted(self._uninterrupted)

    async def abort_running(self, waited_s: float) -> None:
        """End the requests that still run after a drain of ``waited_s``; clients get the
        reason.
        """
        self._abort_reason = (
            f"Server is stopping: the request had not ended within the {waited_s:g} s that "
            "--exit-timeout leaves. Send it again, or raise --exit-timeout."
        )
        for task in self._tasks:
            if task in self._uninterrupted:
                self._uninterrupted[task] = True
            elif task is not None:
                task.cancel()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.wait_idle(), _GIVE_UP_S)

    async def wait_idle(self) -> None:
        """Return when no request is running."""
        while self._num_running:
            self._changed.clear()
            await self._changed.wait()


class Admitted:
    """See `Admission.admit`. A class: a generator takes twice as long for each request."""

    __slots__ = ("_admission", "_task")

    def __init__(self, admission: Admission, task: asyncio.Task[object] | None) -> None:
        self._admission = admission
        self._task = task

    def __enter__(self) -> None:
        self._admission.begin(self._task)

    def __exit__(self, *error: object) -> None:
        self._admission.end(self._task)


class UnlessAborted:
    """See `Admission.unless_aborted`."""

    __slots__ = ("_admission",)

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def __enter__(self) -> None:
        """Nothing happens before an end."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, asyncio.CancelledError) and self._admission.abort_reason:
            raise RequestError(self._admission.abort_reason, ErrorKind.UNAVAILABLE) from None


class Uninterrupted:
    """See `Admission.uninterrupted`. A generator would take twice as long."""

    __slots__ = ("_marks", "_task")

    def __init__(self, marks: dict[asyncio.Task[object] | None, bool]) -> None:
        """``marks`` are the tasks within such a context, and whether they were ended."""
        self._marks = marks
        self._task = asyncio.current_task()

    def __enter__(self) -> None:
        self._marks[self._task] = False

    def __exit__(self, *error: object) -> None:
        if self._marks.pop(self._task) and self._task is not None:
            self._task.cancel()
