"""Durations of steps: seconds by part, of the host's loop and of the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import torch


class Part(IntEnum):
    """A part of rank 0's loop; each moment belongs to exactly one part."""

    IDLE = 0
    """Asleep, without work."""
    RECEIVE = 1
    """Reading and checking messages of front ends."""
    SCHEDULE = 2
    """Deciding the next step."""
    LAUNCH = 3
    """Sending the decision, making inputs, launching kernels; on a CPU running the step."""
    WAIT = 4
    """Waiting for sampled ids."""
    EMIT = 5
    """Updating sequences from sampled ids and writing messages."""


class StepMarks(Protocol):
    """Three moments of one step on its device."""

    def sampling(self) -> None:
        """The model has run; sampling begins."""
        ...

    def end(self) -> None:
        """The step has ended."""
        ...

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` wait until the step has ended."""
        ...

    def seconds(self) -> tuple[float, float] | None:
        """Time in the model and in the sampler; None while the device has not ended the
        step."""
        ...


class CpuMarks:
    """Times on the host's clock; the host runs the step itself."""

    __slots__ = ("_begin", "_end", "_sampling")

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._sampling: float | None = None
        self._end = self._begin

    def sampling(self) -> None:
        """The model has run; sampling begins."""
        self._sampling = time.perf_counter()

    def end(self) -> None:
        """The step has ended."""
        self._end = time.perf_counter()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Do nothing: the host has run the step, so it has ended."""

    def seconds(self) -> tuple[float, float]:
        """Time in the model and in the sampler."""
        middle = self._end if self._sampling is None else self._sampling
        return middle - self._begin, self._end - middle


class CudaMarks:
    """Times on a GPU's clock: events, which the host queries but never awaits.

    An event takes 2 to 3 us on the GPU, so a step that is launched while the preceding step
    runs uses that step's end as its begin.
    """

    __slots__ = ("_begin", "_end", "_is_end_shared", "_sampling", "_stream", "_unused")

    def __init__(self, unused: list[torch.cuda.Event], begin: torch.cuda.Event | None) -> None:
        """``unused`` events are taken from this list and returned to it, except ``begin``."""
        self._unused = unused
        self._stream = torch.cuda.current_stream()
        self._is_end_shared = False
        self._sampling: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None
        self._begin = self._record() if begin is None else begin

    def sampling(self) -> None:
        """The model has run; sampling begins."""
        self._sampling = self._record()

    def end(self) -> None:
        """The step has ended."""
        self._end = self._record()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` wait until the step has ended."""
        assert self._end is not None
        stream.wait_event(self._end)

    def coming_end(self) -> torch.cuda.Event | None:
        """The step's end if the device has not reached it, as the begin of the next step; else
        None."""
        if self._end is None or self._end.query():  # type: ignore[no-untyped-call]
            return None
        self._is_end_shared = True
        return self._end

    def seconds(self) -> tuple[float, float] | None:
        """Time in the model and in the sampler, once; None while the device has not ended
        it."""
        begin, end = self._begin, self._end
        if end is None or not end.query():  # type: ignore[no-untyped-call]
            return None
        middle = self._sampling
        if middle is None:
            times = begin.elapsed_time(end) / 1e3, 0.0
        else:
            times = begin.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3
        # Creating events costs more than recording them, so they are reused.
        self._unused.append(begin)
        if self._sampling is not None:
            self._unused.append(self._sampling)
        if not self._is_end_shared:
            self._unused.append(end)
        self._end = None
        return times

    def _record(self) -> torch.cuda.Event:
        if not self._unused:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._unused.append(event)
        event = self._unused.pop()
        event.record(self._stream)
        return event


class DeviceClock:
    """Creates the marks of steps on one device, which are launched in order."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._unused: list[torch.cuda.Event] = []
        self._last: CudaMarks | None = None

    def begin(self) -> StepMarks:
        """Mark the start of a step on the current stream."""
        if not self._is_gpu:
            return CpuMarks()
        begin = None if self._last is None else self._last.coming_end()
        self._last = CudaMarks(self._unused, begin)
        return self._last


class StepTimes:
    """Seconds of each part, summed since the start. Costs microseconds a step.

    The loop enters parts, and each part is charged until the next begins, so the parts add up
    to the elapsed time. A device's seconds arrive later than the host's.
    """

    def __init__(self) -> None:
        self.on_enter: Callable[[Part], None] | None = None
        """Called with each part that is entered while a trace is recorded."""
        self._seconds = [0.0] * len(Part)
        self._part = Part.IDLE
        self._since = time.perf_counter()
        self._model_s = 0.0
        self._sample_s = 0.0
        self._marks: deque[StepMarks] = deque()

    def enter(self, part: Part) -> float:
        """From now on charge ``part``. Returns the time, in seconds."""
        now = time.perf_counter()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now
        if self.on_enter is not None:
            self.on_enter(part)
        return now

    def launched(self, marks: StepMarks) -> None:
        """Count a step's time on the device once the device has passed its marks."""
        self.collect()
        self._marks.append(marks)

    def collect(self) -> None:
        """Count the steps that the device has ended since the last call."""
        while self._marks:
            times = self._marks[0].seconds()
            if times is None:
                return
            self._marks.popleft()
            self._model_s += times[0]
            self._sample_s += times[1]

    def values(self) -> dict[str, float]:
        """Seconds by key of ``STATS_KEYS``."""
        self.collect()
        values = {f"{part.name.lower()}_seconds": self._seconds[part] for part in _REPORTED}
        return {**values, "device_seconds": self._model_s, "sample_seconds": self._sample_s}


_REPORTED = (Part.RECEIVE, Part.SCHEDULE, Part.LAUNCH, Part.WAIT, Part.EMIT)
