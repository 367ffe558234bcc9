"""Requests that come close together, and go to the engine at one moment."""

from __future__ import annotations

import asyncio

from tritonclient.grpc.model_config_pb2 import ModelConfig


class Gathering:
    """The wait of ``max_queue_delay_microseconds``, so that requests share their first step.

    It ends early once ``preferred_batch_size`` samples wait (the largest, where there are
    several). Without a delay it costs nothing.
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
        """Return when whoever came first has waited for long enough, or enough have come."""
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
        # One that is cancelled must not take the others along.
        await asyncio.shield(gate)

    def _open(self) -> None:
        assert self._gate is not None and self._timer is not None
        self._timer.cancel()
        self._gate.set_result(None)
        self._gate = self._timer = None
        self._num_waiting = 0
