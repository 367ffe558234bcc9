"""Which NVIDIA GPUs this machine shows, found without a CUDA library."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def num_visible_gpus() -> int:
    """GPUs that a rank on this host could use, after CUDA_VISIBLE_DEVICES."""
    present = (
        sum(bool(re.fullmatch(r"nvidia\d+", entry)) for entry in os.listdir("/dev"))
        or _num_driver_gpus()
    )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return present
    words = [word for word in chosen.split(",") if word.strip()]
    # CUDA stops at the first entry that is no device: "-1" hides all of them.
    named = next((n for n, word in enumerate(words) if word.strip() == "-1"), len(words))
    return named if any(word.startswith("MIG") for word in words) else min(named, present)


def torch_is_cpu_only() -> bool:
    """Whether the installed torch is a build without CUDA."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def _num_driver_gpus() -> int:
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
