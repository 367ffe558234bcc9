"""Log lines about clients: at most one a minute, with the number of events since the last."""

from __future__ import annotations

import logging
import time

_INTERVAL_S = 60.0


class Notice:
    """Counts events of clients and logs them, so that clients cannot fill the log."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._num_events = 0
        self._logged_at: float | None = None

    def note(self, text: str, *arguments: object) -> None:
        """Count an event; ``text`` follows the number of events since the last line."""
        self._num_events += 1
        now = time.monotonic()
        if self._logged_at is not None and now - self._logged_at < _INTERVAL_S:
            return
        self._logged_at = now
        self._logger.log(self._level, f"%d {text}", self._num_events, *arguments)
        self._num_events = 0
