"""A progress bar for work that turns out to take over a second, on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_DELAY_S = 1.0


class ProgressBar:
    """Counts steps; shows nothing for the first second, or where stderr is no terminal."""

    def __init__(self, num_steps: int) -> None:
        self._began = time.monotonic()
        self._num_steps = num_steps
        self._done = 0
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, text: str) -> None:
        """Say what is about to be done; what was said before is finished."""
        if self._bar is None and time.monotonic() - self._began > _DELAY_S:
            self._show()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, description=text)
        self._done += 1

    def _show(self) -> None:
        if not sys.stderr.isatty():
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.add_task("", total=self._num_steps)
        self._bar.start()
