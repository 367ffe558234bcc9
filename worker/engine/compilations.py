"""Kernels that are compiled while requests wait: logged, counted, and told to the watchdog."""

from __future__ import annotations

import logging

from trimaran.comm.control.pause_notices import PauseNotices
from trimaran.comm.deadlines import Watchdog
from trimaran.kernels.compilations import hooks

logger = logging.getLogger(__name__)


class Compilations:
    """The kernels that this rank compiled after its start, each of which delayed a step.

    The warm-up runs all kernels of its list. A rank that compiles a kernel all the same is
    not hung: its watchdog, and the ranks that wait for it, wait for the kernel as long as for
    a start.
    """

    def __init__(self) -> None:
        self.num_compiled = 0
        self.num_loaded = 0
        """Kernels read from the cache of an earlier process."""
        self._watchdog: Watchdog | None = None
        self._timeout_s = float("inf")
        self._notices: PauseNotices | None = None

    def watch(
        self,
        watchdog: Watchdog | None,
        timeout_s: float,
        notices: PauseNotices | None = None,
    ) -> None:
        """From now on take note of each kernel. The watchdog allows it ``timeout_s``, and so
        do the other ranks, to which ``notices`` go."""
        self._watchdog, self._timeout_s = watchdog, timeout_s
        self._notices = notices
        hooks.connect(self)

    def begin(self, name: str) -> None:
        """See `CompilationListener`."""
        if self._watchdog is not None:
            what = f"the compilation of kernel {name}"
            self._watchdog.interrupt(lambda: what, self._timeout_s)
        if self._notices is not None:
            self._notices.begin(self._timeout_s)

    def end(self, name: str, seconds: float, *, is_cached: bool) -> None:
        """See `CompilationListener`."""
        if self._watchdog is not None:
            self._watchdog.resume()
        if self._notices is not None:
            self._notices.end()
        if is_cached:
            self.num_loaded += 1
            logger.debug("kernel %s read from the cache while serving in %.2f s", name, seconds)
        else:
            self.num_compiled += 1
            text = "kernel %s compiled while serving, which took %.1f s"
            logger.warning(text, name, seconds)

    def values(self) -> dict[str, float]:
        """The counts by key of ``STATS_KEYS``."""
        return {
            "num_compiled_kernels": self.num_compiled,
            "num_loaded_kernels": self.num_loaded,
        }
