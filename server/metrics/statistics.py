"""Counters of each model's requests, as the statistics extension reports them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tritonclient.grpc.service_pb2 import ModelStatistics as StatisticsMessage
from tritonclient.grpc.service_pb2 import StatisticDuration


@dataclass(slots=True)
class _Duration:
    """How often something happened and how long it took in total."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def message(self) -> StatisticDuration:
        return StatisticDuration(count=self.count, ns=self.ns)


class ModelStatistics:
    """One model version's counters. Used on the event loop only."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._last_inference_ms = 0
        self._num_inferences = 0
        self._num_executions = 0
        self._success = _Duration()
        self._fail = _Duration()
        self._queue = _Duration()
        self._compute_input = _Duration()
        self._compute_infer = _Duration()
        self._compute_output = _Duration()
        self._batches: dict[int, _Duration] = {}

    def record_success(
        self,
        *,
        batch_size: int,
        total_ns: int,
        queue_ns: int,
        infer_ns: int,
        executed_batch: int | None = None,
    ) -> None:
        """Count a finished request; what is neither queue nor inference is output.

        ``executed_batch`` is the size of the batch that it was a part of, or 0 where another
        request counts for the batch.
        """
        self._last_inference_ms = time.time_ns() // 1_000_000
        self._num_inferences += batch_size
        self._success.add(total_ns)
        self._queue.add(queue_ns)
        self._compute_input.add(0)
        self._compute_infer.add(infer_ns)
        self._compute_output.add(max(0, total_ns - queue_ns - infer_ns))
        size = batch_size if executed_batch is None else executed_batch
        if size:
            self._num_executions += 1
            self._batches.setdefault(size, _Duration()).add(infer_ns)

    def record_failure(self, total_ns: int) -> None:
        """Count a request that ended with an error or was cancelled."""
        self._fail.add(total_ns)

    def message(self) -> StatisticsMessage:
        """The counters as the protocol's message."""
        message = StatisticsMessage(
            name=self.name,
            version=self.version,
            last_inference=self._last_inference_ms,
            inference_count=self._num_inferences,
            execution_count=self._num_executions,
        )
        totals = message.inference_stats
        totals.success.CopyFrom(self._success.message())
        totals.fail.CopyFrom(self._fail.message())
        totals.queue.CopyFrom(self._queue.message())
        totals.compute_input.CopyFrom(self._compute_input.message())
        totals.compute_infer.CopyFrom(self._compute_infer.message())
        totals.compute_output.CopyFrom(self._compute_output.message())
        totals.cache_hit.CopyFrom(StatisticDuration())
        totals.cache_miss.CopyFrom(StatisticDuration())
        for batch_size, infer in sorted(self._batches.items()):
            message.batch_stats.add(
                batch_size=batch_size,
                compute_input=StatisticDuration(count=infer.count),
                compute_infer=infer.message(),
                compute_output=StatisticDuration(count=infer.count),
            )
        return message
