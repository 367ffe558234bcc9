"""The last state that the supervisor reported of every process group, and its metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

MAX_FAULTS = 50

_DEFAULTS: dict[str, Any] = {
    "model": "",
    "generation": 1,
    "state": "starting",
    "text": "",
    "fault_time": 0.0,
    "num_restarts": 0,
    "restart_in_s": 0.0,
    "world_size": 1,
    "start_method": "",
    "ranks": [],
}


class GroupBoard:
    """The last ``group_state`` of every group. Used on the event loop only."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Any]] = {}
        self._faults: deque[dict[str, Any]] = deque(maxlen=MAX_FAULTS)

    def update(self, group: str, values: Mapping[str, Any]) -> None:
        """Apply one ``group_state``: its fields replace the known fields; a new fault is
        kept.
        """
        known = self._groups.setdefault(group, {"group": group, **_DEFAULTS})
        before = known["fault_time"]
        known.update(values)
        if known["fault_time"] and known["fault_time"] != before:
            self._faults.append(
                {"time": known["fault_time"], "group": group, "text": known["text"]}
            )

    def remove(self, group: str) -> None:
        """Remove a group that was stopped; its faults stay."""
        self._groups.pop(group, None)

    def group(self, name: str) -> Mapping[str, Any] | None:
        """The state of one group; None if the group is unknown."""
        return self._groups.get(name)

    def groups(self) -> list[dict[str, Any]]:
        """All groups: those of models first, by name."""
        return sorted(
            self._groups.values(), key=lambda each: (not each["model"], each["group"])
        )

    def faults(self) -> list[dict[str, Any]]:
        """The last faults, the youngest first: ``time``, ``group`` and ``text``."""
        return list(reversed(self._faults))


class BoardMetrics:
    """Reads the board at each scrape; a removed group is not shown."""

    def __init__(self, board: GroupBoard, registry: CollectorRegistry) -> None:
        self._board = board
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
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
