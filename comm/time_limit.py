"""Time limits of waits for other ranks, which do not count the time of their compilations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_SHORTEST_SLEEP_S = 0.001


@dataclass(frozen=True, slots=True)
class PauseState:
    """The pauses of other ranks, in which these compile kernels, as far as they were told."""

    ended_s: float = 0.0
    """Total time of the pauses that have ended."""

    is_paused: bool = False
    """Whether another rank compiles now."""


class PeerPauses:
    """The pauses of other ranks, which a rank asks for only when a time limit has passed."""

    def __init__(self) -> None:
        self._ask: Callable[[], PauseState] | None = None
        self._lock = threading.Lock()
        self.ended_s = 0.0
        """As of the last answer."""

    def connect(self, ask: Callable[[], PauseState] | None) -> None:
        """Ask ``ask`` from now on; None: other ranks never pause. Any thread may call it."""
        self._ask = ask

    def state(self) -> PauseState:
        """The pauses until now."""
        with self._lock:
            if self._ask is None:
                return PauseState(self.ended_s)
            found = self._ask()
            self.ended_s = found.ended_s
            return found


pauses = PeerPauses()
"""The pauses of the other ranks of this process's job."""


class TimeLimit:
    """The end of a wait, or of an activity that may wait for other ranks.

    A rank that compiles a kernel is not lost: ranks that wait for it begin to count again
    when it goes on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s
        self._ended_s = pauses.ended_s

    @property
    def late_s(self) -> float:
        """Seconds since the end; negative before."""
        return time.monotonic() - self._end

    def sleep_s(self, longest_s: float) -> float:
        """A sleep up to the end, of at least a millisecond and at most ``longest_s``."""
        return min(max(-self.late_s, _SHORTEST_SLEEP_S), longest_s)

    def has_passed(self) -> bool:
        """Whether the time is over; not while another rank pauses."""
        if self.late_s <= 0:
            return False
        state = pauses.state()
        self._end += state.ended_s - self._ended_s
        self._ended_s = state.ended_s
        return not state.is_paused and self.late_s > 0

    def extend(self, seconds: float) -> None:
        """Let the time end later."""
        self._end += seconds
