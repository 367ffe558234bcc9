"""Where a rank's threads run: on the processors near its GPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

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
