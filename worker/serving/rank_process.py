"""The process of a rank: CPU affinity, garbage collection, start times, late compilation."""

from __future__ import annotations

import gc
import logging
import os
import time
from pathlib import Path
from typing import Any

import psutil
import torch

logger = logging.getLogger(__name__)

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def pin_near(device: torch.device) -> None:
    """Keep this thread, and those it will start, on the processors near a rank's GPU.

    Pinned to all of them, not to one: the kernel moves the thread away from a neighbour that
    is busy, but never across the link between sockets, where each access to the GPU and to
    page-locked memory would take longer. What the operator or the job has allowed is never
    widened. A CPU rank is left where it is.
    """
    if device.type != "cuda":
        return
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
    """A GPU's address on the bus, as the kernel writes it."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def near_cpus(place: str, folder: Path = _PCI_DEVICES) -> set[int]:
    """The processors of the memory node that a PCI device belongs to; empty if unknown."""
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
    """Processor numbers as the kernel writes them: ``0-3,8``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


BUSY_PERIOD_S = 60.0
"""An engine that never rests looks this often: what a step makes holds no cycles, so that
little can have gathered."""

IDLE_PERIOD_S = 1.0


class GarbageCollection:
    """Python's collector, off but for moments that are chosen.

    Left to itself it runs in the middle of steps and looks at every queued request: 5 ms
    with a thousand of them. (What a loaded engine consists of is frozen and never looked at.)
    Use as a context manager: afterwards the collector is as it was.
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
        """Collect if it has been long."""
        self._collect(BUSY_PERIOD_S)

    def at_rest(self) -> None:
        """There is no work: collect, unless that was done a moment ago."""
        self._collect(IDLE_PERIOD_S)

    def _collect(self, period_s: float) -> None:
        now = time.monotonic()
        if now - self._last >= period_s:
            gc.collect()
            self._last = time.monotonic()


def watch_compilations() -> None:
    """From now on log each Triton kernel that is made ready, of this process.

    The warm-up has run every kernel that it knows of. One that is compiled later has kept a
    step waiting, once: the next start finds it in Triton's cache.
    """
    # Imported only now: a CPU needs no Triton.
    from triton import knobs

    knobs.compilation.listener = _log


def _log(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: object) -> None:
    name, seconds = metadata.get("name", "?"), times.total / 1e6
    if cache_hit:
        logger.debug("kernel %s read from the cache while serving in %.2f s", name, seconds)
    else:
        logger.warning("kernel %s compiled while serving, which took %.1f s", name, seconds)


class StartTimes:
    """Stages in their order, each from the end of the one before; the first from the start
    of the process, so that the interpreter's own start counts."""

    def __init__(self) -> None:
        self._last = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._begin = self._last
        self._stages: list[tuple[str, float]] = []

    def end(self, stage: str) -> None:
        """The stage is over."""
        now = time.monotonic()
        self._stages.append((stage, now - self._last))
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self._stages)
        return f"{self._last - self._begin:.1f} s ({parts})"
