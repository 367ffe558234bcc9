"""Sends a workload to a target, records the times of tokens, and ends early at Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trimaran.bench.serving.workload import Item


@contextlib.contextmanager
def at_first_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Call ``stop`` at a Ctrl-C; a second one has its normal effect.

    Main thread only. An ignored signal, as behind nohup, stays ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return

    def call_stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, call_stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(slots=True)
class Record:
    """The times of one request. Times are in seconds of one monotonic clock."""

    item: Item
    due_s: float
    """When the request was due. Latencies count from here, so that a request that waited for
    a free connection does not look fast.
    """
    sent_s: float = 0.0
    """When the request was sent; from then on it was in flight."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of generated tokens of each response."""
    is_stream: bool = False
    """Whether the first response is the first token's, rather than that of all tokens."""
    end_s: float = 0.0
    error: str = ""

    @property
    def num_output_tokens(self) -> int:
        """Number of received tokens."""
        return sum(count for _, count in self.arrivals)


Prepared = Callable[[Record], Awaitable[None]]
"""A prepared request: sends its message, and adds each response to ``record.arrivals``.
Raises ServerError if the request is refused or fails.
"""


class Target(Protocol):
    """The protocol and address of requests."""

    async def connect(self, count: int) -> None:
        """Open the connections for this many requests in flight, so that the first requests
        need not wait for them. A connection that cannot be opened is reported by the request
        that needs it.
        """
        ...

    def prepare(self, item: Item) -> Prepared:
        """Create one request's message, before it is due."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


@dataclass(slots=True)
class Run:
    """All records of a run, with its duration up to the last answer's end."""

    records: list[Record]
    elapsed_s: float
    num_left: int = 0
    """Requests that were not sent or not answered when the run was stopped."""

    @classmethod
    def of(cls, records: list[Record], begin: float, num_planned: int) -> Run:
        """The ended requests of ``num_planned``, from ``begin`` on their clock."""
        end = max((record.end_s for record in records), default=begin)
        return cls(records, end - begin, num_planned - len(records))


class LoadGenerator:
    """Runs a workload with a bounded number of requests in flight."""

    def __init__(self, target: Target, concurrency: int) -> None:
        self._target = target
        self._concurrency = concurrency
        self._sending: asyncio.Future[Any] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Send no more requests and drop the unanswered ones, so that `run` returns."""
        if self._sending is not None:
            self._is_stopped = self._sending.cancel()

    async def warm_up(self, items: Sequence[Item], num_planned: int) -> None:
        """Send the warm-up, which is not counted, then connect for a plan of this many
        requests.
        """
        await self.run([(item, 0.0) for item in items])
        await self._target.connect(min(self._concurrency, num_planned))

    async def run(
        self,
        plan: Sequence[tuple[Item, float]],
        on_done: Callable[[], None] = lambda: None,
        *,
        begin: float | None = None,
    ) -> Run:
        """Send each item, some seconds after the start, once fewer than the allowed number are
        in flight. Returns when all are done, or at `stop`.

        The start is now, or ``begin`` on the monotonic clock.
        """
        if begin is None:
            begin = time.monotonic()
        is_paced = any(delay for _, delay in plan)
        todo = iter(plan)
        records: list[Record] = []

        async def worker() -> None:
            for item, delay in todo:
                request = self._target.prepare(item)
                wait = begin + delay - time.monotonic()
                if wait > 0:
                    await asyncio.sleep(wait)
                due = begin + delay if is_paced else time.monotonic()
                record = Record(item, due)
                records.append(record)
                await self._send(request, record)
                on_done()

        num_workers = min(self._concurrency, len(plan))
        self._sending = asyncio.gather(*(worker() for _ in range(num_workers)))
        try:
            await self._sending
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
        return Run.of([record for record in records if record.end_s], begin, len(plan))

    async def _send(self, request: Prepared, record: Record) -> None:
        record.sent_s = time.monotonic()
        try:
            await request(record)
        except Exception as error:  # one request's failure is a result of the benchmark
            record.error = f"{type(error).__name__}: {error}"
        else:
            if not record.arrivals:
                record.error = "the answer ended without a token, and without an error"
        record.end_s = time.monotonic()
