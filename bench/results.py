"""One line of a result file: what was measured, on what, by which command."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from trimaran.bench.roofline import Ceilings

COMMIT = "TRIMARAN_COMMIT"
"""Names the commit where the sources lie outside of their repository."""


def environment(device: torch.device, ceilings: Ceilings | None) -> dict[str, Any]:
    """The machine, the versions, the commit and the command."""
    is_gpu = device.type == "cuda"
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if is_gpu else _processor(),
        "torch": torch.__version__,
        "triton": _version("triton") if is_gpu else None,
        "commit": commit(),
        "command": shlex.join(["trimaran", *sys.argv[1:]]),
    }
    if not is_gpu:
        facts["load_average"] = round(os.getloadavg()[0], 2)
    if ceilings is not None:
        facts["ceiling_tflops"] = round(ceilings.flops / 1e12, 1)
        facts["ceiling_tb_s"] = round(ceilings.bandwidth / 1e12, 3)
    return facts


def commit() -> str:
    """The sources' commit, marked where files differ from it; ``unknown`` without git."""
    if os.environ.get(COMMIT):
        return os.environ[COMMIT]
    here = Path(__file__).parent
    head = _git(here, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}-modified" if _git(here, "status", "--porcelain") else head


def append(path: str, result: dict[str, Any]) -> None:
    """Add one JSON object to a file of such lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def _processor() -> str:
    """The processor's name as its kernel gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
