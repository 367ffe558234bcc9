"""Decides which requests one port serves, by category and headers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trimaran.server.access.api_keys import KeyFile
from trimaran.server.access.restrictions import Restriction

logger = logging.getLogger(__name__)

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


AUTHORIZATION = "authorization"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served, and its status over HTTP and over gRPC."""

    text: str
    http_status: int
    grpc_status: str

    @property
    def needs_key(self) -> bool:
        """Whether a key would help: the answer then says that keys are ``Bearer`` tokens."""
        return self.http_status == 401


@dataclass(slots=True)
class AccessPolicy:
    """What one port asks of requests. A check costs O(keys) where keys are in use."""

    restrictions: Mapping[str, Restriction] = field(default_factory=dict)
    keys: KeyFile | None = None
    moved: Mapping[str, str] = field(default_factory=dict)
    """Categories that another port serves, and what to tell their clients."""

    kind: str = "API"
    """What Triton calls an endpoint here: API over HTTP, protocol over gRPC."""

    _no_header: Notice = field(default_factory=lambda: Notice(logger, logging.WARNING))
    _no_key: Notice = field(default_factory=lambda: Notice(logger, logging.WARNING))

    @property
    def is_open(self) -> bool:
        """Whether every request is served."""
        return not (self.restrictions or self.keys or self.moved)

    def refusal(self, category: str, header: Callable[[str], str | None]) -> Refusal | None:
        """Why a request is refused, or None; ``header`` gives the value of a name."""
        if category in self.moved:
            return Refusal(self.moved[category], 403, "PERMISSION_DENIED")
        restriction = self.restrictions.get(category)
        if restriction is not None and not restriction.is_met(header(restriction.header)):
            self._no_header.note("requests lacked the header of a restricted %s", self.kind)
            text = f"This {self.kind} is restricted, expecting header '{restriction.header}'"
            # The statuses and the text are Triton's.
            return Refusal(text, 403, "UNAVAILABLE")
        return self._refusal_of_key(category, header) if self.keys is not None else None

    def _refusal_of_key(
        self, category: str, header: Callable[[str], str | None]
    ) -> Refusal | None:
        assert self.keys is not None
        known = self.keys.current
        if category in known.open:
            return None
        shown = header(AUTHORIZATION)
        key = known.find(shown) if shown else None
        if key is None:
            self._no_key.note("requests lacked a valid API key")
            why = "is not valid" if shown else "is missing"
            text = f"the API key of {category} requests {why}: send 'Authorization: Bearer KEY'"
            return Refusal(text, 401, "UNAUTHENTICATED")
        if category not in key.categories:
            text = f"the API key '{key.name}' does not open {category} requests"
            return Refusal(text, 403, "PERMISSION_DENIED")
        return None
