"""What the supervisor says about processes, as metrics read off the board of groups."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from trimaran.server.metrics.group_board import GroupBoard


class BoardMetrics:
    """Looks at the board whenever somebody asks; a group that is forgotten is not shown."""

    def __init__(self, board: GroupBoard, registry: CollectorRegistry) -> None:
        self._board = board
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The registry's question for samples."""
        up = GaugeMetricFamily(
            "trimaran_process_up",
            "Whether a process beside the worker groups runs (1) or not (0)",
            labels=("process",),
        )
        restarts = GaugeMetricFamily(
            "trimaran_process_restarts",
            "Restarts so far of a process beside the worker groups",
            labels=("process",),
        )
        faults = GaugeMetricFamily(
            "trimaran_last_fault_timestamp_seconds",
            "When a group or process failed last, in seconds since the epoch",
            labels=("model", "group"),
        )
        for group in self._board.groups():
            name, model = str(group["group"]), str(group["model"])
            if not model:
                up.add_metric((name,), float(group["state"] == "up"))
                restarts.add_metric((name,), float(group["num_restarts"]))
            if group["fault_time"]:
                faults.add_metric((model, name), float(group["fault_time"]))
        yield from (up, restarts, faults)
