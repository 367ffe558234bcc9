"""Requests on their way to the engine: stopped by id, and submitted together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig


@dataclass(slots=True, eq=False)
class Arrival:
    """A request whose prompt is being tokenized, while the context lasts."""

    request_id: str
    by_id: dict[str, set[Arrival]]
    """All arrivals of the model."""
    is_stopped: bool = False

    def __enter__(self) -> Arrival:
        self.by_id.setdefault(self.request_id, set()).add(self)
        return self

    def __exit__(self, *error: object) -> None:
        arrivals = self.by_id[self.request_id]
        arrivals.discard(self)
        if not arrivals:
            del self.by_id[self.request_id]


class Arrivals:
    """All `Arrival` objects by request id. Used on the event loop only."""

    def __init__(self) -> None:
        self._by_id: dict[str, set[Arrival]] = {}

    def expect(self, request_id: str) -> Arrival:
        """A request, registered until its context ends."""
        return Arrival(request_id, self._by_id)

    def stop(self, request_id: str) -> None:
        """Mark the requests of an id as stopped: each ends as soon as it is submitted."""
        for arrival in self._by_id.get(request_id, ()):
            arrival.is_stopped = True


class Gathering:
    """The wait of ``max_queue_delay_microseconds``, so that requests share their first step.

    The wait ends early once ``preferred_batch_size`` samples wait (the largest of several
    sizes). Without a delay it costs nothing.
    """

    def __init__(self, config: ModelConfig) -> None:
        batching = config.dynamic_batching
        self._delay_s = batching.max_queue_delay_microseconds / 1e6
        sizes = batching.preferred_batch_size
        self._enough = max(sizes, default=max(1, config.max_batch_size))
        self._num_waiting = 0
        self._gate: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def join(self, num_samples: int) -> None:
        """Return once the first request has waited for the delay, or the batch is full."""
        if not self._delay_s:
            return
        if self._gate is None:
            loop = asyncio.get_running_loop()
            self._gate = loop.create_future()
            self._timer = loop.call_later(self._delay_s, self._open)
        gate = self._gate
        self._num_waiting += num_samples
        if self._num_waiting >= self._enough:
            self._open()
        # Cancelling one request must not cancel the gate for the others.
        await asyncio.shield(gate)

    def _open(self) -> None:
        assert self._gate is not None and self._timer is not None
        self._timer.cancel()
        self._gate.set_result(None)
        self._gate = self._timer = None
        self._num_waiting = 0
