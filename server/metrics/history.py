"""The last ten minutes of each engine, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from trimaran.server.metrics.recent_rates import SAMPLE_PERIOD_S, Key

PERIOD_S = 3 * SAMPLE_PERIOD_S
_WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine at one moment; times in seconds."""

    tokens_per_s: float
    waiting_requests: float
    kv_used_fraction: float
    first_token_p99_s: float | None
    """Over the last minute; None without requests in that minute."""


class History:
    """The readings of ten minutes, one each `PERIOD_S`. Used on the event loop only."""

    def __init__(self) -> None:
        self._moments: deque[Mapping[Key, Reading]] = deque(maxlen=int(_WINDOW_S / PERIOD_S))

    @property
    def max_readings(self) -> int:
        """Readings that ten minutes hold."""
        assert self._moments.maxlen is not None
        return self._moments.maxlen

    def add(self, readings: Mapping[Key, Reading]) -> None:
        """Keep the readings of all engines at one moment, and drop those of ten minutes ago."""
        self._moments.append(readings)

    def of(self, key: Key) -> dict[str, list[float | None]]:
        """One engine's values, oldest first, by the names of `Reading`.

        A value is None at a moment at which the engine was not loaded.
        """
        readings = [moment.get(key) for moment in self._moments]
        rows = [None if reading is None else asdict(reading) for reading in readings]
        return {
            each.name: [None if row is None else row[each.name] for row in rows]
            for each in fields(Reading)
        }


def svg_path(values: Sequence[float | None], num_steps: int, top: float, height: float) -> str:
    """The path of a line through values, of which the last lies at x = ``num_steps`` - 1.

    ``top`` is the value at y = 0; 0 lies at y = ``height``. The line is broken at None.
    """
    parts: list[str] = []
    is_drawing = False
    for x, value in enumerate(values, num_steps - len(values)):
        if value is not None:
            y = height * (1.0 - min(value / top, 1.0)) if top > 0 else height
            # A line of no length is a dot, by which a single value is seen.
            parts.append(f"L{x} {y:.1f}" if is_drawing else f"M{x} {y:.1f}h0")
        is_drawing = value is not None
    return "".join(parts)
