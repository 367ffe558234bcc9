"""The cores and the memory that this process may use, limits of its container included."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 of control groups reports no limit as a value above this."""


def usable_cores(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Cores that this process may run on, or its quota of CPU time in cores if that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _groups(root, membership, "cpu"):
        words = _words(folder / "cpu.max")
        if not words:
            words = [
                *_words(folder / "cpu.cfs_quota_us"),
                *_words(folder / "cpu.cfs_period_us"),
            ]
        if len(words) == 2 and words[0].isdigit():
            cores = min(cores, int(words[0]) / int(words[1]))
    return max(1, math.ceil(cores))


def free_memory_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Memory that this process can still allocate; the page cache counts as free."""
    free = int(psutil.virtual_memory().available)
    for folder in _groups(root, membership, "memory"):
        for limit, used in (("memory.max", "anon"), ("memory.limit_in_bytes", "total_rss")):
            words = _words(folder / limit)
            if words and words[0].isdigit() and int(words[0]) < _UNLIMITED:
                free = min(free, int(words[0]) - _of_stat(folder / "memory.stat", used))
    return max(0, free)


def _groups(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups for a resource, up to the outermost.

    Both versions are searched. In a container the paths are those of the host, and only the
    outermost folder exists.
    """
    for line in _lines(membership):
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = root / (controller if names else "")
        group = mount / path.lstrip("/")
        yield from (
            folder for folder in (group, *group.parents) if folder.is_relative_to(mount)
        )


def _of_stat(path: Path, name: str) -> int:
    values = dict(line.split(maxsplit=1) for line in _lines(path) if " " in line)
    return int(values.get(name, "0"))


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    """The lines of a file that may be absent, depending on the kernel's settings."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
