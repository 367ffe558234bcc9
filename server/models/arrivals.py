"""Requests that are on their way to the token model, for whoever stops them by their id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Arrival:
    """A request whose prompt is being made."""

    is_stopped: bool = False


class Arrivals:
    """All of them by id. Used on the event loop only."""

    def __init__(self) -> None:
        self._by_id: dict[str, set[Arrival]] = {}

    @contextmanager
    def expect(self, request_id: str) -> Iterator[Arrival]:
        """A request is on its way until this ends."""
        arrival = Arrival()
        arrivals = self._by_id.setdefault(request_id, set())
        arrivals.add(arrival)
        try:
            yield arrival
        finally:
            arrivals.discard(arrival)
            if not arrivals:
                self._by_id.pop(request_id, None)

    def stop(self, request_id: str) -> None:
        """End those of an id as soon as they arrive."""
        for arrival in self._by_id.get(request_id, ()):
            arrival.is_stopped = True
