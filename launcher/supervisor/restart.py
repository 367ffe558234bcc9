"""The restart budget: how soon, and how often, what died is started again."""

from __future__ import annotations

from collections import deque

from trimaran.launcher.config import RestartPolicy

_MOST_DOUBLINGS = 64
"""Beyond the longest pause in any case; a float has room for a thousand."""


class RestartBudget:
    """At most ``max_restarts`` within the window, each after a longer pause than the last."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._taken: deque[float] = deque()
        self.num_restarts = 0

    def take(self, now: float) -> float | None:
        """Seconds to wait before the next restart; None if the budget is used up."""
        while self._taken and now - self._taken[0] > self._policy.window_s:
            self._taken.popleft()
        if len(self._taken) >= self._policy.max_restarts:
            return None
        delay = self._policy.first_delay_s * 2.0 ** min(len(self._taken), _MOST_DOUBLINGS)
        self._taken.append(now)
        self.num_restarts += 1
        return min(delay, self._policy.max_delay_s)

    def __str__(self) -> str:
        return f"{self._policy.max_restarts} restarts within {self._policy.window_s:g} s"
