"""When the next step has to be planned: late, for newcomers; in time, for the device."""

from __future__ import annotations

_MARGIN_S = 0.0004
"""Kept beside the time that planning and launching take, as the host's clock is not exact."""

_GRAIN_S = 0.001
"""A sleep in the kernel is this long or a multiple of it."""

_RECENT_S = 2.0
"""Without a request for so long, none is waited for."""

_DRIFT = 0.1
"""How much of a change to the worse side is believed at once."""


class PlanTiming:
    """How long the plan of the next step can wait while the device runs the last one.

    With two steps in flight, a plan made as soon as one has ended is queued behind a step that
    has only begun, and a request that comes meanwhile waits for both. Made as late as the
    device allows, the plan takes the request along. What it costs if the estimate is wrong is
    a short gap on the device, so estimates are careful: a running step counts as long as a
    decode, whatever it holds, decodes are believed to be shorter at once and longer only
    slowly, planning the other way round. Times are those of ``time.perf_counter``.
    """

    def __init__(self, is_overlapped: bool) -> None:
        self._is_overlapped = is_overlapped
        self._decode_s = 0.0
        self._plan_s = 0.0
        self._last_result = 0.0
        self._last_submit = float("-inf")
        self._is_running = False

    def submitted(self, now: float) -> None:
        """A request has come."""
        self._last_submit = now

    def planned(self, start: float, end: float) -> None:
        """A step was planned and launched between these times."""
        self._plan_s = _towards(self._plan_s, end - start, is_worse=end - start < self._plan_s)

    def arrived(self, now: float, *, is_decode: bool, has_waited: bool, is_last: bool) -> None:
        """A step's result is there; the host ``has_waited`` for it.

        ``is_decode`` says that the step held nothing else, and ``is_last`` that no other step
        is in flight.
        """
        took = now - self._last_result
        if is_decode and has_waited and self._is_running:
            known = self._decode_s
            self._decode_s = _towards(known, took, is_worse=took > known) if known else took
        self._last_result = now
        self._is_running = not is_last

    def spare_s(self, now: float) -> float:
        """Seconds that the plan can wait, in grains; 0 if it is to be made now."""
        if not (self._is_overlapped and self._is_running):
            return 0.0
        if now - self._last_submit > _RECENT_S:
            return 0.0
        due = self._last_result + self._decode_s - 1.25 * self._plan_s - _MARGIN_S
        return max(0.0, (due - now) // _GRAIN_S * _GRAIN_S)


def _towards(known: float, found: float, *, is_worse: bool) -> float:
    """The new estimate: believed at once, or only a little if ``is_worse``."""
    return known + _DRIFT * (found - known) if is_worse else found
