"""Where the time of steps goes: seconds by part, of the host's loop and of the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import torch


class Part(IntEnum):
    """What the loop of rank 0 is doing; each moment belongs to exactly one part."""

    IDLE = 0
    """Asleep, without work."""
    RECEIVE = 1
    """Reading and checking what front ends sent."""
    SCHEDULE = 2
    """Deciding the next step."""
    LAUNCH = 3
    """Sending the decision, making inputs, launching kernels; on a CPU running them."""
    WAIT = 4
    """Waiting for sampled ids."""
    EMIT = 5
    """Taking in sampled ids and writing messages."""


class StepMarks(Protocol):
    """Three moments of one step on its device."""

    def sampling(self) -> None:
        """The model has run: what follows is sampling."""
        ...

    def end(self) -> None:
        """The step is over."""
        ...

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have ``stream`` wait until the step is over."""
        ...

    def seconds(self) -> tuple[float, float] | None:
        """Time in the model and in the sampler; None while the device is not there yet."""
        ...


class CpuMarks:
    """Moments on the clock of the host, which runs the step itself."""

    __slots__ = ("_begin", "_end", "_sampling")

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._sampling: float | None = None
        self._end = self._begin

    def sampling(self) -> None:
        """The model has run: what follows is sampling."""
        self._sampling = time.perf_counter()

    def end(self) -> None:
        """The step is over."""
        self._end = time.perf_counter()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """The host has run the step itself: it is over."""

    def seconds(self) -> tuple[float, float]:
        """Time in the model and in the sampler."""
        middle = self._end if self._sampling is None else self._sampling
        return middle - self._begin, self._end - middle


class CudaMarks:
    """Moments on the clock of a GPU: events, which the host asks about but never awaits.

    Each keeps the GPU for 2 to 3 us, so a step that is launched while the one before it runs
    begins with that one's end.
    """

    __slots__ = ("_begin", "_end", "_is_end_shared", "_sampling", "_unused")

    def __init__(self, unused: list[torch.cuda.Event], begin: torch.cuda.Event | None) -> None:
        """``unused`` events are taken from, and come back to, where they are not ``begin``."""
        self._unused = unused
        self._is_end_shared = False
        self._sampling: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None
        self._begin = self._record() if begin is None else begin

    def sampling(self) -> None:
        """The model has run: what follows is sampling."""
        self._sampling = self._record()

    def end(self) -> None:
        """The step is over."""
        self._end = self._record()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have ``stream`` wait until the step is over."""
        assert self._end is not None
        stream.wait_event(self._end)

    def coming_end(self) -> torch.cuda.Event | None:
        """The end that the device has still to reach, for the step behind this one to begin
        with; None if it has."""
        if self._end is None or self._end.query():  # type: ignore[no-untyped-call]
            return None
        self._is_end_shared = True
        return self._end

    def seconds(self) -> tuple[float, float] | None:
        """Time in the model and in the sampler, once; None while the device is not there."""
        begin, end = self._begin, self._end
        if end is None or not end.query():  # type: ignore[no-untyped-call]
            return None
        middle = self._sampling or end
        times = begin.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3
        # Making events costs more than recording them, so they are used again.
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
        event.record()
        return event


class DeviceClock:
    """Hands out marks for steps on one device, which are launched in turn."""

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
    """Seconds of each part, summed since the start; microseconds of cost a step.

    The loop says what it enters; what it leaves is charged up to that moment, so the parts
    add up to the time that has passed. A device's seconds come later than the host's.
    """

    def __init__(self) -> None:
        self.on_enter: Callable[[Part], None] | None = None
        """Called with every part that is entered while a trace is recorded."""
        self._seconds = [0.0] * len(Part)
        self._part = Part.IDLE
        self._since = time.perf_counter()
        self._model_s = 0.0
        self._sample_s = 0.0
        self._marks: deque[StepMarks] = deque()

    def enter(self, part: Part) -> float:
        """From now on the time belongs to ``part``. Returns the time, in seconds."""
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
        """Count the steps that the device has ended since."""
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
