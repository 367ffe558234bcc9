"""A trace of some steps, in the format that Perfetto and Chrome open."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trimaran.worker.config.engine_config import ProfileConfig, RankConfig
from trimaran.worker.steps.step_times import Part, StepTimes

logger = logging.getLogger(__name__)


class StepProfile:
    """Traces the steps ``first`` to ``last`` of one rank and writes one compressed file.

    Nothing is recorded before and after. The profiler is prepared before the engine captures
    graphs: kernels of graphs captured earlier would not be attributed.
    """

    def __init__(self, config: ProfileConfig, path: Path, device: torch.device) -> None:
        self._config = config
        self._path = path
        self._device = device
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._times: StepTimes | None = None
        self._profile: profile | None = None
        self._span: record_function | None = None
        self._writer: threading.Thread | None = None

    @classmethod
    def of_rank(cls, config: RankConfig, rank: int, device: torch.device) -> StepProfile | None:
        """The profile that a rank's configuration asks for; None for none."""
        if config.profile is None:
            return None
        group = config.group.replace("/", "-")
        name = f"{group}-rank{rank}-start{config.incarnation}.trace.json.gz"
        return cls(config.profile, Path(config.profile.folder) / name, device)

    def prepare(self) -> None:
        """Load the profiler's library, which takes a second; before any graph is captured."""
        with profile(activities=self._activities, acc_events=True):
            torch.zeros(1, device=self._device)

    def begin_step(self, step: int, times: StepTimes | None = None) -> None:
        """Start when ``step``, about to be launched, is the first one of the trace.

        The parts that ``times`` enters become spans of the trace.
        """
        config = self._config
        if self._profile is not None or self._writer is not None:
            return
        if not config.first <= step <= config.last:
            return
        self._profile = profile(activities=self._activities, acc_events=True)
        self._profile.start()
        if times is not None:
            self._times = times
            times.on_enter = self._enter

    def end_step(self, step: int) -> None:
        """Stop after the last step of the trace and write the file beside the loop."""
        if self._profile is not None and step >= self._config.last:
            self._stop()

    def close(self) -> None:
        """Stop if still tracing, and wait until the file is written."""
        if self._profile is not None:
            self._stop()
        if self._writer is not None:
            self._writer.join()
        else:
            logger.warning(
                "no trace was written: the steps %d to %d never came",
                self._config.first, self._config.last,
            )  # fmt: skip

    def _enter(self, part: Part) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = record_function(f"engine: {part.name.lower()}")
        self._span.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self) -> None:
        trace = self._profile
        assert trace is not None
        if self._times is not None:
            self._times.on_enter = None
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        trace.stop()
        self._profile = None
        self._writer = threading.Thread(target=self._write, args=(trace,), name="profile")
        self._writer.start()

    def _write(self, trace: profile) -> None:
        start = time.monotonic()
        partial = self._path.with_name(f".{self._path.name}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(partial))
            partial.rename(self._path)
        except OSError as error:
            logger.error(
                "the trace %s cannot be written: %s. Free space there, or name another "
                "folder, and start again.", self._path, error.strerror or error,
            )  # fmt: skip
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return
        seconds = time.monotonic() - start
        logger.info("trace written to %s in %.1f s", self._path, seconds)
