"""Distinguishes a hung process from a process that computes without answering."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from trimaran.launcher.supervisor.child_connections import ChildConnection

logger = logging.getLogger(__name__)

_MAX_PINGS = 4
"""Unanswered pings that make up ``hang_timeout_s``. Counted, not timed: after a suspension
of this process, no child counts as hung.
"""

_LOADING_PATIENCE = 6
"""Factor of the silence allowed to a loading process: code that holds the interpreter, such
as an import, is not a hang.
"""

_BUSY_SHARE = 0.05
"""A process that used this part of one processor since the last look makes progress. The
threads of an event loop that waits for ever use less than a tenth of that."""


@dataclass(frozen=True, slots=True)
class Silence:
    """A process that was silent for too long."""

    connection: ChildConnection
    text: str
    """The part of the failure's text after the name of the process."""


class SignsOfLife:
    """Pings the processes of one group, and judges silent processes.

    Only a front end is given ``stall_timeout_s`` while it uses the processor: a rank that
    waits for a lost rank uses the processor too.
    """

    def __init__(self, hang_timeout_s: float, stall_timeout_s: float) -> None:
        """``hang_timeout_s`` 0 means that no process is judged. ``stall_timeout_s`` applies
        to front ends and is 0 for other processes."""
        self._hang_timeout_s = hang_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._sample: tuple[float, float] | None = None
        """When a silent front end was looked at last, and its processor time then."""

    @property
    def period_s(self) -> float:
        """Pause between two checks; 0 without checks. The pause is the same during loading,
        because ranks on other hosts end without pings."""
        return self._hang_timeout_s / _MAX_PINGS

    def look(
        self, connections: Iterable[ChildConnection], *, is_loading: bool
    ) -> Silence | None:
        """Judge every process, then ping all; a process that was silent for too long."""
        patience = _LOADING_PATIENCE if is_loading else 1
        why = "--hang-timeout"
        if is_loading:
            why = f"{_LOADING_PATIENCE} times --hang-timeout, while loading"
        limit_s = self._hang_timeout_s * patience
        for connection in connections:
            is_busy = self._is_busy(connection)
            if connection.num_unanswered < _MAX_PINGS * patience:
                continue
            if is_loading or not self._stall_timeout_s:
                return Silence(
                    connection, f"has hung: no sign of life for {limit_s:g} s ({why})"
                )
            silence = self._judge_frontend(connection, is_busy)
            if silence is not None:
                return silence
        for connection in connections:
            connection.ping()
        return None

    def _judge_frontend(self, connection: ChildConnection, is_busy: bool) -> Silence | None:
        silent_s = connection.num_unanswered * self.period_s
        if not is_busy:
            text = (
                f"has hung: no sign of life for {silent_s:g} s and no work done "
                "(--hang-timeout). The log has its stacks"
            )
            return Silence(connection, text)
        if silent_s >= self._stall_timeout_s:
            text = (
                f"has stalled: it computes, but gave no sign of life for {silent_s:g} s "
                "(--stall-timeout). The log has its stacks"
            )
            return Silence(connection, text)
        if connection.num_unanswered == _MAX_PINGS:
            logger.warning(
                "the front end (pid %d) has answered nothing for %g s, but computes: it has "
                "until %g s (--stall-timeout)", connection.pid, silent_s, self._stall_timeout_s,
            )  # fmt: skip
        return None

    def _is_busy(self, connection: ChildConnection) -> bool:
        """Whether a silent front end has used the processor since the last look."""
        if not self._stall_timeout_s or not connection.num_unanswered:
            self._sample = None
            return False
        now, used_s = time.monotonic(), _cpu_time(connection.pid)
        then, used_then_s = self._sample or (now, used_s)
        self._sample = now, used_s
        return used_s - used_then_s > _BUSY_SHARE * (now - then)


def _cpu_time(pid: int) -> float:
    """Processor time of all threads of a process of this host; 0 for a dead one."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
