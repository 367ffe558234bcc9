"""When to plan the next step: late, so newcomers join it, but in time for the device."""

from __future__ import annotations

from collections import deque

_MARGIN_S = 0.0004
"""Safety margin beside the time of planning and launching, as host timing is not exact."""

_SHORTEST_S = 0.0001
"""A shorter wait is not worth a sleep."""

_RECENT_S = 2.0
"""If no request came for this long, planning does not wait for one."""

_DRIFT = 0.1
"""Fraction of a change for the worse that an estimate follows at once."""

_MIN_PROMPT_TOKENS = 128
"""Steps with fewer prompt tokens say little about the cost of a prompt token."""


class PlanTiming:
    """How long planning the next step can wait while the device runs the last one.

    With two steps in flight, a step that is planned as soon as another has ended is queued
    behind a step that has only begun, and a request that arrives meanwhile waits for both. A
    step that is planned as late as the device allows includes the request. If the estimate is
    wrong, the device has a short gap. So the estimates are careful: that of a step's time
    shrinks at once and grows slowly, and that of planning grows at once and shrinks slowly. A
    step with prompts takes the time of a decode step, plus a time per prompt token. Times are
    those of ``time.perf_counter``.
    """

    def __init__(self, is_overlapped: bool) -> None:
        self._is_overlapped = is_overlapped
        self._decode_s = 0.0
        self._prompt_token_s = 0.0
        self._plan_s = 0.0
        self._last_result = 0.0
        self._last_submit = float("-inf")
        self._in_flight: deque[int] = deque()

    def submitted(self, now: float) -> None:
        """A request has arrived."""
        self._last_submit = now

    def planned(self, start: float, end: float, num_prompt_tokens: int) -> None:
        """A step was planned and launched between these times."""
        is_first = not self._in_flight
        self._in_flight.append(num_prompt_tokens)
        if not num_prompt_tokens:
            took = end - start
            self._plan_s = _towards(self._plan_s, took, is_worse=took < self._plan_s)
        if is_first:
            self._last_result = start

    def arrived(self, now: float, *, has_waited: bool) -> None:
        """The oldest step's result is here; the host ``has_waited`` for it."""
        took = now - self._last_result
        tokens = self._in_flight.popleft()
        if has_waited and not tokens:
            known = self._decode_s
            self._decode_s = _towards(known, took, is_worse=took > known) if known else took
        elif has_waited and tokens >= _MIN_PROMPT_TOKENS and self._decode_s:
            each, known = max(0.0, took - self._decode_s) / tokens, self._prompt_token_s
            self._prompt_token_s = (
                _towards(known, each, is_worse=each > known) if known else each
            )
        self._last_result = now

    def spare_s(self, now: float) -> float:
        """Seconds that planning can wait; 0 to plan now."""
        if not (self._is_overlapped and self._in_flight):
            return 0.0
        if now - self._last_submit > _RECENT_S:
            return 0.0
        running_s = self._decode_s + self._in_flight[0] * self._prompt_token_s
        spare_s = self._last_result + running_s - 1.25 * self._plan_s - _MARGIN_S - now
        return spare_s if spare_s >= _SHORTEST_S else 0.0


def _towards(known: float, found: float, *, is_worse: bool) -> float:
    """The new estimate: the found value, or a small move towards it if ``is_worse``."""
    return known + _DRIFT * (found - known) if is_worse else found
