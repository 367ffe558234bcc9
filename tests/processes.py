"""Queries of processes that may end while a test looks at them."""

from __future__ import annotations

import contextlib

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Whether the process runs; zombies do not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def runs(process: psutil.Process, program: str) -> bool:
    """Whether the process runs this program or script, given by name."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(program in word for word in process.cmdline()[:2])
    return False
