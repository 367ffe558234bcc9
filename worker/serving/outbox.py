"""What a step says, on its way to the front ends; large payloads are written aside."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from trimaran.comm.messages.bulk import BulkSender, bulky_bytes, pack
from trimaran.comm.messages.messages import Message, StepOutput
from trimaran.worker.serving.frontend_link import FrontendLinks

_ASIDE_BYTES = 8 << 20
"""Payloads from here on take longer to write than a step may wait."""


class Outbox:
    """Sends each front end its messages in order. One thread calls it.

    While a large payload is being written, later messages to that front end wait for it;
    steps and other front ends do not.
    """

    def __init__(self, links: FrontendLinks) -> None:
        self._links = links
        self._bulk = BulkSender()
        self._waiting: dict[int, deque[tuple[Message, Future[None] | None]]] = {}
        self._writer = ThreadPoolExecutor(1, "bulk-writer")

    @property
    def is_waiting(self) -> bool:
        """Whether `flush` has something to send yet."""
        return bool(self._waiting)

    def send(self, source: int, message: Message) -> None:
        """Send a message, or queue it behind what is being written."""
        writing: Future[None] | None = None
        if isinstance(message, StepOutput) and message.extras:
            sender = self._bulk if self._links.is_local(source) else None
            if sender is not None and bulky_bytes(message) >= _ASIDE_BYTES:
                writing = self._writer.submit(pack, message, source, sender)
            else:
                pack(message, source, sender)
        if writing is None and source not in self._waiting:
            self._links.send(source, message)
        else:
            self._waiting.setdefault(source, deque()).append((message, writing))

    def flush(self) -> None:
        """Send what is ready."""
        for source, queue in list(self._waiting.items()):
            for message in _take_ready(queue):
                self._links.send(source, message)
                if not self._links.is_open(source):
                    # It was written for nobody.
                    self._bulk.drop(source)
            if not queue:
                del self._waiting[source]

    def release(self, source: int, numbers: list[int]) -> None:
        """A front end needs these payloads no more."""
        self._bulk.release(source, numbers)

    def drop(self, source: int) -> None:
        """A front end is gone."""
        self._bulk.drop(source)

    @property
    def num_held(self) -> int:
        """Payloads that no front end gave back."""
        return self._bulk.num_held

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()


def _take_ready(
    queue: deque[tuple[Message, Future[None] | None]],
) -> Iterator[Message]:
    while queue:
        message, writing = queue[0]
        if writing is not None:
            if not writing.done():
                return
            writing.result()
        queue.popleft()
        yield message
