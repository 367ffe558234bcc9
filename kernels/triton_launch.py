"""How Triton kernels are launched one behind the other on this machine."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

# Programmatic dependent launch (CUDA 12, Hopper and later): a kernel begins while the one
# before it ends. It may read what no kernel of the step writes, and must call `gdc_wait`
# before it touches anything else. That holds over a chain of kernels too, since each of them
# waits for its own predecessor before it ends.


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on a device may begin before their predecessor has ended."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def overlap_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch whose kernel has a constant ``OVERLAPS``."""
    if can_overlap(device):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}
