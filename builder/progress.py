"""A progress bar on a terminal for work that takes more than a second."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_DELAY_S = 1.0


class ProgressBar:
    """Counts bytes or steps; prints nothing in the first second, or without a terminal."""

    def __init__(self, total: int, *, counts_bytes: bool = True) -> None:
        self._began = time.monotonic()
        self._total = total
        self._counts_bytes = counts_bytes
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

    def show(self, num_done: int, text: str) -> None:
        """Show how many bytes or steps are done, with a description."""
        if self._bar is None and time.monotonic() - self._began > _DELAY_S:
            self._start()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=num_done, description=text)

    def _start(self) -> None:
        if not sys.stderr.isatty():
            return
        numbers: tuple[ProgressColumn, ...] = (MofNCompleteColumn(),)
        if self._counts_bytes:
            numbers = (DownloadColumn(binary_units=True), TransferSpeedColumn())
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *numbers,
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.add_task("", total=self._total)
        self._bar.start()
