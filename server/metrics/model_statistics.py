"""The counters of one model version's requests."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum

from tritonclient.grpc.service_pb2 import ModelStatistics as StatisticsMessage
from tritonclient.grpc.service_pb2 import StatisticDuration


class FailureReason(Enum):
    """The reason of a failed request, as the failure counter's label."""

    REJECTED = "REJECTED"
    """The request's queue was full, or the request waited too long."""

    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    """The backend failed or died."""

    OTHER = "OTHER"
    """The request has a faulty value, a step of an ensemble failed, or the server has a bug."""


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
    """One model version's counters, shown in statistics answers and at each scrape. Used on
    the event loop only.
    """

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.num_inferences = 0
        self.num_executions = 0
        self.num_failures = dict.fromkeys(FailureReason, 0)
        self.success = _Duration()
        """Successful requests, and their whole time."""
        self._input_ns = self._queue_ns = self._infer_ns = self._output_ns = 0
        """Time of successful requests in each phase: a request has every phase once."""
        self._last_inference_ms = 0
        self._fail = _Duration()
        self._batches: defaultdict[int, _Duration] = defaultdict(_Duration)

    def record_success(
        self,
        *,
        batch_size: int,
        executed_batch: int,
        total_ns: int,
        input_ns: int,
        queue_ns: int,
        infer_ns: int,
    ) -> None:
        """Count a finished request; time that is neither input, queue nor inference is output.

        ``executed_batch`` is the size of the request's batch, or 0 where another request of the
        batch reports it.
        """
        self._last_inference_ms = time.time_ns() // 1_000_000
        self.num_inferences += batch_size
        self.success.add(total_ns)
        self._input_ns += input_ns
        self._queue_ns += queue_ns
        self._infer_ns += infer_ns
        self._output_ns += max(0, total_ns - input_ns - queue_ns - infer_ns)
        if executed_batch:
            self.num_executions += 1
            self._batches[executed_batch].add(infer_ns)

    def record_failure(self, reason: FailureReason, total_ns: int | None) -> None:
        """Count a request that ended with an error or was cancelled. ``total_ns`` is None for a
        request that had not begun.
        """
        self.num_failures[reason] += 1
        if total_ns is not None:
            self._fail.add(total_ns)

    def durations_ns(self) -> dict[str, int]:
        """The times of successful requests: of whole requests, and of each phase."""
        return {
            "request": self.success.ns,
            "queue": self._queue_ns,
            "compute_input": self._input_ns,
            "compute_infer": self._infer_ns,
            "compute_output": self._output_ns,
        }

    def message(self) -> StatisticsMessage:
        """The counters as the protocol's message."""
        message = StatisticsMessage(
            name=self.name,
            version=self.version,
            last_inference=self._last_inference_ms,
            inference_count=self.num_inferences,
            execution_count=self.num_executions,
        )
        totals = message.inference_stats
        count, durations = self.success.count, self.durations_ns()
        totals.success.CopyFrom(self.success.message())
        totals.fail.CopyFrom(self._fail.message())
        for phase in ("queue", "compute_input", "compute_infer", "compute_output"):
            duration = StatisticDuration(count=count, ns=durations[phase])
            getattr(totals, phase).CopyFrom(duration)
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
