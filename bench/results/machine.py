"""The machine and the server of a measurement: versions, processor, GPUs, engine facts."""

from __future__ import annotations

import os
import platform
import subprocess
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def environment(metrics_url: str | None) -> dict[str, Any]:
    """The conditions of a measurement: this machine, versions, and the engine's own facts."""
    packages = ("trimaran", "tritonclient", "aiohttp", "grpcio", "numpy")
    return {
        "client_host": {
            "cpu": cpu_model(),
            "num_cpus": len(os.sched_getaffinity(0)),
            "gpus": gpus(),
            "platform": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(), **{name: version(name) for name in packages},
        },
        "engine": engine_info(metrics_url) if metrics_url else None,
    }  # fmt: skip


def engine_info(metrics_url: str) -> dict[str, list[dict[str, str]]]:
    """The labels of every ``*_info`` metric of the server.

    Raises:
        OSError: no server answers there.
    """
    with urllib.request.urlopen(metrics_url, timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {
            family.name: [dict(sample.labels) for sample in family.samples]
            for family in families
            if family.name.endswith("_info") and family.samples
        }


def cpu_model() -> str:
    """The processor's name as its kernel gives it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpus() -> list[str]:
    """The names of this host's GPUs, without using them."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []  # a host without GPUs has no nvidia-smi
    return listing.stdout.split("\n")[:-1]
