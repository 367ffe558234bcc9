"""Deadlines: polling waits, the longest waits of a rank in a step, and the watchdog."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from trimaran.comm.time_limit import TimeLimit
from trimaran.comm.topology import ParallelLayout

SPIN_S = 0.0005
FIRST_SLEEP_S = 0.00005
BUSY_SLEEP_S = 0.001
"""Longest sleep of a waiter that expects an event soon."""

_SHORTEST, _LONGEST = 0.8, 0.88
"""Fractions of the hang timeout: a waiting rank reports the missing rank before its own
watchdog acts."""

logger = logging.getLogger(__name__)
_LONGEST_PERIOD_S = 1.0


class Backoff:
    """The pauses of one polling wait.

    The first `SPIN_S` only yields the core, so that a peer on the same core can run;
    later pauses sleep, growing by half each time up to ``max_sleep_s``.
    """

    def __init__(self, max_sleep_s: float = BUSY_SLEEP_S) -> None:
        self._max_sleep_s = max_sleep_s
        self._spin_until = time.monotonic() + SPIN_S
        self._sleep_s = FIRST_SLEEP_S

    def pause(self) -> None:
        """Yield the core once."""
        if time.monotonic() < self._spin_until:
            os.sched_yield()
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * 1.5, self._max_sleep_s)


def wait_for(
    is_done: Callable[[], bool], timeout_s: float, max_sleep_s: float = BUSY_SLEEP_S
) -> bool:
    """Poll until ``is_done()``; False if that takes longer than ``timeout_s``."""
    if is_done():
        return True
    limit = TimeLimit(timeout_s)
    backoff = Backoff(max_sleep_s)
    while not is_done():
        if limit.has_passed():
            return False
        backoff.pause()
    return True


@dataclass(frozen=True, slots=True)
class StepTimeouts:
    """The longest waits of one rank in a step, in seconds.

    When a rank is lost, all other ranks soon wait, most of them for waiting ranks. The rank
    that waits for the lost rank has the shortest limit, so that the first error names the lost
    rank.
    """

    hidden_s: float
    """For the hidden states of the preceding stage."""

    tensor_s: float
    """For collectives of the tensor group, whose ranks wait for hidden states first."""

    experts_s: float
    """For the expert all-to-all, whose ranks wait for their tensor groups first."""

    results_s: float
    """On rank 0 for the results of the last stage; longer than all waits above."""

    @classmethod
    def of(cls, topology: ParallelLayout, hang_timeout_s: float) -> StepTimeouts:
        """The timeouts of a rank, by its stage."""
        num_waits = 3 * topology.pp_size

        def behind(number: int) -> float:
            return hang_timeout_s * (_SHORTEST + (_LONGEST - _SHORTEST) * number / num_waits)

        first = 3 * topology.pp_rank
        return cls(behind(first), behind(first + 1), behind(first + 2), behind(num_waits))


class Watchdog:
    """A thread that ends the job when one activity of the main thread takes too long.

    `watch` and `pause` only store two values, so they can be called around every step. The
    thread checks about four times per hang timeout, at least once a second, so a hang is
    noticed up to a quarter late. After a stall of the whole process, for example of its
    machine, the thread checks once more: waits of the main thread have ended then too, and
    their errors name the lost rank.
    """

    def __init__(self, hang_timeout_s: float, on_hang: Callable[[], None]) -> None:
        self.hang_timeout_s = hang_timeout_s
        self._on_hang = on_hang
        self._limit: TimeLimit | None = None
        self._what: Callable[[], str] = str
        self._interrupted: tuple[Callable[[], str], TimeLimit | None, float] | None = None
        """The activity that waits for another one, its limit, and the wait's begin."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def watch(self, what: Callable[[], str], timeout_s: float | None = None) -> None:
        """An activity begins; ``what()`` describes the activity in the report of a hang."""
        limit = self.hang_timeout_s if timeout_s is None else timeout_s
        self._interrupted = None
        self._what = what
        self._limit = TimeLimit(limit)

    def interrupt(self, what: Callable[[], str], timeout_s: float) -> None:
        """The activity waits for another one, which may take ``timeout_s``; see `resume`."""
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = self._what, self._limit, now
        self._watch_until(what, TimeLimit(timeout_s))

    def resume(self) -> None:
        """The activity goes on: its time limit does not include the interruption."""
        if self._interrupted is not None:
            what, limit, begin = self._interrupted
            self._interrupted = None
            if limit is not None:
                limit.extend(time.monotonic() - begin)
            self._watch_until(what, limit)

    def _watch_until(self, what: Callable[[], str], limit: TimeLimit | None) -> None:
        self._what, self._limit = what, limit

    def pause(self) -> None:
        """Nothing runs that could hang."""
        self._interrupted = None
        self._limit = None

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        period_s = min(self.hang_timeout_s / 4, _LONGEST_PERIOD_S)
        checked, forgiven = time.monotonic(), None
        while not self._stopped.wait(period_s):
            last, checked = checked, time.monotonic()
            has_stalled = checked - last > 2 * period_s
            limit = self._limit
            # The activity may have ended while the other ranks were asked for their pauses.
            if limit is None or not limit.has_passed() or limit is not self._limit:
                continue
            if has_stalled and limit is not forgiven:
                forgiven = limit
                continue
            self._bark(limit.late_s)
            return

    def _bark(self, late_s: float) -> None:
        logger.error(
            "%s did not end within its time limit (%.1f s over): the job ends. If it needs "
            "that long, raise --hang-timeout. Stacks of the main thread and of all follow.",
            self._what(),
            late_s,
        )
        try:
            # The dump leaves out the oldest of more than a hundred threads, the main one first.
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            if frame is not None:
                traceback.print_stack(frame, file=sys.stderr)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        except (OSError, ValueError):
            logger.exception("the stacks could not be written")
        self._on_hang()
