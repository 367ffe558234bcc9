"""The process of a rank: CPU affinity, garbage collection, start times."""

from __future__ import annotations

import gc
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def pin_near(device: torch.device) -> None:
    """Pin this thread, and the threads that it starts, to the CPUs near a rank's GPU.

    The set holds all near CPUs, so that the kernel can move the thread away from a busy
    neighbour. Crossing the link between sockets would slow each access to the GPU and to
    page-locked memory. The CPUs that the operator or the job allows are never widened. Ranks
    without a GPU are not pinned.
    """
    if device.type != "cuda":
        return
    # The import takes seconds, and a rank connects to its supervisor before.
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    place = pci_place(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    near = near_cpus(place)
    allowed = os.sched_getaffinity(0)
    chosen = near & allowed
    if not chosen:
        logger.info(
            "not pinned: %s, and this process may use CPUs %s",
            f"GPU {place} is near CPUs {ranges(near)}" if near else f"GPU {place} is near none",
            ranges(allowed),
        )
        return
    os.sched_setaffinity(0, chosen)
    logger.info("pinned to CPUs %s, near GPU %s", ranges(chosen), place)


def pci_place(domain: int, bus: int, device: int) -> str:
    """A GPU's PCI address in the kernel's notation."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def near_cpus(place: str, folder: Path = _PCI_DEVICES) -> set[int]:
    """The CPUs of a PCI device's NUMA node; empty if unknown."""
    try:
        text = (folder / place / "local_cpulist").read_text()
    except OSError:
        return set()
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def ranges(cpus: set[int]) -> str:
    """CPU numbers in the kernel's notation: ``0-3,8``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


BUSY_PERIOD_S = 60.0
"""Seconds between collections of an engine that is never idle; steps make no reference
cycles, so little garbage gathers."""

IDLE_PERIOD_S = 1.0


class GarbageCollection:
    """Python's garbage collector, run at chosen moments alone.

    Otherwise it runs in the middle of steps and visits every queued request: 5 ms with a
    thousand requests. (Objects of a loaded engine are frozen and never visited.) Use as a
    context manager, which restores the collector's state.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._was_enabled = False

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._was_enabled:
            gc.enable()

    def after_step(self) -> None:
        """Collect if the period has passed."""
        self._collect(BUSY_PERIOD_S)

    def at_rest(self) -> None:
        """The engine is idle: collect, unless that was done just before."""
        self._collect(IDLE_PERIOD_S)

    def _collect(self, period_s: float) -> None:
        now = time.monotonic()
        if now - self._last >= period_s:
            gc.collect()
            self._last = time.monotonic()


class StartTimes:
    """The durations of a start's stages, in order. The first stage begins with the process, so
    that it includes the interpreter's start."""

    def __init__(self) -> None:
        self._last = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._begin = self._last
        self._stages: list[tuple[str, float]] = []

    def end(self, stage: str) -> None:
        """End a stage; the next begins."""
        now = time.monotonic()
        self._stages.append((stage, now - self._last))
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self._stages)
        return f"{self._last - self._begin:.1f} s ({parts})"
